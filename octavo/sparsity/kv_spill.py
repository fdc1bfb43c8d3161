"""Temporary file of the native backend for KV blocks that do not fit into memory.

The file is unlinked, so it disappears with the process. `csrc/runtime/kv_spill.h` moves the blocks.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from octavo.api.errors import ConfigError
from octavo.config.engine_config import EngineConfig
from octavo.config.sizes import format_bytes
from octavo.engine.protocol.kv_cache_spec import KvDemand
from octavo.executor.kv import KvLayout
from octavo.executor.native.weight_file import check_directory, directory_error
from octavo.program.ops import Attention
from octavo.program.program import Op, Program, Value
from octavo.sparsity.options import KvSpillOptions
from octavo.worker.kv_hooks import Counters, KvHooks
from octavo.worker.memory import GroupSize, KvBudget, KvPlanner, block_counts, most_blocks

NAME = "kv_spill_dir"

DEPTH = 16
"""Number of reads and writes in flight; each uses a thread."""


@dataclass(frozen=True, slots=True)
class KvOffDevice:
    """KV cache of key-selecting layers, kept in a file and cached in memory."""

    directory: Path
    file_bytes: int
    memory_bytes: int
    """Memory for the complete KV cache, in bytes."""
    prefetches: bool = False
    """Whether to prefetch the blocks that the next layer may select."""


def spilled_layers(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns, per cache group, the layers in which every attention selects keys.

    Raises ConfigError if they belong to several groups.
    """
    chosen: defaultdict[str, set[int]] = defaultdict(set)
    whole: defaultdict[str, set[int]] = defaultdict(set)
    for op in program.ops:
        if isinstance(op, Attention):
            (whole if op.selection is None else chosen)[op.group].add(op.layer)
    layers_by_group = {
        group: tuple(sorted(layers - whole[group])) for group, layers in chosen.items()
    }
    layers_by_group = {group: layers for group, layers in layers_by_group.items() if layers}
    if len(layers_by_group) > 1:
        raise ConfigError(
            f"{NAME}: {program.name} selects keys in several cache groups, expected one:"
            f" {', '.join(layers_by_group)}",
            hint=f"remove {NAME}",
        )
    return layers_by_group


def next_chosen(in_order: Sequence[Op]) -> dict[int, Attention]:
    """Maps the id of each attention to the next attention, if that one's key selection can be
    prefetched.

    The next attention must select keys of the same cache group, with queries that are computed
    before the first attention.
    """
    next_attentions: dict[int, Attention] = {}
    produced: set[Value] = set()
    before: Attention | None = None
    known: set[Value] = set()
    for op in in_order:
        if isinstance(op, Attention):
            if before is not None and op.partial_q in known:
                alike = (op.group, op.num_heads, op.scale, op.mask)
                if alike == (before.group, before.num_heads, before.scale, before.mask):
                    next_attentions[id(before)] = op
            before, known = op, set(produced)
        produced.update(op.outputs)
    return next_attentions


COUNTERS = (
    "kv_spill_found",
    "kv_spill_read",
    "kv_spill_read_bytes",
    "kv_spill_written_bytes",
    "kv_spill_wait_seconds",
    "kv_spill_foreseen",
    "kv_spill_foreseen_used",
)
"""First counters that the KV memory returns for each cache group, in this order."""


def check_spill(options: KvOffDevice) -> None:
    """Raises ConfigError if the directory is in memory or lacks space for the file."""
    nowhere = options.directory / ".octavo-kv"
    check_directory(options.directory, nowhere, options.file_bytes, name=NAME)


def spill_to_file(
    memory: Any,
    group: int,
    layout: KvLayout,
    options: KvOffDevice,
    *,
    num_blocks: int,
    num_kept: int,
) -> None:
    """Attaches a file to the KV memory for the layers of a group.

    Raises ConfigError if the disk lacks space.
    """
    num_bytes = len(layout.in_file) * num_blocks * layout.record_bytes
    try:
        with tempfile.TemporaryFile(dir=options.directory, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory.spill_to(
                group,
                list(layout.in_file),
                file.fileno(),
                num_threads=DEPTH,
                num_kept=num_kept,
            )
    except OSError as error:
        raise directory_error(options.directory, error, name=NAME) from None


def num_kept(
    memory_bytes: int,
    resident_bytes: Sequence[int],
    num_blocks: Sequence[int],
    *,
    record_bytes: int,
    num_layers: int,
) -> int:
    """Returns how many blocks of each spilled layer fit into memory.

    Memory also contains the resident part of each group and one complete spilled layer; the result
    is negative if these do not fit.
    """
    resident = sum(size * count for size, count in zip(resident_bytes, num_blocks, strict=True))
    fixed = resident + max(num_blocks) * record_bytes
    return min(max(num_blocks), (memory_bytes - fixed) // (record_bytes * num_layers))


class KvSpillHooks(KvHooks):
    """Plans the KV cache's memory and file size, and counts the blocks moved between memory and
    file.
    """

    def planner(self, config: EngineConfig) -> KvPlanner | None:
        file_bytes = config.of(KvSpillOptions).kv_spill_bytes
        memory_bytes = config.cache.kv_cache_memory_bytes
        if file_bytes is None:
            return None
        assert memory_bytes is not None, "the options were checked"
        return partial(_plan, memory_bytes=memory_bytes, file_bytes=file_bytes)

    def counters(self, kv: Any, layouts: Sequence[KvLayout]) -> Counters | None:
        groups = [group_index for group_index, layout in enumerate(layouts) if layout.in_file]
        if not groups:
            return None

        def count() -> dict[str, float]:
            totals = [sum(column) for column in zip(*map(kv.spilled, groups), strict=True)]
            return dict(zip(COUNTERS, totals, strict=False))

        return count


def _plan(
    groups: Sequence[GroupSize], demand: KvDemand, *, memory_bytes: int, file_bytes: int
) -> KvBudget:
    """Plans as many blocks as the file can hold.

    Memory contains the resident bytes of all blocks, one complete spilled layer, and as many blocks
    of each spilled layer as fit in addition.
    """
    (spilled,) = (group for group in groups if group.num_in_file)
    caps = most_blocks(memory_bytes, groups, demand)
    min_blocks = max(group.least_blocks(demand) for group in groups)
    of_layers = spilled.record_bytes * spilled.num_in_file
    num_blocks = min(file_bytes // of_layers, max(caps))
    if num_blocks < min_blocks:
        raise ConfigError(
            f"kv_spill_bytes: got {format_bytes(file_bytes)}, expected at least"
            f" {format_bytes(min_blocks * of_layers)} for one request of {demand.max_model_len:,}"
            " tokens",
            hint=f"set kv_spill_bytes to {min_blocks * of_layers} or more, or lower max_model_len",
        )
    counts = block_counts(num_blocks, groups, caps, keeps_checkpoints=False)
    fixed = sum(group.block_bytes * count for group, count in zip(groups, counts, strict=True))
    fixed += num_blocks * spilled.record_bytes
    least_bytes = fixed + min(num_blocks, demand.max_num_seqs) * of_layers
    if memory_bytes < least_bytes:
        raise ConfigError(
            f"kv_cache_memory_bytes: got {format_bytes(memory_bytes)}, expected at least"
            f" {format_bytes(least_bytes)} for {format_bytes(file_bytes)} of kv_spill_bytes: the"
            " layers that stay in memory, one spilled layer, and one block per layer and request",
            hint=f"set kv_cache_memory_bytes to {least_bytes} or more, or lower kv_spill_bytes or"
            " max_num_seqs",
        )
    num_in_memory = num_kept(
        memory_bytes,
        [group.block_bytes for group in groups],
        counts,
        record_bytes=spilled.record_bytes,
        num_layers=spilled.num_in_file,
    )
    return KvBudget(tuple(counts), tuple(groups), demand, num_in_memory)
