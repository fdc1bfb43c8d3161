"""Finds single-row requests whose block tables begin with the same splits, so that these are read
once.

Only complete splits of 256 keys that every row sees are shared, so a shared run writes the same
states as separate runs of each row would, and merging is unchanged
(docs/decisions/0015-shared-prefix-by-partials.md). Source: Ye et al. 2024 (ChunkAttention's two
phases).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE, SPLIT_KEYS
from octavo.program import ops
from octavo.program.program import Program

SPLIT_BLOCKS = SPLIT_KEYS // BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Sharing:
    """Runs of requests that read the first splits of their contexts together. A slot is a
    single-row request.
    """

    run_slots: NDArray[np.int32]
    """Slots of each run, `[runs, rows]`, -1 for none."""
    run_splits: NDArray[np.int32]
    """Leading splits that each run reads, `[runs]`."""
    own_splits: NDArray[np.int32]
    """First split that a slot reads on its own, `[slots]`; 0 if it shares none."""

    def padded(self, num_runs: int) -> Sharing:
        """Pads with empty runs to `num_runs`, so that shapes depend only on the number of rows."""
        more = num_runs - len(self.run_slots)
        slots = np.concatenate(
            [self.run_slots, np.full((more, self.run_slots.shape[1]), -1, np.int32)]
        )
        return Sharing(
            slots, np.concatenate([self.run_splits, np.zeros(more, np.int32)]), self.own_splits
        )


class ArrayNames(NamedTuple):
    """Names of the arrays of a `Sharing` among a step's inputs."""

    slots: str
    splits: str
    own_splits: str


def array_names(group: int, window: int | None, *, full: bool) -> ArrayNames:
    kind = f"sharing of {group}, window {window}, full {full}"
    return ArrayNames(f"{kind}, slots", f"{kind}, splits", f"{kind}, own")


@dataclass(frozen=True, slots=True)
class PrefixMask:
    """Properties by which attention ops share one `Sharing`: visible keys and rows per run."""

    group: int
    window: int | None
    """Window or chunk length: a row that sees the first key is within it."""
    full: bool
    rows_per_run: int

    @staticmethod
    def of(
        op: ops.Attention | ops.MlaAttention,
        program: Program,
        rows_per_run: Callable[[int, int, int], int],
    ) -> PrefixMask:
        """Returns an op's mask.

        `rows_per_run` maps key width, value width and query heads per KV head to the rows of a run.
        """
        group_index = program.group_index(op.group)
        group = program.groups[group_index]
        v_width = op.latent_width if isinstance(op, ops.MlaAttention) else group.v_width
        full = isinstance(op, ops.Attention) and op.mask == "full"
        window = None
        if isinstance(op, ops.Attention) and op.mask in ("window", "chunk"):
            window = op.window
        rows = rows_per_run(group.k_width, v_width, op.num_heads // group.num_kv_heads)
        return PrefixMask(group_index, window, full, rows)

    @property
    def name(self) -> str:
        """Unique name of this mask."""
        return array_names(self.group, self.window, full=self.full).slots

    def arrays(self, batch: StepBatch, *, fixed: bool) -> dict[str, NDArray[np.int32]]:
        """Returns the arrays of a step's `Sharing` by name; empty if no requests share a prefix,
        unless shapes are `fixed`.
        """
        most_runs = (len(batch.query_starts) - 1) // 2
        if self.rows_per_run < 2 or not most_runs:
            return {}
        sharing = find_sharing(
            batch, self.group, window=self.window, full=self.full, rows_per_run=self.rows_per_run
        )
        if fixed:
            sharing = sharing.padded(most_runs)
        elif not len(sharing.run_slots):
            return {}
        names = array_names(self.group, self.window, full=self.full)
        return {
            names.slots: sharing.run_slots,
            names.splits: sharing.run_splits,
            names.own_splits: sharing.own_splits,
        }


@dataclass(frozen=True, slots=True)
class _Sharer:
    """A single-row request that may share its first splits."""

    slot: int
    splits: int
    """Leading splits that are full and completely visible."""
    table: NDArray[np.int32]

    @property
    def order(self) -> bytes:
        """Sort key that places tables with a common prefix next to each other."""
        return self.table[: self.splits * SPLIT_BLOCKS].tobytes()


def find_sharing(
    batch: StepBatch, group: int, *, window: int | None, full: bool, rows_per_run: int
) -> Sharing:
    """Finds the shared runs of a step. A run has at most `rows_per_run` rows, whose query heads of
    one KV head fill a tile.
    """
    num_rows = np.diff(batch.query_starts)
    singles = np.flatnonzero((num_rows == 1) & (batch.context_lens[group] > 0))
    own = np.zeros(len(singles), np.int32)
    runs: list[tuple[list[int], int]] = []
    if rows_per_run > 1:
        for alike in _sharers(batch, group, singles, window=window, full=full):
            for members, splits in _divide(alike)[1]:
                for first in range(0, len(members), rows_per_run):
                    run = [member.slot for member in members[first : first + rows_per_run]]
                    if len(run) > 1:
                        runs.append((run, splits))
                        own[run] = splits
    slots = np.full((len(runs), max(1, rows_per_run)), -1, np.int32)
    for index, (run, _) in enumerate(runs):
        slots[index, : len(run)] = run
    return Sharing(slots, np.array([splits for _, splits in runs], np.int32), own)


def _sharers(
    batch: StepBatch, group: int, singles: NDArray[np.int64], *, window: int | None, full: bool
) -> list[list[_Sharer]]:
    """Groups requests by their first split, sorted.

    With a window or chunks, only rows that see the first key can share.
    """
    context = batch.context_lens[group, singles]
    key_index = batch.key_indices[batch.query_starts[:-1][singles]]
    splits = (context if full else np.minimum(context, key_index + 1)) // SPLIT_KEYS
    eligible = splits > 0 if window is None else (splits > 0) & (key_index < window)
    alike: dict[bytes, list[_Sharer]] = defaultdict(list)
    for slot in np.flatnonzero(eligible).tolist():
        table = batch.block_tables[group, singles[slot]]
        alike[table[:SPLIT_BLOCKS].tobytes()].append(_Sharer(slot, int(splits[slot]), table))
    return [
        sorted(sharers, key=lambda sharer: sharer.order)
        for sharers in alike.values()
        if len(sharers) > 1
    ]


def _divide(sharers: Sequence[_Sharer]) -> tuple[int, list[tuple[Sequence[_Sharer], int]]]:
    """Divides requests into the runs that save the most split reads: all together, or in parts with
    longer common prefixes.

    Returns the reads saved and the runs as (requests, splits).
    """
    if len(sharers) < 2:
        return 0, []
    splits = _common(sharers[0], sharers[-1])
    together = (len(sharers) - 1) * splits
    apart = 0
    parts = []
    first = 0
    while first < len(sharers):
        last = first + 1
        while last < len(sharers) and _common(sharers[first], sharers[last]) > splits:
            last += 1
        spared, runs = _divide(sharers[first:last]) if last - first < len(sharers) else (0, [])
        apart, first = apart + spared, last
        parts += runs
    return (together, [(sharers, splits)]) if together > 0 and together >= apart else (apart, parts)


def _common(a: _Sharer, b: _Sharer) -> int:
    """Returns the number of complete leading splits that two tables have in common."""
    end = min(a.splits, b.splits) * SPLIT_BLOCKS
    other = np.flatnonzero(a.table[:end] != b.table[:end])
    return (int(other[0]) if len(other) else end) // SPLIT_BLOCKS
