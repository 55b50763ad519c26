"""Opening a corpus: what a run reads, and what is refused."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxscale.config.errors import UserError
from jaxscale.config.schema import DataConfig, MixtureConfig
from jaxscale.data.dataset import open_data
from jaxscale.data.tokenizer import ByteTokenizer


def write_corpus(folder: Path, *texts: str) -> str:
    folder.mkdir(exist_ok=True)
    for index, text in enumerate(texts):
        (folder / f"{index}.txt").write_text(text)
    return f"{folder}/*.txt"


def configure(tmp_path: Path, *paths: str, **options: Any) -> DataConfig:
    options = {"source": "text", "cache_dir": str(tmp_path / "cache")} | options
    return DataConfig(paths=paths, **options)


def test_a_corpus_opens_and_every_training_token_is_read_in_an_epoch(tmp_path: Path) -> None:
    text = "".join(chr(0x20 + index % 90) for index in range(1000))
    config = configure(tmp_path, write_corpus(tmp_path / "t", text), validation_fraction=0.2)
    data = open_data(config, length=16, seed=0)
    assert (data.vocab, data.tokenizer.identity) == (257, "bytes")
    assert (len(data.train), len(data.validation)) == (50, 13)  # 801 tokens to train on, 200 to validate
    windows = [data.train[sequence] for sequence in range(50)]
    labels = np.concatenate([window["labels"][window["weights"] > 0] for window in windows])
    assert sorted(labels.tolist()) == sorted(text.encode()[1:801])
    again, other = (open_data(config, length=16, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(again.train[60]["tokens"], data.train[60]["tokens"])
    assert any((other.train[s]["tokens"] != data.train[s]["tokens"]).any() for s in range(5))
    np.testing.assert_array_equal(other.validation[3]["tokens"], data.validation[3]["tokens"])


def test_a_mixture_draws_by_weight_and_validates_on_every_source(tmp_path: Path) -> None:
    parts = tuple(
        MixtureConfig(source="text", paths=(write_corpus(tmp_path / letter, letter * size),), weight=weight)
        for letter, size, weight in [("a", 400, 3.0), ("b", 4000, 1.0)]
    )
    config = DataConfig(mixture=parts, validation_fraction=0.1, cache_dir=str(tmp_path / "cache"))
    data = open_data(config, length=8, seed=0)
    first_bytes = Counter(chr(data.train[sequence]["tokens"][0]) for sequence in range(400))
    assert abs(first_bytes["a"] - 300) <= 1
    assert first_bytes["b"] == 400 - first_bytes["a"]
    letters = {chr(data.validation[index]["tokens"][0]) for index in range(len(data.validation))}
    assert letters == {"a", "b"}
    assert len(data.validation) == 5 + 50


def test_a_larger_model_vocabulary_is_kept_and_a_smaller_one_refused(tmp_path: Path) -> None:
    config = configure(tmp_path, write_corpus(tmp_path / "t", "text " * 100))
    assert open_data(config, length=8, seed=0, vocab=384).vocab == 384
    with pytest.raises(UserError, match=r"model\.vocab is 256 but the tokenizer bytes has 257 tokens"):
        open_data(config, length=8, seed=0, vocab=256)


def test_a_continued_run_reads_with_its_own_tokenizer(tmp_path: Path) -> None:
    pattern = write_corpus(tmp_path / "t", "some words to train on, " * 40)
    config = configure(tmp_path, pattern, tokenizer="train:270")
    first = open_data(config, length=8, seed=0, tokenizer_dir=tmp_path / "run")
    first.tokenizer.save(tmp_path / "run")
    write_corpus(tmp_path / "t", "wholly other text; not the same pairs at all. " * 40)
    again = open_data(config, length=8, seed=0, tokenizer_dir=tmp_path / "run")
    assert again.tokenizer.identity == first.tokenizer.identity
    assert open_data(config, length=8, seed=0).tokenizer.identity != first.tokenizer.identity
    ByteTokenizer().save(tmp_path / "run")
    assert open_data(config, length=8, seed=0, tokenizer_dir=tmp_path / "run").vocab == 257


def test_pretokenised_ids_without_a_tokenizer(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(65_500, 70_000))
    config = configure(
        tmp_path, str(tmp_path / "a.npy"), source="tokens", tokenizer="none", validation_fraction=0
    )
    data = open_data(config, length=4499, seed=0, vocab=70_000)
    assert data.train[0]["labels"].tolist() == list(range(65_501, 70_000))
    assert len(data.validation) == 0
    with pytest.raises(UserError, match=r"a\.npy: token id 69000 at offset 3500 is outside .*\[0, 69000\)"):
        open_data(config, length=8, seed=0, vocab=69_000)


def test_short_corpora_are_refused_with_both_numbers(tmp_path: Path) -> None:
    pattern = write_corpus(tmp_path / "t", "x" * 99)
    no_validation = configure(tmp_path, pattern, validation_fraction=0)
    assert len(open_data(no_validation, length=99, seed=0).train) == 1
    with pytest.raises(UserError, match=r"data: 100 of the corpus's 100 tokens .* \(101\)"):
        open_data(no_validation, length=100, seed=0)
    with pytest.raises(
        UserError, match=r"training split has 10 windows of 10 tokens, fewer than batch.sequences 11"
    ):
        open_data(no_validation, length=10, seed=0, sequences=11)
    with pytest.raises(UserError, match=r"validation_fraction 0\.01 of the corpus's 100 tokens leaves 1 "):
        open_data(configure(tmp_path, pattern, validation_fraction=0.01), length=8, seed=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"source": "tokens", "tokenizer": "train:300"},
            "train:300 but data.source is tokens, which holds no text",
        ),
        ({"tokenizer": "none"}, "data.tokenizer is none but data.source is text"),
        (
            {"mixture": (MixtureConfig(source="text", weight=1.0),)},
            "data.mixture replaces data.source and data.paths, but both are set",
        ),
    ],
)
def test_settings_that_contradict_are_refused(tmp_path: Path, options: dict, words: str) -> None:
    (tmp_path / "a").write_text("text")
    with pytest.raises(UserError, match=words):
        open_data(configure(tmp_path, str(tmp_path / "a"), **options), length=8, seed=0, vocab=300)


def test_a_corpus_whose_labels_mostly_do_not_count_is_warned_about(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full(100, 256))
    config = configure(tmp_path, str(tmp_path / "a.npy"), source="tokens")
    with pytest.warns(UserWarning, match="100 documents in 100 tokens, so most labels"):
        open_data(config, length=8, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        open_data(configure(tmp_path, write_corpus(tmp_path / "t", "text " * 100)), length=8, seed=0)
