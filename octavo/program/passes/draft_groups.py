"""Gives a model's Program and that of the model that drafts for it the same cache groups, so that
both keep K and V in one cache, under the same block tables.

Each reads and writes its own groups alone. Knows no weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.program.program import CacheGroup, Op, Program

PREFIX = "draft."
MOST_BEHIND = 32
"""Most tokens that a draft model may lack of those that the model has computed, two blocks: it
computes full blocks, and reads the windows of tokens that the model has gone past.
"""


def beside(target: Program, draft: Program) -> tuple[Program, Program]:
    """Returns both Programs over the groups of both, those of the target first."""
    own = tuple(_of_draft(group) for group in draft.groups)
    groups = (*target.groups, *own)
    ops = tuple(_renamed(op) for op in draft.ops)
    return replace(target, groups=groups), replace(draft, name="draft", groups=groups, ops=ops)


def _of_draft(group: CacheGroup) -> CacheGroup:
    """Returns a group of the draft model under its new name. Its keys stay as long as a draft model
    that is behind may read them, which is longer than its ops look back.
    """
    window = None if group.window is None else group.window + MOST_BEHIND
    return replace(group, name=PREFIX + group.name, window=window)


def _renamed(op: Op) -> Op:
    """Returns an op on its group's new name, where it has one."""
    group = getattr(op, "group", None)
    if group is None:
        return op
    changes: dict[str, Any] = {"group": PREFIX + group}
    return replace(op, **changes)
