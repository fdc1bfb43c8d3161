"""Parameters of op specs: attention biases, convolution and scan weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.native.check import ACTIVATIONS
from octavo.executor.native.states import StateBlocks
from octavo.program import ops
from octavo.program.mixers import SelectiveScan, ShortConv
from octavo.program.program import CacheGroup, Weight
from octavo.program.t5_buckets import t5_buckets

FloatsOf = Callable[[Weight], NDArray[np.float32]]


AnyBias = ops.T5Bias | ops.AlibiBias | ops.NearBias | ops.PositionBuckets


def get_alibi_slopes(bias: AnyBias | None) -> NDArray[np.float32] | None:
    """Returns ALiBi slopes; None for other biases."""
    return np.array(bias.slopes, np.float32) if isinstance(bias, ops.AlibiBias) else None


def get_distance_bias(
    bias: AnyBias | None, floats: FloatsOf, num_heads: int
) -> NDArray[np.float32] | None:
    """Returns the bias per head and distance `[H, 2 d + 1]`, up to the distance d from which it is
    constant; None for other biases.
    """
    if isinstance(bias, ops.NearBias):
        is_far = abs(np.arange(-bias.reach - 1, bias.reach + 2)) > bias.reach
        return np.tile(np.where(is_far, ops.FAR, 0.0).astype(np.float32), (num_heads, 1))
    if not isinstance(bias, ops.T5Bias):
        return None
    far = np.arange(-bias.max_distance, bias.max_distance + 1)
    return np.ascontiguousarray(floats(bias.table)[t5_buckets(far, bias)].T)


def convolution_parameters(op: ShortConv, floats: FloatsOf) -> dict[str, Any]:
    """Returns the weights of a convolution by tap, its bias and its activation."""
    weight = floats(op.weight)[:, 0]
    if op.factors:
        factors = np.repeat(np.array(op.factors, np.float32), [part.width for part in op.outs])
        weight = weight * factors[:, None]
    return {
        "weight": np.ascontiguousarray(weight.T),
        "bias": None if op.bias is None else floats(op.bias),
        "activation": -1 if op.activation is None else ACTIVATIONS.index(op.activation),
    }


def scan_parameters(op: SelectiveScan, group: CacheGroup, floats: FloatsOf) -> dict[str, Any]:
    """Returns the sizes and parameters of a scan, in lane layout."""
    lanes = StateBlocks.of(group).by_lanes
    return {
        "state_size": op.state_size,
        "head_width": group.k_width,
        "decay": lanes(np.exp(floats(op.a_log))),
        "skip": lanes(np.zeros(op.num_heads, np.float32) if op.skip is None else floats(op.skip)),
        "bias": None if op.dt_bias is None else lanes(floats(op.dt_bias)),
        "low": op.low,
        "high": op.high,
    }
