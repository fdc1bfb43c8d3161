"""Who shares splits with whom in a step, read off its block tables: requests of one row each whose
tables begin with the same blocks.

Only whole splits of 256 keys that every row sees are shared, so the states of a shared run are
those that each row's own run would have left, and merging does not know of it
(docs/decisions/0015-shared-prefix-by-partials.md). Knows NumPy and no kernel. Source: Ye et al.
2024 (ChunkAttention's two phases).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.batch import StepBatch
from octavo.backends.kv import BLOCK_SIZE, SPLIT_KEYS

SPLIT_BLOCKS = SPLIT_KEYS // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Sharing:
    """`run_slots [runs, rows]`: slots (which of the one-row requests) that are read together, -1:
    none; of each run the first `run_splits [runs]` splits. `own_splits [slots]`: where a slot's own
    run begins, 0 for those that share nothing."""

    run_slots: NDArray[np.int32]
    run_splits: NDArray[np.int32]
    own_splits: NDArray[np.int32]

    def padded(self, num_runs: int) -> Sharing:
        """With runs of nobody behind, so that every step of so many rows has the same shapes."""
        more = num_runs - len(self.run_slots)
        slots = np.concatenate(
            [self.run_slots, np.full((more, self.run_slots.shape[1]), -1, np.int32)]
        )
        return Sharing(
            slots, np.concatenate([self.run_splits, np.zeros(more, np.int32)]), self.own_splits
        )


@dataclass(frozen=True, slots=True)
class _Sharer:
    slot: int
    splits: int
    """That all of its keys fill, and its row sees."""
    table: NDArray[np.int32]

    @property
    def order(self) -> bytes:
        """Tables that begin alike stand side by side in it."""
        return self.table[: self.splits * SPLIT_BLOCKS].tobytes()


def sharing_of(
    batch: StepBatch, group: int, *, window: int | None, full: bool, rows_a_run: int
) -> Sharing:
    """`rows_a_run`: rows whose query heads of one KV head fill a tile."""
    num_rows = np.diff(batch.query_starts)
    singles = np.flatnonzero((num_rows == 1) & (batch.context_lens[group] > 0))
    own = np.zeros(len(singles), np.int32)
    runs: list[tuple[list[int], int]] = []
    if rows_a_run > 1:
        for alike in _sharers(batch, group, singles, window=window, full=full):
            for members, splits in _divided(alike)[1]:
                for first in range(0, len(members), rows_a_run):
                    run = [member.slot for member in members[first : first + rows_a_run]]
                    if len(run) > 1:
                        runs.append((run, splits))
                        own[run] = splits
    slots = np.full((len(runs), max(1, rows_a_run)), -1, np.int32)
    for at, (run, _) in enumerate(runs):
        slots[at, : len(run)] = run
    return Sharing(slots, np.array([splits for _, splits in runs], np.int32), own)


def _sharers(
    batch: StepBatch, group: int, singles: NDArray[np.int64], *, window: int | None, full: bool
) -> list[list[_Sharer]]:
    """Those that begin with the same split, sorted; of a window only rows that see from the first
    key on.
    """
    context, place = (
        batch.context_lens[group, singles],
        batch.places[batch.query_starts[:-1][singles]],
    )
    splits = (context if full else np.minimum(context, place + 1)) // SPLIT_KEYS
    eligible = splits > 0 if window is None else (splits > 0) & (place < window)
    alike: dict[bytes, list[_Sharer]] = defaultdict(list)
    for slot in np.flatnonzero(eligible).tolist():
        table = batch.block_tables[group, singles[slot]]
        alike[table[:SPLIT_BLOCKS].tobytes()].append(_Sharer(slot, int(splits[slot]), table))
    return [
        sorted(sharers, key=lambda sharer: sharer.order)
        for sharers in alike.values()
        if len(sharers) > 1
    ]


def _divided(sharers: Sequence[_Sharer]) -> tuple[int, list[tuple[Sequence[_Sharer], int]]]:
    """How many reads of a split are spared, and by which (sharers, splits): all with what all have
    in common, or each part that has more in common by itself."""
    if len(sharers) < 2:
        return 0, []
    splits = _common(sharers[0], sharers[-1])
    together = (len(sharers) - 1) * splits
    apart, parts, first = 0, [], 0
    while first < len(sharers):
        last = first + 1
        while last < len(sharers) and _common(sharers[first], sharers[last]) > splits:
            last += 1
        spared, found = _divided(sharers[first:last]) if last - first < len(sharers) else (0, [])
        apart, first = apart + spared, last
        parts += found
    return (together, [(sharers, splits)]) if together > 0 and together >= apart else (apart, parts)


def _common(a: _Sharer, b: _Sharer) -> int:
    """Whole splits in which the tables begin alike."""
    end = min(a.splits, b.splits) * SPLIT_BLOCKS
    other = np.flatnonzero(a.table[:end] != b.table[:end])
    return (int(other[0]) if len(other) else end) // SPLIT_BLOCKS
