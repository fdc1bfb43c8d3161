"""Gives the target's and the draft model's Programs the same cache groups, so that both use one KV
cache and the same block tables.

Each reads and writes only its own groups, except drafters without KV, which read the target's.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import Any

from octavo.program.program import CacheGroup, Op, Program

PREFIX = "draft."
MOST_BEHIND = 32
"""Maximum number of tokens by which a draft model's KV may lag behind the target: two blocks."""


def join_groups(
    target: Program, draft: Program, *, reads_keys: bool = False
) -> tuple[Program, Program]:
    """Returns both Programs with the cache groups of both, the target's groups first. With
    `reads_keys`, the draft's groups that have names of the target's are the target's.
    """
    shared = {group.name for group in target.groups} if reads_keys else set()
    own = tuple(_make_draft_group(each) for each in draft.groups if each.name not in shared)
    groups = (*target.groups, *own)
    ops = tuple(_rename(op, shared) for op in draft.ops)
    return replace(target, groups=groups), replace(draft, name="draft", groups=groups, ops=ops)


def whole_groups(whole: Program, own: Program) -> tuple[CacheGroup, ...]:
    """Returns the cache groups of a rank's Program as one rank would have them: those of the
    unsharded Program, then the draft's, which every rank has completely.
    """
    return (*whole.groups, *own.groups[len(whole.groups) :])


def is_draft_group(group: CacheGroup) -> bool:
    return group.name.startswith(PREFIX)


def _make_draft_group(group: CacheGroup) -> CacheGroup:
    """Renames a draft model's group and extends its window, because a lagging draft model reads
    older keys.
    """
    window = None if group.window is None else group.window + MOST_BEHIND
    return replace(group, name=PREFIX + group.name, window=window)


def _rename(op: Op, shared: Set[str]) -> Op:
    group = getattr(op, "group", None)
    if group is None or group in shared:
        return op
    changes: dict[str, Any] = {"group": PREFIX + group}
    return replace(op, **changes)
