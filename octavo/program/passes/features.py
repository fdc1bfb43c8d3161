"""Features pass: the target model writes the hidden states that a draft head reads, one row per
token, to a cache group.

Feature rows are cached, swapped and forked like KV. The head reads the previous token's row and
writes its own rows while drafting; the target overwrites them later. Runs before all passes that
fuse ops. Source: Li et al. 2025 (EAGLE-3), DeepSeek-AI 2024 (multi-token prediction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.api.errors import UnsupportedModel
from octavo.program.ops import Add, GatherRows, KvWrite, LayerNorm, Linear, RmsNorm
from octavo.program.passes.stages import layer_inputs
from octavo.program.program import CacheGroup, Op, Program, Value, Weight

FEATURES = "features"
"""Name of the cache group."""
WINDOW = 2
"""Rows that a head reads per token: its own and the previous one."""
PREVIOUS = (1.0, 0.0)
"""Convolution taps that select the previous row."""


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states that a draft head reads: sums of projected layer inputs, or the output of the
    last norm.
    """

    layers: tuple[int, ...] = ()
    """Layer indices; (): the output of the last norm."""
    weights: tuple[Weight, ...] = ()
    """Matrix of each of `layers`, `[out, in]`."""


def feature_group(width: int) -> CacheGroup:
    """Returns the cache group of one row of `width` values per token."""
    return CacheGroup(FEATURES, "conv", 1, 1, width, 0, window=WINDOW)


def with_features(program: Program, features: Features, group: str) -> Program:
    """Returns the Program that also writes each token's feature row to a cache group."""
    ops, row = _select_layers(program, features) if features.layers else _behind_last_norm(program)
    extended = replace(program, ops=(*program.ops, *ops, KvWrite((row,), None, group, 0)))
    extended.check()
    return extended


def _select_layers(program: Program, features: Features) -> tuple[Sequence[Op], Value]:
    inputs = layer_inputs(program)
    missing = [layer for layer in features.layers if layer not in inputs]
    if missing:
        raise UnsupportedModel(
            f"spec_method: eagle3 requires the input of layer {missing[0]}, which is not available"
            f" in"
            f" {program.name} of {len(inputs) + 1} layers",
            hint="eagle_aux_hidden_state_layer_ids in the head's config.json sets the layers",
        )
    ops: list[Op] = []
    total: Value | None = None
    for layer, weight in zip(features.layers, features.weights, strict=True):
        out = Value(f"features.{layer}", "tokens", weight.shape[0])
        ops.append(Linear(inputs[layer], (out,), (weight,)))
        if total is not None:
            summed = replace(out, name=f"features.up_to_{layer}")
            ops.append(Add(total, out, summed))
            out = summed
        total = out
    assert total is not None, "a head reads at least one layer"
    return ops, total


def _behind_last_norm(program: Program) -> tuple[Sequence[Op], Value]:
    """Returns the last norm applied to all tokens instead of only sampled rows."""
    gather = _gather(program)
    norms = [
        op
        for op in program.ops
        if isinstance(op, RmsNorm | LayerNorm) and op.x in (gather.out, gather.x)
    ]
    if not norms or not isinstance(norms[-1], RmsNorm):
        return [], gather.x
    out = Value("features", "tokens", gather.x.width)
    return [replace(norms[-1], x=gather.x, out=out)], out


def _gather(program: Program) -> GatherRows:
    return next(op for op in program.ops if isinstance(op, GatherRows))
