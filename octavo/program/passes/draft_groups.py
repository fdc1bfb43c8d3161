"""Gives the target's and the draft model's Programs the same cache groups, so that both use one KV
cache and the same block tables.

Each reads and writes only its own groups.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.program.program import CacheGroup, Op, Program

PREFIX = "draft."
MOST_BEHIND = 32
"""Maximum number of tokens by which a draft model's KV may lag behind the target: two blocks."""


def join_groups(target: Program, draft: Program) -> tuple[Program, Program]:
    """Returns both Programs with the cache groups of both, the target's groups first."""
    own = tuple(_make_draft_group(group) for group in draft.groups)
    groups = (*target.groups, *own)
    ops = tuple(_rename(op) for op in draft.ops)
    return replace(target, groups=groups), replace(draft, name="draft", groups=groups, ops=ops)


def _make_draft_group(group: CacheGroup) -> CacheGroup:
    """Renames a draft model's group and extends its window, because a lagging draft model reads
    older keys.
    """
    window = None if group.window is None else group.window + MOST_BEHIND
    return replace(group, name=PREFIX + group.name, window=window)


def _rename(op: Op) -> Op:
    group = getattr(op, "group", None)
    if group is None:
        return op
    changes: dict[str, Any] = {"group": PREFIX + group}
    return replace(op, **changes)
