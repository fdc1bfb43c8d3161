"""Pooling of a model, from its Program and its checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from octavo.api.errors import UnsupportedModel
from octavo.frontend.pooling import Pools
from octavo.models.hf_config import HfConfig
from octavo.models.pooling import get_activation, get_labels, get_pair_template, is_classifier
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
    """Returns whether a text must be computed in one step: attention is not causal, or pooling uses
    all tokens.
    """
    return any(
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
        if isinstance(op, Embedding) and op.by_position and op.axis == 0
    ]
    length = HfConfig(HfConfig(config).table("pooling")).integer("max_seq_length", context_tokens)
    return min(context_tokens, length, *tables)
