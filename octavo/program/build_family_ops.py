"""Builder functions for the ops of `family_ops.py` that several families use."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.program.builder import Builder
from octavo.program.family_ops import Concat, Mix, SelectColumns
from octavo.program.program import Value


def concat(b: Builder, xs: Sequence[Value]) -> Value:
    """Appends the concatenation of columns; returns a single x itself."""
    if len(xs) == 1:
        return xs[0]
    out = b.value("concatenated", xs[0].axis, sum(x.width for x in xs))
    b.append(Concat(tuple(xs), out))
    return out


def columns(b: Builder, x: Value, start: int, width: int) -> Value:
    out = b.value("columns", x.axis, width)
    b.append(SelectColumns(x, out, start))
    return out


def mix(
    b: Builder,
    xs: Sequence[Value],
    bases: Sequence[Value],
    coefs: Value,
    *,
    offset: float = 0.0,
) -> tuple[Value, ...]:
    """Appends each base plus its weighted sum of `xs`."""
    outs = tuple(b.like("mixed", base) for base in bases)
    b.append(Mix(tuple(xs), tuple(bases), coefs, outs, offset))
    return outs
