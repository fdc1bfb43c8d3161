"""The file of the native backend for blocks of keys and values that memory has no room for.

Makes the file, which has no name: it is gone with the process, however that ends. What goes there
and what comes back is csrc/core/kv_spill.h.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from octavo.api.errors import ConfigError
from octavo.executor.base import KvOffDevice
from octavo.executor.kv import KvLayout
from octavo.executor.native.weight_file import check_directory, refused
from octavo.program.ops import Attention
from octavo.program.program import Op, Program, Value

NAME = "kv_spill_dir"

DEPTH = 16
"""Number of reads and writes in flight, each in a thread of its own."""


def spilled_layers(program: Program) -> dict[str, tuple[int, ...]]:
    """Returns the layers of each cache group of which every attention chooses the keys that it
    reads; ConfigError where they are in several groups.
    """
    chosen: defaultdict[str, set[int]] = defaultdict(set)
    whole: defaultdict[str, set[int]] = defaultdict(set)
    for op in program.ops:
        if isinstance(op, Attention):
            (whole if op.selection is None else chosen)[op.group].add(op.layer)
    found = {group: tuple(sorted(layers - whole[group])) for group, layers in chosen.items()}
    found = {group: layers for group, layers in found.items() if layers}
    if len(found) > 1:
        raise ConfigError(
            f"{NAME}: {program.name} chooses keys in several cache groups, {', '.join(found)}",
            hint=f"leave {NAME} out",
        )
    return found


def next_chosen(in_order: Sequence[Op]) -> dict[int, Attention]:
    """Returns by the identity of each attention the one behind it, where that chooses keys of the
    same cache group by queries that are made before the first of both.
    """
    found: dict[int, Attention] = {}
    made: set[Value] = set()
    before: Attention | None = None
    known: set[Value] = set()
    for op in in_order:
        if isinstance(op, Attention):
            if before is not None and op.partial_q in known:
                alike = (op.group, op.num_heads, op.scale, op.mask)
                if alike == (before.group, before.num_heads, before.scale, before.mask):
                    found[id(before)] = op
            before, known = op, set(made)
        made.update(op.outputs)
    return found


def check_spill(options: KvOffDevice) -> None:
    """Raises ConfigError where the directory is in memory, or has no room for the file."""
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
    """Gives KV memory a file for the layers of a group; ConfigError where the disk has no room."""
    num_bytes = len(layout.spilled) * num_blocks * layout.record_bytes
    try:
        with tempfile.TemporaryFile(dir=options.directory, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            memory.spill_to(
                group,
                list(layout.spilled),
                file.fileno(),
                num_threads=DEPTH,
                num_kept=num_kept,
            )
    except OSError as error:
        raise refused(options.directory, error, name=NAME) from None
