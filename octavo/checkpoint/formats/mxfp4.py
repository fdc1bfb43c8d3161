"""MXFP4 as saved by gpt-oss.

Each layer's experts have `gate_up_proj_blocks [E, out, in / 32, 16] u8`, pairs of e2m1 codes with
the first one low, and `gate_up_proj_scales [E, out, in / 32] u8`, powers of two as e8m0;
`down_proj` likewise. In bf16 the same matrices are `[E, in, out]`. Source: transformers'
`integrations/mxfp4.py`; tests compare with its `convert_moe_packed_tensors`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.formats.e2m1 import decode_half_e8m0, e2m1_name, e2m1_weight
from octavo.checkpoint.formats.format import (
    Described,
    Tensors,
    check_shape,
    get_required,
    modules_with,
)
from octavo.quant.packed import PackedWeight

GROUP = 32
EXPERTS = ".experts."


class Mxfp4:
    """Implements `QuantizedFormat`."""

    joint = "_"
    matrix = ""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Ignores the config: tensor names already show which modules are quantized."""

    def parts(self, names: Collection[str]) -> dict[str, list[str]]:
        modules = modules_with(names, "blocks", ("scales",), self.joint)
        lone = modules_with(names, "scales", ("blocks",), self.joint).keys() - modules.keys()
        if lone:
            raise WeightMismatch(f"{min(lone)}: blocks are missing")
        return modules

    def describe(self, module: str, tensors: Tensors) -> Described:
        return Described(_shape(module, tensors), e2m1_name(GROUP))

    def weight(self, module: str, tensors: Tensors) -> PackedWeight:
        *lead, inputs = _shape(module, tensors)
        pairs = tensors["blocks"].reshape(*lead, inputs // 2)
        return e2m1_weight(pairs, decode_half_e8m0(tensors["scales"]), GROUP)

    def planned_name(self, module: str) -> str | None:
        return e2m1_name(GROUP) if EXPERTS in module and not module.endswith("_bias") else None


def _shape(module: str, tensors: Tensors) -> tuple[int, ...]:
    """Returns the shape of the experts' matrices, `[E, out, in]`."""
    blocks, scales = tensors["blocks"], get_required(tensors, "scales", module)
    if blocks.ndim != 4 or blocks.shape[-1] * 2 != GROUP or blocks.dtype != np.uint8:
        raise WeightMismatch(
            f"{module}_blocks is {blocks.dtype} of shape {blocks.shape}, expected uint8 [experts,"
            f" out, in / {GROUP}, {GROUP // 2}]"
        )
    check_shape(scales, blocks.shape[:-1], "scales", module, f"one for {GROUP} inputs")
    if scales.dtype != np.uint8:
        raise WeightMismatch(f"{module}_scales is {scales.dtype}, expected uint8")
    return (*blocks.shape[:2], blocks.shape[2] * GROUP)
