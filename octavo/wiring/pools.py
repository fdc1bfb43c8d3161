"""What a model that pools makes of a text, by its Program and its checkpoint's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.engine.front.pooling_inputs import Pools
from octavo.models.encoder import is_classifier
from octavo.models.hf_config import HfConfig
from octavo.program.ops import Attention, Embedding, PoolRows
from octavo.program.program import Program


def pools_of(config: Mapping[str, Any], program: Program) -> Pools:
    """Returns what the Program's pooled rows are, and what is made of them."""
    hf = HfConfig(config)
    pooling = hf.table("pooling")
    return Pools(
        "classify" if is_classifier(hf) else "embed",
        program.name,
        width=program.outputs["pooled"].width,
        normalize=bool(pooling.get("normalize", False)),
        lower_case=bool(pooling.get("do_lower_case", False)),
    )


def reads_whole_texts(program: Program) -> bool:
    """Returns whether a text has to be computed in one step: a token sees those after it, or the
    pooled row is made of all of them.
    """
    return any(
        (isinstance(op, Attention) and op.mask == "full")
        or (isinstance(op, PoolRows) and op.mode != "last")
        for op in program.ops
    )


def most_tokens(config: Mapping[str, Any], program: Program, context_tokens: int) -> int:
    """Returns the most tokens of a text: as many as `context_tokens`, the tables of positions and
    the checkpoint's max_seq_length all allow.
    """
    tables = [
        op.table.shape[0] - op.offset
        for op in program.ops
        if isinstance(op, Embedding) and op.by_position and op.axis == 0
    ]
    length = HfConfig(HfConfig(config).table("pooling")).integer("max_seq_length", context_tokens)
    return min(context_tokens, length, *tables)
