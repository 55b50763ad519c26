"""Batches that bring faults to light: random tokens, two documents a window, padding, unequal masks."""

import numpy as np

from jaxscale.config import BatchConfig

Arrays = dict[str, np.ndarray]


def make_batch(
    batch: BatchConfig, vocab: int, step: int, *, shards: int = 8, microbatches: int = 4
) -> Arrays:
    """A step's arrays [sequences, length]; a pure function of its arguments.

    Masks go from empty to full. When the batch is cut into so many microbatches over so many shards, one
    microbatch, one shard and a few sequences have no label that counts; a mean of means shows at once. A mask
    over everything cannot happen. Some sequences end in padding (segment 0), which no expert may see.
    """
    rng = np.random.default_rng([step, batch.sequences, batch.length])
    shape = (batch.sequences, batch.length)
    text = rng.integers(0, vocab, (batch.sequences, batch.length + 1))
    boundary = rng.integers(1, max(batch.length, 2), (batch.sequences, 1))
    places = np.arange(batch.length)
    counted = rng.random(shape) < rng.random((batch.sequences, 1)) ** 2
    counted[_choose_empty(batch.sequences, step, shards, microbatches)] = False
    counted[rng.integers(0, batch.sequences, batch.sequences // 10)] = False
    padded = places >= batch.length - _choose_padding(rng, batch)
    counted &= ~padded
    if not counted.any():
        counted[-1], padded[-1] = True, False
    return {
        "tokens": text[:, :-1].astype(np.int32),
        "labels": text[:, 1:].astype(np.int32),
        "positions": np.where(places < boundary, places, places - boundary).astype(np.int32),
        "segments": np.where(padded, 0, np.where(places < boundary, 1, 2)).astype(np.int32),
        "weights": counted.astype(np.float32),
    }


def _choose_padding(rng: np.random.Generator, batch: BatchConfig) -> np.ndarray:
    """Places of padding at the end of each sequence [sequences, 1]; one in eight is nothing else."""
    places = np.minimum(rng.integers(0, 2 * batch.length, batch.sequences), batch.length)
    return np.where(rng.random(batch.sequences) < 0.25, places, 0)[:, None]


def _choose_empty(sequences: int, step: int, shards: int, microbatches: int) -> np.ndarray:
    """Marks the sequences of one microbatch and of one shard of every microbatch, others at each step."""
    rows = sequences // microbatches
    numbers = np.arange(sequences)
    in_microbatch = numbers // max(rows, 1) == step % microbatches
    in_shard = numbers % max(rows, 1) * shards // max(rows, 1) == (step + 1) % shards
    return (in_microbatch & (microbatches > 1)) | (in_shard & (rows > 1))
