"""Which requests of one row share splits of their contexts in a step: those whose block tables
begin with the same blocks.

Only whole splits of 256 keys that every row sees are shared, so a shared run leaves the states that
each row's own run would have left, and merging does not know of it
(docs/decisions/0015-shared-prefix-by-partials.md). Knows NumPy, ops and no kernel. Source: Ye et
al. 2024 (ChunkAttention's two phases).
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
    """Runs of requests that read the first splits of their contexts together. A slot is one of the
    step's requests of one row.
    """

    run_slots: NDArray[np.int32]
    """Slots of each run, `[runs, rows]`, -1 where there is none."""
    run_splits: NDArray[np.int32]
    """Number of leading splits that each run reads, `[runs]`."""
    own_splits: NDArray[np.int32]
    """First split that a slot reads by itself, `[slots]`; 0 where it shares nothing."""

    def padded(self, num_runs: int) -> Sharing:
        """Returns `num_runs` runs, the added ones empty, so that every step of as many rows has the
        same shapes.
        """
        more = num_runs - len(self.run_slots)
        slots = np.concatenate(
            [self.run_slots, np.full((more, self.run_slots.shape[1]), -1, np.int32)]
        )
        return Sharing(
            slots, np.concatenate([self.run_splits, np.zeros(more, np.int32)]), self.own_splits
        )


class ArrayNames(NamedTuple):
    """Names under which the arrays of a `Sharing` travel with a step's inputs."""

    slots: str
    splits: str
    own_splits: str


def array_names(group: int, window: int | None, *, full: bool) -> ArrayNames:
    kind = f"sharing of {group}, window {window}, full {full}"
    return ArrayNames(f"{kind}, slots", f"{kind}, splits", f"{kind}, own")


@dataclass(frozen=True, slots=True)
class PrefixMask:
    """The properties by which attention ops share one `Sharing`: the keys that rows see, and the
    rows of a run.
    """

    group: int
    window: int | None
    """Number of the first keys, or of a chunk's: a row that sees the first key lies within it."""
    full: bool
    rows_a_run: int

    @staticmethod
    def of(
        op: ops.Attention | ops.MlaAttention,
        program: Program,
        rows_a_run: Callable[[int, int, int], int],
    ) -> PrefixMask:
        """Returns an op's mask. `rows_a_run` maps the widths of keys and values and the query heads
        of a KV head to the rows of a run.
        """
        at = program.group_index(op.group)
        group = program.groups[at]
        v_width = op.latent_width if isinstance(op, ops.MlaAttention) else group.v_width
        full = isinstance(op, ops.Attention) and op.mask == "full"
        window = None
        if isinstance(op, ops.Attention) and op.mask in ("window", "chunk"):
            window = op.window
        rows = rows_a_run(group.k_width, v_width, op.num_heads // group.num_kv_heads)
        return PrefixMask(at, window, full, rows)

    @property
    def name(self) -> str:
        """A name that other masks do not have."""
        return array_names(self.group, self.window, full=self.full).slots

    def arrays(self, batch: StepBatch, *, fixed: bool) -> dict[str, NDArray[np.int32]]:
        """Returns the arrays of a step's `Sharing` by name; none where no requests share a prefix,
        unless shapes are `fixed`.
        """
        most_runs = (len(batch.query_starts) - 1) // 2
        if self.rows_a_run < 2 or not most_runs:
            return {}
        found = sharing_of(
            batch, self.group, window=self.window, full=self.full, rows_a_run=self.rows_a_run
        )
        if fixed:
            found = found.padded(most_runs)
        elif not len(found.run_slots):
            return {}
        names = array_names(self.group, self.window, full=self.full)
        return {
            names.slots: found.run_slots,
            names.splits: found.run_splits,
            names.own_splits: found.own_splits,
        }


@dataclass(frozen=True, slots=True)
class _Sharer:
    """A request of one row that may share its first splits."""

    slot: int
    splits: int
    """Number of leading splits that its keys fill and its row sees whole."""
    table: NDArray[np.int32]

    @property
    def order(self) -> bytes:
        """Sort key by which tables that begin alike are neighbours."""
        return self.table[: self.splits * SPLIT_BLOCKS].tobytes()


def sharing_of(
    batch: StepBatch, group: int, *, window: int | None, full: bool, rows_a_run: int
) -> Sharing:
    """Finds the shared runs of a step. A run has at most `rows_a_run` rows: their query heads of
    one KV head fill a tile.
    """
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
    """Returns the requests that begin with the same split, sorted, for each such split. With a
    window, or in chunks, only rows that see the first key can share.
    """
    context = batch.context_lens[group, singles]
    place = batch.places[batch.query_starts[:-1][singles]]
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
    """Divides requests into runs that save the most reads of splits: all together over what all
    have in common, or in parts that have more in common each. Returns the number of reads saved and
    the runs as (requests, splits).
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
        spared, found = _divided(sharers[first:last]) if last - first < len(sharers) else (0, [])
        apart, first = apart + spared, last
        parts += found
    return (together, [(sharers, splits)]) if together > 0 and together >= apart else (apart, parts)


def _common(a: _Sharer, b: _Sharer) -> int:
    """Returns the number of whole leading splits that two tables have in common."""
    end = min(a.splits, b.splits) * SPLIT_BLOCKS
    other = np.flatnonzero(a.table[:end] != b.table[:end])
    return (int(other[0]) if len(other) else end) // SPLIT_BLOCKS
