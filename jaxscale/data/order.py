"""Which window stands at which place of the run: a pure function of (seed, sequence index)."""

import hashlib
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

_WEIGHT_DENOMINATOR = 10**6
_SEED_VALUES = 2**32


class SequenceOrder:
    """The endless order of the training windows of one or several sources.

    `order[s]` is (source, window) of the run's sequence s, at a cost that does not grow with s: nothing is
    stored, so a run goes on anywhere from one integer, on any number of processes. Each source goes through
    all its windows in a new permutation every epoch, on its own clock; sources take turns by their weights.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """`counts` are windows a source (> 0), `weights` (> 0) their shares, `seed` 0 to 2**32 - 1."""
        import grain  # here, as its import takes 0.3 s beside jax's

        orders = [
            # grain seeds epoch e with (seed + e), so neighbouring seeds would share epochs: hash them apart.
            grain.MapDataset.range(count).shuffle(seed=_hash_seed(seed, source)).repeat()
            for source, count in enumerate(counts)
        ]
        tagged = [order.map(_Tag(source)) for source, order in enumerate(orders)]
        # Not MapDataset.mix: it rounds shares to 1/100 of the smallest, and 1 : 1.009 became 1 : 1.
        self._order = grain.MapDataset.select_from_datasets(tagged, _Turns(weights))

    def __getitem__(self, sequence: int) -> tuple[int, int]:
        if sequence < 0:
            raise IndexError(f"sequence {sequence}: sequences count from 0")
        source, window = self._order[sequence]
        return int(source), int(window)


class _Tag:
    def __init__(self, source: int) -> None:
        self._source = source

    def __call__(self, window: int) -> tuple[int, int]:
        return self._source, window


class _Turns:
    """Whose turn it is: sequence index -> (source, index within the source), in exact integer arithmetic.

    Of the first k sequences each source has had its share of k, to within one or two. The recurrence is the
    one of grain's mix: split off one source after another, each time dividing what is left in two.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = [Fraction(weight) / Fraction(max(weights)) for weight in weights]
        self._shares = [max(1, round(share * _WEIGHT_DENOMINATOR)) for share in shares]

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        before, after, remaining = index, index + 1, sum(self._shares)
        for source, share in enumerate(self._shares):
            others_before = before * (remaining - share) // remaining
            others_after = after * (remaining - share) // remaining
            if after - others_after > before - others_before:
                return source, before - others_before
            before, after, remaining = others_before, others_after, remaining - share
        raise AssertionError("the last source takes every turn that is left")


def _hash_seed(*parts: Any) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % _SEED_VALUES
