"""From a data configuration to windows by sequence index: what a run reads."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxscale.config.errors import UserError
from jaxscale.config.schema import Config, DataConfig
from jaxscale.data.cache import TokenisedCorpus, find_cache_dir, open_tokenised
from jaxscale.data.order import SequenceOrder
from jaxscale.data.sources import Source, open_source
from jaxscale.data.tokenizer import Tokenizer, find_vocab_size, load_tokenizer, open_tokenizer
from jaxscale.data.windows import DocumentStream, JoinedWindows, Window, Windows, split_at


class TrainingSequences:
    """The endless training sequences: `[s]` is the window of the run's sequence s, for any s >= 0."""

    def __init__(self, sources: tuple[Windows, ...], weights: tuple[float, ...], seed: int) -> None:
        self._sources = sources
        self._order = SequenceOrder([len(source) for source in sources], weights, seed)

    def __len__(self) -> int:
        """Windows in all sources together: one epoch of a single source."""
        return sum(len(source) for source in self._sources)

    def __getitem__(self, index: int) -> Window:
        source, window = self._order[index]
        return self._sources[source][window]


@dataclass(frozen=True)
class Data:
    """What a run reads. `vocab` is model.vocab, or the tokenizer's size where that is null."""

    tokenizer: Tokenizer
    vocab: int
    train: TrainingSequences
    validation: JoinedWindows


def open_data(
    config: DataConfig,
    *,
    length: int,
    seed: int,
    vocab: int | None = None,
    tokenizer_dir: Path | None = None,
    sequences: int = 1,
) -> Data:
    """Opens the corpus of a run, tokenising it the first time.

    `length` is tokens a window, `seed` orders the training windows, `vocab` is model.vocab. A tokenizer
    saved in `tokenizer_dir` (by `Tokenizer.save`, when the run began) is used in place of the configured one.
    `sequences` are those of a step, which the training split must have at least. Raises UserError for
    whatever the user can mend: files, text, tokenizer, vocabulary, a corpus too short for these sizes.
    """
    sources = _open_sources(config)
    contents = [source.hash_content() for _, source, _ in sources]
    cache_dir = find_cache_dir(config.cache_dir)
    tokenizer = load_tokenizer(tokenizer_dir) if tokenizer_dir is not None else None
    if tokenizer is None:
        tokenizer = open_tokenizer(
            config.tokenizer,
            config.end_token,
            vocab=vocab,
            texts=lambda: _read_texts([source for _, source, _ in sources]),
            corpus="/".join(contents),
            cache_dir=cache_dir,
        )
    if vocab is not None and vocab < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab is {vocab} but the tokenizer {config.tokenizer} has {tokenizer.vocab_size} tokens; "
            f"set model.vocab to {tokenizer.vocab_size} or more, or to null"
        )
    train: list[Windows] = []
    validation: list[Windows] = []
    for (key, source, _), content in zip(sources, contents, strict=True):
        corpus = open_tokenised(source, content, tokenizer, cache_dir)
        _warn_if_mostly_masked(key, corpus)
        train_part, validation_part = _split(key, corpus, config, length)
        train.append(train_part)
        validation.append(validation_part)
    windows_in_all = sum(len(windows) for windows in train)
    if windows_in_all < sequences:
        raise UserError(
            f"the training split has {windows_in_all} windows of {length} tokens, fewer than "
            f"batch.sequences {sequences}; give more text, or lower batch.sequences or batch.length"
        )
    weights = tuple(weight for _, _, weight in sources)
    return Data(
        tokenizer,
        vocab if vocab is not None else tokenizer.vocab_size,
        TrainingSequences(tuple(train), weights, seed),
        JoinedWindows(tuple(validation)),
    )


def find_vocab(config: Config, tokenizer_dir: Path | None = None) -> int:
    """Tokens in the vocabulary of a run, no corpus read: model.vocab, or the tokenizer's size.

    Raises:
      UserError: the tokenizer cannot be opened, or does not know its size without model.vocab.
    """
    if config.model is not None and config.model.vocab is not None:
        return config.model.vocab
    tokenizer = load_tokenizer(tokenizer_dir) if tokenizer_dir is not None else None
    if tokenizer is not None:
        return tokenizer.vocab_size
    return find_vocab_size(config.data.tokenizer, config.data.end_token)


def _open_sources(config: DataConfig) -> list[tuple[str, Source, float]]:
    """(configuration section, source, weight) of each source."""
    if config.mixture and (config.paths or config.source != "python-stdlib"):
        raise UserError(
            "data.mixture replaces data.source and data.paths, but both are set: "
            "move the source into data.mixture or remove data.mixture"
        )
    if not config.mixture:
        found = [("data", open_source(config.source, config.paths, config.field), 1.0)]
    else:
        keys = [f"data.mixture[{index}]" for index in range(len(config.mixture))]
        found = [
            (key, open_source(part.source, part.paths, part.field, key), part.weight)
            for key, part in zip(keys, config.mixture, strict=True)
        ]
    for key, source, _ in found:
        if source.kind == "tokens" and config.tokenizer.startswith("train:"):
            raise UserError(
                f"data.tokenizer is {config.tokenizer} but {key}.source is tokens, which holds no text to "
                "train on; set data.tokenizer to the one that wrote the files, or to none with model.vocab"
            )
        if source.kind != "tokens" and config.tokenizer == "none":
            raise UserError(
                f"data.tokenizer is none but {key}.source is {source.kind}, whose text needs one; "
                "give bytes, the path of a tokenizer.json or train:N"
            )
    return found


def _read_texts(sources: list[Source]) -> Iterator[str]:
    return (document.text for source in sources for document in source.read_documents())


def _split(key: str, corpus: TokenisedCorpus, config: DataConfig, length: int) -> tuple[Windows, Windows]:
    stream = DocumentStream(corpus)
    cut = split_at(stream, config.validation_fraction)

    def window(start: int, stop: int) -> Windows:
        return Windows(stream, start, stop, length, config.cross_documents, config.restart_positions)

    train, validation = window(0, cut), window(cut, len(stream))
    if cut < length + 1:
        raise UserError(
            f"{key}: {cut} of the corpus's {len(stream)} tokens are for training, fewer than one window of "
            f"{length} tokens and a label ({length + 1}); give more text or lower batch.length"
        )
    if config.validation_fraction > 0 and not len(validation):
        raise UserError(
            f"{key}: data.validation_fraction {config.validation_fraction} of the corpus's {len(stream)} "
            f"tokens leaves {len(stream) - cut} for validation, and 2 are the least; give more text, raise "
            "the fraction, or set it to 0"
        )
    return train, validation


def _warn_if_mostly_masked(key: str, corpus: TokenisedCorpus) -> None:
    tokens, documents = corpus.tokens.size, corpus.offsets.size - 1
    if 2 * documents > tokens:
        warnings.warn(
            f"{key}: {documents} documents in {tokens} tokens, so most labels start another document "
            "and do not count; check that data.field and data.end_token are the right ones",
            stacklevel=3,
        )
