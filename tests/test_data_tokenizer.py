"""Tokenizers: exact round trips, end tokens, and what a run directory keeps."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxscale.config.errors import UserError
from jaxscale.data.tokenizer import Tokenizer, load_tokenizer, open_tokenizer

CORPUS = ["the cat sat on the mat\n" * 20, "def f(x):\r\n\treturn x  \n" * 20, "naïve 日本語 🎉\x00\n" * 5]
HARD_TEXTS = [
    "",
    " ",
    "  two\r\n\ttabs ",
    "unseen: ÿ 漢 🧪 e\u0301 \u200b",
    "\x00\x7f",
    "say <|endoftext|> in text",
]


def open_it(
    name: str, cache_dir: Path, *, end: str | None = None, vocab: int | None = None, corpus: str = "c"
) -> Tokenizer:
    return open_tokenizer(
        name, end, vocab=vocab, texts=lambda: iter(CORPUS), corpus=corpus, cache_dir=cache_dir
    )


def write_word_tokenizer(path: Path, *tokens: str, template: bool = False) -> str:
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="a")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([token for token in tokens if token.startswith("<")])
    if template:
        ids = [(token, tokens.index(token)) for token in ("<s>", "</s>")]
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=ids
        )
        made.enable_truncation(3)
        made.enable_padding(length=8, pad_token="</s>", pad_id=tokens.index("</s>"))
    made.save(str(path))
    return str(path)


@pytest.mark.parametrize("name", ["bytes", "train:300"])
def test_round_trip_is_exact(tmp_path: Path, name: str) -> None:
    tokenizer = open_it(name, tmp_path)
    for text in [*HARD_TEXTS, *CORPUS]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_id not in ids  # text that spells the end token does not end the document
    assert tokenizer.decode([tokenizer.end_id]) == "<|endoftext|>"


def test_bytes_has_256_bytes_and_one_end_token(tmp_path: Path) -> None:
    tokenizer = open_it("bytes", tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_id) == (257, 256)
    np.testing.assert_array_equal(tokenizer.encode("aé"), [97, 0xC3, 0xA9])
    assert tokenizer.decode([0xC3]) == "�"


def test_trained_tokenizer_has_n_tokens_and_is_the_same_each_time(tmp_path: Path) -> None:
    first, again = (open_it("train:300", tmp_path / folder) for folder in "ab")
    assert first.vocab_size == 300
    assert first.identity == again.identity
    assert first.encode(CORPUS[0]).size < len(CORPUS[0]) / 2


def test_training_happens_once_for_a_corpus(tmp_path: Path) -> None:
    open_it("train:300", tmp_path)

    def fail() -> None:
        raise AssertionError("trained again")

    def train_again(corpus: str) -> None:
        open_tokenizer("train:300", None, vocab=None, texts=fail, corpus=corpus, cache_dir=tmp_path)

    train_again("c")
    with pytest.raises(AssertionError, match="trained again"):
        train_again("another corpus")


def test_a_damaged_trained_tokenizer_is_trained_anew(tmp_path: Path) -> None:
    identity = open_it("train:300", tmp_path).identity
    [saved] = tmp_path.glob("tokenizers/*/tokenizer.json")
    whole = saved.read_bytes()
    saved.write_bytes(whole[:-100])
    assert open_it("train:300", tmp_path).identity == identity
    assert saved.read_bytes() == whole


def test_front_of_the_template_is_kept_and_its_end_token_is_not_doubled(tmp_path: Path) -> None:
    path = write_word_tokenizer(tmp_path / "t.json", "a", "b", "<s>", "</s>", template=True)
    tokenizer = open_it(path, tmp_path)
    np.testing.assert_array_equal(tokenizer.encode("b a b a b"), [2, 1, 0, 1, 0, 1])  # neither cut nor padded
    assert tokenizer.end_id == 3


def test_vocabulary_is_the_largest_id_plus_one_even_with_gaps(tmp_path: Path) -> None:
    path = Path(write_word_tokenizer(tmp_path / "t.json", "a", "b", "</s>"))
    content = json.loads(path.read_text())
    content["model"]["vocab"]["b"] = 99
    path.write_text(json.dumps(content))
    assert open_it(str(path), tmp_path).vocab_size == 100


def test_end_token_is_found_by_its_usual_name_or_named_or_asked_for(tmp_path: Path) -> None:
    usual = write_word_tokenizer(tmp_path / "usual.json", "a", "<stop>", "<eos>")
    assert open_it(usual, tmp_path).end_id == 2
    assert open_it(usual, tmp_path, end="<stop>").end_id == 1
    with pytest.raises(UserError, match=r"data\.end_token '<no>' is not a token of .*usual\.json"):
        open_it(usual, tmp_path, end="<no>")
    with pytest.raises(UserError, match=r"none of the usual end tokens.*set data\.end_token"):
        open_it(write_word_tokenizer(tmp_path / "odd.json", "a", "<stop>"), tmp_path)


@pytest.mark.parametrize(
    ("name", "end", "words"),
    [
        ("train:256", None, "'train:256': train:N takes a whole number of tokens from 257 on"),
        ("train:8k", None, "'train:8k': train:N takes"),
        ("train:5000", None, r"train:5000 but this corpus yields \d+ tokens only.*set train:\d+ or fewer"),
        ("train:300", "</s>", "data.end_token is '</s>' but train:300 makes its own"),
        ("bytes", "</s>", "data.end_token is '</s>' but data.tokenizer is bytes"),
        ("none", None, "data.tokenizer none does not know the vocabulary: set model.vocab"),
        ("no/tokenizer.json", None, "data.tokenizer: there is no file no/tokenizer.json"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(
    tmp_path: Path, name: str, end: str | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        open_it(name, tmp_path, end=end)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    for content, words in [(b"{", "is not JSON"), (b"{}", "has no `model`"), (b"\xff", "is not UTF-8")]:
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(UserError, match=words):
            open_it(str(tmp_path / "t.json"), tmp_path)


def test_ids_without_a_tokenizer(tmp_path: Path) -> None:
    assert open_it("none", tmp_path, vocab=70_000).end_id is None
    assert open_it("none", tmp_path, vocab=70_000, end="69999").end_id == 69_999
    with pytest.raises(UserError, match=r"data.end_token is '70000'.*an id from 0 to 69999"):
        open_it("none", tmp_path, vocab=70_000, end="70000")
    with pytest.raises(UserError, match=r"data\.tokenizer is none, which cannot encode text"):
        open_it("none", tmp_path, vocab=9).encode("text")


def test_a_run_directory_keeps_its_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    named = write_word_tokenizer(tmp_path / "t.json", "a", "<stop>", "<eos>")
    opened = [
        open_it("bytes", tmp_path),
        open_it("train:300", tmp_path),
        open_it(named, tmp_path, end="<stop>"),
        open_it("none", tmp_path, vocab=9, end="3"),
    ]
    for index, tokenizer in enumerate(opened):
        folder = tmp_path / f"run{index}"
        tokenizer.save(folder)
        loaded = load_tokenizer(folder)
        assert loaded is not None
        assert (loaded.identity, loaded.vocab_size, loaded.end_id) == (
            tokenizer.identity,
            tokenizer.vocab_size,
            tokenizer.end_id,
        )
        assert not list(folder.glob("*.partial*")) + list(folder.glob(".*partial*"))
