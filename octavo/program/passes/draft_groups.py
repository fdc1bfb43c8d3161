"""Gives a model's Program and that of the model that drafts for it the same cache groups, so that
both keep K and V in one cache, under the same block tables.

Each reads and writes its own groups alone. Knows no weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.program.program import Op, Program

PREFIX = "draft."


def beside(target: Program, draft: Program) -> tuple[Program, Program]:
    """Returns both Programs over the groups of both, those of the target first."""
    own = tuple(replace(group, name=PREFIX + group.name) for group in draft.groups)
    groups = (*target.groups, *own)
    ops = tuple(_renamed(op) for op in draft.ops)
    return replace(target, groups=groups), replace(draft, name="draft", groups=groups, ops=ops)


def _renamed(op: Op) -> Op:
    """Returns an op on its group's new name, where it has one."""
    group = getattr(op, "group", None)
    if group is None:
        return op
    changes: dict[str, Any] = {"group": PREFIX + group}
    return replace(op, **changes)
