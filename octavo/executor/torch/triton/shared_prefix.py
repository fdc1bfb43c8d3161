"""Finds single-row requests whose block tables begin with the same splits, so that these are read
once.

Only complete splits of 256 keys that every row sees are shared, so a shared run writes the same
states as separate runs of each row would, and merging is unchanged
(docs/decisions/0015-shared-prefix-by-partials.md). Source: Ye et al. 2024 (ChunkAttention's two
phases).
"""

from __future__ import annotations

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


def find_sharing(
    batch: StepBatch, group: int, *, window: int | None, full: bool, rows_per_run: int
) -> Sharing:
    """Finds the shared runs of a step. A run has at most `rows_per_run` rows, whose query heads of
    one KV head fill a tile.
    """
    num_rows = np.diff(batch.query_starts)
    singles = np.flatnonzero((num_rows == 1) & (batch.context_lens[group] > 0))
    own = np.zeros(len(singles), np.int32)
    runs: list[tuple[NDArray[np.intp], int]] = []
    if rows_per_run > 1:
        slots, common = _sort_by_prefix(batch, group, singles, window=window, full=full)
        for first, end in _divide(common, 0, len(slots))[1]:
            read = min(common[first : end - 1])
            for start in range(first, end, rows_per_run):
                run = slots[start : min(start + rows_per_run, end)]
                if len(run) > 1:
                    runs.append((run, read))
                    own[run] = read
    run_slots = np.full((len(runs), max(1, rows_per_run)), -1, np.int32)
    for index, (run, _) in enumerate(runs):
        run_slots[index, : len(run)] = run
    return Sharing(run_slots, np.array([read for _, read in runs], np.int32), own)


def _sort_by_prefix(
    batch: StepBatch, group: int, singles: NDArray[np.intp], *, window: int | None, full: bool
) -> tuple[NDArray[np.intp], list[int]]:
    """Returns the slots whose first block another one shares, sorted by their tables, and how many
    leading splits each has in common with the next; counted are splits that are full and completely
    visible.

    With a window or chunks, only rows that see the first key can share.
    """
    context = batch.context_lens[group, singles]
    key_index = batch.key_indices[batch.query_starts[:-1][singles]]
    splits = (context if full else np.minimum(context, key_index + 1)) // SPLIT_KEYS
    eligible = splits > 0 if window is None else (splits > 0) & (key_index < window)
    _, kind, count = np.unique(
        np.where(eligible, batch.block_tables[group, singles, 0], -1 - np.arange(len(singles)))
        if len(singles)
        else singles,
        return_inverse=True,
        return_counts=True,
    )
    slots = np.flatnonzero(count[kind] > 1)
    if not len(slots):
        return slots, []
    splits = splits[slots]
    tables = batch.block_tables[group, singles[slots], : int(splits.max()) * SPLIT_BLOCKS]
    tables = np.where(np.arange(tables.shape[1]) < splits[:, None] * SPLIT_BLOCKS, tables, -1)
    order = np.argsort(tables.view(f"V{tables.shape[1] * tables.itemsize}")[:, 0], kind="stable")
    tables, splits = tables[order], splits[order]
    same = (tables[1:] == tables[:-1]).reshape(len(slots) - 1, -1, SPLIT_BLOCKS).all(axis=2)
    common = np.minimum(same.cumprod(axis=1).sum(axis=1), np.minimum(splits[1:], splits[:-1]))
    return slots[order], common.tolist()


def _divide(common: Sequence[int], first: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """Divides sorted requests first..end-1 into the runs that save the most split reads: all
    together, or in parts with longer common prefixes.

    Returns the reads saved and the runs.
    """
    if end - first < 2:
        return 0, []
    least = min(common[first : end - 1])
    together, apart = (end - first - 1) * least, 0
    parts: list[tuple[int, int]] = []
    start = first
    for at in range(first, end):
        if at == end - 1 or common[at] <= least:
            if at + 1 - start < end - first:
                spared, runs = _divide(common, start, at + 1)
                apart, parts = apart + spared, parts + runs
            start = at + 1
    return (together, [(first, end)]) if together > 0 and together >= apart else (apart, parts)
