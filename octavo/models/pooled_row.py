"""The end of a pooling decoder: one row per request, an embedding or a classifier's scores.

A classifier has its own weights (`score`, as saved by transformers) or compares token logits.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.models.pooling import PooledHead
from octavo.program.builder import Builder
from octavo.program.program import Value


def pooled_row(
    b: Builder,
    x: Value,
    head: PooledHead,
    norm: Callable[[Value], Value],
    logit: Callable[[Value, int], Value],
) -> Value:
    """Appends norm, pooling and classifier; `logit` appends the logit of a token."""
    one = head.mode != "mean"  # a single token's row is normed separately
    row = norm(b.pool_rows(x, head.mode)) if one else b.pool_rows(norm(x), head.mode)
    if head.tokens:
        score, *others = (logit(row, token_id) for token_id in head.tokens)
        for other in others:
            score = b.add(score, b.scale(other, -1.0))
        return score
    return b.linear(row, "score", head.num_labels) if head.num_labels else row
