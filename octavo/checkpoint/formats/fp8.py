"""fp8 (e4m3) as saved by transformers' FineGrainedFP8Config and DeepSeek-V3: codes under the
weight's own name, and multiplicative scales next to it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from numpy.typing import NDArray

from octavo.checkpoint.formats.format import (
    ByModule,
    Described,
    Tensors,
    get_required,
    modules_with,
)
from octavo.checkpoint.formats.options import quantization_error
from octavo.quant.fp8 import Fp8Scheme, check_fp8, fp8_weight
from octavo.quant.packed import PackedWeight

SCALES = ("weight_scale_inv", "weight_scale")
"""Suffixes of the scales' names; both kinds are multiplied with the codes."""
QUANTIZED = "_proj"


class Fp8(ByModule):
    """Implements `QuantizedFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        if config.get("fmt", "e4m3") != "e4m3":
            raise quantization_error(f"fmt is {config['fmt']!r}, supported: 'e4m3'")
        block = config.get("weight_block_size")
        self._scheme = Fp8Scheme(None if block is None else parse_block(block), "per_token")

    def parts(self, names: Collection[str]) -> dict[str, list[str]]:
        return with_scales(names)

    def describe(self, module: str, tensors: Tensors) -> Described:
        return describe_fp8(module, tensors, self._scheme)

    def weight(self, module: str, tensors: Tensors) -> PackedWeight:
        return read_fp8(module, tensors, self._scheme)

    def planned_name(self, module: str) -> str | None:
        return self._scheme.format_name if QUANTIZED in module else None


def with_scales(names: Collection[str]) -> dict[str, list[str]]:
    """Returns the modules whose weight has scales."""
    modules = modules_with(names, "weight", SCALES)
    return {module: rests for module, rests in modules.items() if len(rests) > 1}


def describe_fp8(module: str, tensors: Tensors, scheme: Fp8Scheme) -> Described:
    codes, scales = _codes_and_scales(module, tensors)
    check_fp8(codes, scales, scheme, f"{module}.weight")
    return Described(codes.shape, scheme.format_name)


def read_fp8(module: str, tensors: Tensors, scheme: Fp8Scheme) -> PackedWeight:
    codes, scales = _codes_and_scales(module, tensors)
    return fp8_weight(codes, scales, scheme, f"{module}.weight")


def _codes_and_scales(module: str, tensors: Tensors) -> tuple[NDArray, NDArray]:
    scales = next((tensors[rest] for rest in SCALES if rest in tensors), None)
    return get_required(tensors, "weight", module), (
        get_required(tensors, SCALES[-1], module) if scales is None else scales
    )


def parse_block(block: object) -> tuple[int, int]:
    """Returns the outputs and inputs per scale; older files write "128x128"."""
    if isinstance(block, str) and re.fullmatch(r"[1-9]\d{0,6}x[1-9]\d{0,6}", block):
        block = [int(size) for size in block.split("x")]
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise quantization_error(f"weight_block_size is {block!r}, expected two integers above 0")
    return block[0], block[1]
