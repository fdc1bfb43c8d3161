"""The end of a pooling model: a row per request, or per token, of an embedding or of scores.

A decoder's classifier has its own weights (`score`, as saved by transformers) or compares token
logits.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.pooling import PooledHead, is_token_classifier, num_labels, pooling_mode
from octavo.program.builder import Builder
from octavo.program.ops import Activation
from octavo.program.program import Value

DENSE_ACTIVATIONS: dict[str, Activation | None] = {"Identity": None, "Tanh": "tanh"}
"""Activation of a Dense module by `torch.nn` class."""


def pooled_row(
    b: Builder,
    x: Value,
    head: PooledHead,
    norm: Callable[[Value], Value],
    logit: Callable[[Value, int], Value],
) -> Value:
    """Appends norm, pooling and classifier; `logit` appends the logit of a token."""
    if head.mode == "tokens":
        return norm(b.gather_rows(x))
    one = head.mode != "mean"  # a single token's row is normed separately
    row = norm(b.pool_rows(x, head.mode)) if one else b.pool_rows(norm(x), head.mode)
    if head.tokens:
        score, *others = (logit(row, token_id) for token_id in head.tokens)
        for other in others:
            score = b.add(score, b.scale(other, -1.0))
        return score
    return b.linear(row, "score", head.num_labels) if head.num_labels else row


def embed_rows(b: Builder, x: Value, config: HfConfig) -> Value:
    """Appends the pooling of an encoder's rows and the Dense modules after it, or the classifier of
    each token; returns a row per text, or per token.
    """
    if is_token_classifier(config):
        return b.linear(b.gather_rows(x), "classifier", num_labels(config), bias=True)
    mode = pooling_mode(config)
    rows = b.gather_rows(x) if mode == "tokens" else b.pool_rows(x, mode)
    for dense in config.table("pooling").get("dense", ()):
        activation = dense["activation"]
        if activation not in DENSE_ACTIVATIONS:
            raise UnsupportedModel(
                f"{dense['module']}: the activation is {activation}, supported:"
                f" {', '.join(DENSE_ACTIVATIONS)}"
            )
        rows = b.linear(rows, dense["module"], dense["width"], bias=dense["bias"])
        named = DENSE_ACTIVATIONS[activation]
        rows = rows if named is None else b.act(rows, named)
    return rows
