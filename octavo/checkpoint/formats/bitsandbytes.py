"""bitsandbytes (Dettmers et al. 2022, 2023) as saved by transformers: NF4 and FP4, optionally with
quantized scales, and int8.

A 4-bit module has `weight`, two codes per byte with the first one high, flattened over all rows;
`weight.absmax`, one scale per block; `weight.quant_map [16]`, the value of each code; and
`weight.quant_state.bitsandbytes__nf4`, JSON with the matrix's shape and the block sizes. If absmax
is uint8, a scale is its `nested_quant_map` entry times `nested_absmax`, plus an offset. An int8
module has `weight [out, in]` and `SCB [out]`, 127 times the scales.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import WeightMismatch, shown
from octavo.checkpoint.formats.format import (
    FLOATS,
    ByModule,
    Described,
    Tensors,
    check_shape,
    check_type,
    get_required,
)
from octavo.checkpoint.formats.options import choice, flag
from octavo.quant.packed import Levels, PackedWeight

STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
FOUR_BITS = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
EIGHT_BITS = ("SCB", "weight_format")
QUANTIZED = "_proj"
BLOCK = 64
UNIT = 32
"""Groups must be a multiple of this many inputs to keep the codes packed."""
MAX_STATE_BYTES = 1 << 16
SCALE_OF_SCB = np.float32(1 / 127)


class BlockState(NamedTuple):
    """Shape and block sizes of a module's 4-bit codes."""

    shape: tuple[int, int]
    block: int
    """Codes per scale."""
    nested_block: int
    nested_offset: float


class Bitsandbytes(ByModule):
    """Implements `QuantizedFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        is_wide = flag(config, "load_in_8bit", default=False)
        self._is_narrow = flag(config, "load_in_4bit", default=not is_wide)
        choice(config, "bnb_4bit_quant_type", KINDS, "fp4")
        choice(config, "bnb_4bit_quant_storage", ("uint8",), "uint8")

    def parts(self, names: Collection[str]) -> dict[str, list[str]]:
        known = set(names)
        suffixes: dict[str, list[str]] = {}
        for kind in KINDS:
            ending = f".{STATE}{kind}"
            for name in (name for name in names if name.endswith(ending)):
                module = name.removesuffix(ending)
                rests = [rest for rest in FOUR_BITS if f"{module}.{rest}" in known]
                suffixes[module] = ["weight", *rests, f"{STATE}{kind}"]
        for name in (name for name in names if name.endswith(".SCB")):
            module = name.removesuffix(".SCB")
            rests = [rest for rest in EIGHT_BITS if f"{module}.{rest}" in known]
            suffixes[module] = ["weight", *rests]
        for module, rests in suffixes.items():
            if f"{module}.weight" not in known:
                raise WeightMismatch(
                    f"{module}: weight is missing, found only {', '.join(rests[1:])}"
                )
        return suffixes

    def describe(self, module: str, tensors: Tensors) -> Described:
        if "SCB" in tensors:
            return Described(_get_int8_shape(module, tensors), "I8")
        state = _state(module, tensors)
        _check_codes(module, tensors, state)
        return Described(state.shape, _make_format_name(state))

    def weight(self, module: str, tensors: Tensors) -> PackedWeight:
        if "SCB" in tensors:
            return _eight_bits(module, tensors)
        state = _state(module, tensors)
        _check_codes(module, tensors, state)
        scales = _scales(tensors, state)
        numbers = tensors["weight.quant_map"].astype(np.float32)
        pairs = tensors["weight"].reshape(-1)
        if _group(state) % UNIT:
            codes = np.stack([pairs >> 4, pairs & 15], axis=-1).reshape(-1)
            codes = codes[: math.prod(state.shape)]
            values = numbers[codes] * np.repeat(scales, state.block)[: len(codes)]
            return PackedWeight.plain(values.reshape(state.shape))
        outputs, inputs = state.shape
        group = _group(state)
        each = np.repeat(scales, state.block // group)[: outputs * inputs // group]
        return PackedWeight(
            state.shape,
            4,
            "lookup",
            (pairs >> 4 | pairs << 4).reshape(outputs, inputs // 2),
            group,
            Levels(each.reshape(outputs, inputs // group)),
            lookup=numbers,
            activation="none",
        )

    def planned_name(self, module: str) -> str | None:
        if QUANTIZED not in module:
            return None
        return f"L4_F32:{BLOCK}" if self._is_narrow else "I8"


def _make_format_name(state: BlockState) -> str:
    group = _group(state)
    return "F32" if group % UNIT else f"L4_F32:{group}"


def _group(state: BlockState) -> int:
    """Returns the inputs per scale in every row: blocks may begin and end within a row."""
    return math.gcd(state.shape[1], state.block)


def _state(module: str, tensors: Tensors) -> BlockState:
    """Parses a module's JSON; raises WeightMismatch if it is damaged."""
    name = next(rest for rest in tensors if rest.startswith(STATE))
    raw = tensors[name]
    if raw.dtype != np.uint8 or raw.size > MAX_STATE_BYTES:
        raise WeightMismatch(
            f"{module}.{name} is {raw.dtype} of {raw.size} bytes, expected JSON as uint8"
        )
    try:
        parsed = json.loads(raw.tobytes())
        shape, block = parsed["shape"], parsed["blocksize"]
        nested, offset = parsed.get("nested_blocksize", 256), parsed.get("nested_offset", 0.0)
        sizes = (*shape, block, nested)
        if len(shape) != 2 or not all(type(size) is int and 0 < size < 1 << 31 for size in sizes):
            raise ValueError("shape and blocksize are integers above 0")
        if block % 2 or not isinstance(offset, int | float):
            raise ValueError("blocksize is even, nested_offset a number")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightMismatch(
            f"{module}.{name} is damaged: {shown(str(error))}", hint="download the file again"
        ) from None
    return BlockState((shape[0], shape[1]), block, nested, float(offset))


def _check_codes(module: str, tensors: Tensors, state: BlockState) -> None:
    codes, count = tensors["weight"], math.prod(state.shape)
    if codes.dtype != np.uint8 or codes.size != -(-count // 2):
        raise WeightMismatch(
            f"{module}.weight holds {codes.size} of {codes.dtype}, expected {-(-count // 2)} bytes"
            f" for {state.shape[0]} x {state.shape[1]} codes"
        )
    numbers = get_required(tensors, "weight.quant_map", module)
    check_shape(numbers, (16,), "weight.quant_map", module, "a number for each code")
    check_type(numbers, FLOATS, "weight.quant_map", module)
    absmax = get_required(tensors, "weight.absmax", module)
    blocks = -(-count // state.block)
    check_shape(absmax, (blocks,), "weight.absmax", module, f"blocks of {state.block}")
    check_type(absmax, ("uint8", *FLOATS), "weight.absmax", module)
    if absmax.dtype == np.uint8:
        _check_nested(module, tensors, -(-len(absmax) // state.nested_block), state)


def _check_nested(module: str, tensors: Tensors, blocks: int, state: BlockState) -> None:
    """Checks the tensors of quantized scales."""
    numbers = get_required(tensors, "weight.nested_quant_map", module)
    check_shape(numbers, (256,), "weight.nested_quant_map", module, "a number for each code")
    nested = get_required(tensors, "weight.nested_absmax", module)
    why = f"blocks of {state.nested_block}"
    check_shape(nested, (blocks,), "weight.nested_absmax", module, why)
    check_type(numbers, FLOATS, "weight.nested_quant_map", module)
    check_type(nested, FLOATS, "weight.nested_absmax", module)


def _scales(tensors: Tensors, state: BlockState) -> NDArray[np.float32]:
    """Returns the scale of each block, `[blocks]`."""
    absmax = tensors["weight.absmax"]
    if absmax.dtype != np.uint8:
        return absmax.astype(np.float32)
    numbers, nested = (tensors[f"weight.nested_{rest}"] for rest in ("quant_map", "absmax"))
    spread = np.repeat(nested.astype(np.float32), state.nested_block)[: len(absmax)]
    scales: NDArray[np.float32] = numbers.astype(np.float32)[absmax] * spread
    return scales + np.float32(state.nested_offset)


def _get_int8_shape(module: str, tensors: Tensors) -> tuple[int, int]:
    codes = tensors["weight"]
    if codes.ndim != 2 or codes.dtype != np.int8:
        raise WeightMismatch(
            f"{module}.weight is {codes.dtype} of shape {codes.shape}, expected int8 [out, in]"
        )
    order = tensors.get("weight_format")
    if order is not None and (order.size != 1 or int(order.reshape(-1)[0]) != 0):
        raise WeightMismatch(
            f"{module}.weight_format is {shown(order.tolist())}, expected 0 (row-major)"
        )
    check_shape(tensors["SCB"], (len(codes),), "SCB", module, "one for each output")
    check_type(tensors["SCB"], FLOATS, "SCB", module)
    return codes.shape[0], codes.shape[1]


def _eight_bits(module: str, tensors: Tensors) -> PackedWeight:
    shape = _get_int8_shape(module, tensors)
    scales = tensors["SCB"].astype(np.float32)[:, None] * SCALE_OF_SCB
    return PackedWeight(
        shape, 8, "int", tensors["weight"], shape[1], Levels(scales), activation="per_token"
    )
