"""Pooling of a model, from its Program and its checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np

from octavo.api.errors import UnsupportedModel
from octavo.api.outputs import RequestOutput
from octavo.frontend.pooling import Pools
from octavo.models.hf_config import HfConfig
from octavo.models.pooling import (
    get_activation,
    get_labels,
    get_pair_template,
    is_classifier,
    is_token_classifier,
)
from octavo.program.ops import Attention, Embedding, PoolRows
from octavo.program.program import Program


def get_pools(config: Mapping[str, Any], program: Program) -> Pools:
    """Returns the pooling task and its options."""
    hf = HfConfig(config)
    pooling = hf.table("pooling")
    width = program.outputs["pooled"].width
    rows = Pools(
        "embed",
        program.name,
        width=width,
        normalize=bool(pooling.get("normalize", False)),
        lower_case=bool(pooling.get("do_lower_case", False)),
        prefix=HfConfig(pooling).text("prompt", ""),
        has_segments=any(
            isinstance(op, Embedding) and op.by_position and op.axis == 1 and op.table.shape[0] > 1
            for op in program.ops
        ),
        dimensions=_dimensions(hf, width),
    )
    if is_token_classifier(hf):
        return replace(
            rows,
            task="token_classify",
            normalize=False,
            activation=get_activation(hf, width),
            labels=get_labels(hf, width),
            dimensions=(),
        )
    if program.outputs["pooled"].axis == "samples":
        return replace(
            rows,
            task="token_embed",
            markers=tuple(pooling.get("markers", ())),
            skiplist=tuple(pooling.get("skiplist", ())),
            compare=max_similarity,
        )
    if not is_classifier(hf):
        return rows
    return replace(
        rows,
        task="classify",
        normalize=False,
        activation=get_activation(hf, width),
        labels=get_labels(hf, width),
        pair_template=get_pair_template(hf),
        dimensions=(),
    )


def max_similarity(query: RequestOutput, document: RequestOutput, skipped: Set[int]) -> float:
    """Returns the sum over a query's tokens of the largest dot product with a document's token,
    without the `skipped` ids (MaxSim, Khattab and Zaharia 2020).
    """
    rows, others = (
        np.frombuffer(output.pooled or b"", "<f4").reshape(len(output.prompt_token_ids), -1)
        for output in (query, document)
    )
    kept = [token not in skipped for token in document.prompt_token_ids]
    others = others[kept] if any(kept) else others
    return float((rows @ others.T).max(axis=1).sum())


def _dimensions(config: HfConfig, width: int) -> Sequence[int]:
    """Returns the allowed sizes of truncated embeddings."""
    named = config.integers("matryoshka_dimensions")
    for number in named:
        if not 1 <= number <= width:
            raise UnsupportedModel(
                f"config.json: matryoshka_dimensions holds {number}, expected 1 to {width}"
            )
    return range(1, width + 1) if not named and config.flag("is_matryoshka", False) else named


def needs_whole_text(program: Program) -> bool:
    """Returns whether a text must be computed in one step: attention is not causal, or the output
    uses all tokens.
    """
    pooled = program.outputs.get("pooled")
    return (pooled is not None and pooled.axis == "samples") or any(
        (
            isinstance(op, Attention)
            and op.mask == "full"
            and program.group(op.group).kind != "cross"
        )
        or (isinstance(op, PoolRows) and op.mode != "last")
        for op in program.ops
    )


def get_max_tokens(config: Mapping[str, Any], program: Program, context_tokens: int) -> int:
    """Returns the maximum length of a text: the minimum of `context_tokens`, the number of position
    embeddings and the checkpoint's max_seq_length.
    """
    tables = [
        op.table.shape[0] - op.offset
        for op in program.ops
        if isinstance(op, Embedding) and op.by_position and op.axis == 0 and not op.others_first
    ]
    length = HfConfig(HfConfig(config).table("pooling")).integer("max_seq_length", context_tokens)
    return min(context_tokens, length, *tables)
