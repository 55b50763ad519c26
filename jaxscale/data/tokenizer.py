"""Text to token ids and back: bytes, a Hugging Face tokenizer.json, or a BPE trained on the corpus."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.config.errors import UserError
from jaxscale.data.publish import open_or_build
from jaxscale.disk import write_whole

END_TEXT = "<|endoftext|>"
_USUAL_END_TOKENS = (
    END_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|im_end|>",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
)
_TOKENIZER_NAME = "tokenizer.json"
_SETTINGS_NAME = "tokenizer_settings.json"
_BYTE_VALUES = 256
_TRAIN_FORMAT = 1


class Tokenizer(ABC):
    """What the data and the commands need of a tokenizer.

    `end_id` ends every document (None: unknown, possible for token ids without a tokenizer only). `identity`
    names the tokenizer by its content, so that a tokenised corpus is never read with another one.
    """

    vocab_size: int
    end_id: int | None
    identity: str

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, 1-D arrays of unsigned integers, without an end token."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def _settings(self) -> dict[str, Any]: ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, a 1-D array of unsigned integers, without an end token."""
        return self.encode_batch([text])[0]

    def save(self, folder: Path) -> None:
        """Writes the tokenizer into a folder, for `load_tokenizer`; the settings come last."""
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _SETTINGS_NAME, json.dumps(self._settings(), indent=1))


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8 text, and id 256 that ends a document."""

    vocab_size = _BYTE_VALUES + 1
    end_id = _BYTE_VALUES
    identity = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        pieces = (bytes([token]) if token < _BYTE_VALUES else END_TEXT.encode() for token in map(int, ids))
        return b"".join(pieces).decode("utf-8", errors="replace")

    def _settings(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, through the `tokenizers` library.

    What its post-processor puts in front of a text (a BOS token) is kept: it opens every document and every
    prompt. An end token it puts behind is removed, as each document gets exactly one from the cache. Text
    that spells a special token is encoded as plain text. Truncation and padding set in the file are
    switched off.
    """

    def __init__(self, text: str, end_token: str | None, place: str) -> None:
        """`text` is the content of a tokenizer.json, `place` its path for messages.

        Raises UserError where it is no tokenizer.json, or its end token is not known.
        """
        import tokenizers

        _check_tokenizer_json(text, place)
        self._text = text
        self._tokenizer = tokenizers.Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1  # ids may leave gaps: the number of tokens is no bound
        self._end_token = end_token if end_token is not None else _find_end_token(ids, place)
        if self._end_token not in ids:
            raise UserError(
                f"data.end_token {self._end_token!r} is not a token of {place}; "
                "set it to the one that ends a document"
            )
        self.end_id = ids[self._end_token]
        content = json.dumps([text, self.end_id, tokenizers.__version__])
        self.identity = "huggingface-" + hashlib.blake2b(content.encode(), digest_size=20).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=True)
        return [self._drop_end(np.array(encoding.ids, np.uint32)) for encoding in encodings]

    def _drop_end(self, ids: np.ndarray) -> np.ndarray:
        return ids[:-1] if ids.size and ids[-1] == self.end_id else ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)

    def _settings(self) -> dict[str, Any]:
        return {"kind": "huggingface", "end_token": self._end_token}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / _TOKENIZER_NAME, self._text)
        super().save(folder)


class IdTokenizer(Tokenizer):
    """Token ids whose tokenizer is not at hand (`data.tokenizer: none`), of a given vocabulary."""

    def __init__(self, vocab_size: int, end_id: int | None) -> None:
        self.vocab_size = vocab_size
        self.end_id = end_id
        self.identity = f"none-{vocab_size}-{end_id}"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        raise UserError(
            "data.tokenizer is none, which cannot encode text; "
            "set it to the tokenizer that wrote the token files"
        )

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(token)) for token in ids)

    def _settings(self) -> dict[str, Any]:
        return {"kind": "none", "vocab_size": self.vocab_size, "end_id": self.end_id}


def open_tokenizer(
    name: str,
    end_token: str | None,
    *,
    vocab: int | None,
    texts: Callable[[], Iterator[str]],
    corpus: str,
    cache_dir: Path,
) -> Tokenizer:
    """Opens the tokenizer that `data.tokenizer` names, training it first for `train:N`.

    `vocab` is model.vocab. `texts()` yields the documents to train on and `corpus` the hash of their content;
    both are used by `train:N` only. Raises UserError for a name, a file or an end token that does not exist.
    """
    if name == "bytes":
        if end_token not in (None, END_TEXT):
            raise UserError(
                f"data.end_token is {end_token!r} but data.tokenizer is bytes, whose end token is id 256, "
                f"written {END_TEXT}; remove data.end_token"
            )
        return ByteTokenizer()
    if name == "none":
        return _open_ids(end_token, vocab)
    if name.startswith("train:"):
        return _open_trained(name, end_token, texts, corpus, cache_dir)
    return _open_file(Path(name).expanduser(), end_token)


def find_vocab_size(name: str, end_token: str | None) -> int:
    """Tokens of the tokenizer that `data.tokenizer` names, no corpus read.

    Raises:
      UserError: as `open_tokenizer`.
    """
    if name == "bytes":
        return ByteTokenizer().vocab_size
    if name == "none":
        return _open_ids(end_token, None).vocab_size
    if name.startswith("train:"):
        return _parse_trained_size(name)
    return _open_file(Path(name).expanduser(), end_token).vocab_size


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer that `save` wrote into a folder; None where there is none."""
    path = folder / _SETTINGS_NAME
    if not path.exists():
        return None
    settings = json.loads(path.read_text(encoding="utf-8"))
    if settings["kind"] == "bytes":
        return ByteTokenizer()
    if settings["kind"] == "none":
        return IdTokenizer(settings["vocab_size"], settings["end_id"])
    return _open_file(folder / _TOKENIZER_NAME, settings["end_token"])


def _open_file(path: Path, end_token: str | None) -> HuggingFaceTokenizer:
    if not path.is_file():
        raise UserError(
            f"data.tokenizer: there is no file {path} (seen from {Path.cwd()}); "
            "give bytes, the path of a tokenizer.json, train:N or none"
        )
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.tokenizer: {path} is not UTF-8 text ({error}); give a tokenizer.json"
        ) from None
    return HuggingFaceTokenizer(text, end_token, str(path))


def _open_ids(end_token: str | None, vocab: int | None) -> IdTokenizer:
    if vocab is None:
        raise UserError("data.tokenizer none does not know the vocabulary: set model.vocab")
    if end_token is None:
        return IdTokenizer(vocab, None)
    if not (end_token.isdecimal() and int(end_token) < vocab):
        raise UserError(
            f"data.end_token is {end_token!r}: with data.tokenizer none it is an id from 0 to {vocab - 1}"
        )
    return IdTokenizer(vocab, int(end_token))


def _open_trained(
    name: str, end_token: str | None, texts: Callable[[], Iterator[str]], corpus: str, cache_dir: Path
) -> HuggingFaceTokenizer:
    size = _parse_trained_size(name)
    if end_token not in (None, END_TEXT):
        raise UserError(
            f"data.end_token is {end_token!r} but {name} makes its own, {END_TEXT}; remove data.end_token"
        )
    import tokenizers

    identity = json.dumps([_TRAIN_FORMAT, tokenizers.__version__, corpus, size])
    folder = cache_dir / "tokenizers" / hashlib.blake2b(identity.encode(), digest_size=20).hexdigest()
    open_or_build(folder, partial(_train, texts=texts, vocab_size=size))
    return _open_file(folder / _TOKENIZER_NAME, END_TEXT)


def _parse_trained_size(name: str) -> int:
    """N of `train:N`; the trained tokenizer has exactly so many tokens, or is refused."""
    digits = name.removeprefix("train:")
    if not digits.isdecimal() or int(digits) <= _BYTE_VALUES:
        raise UserError(
            f"data.tokenizer is {name!r}: train:N takes a whole number of tokens from {_BYTE_VALUES + 1} on "
            "(the 256 bytes and the end token), such as train:8192"
        )
    return int(digits)


def _train(folder: Path, *, texts: Callable[[], Iterator[str]], vocab_size: int) -> dict[str, Any]:
    """Trains a byte-level BPE with the splitting rule of GPT-2 (Radford 2019): exact for every text."""
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Trained(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[END_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts(), trainer=trainer)
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found < vocab_size:
        raise UserError(
            f"data.tokenizer is train:{vocab_size} but this corpus yields {found} tokens only "
            f"(no further pair occurs twice); set train:{found} or fewer, or give more text"
        )
    (folder / _TOKENIZER_NAME).write_text(tokenizer.to_str(), encoding="utf-8", newline="")
    return {"tokens": found}


def _check_tokenizer_json(text: str, place: str) -> None:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"data.tokenizer: {place} is not JSON ({error}); give a tokenizer.json") from None
    if not isinstance(content, dict) or "model" not in content:
        raise UserError(
            f"data.tokenizer: {place} has no `model`, so it is not a Hugging Face tokenizer.json; "
            "give bytes, the path of a tokenizer.json, train:N or none"
        )


def _find_end_token(ids: dict[str, int], place: str) -> str:
    for name in _USUAL_END_TOKENS:
        if name in ids:
            return name
    raise UserError(
        f"data.tokenizer: {place} has none of the usual end tokens ({', '.join(_USUAL_END_TOKENS)}); "
        "set data.end_token to the token that ends a document"
    )
