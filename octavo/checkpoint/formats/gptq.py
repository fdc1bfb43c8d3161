"""GPTQ (Frantar et al. 2023) as saved by AutoGPTQ and GPTQModel.

A module has `qweight [in * bits / 32, out]`, packed along the inputs; `scales [groups, out]`;
`qzeros [groups, out * bits / 32]`, packed along the outputs; and `g_idx [in]`, the group of each
input. Version 1 stores zeros minus 1, so a zero may be 2 ** bits. Some files declare version 1 but
have the symmetric zeros of version 2; these are recognised by the zeros.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import WeightMismatch, shown
from octavo.checkpoint.formats.format import (
    FLOATS,
    INDICES,
    WORDS,
    ByModule,
    Described,
    Tensors,
    check_shape,
    check_type,
    get_required,
    modules_with,
)
from octavo.checkpoint.formats.options import (
    USUAL_GROUP,
    choice,
    flag,
    group_size,
    layout,
    quantization_error,
)
from octavo.quant.bitstream import num_words, unpack_bits
from octavo.quant.grouped import GroupedCodes, common_zero, grouped_name, grouped_weight
from octavo.quant.packed import PackedWeight

BITS = (2, 3, 4, 8)
VERSIONS = ("gptq", "gptq_v2")
QUANTIZED = "_proj"
"""Substring of the names of quantized modules, used when only the config is known."""


@dataclass(frozen=True, slots=True)
class GptqScheme:
    """Bits, group size and symmetry of a module."""

    bits: int
    group: int | None
    """Inputs per group; None: one group."""
    is_symmetric: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> GptqScheme:
        bits = choice(config, "bits", BITS, None)
        group = group_size({"group_size": USUAL_GROUP, **config})
        return GptqScheme(bits, group, flag(config, "sym", default=True))


@dataclass(frozen=True, slots=True)
class GptqLevels:
    """Scales, zeros and groups of a module."""

    scales: NDArray
    zeros: NDArray[np.int16]
    group: int
    permutation: NDArray[np.int32] | None
    num_inputs: int


class Gptq(ByModule):
    """Implements `QuantizedFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._stores_less_one = layout(config, ("checkpoint_format", "format"), VERSIONS) == "gptq"
        choice(config, "pack_dtype", ("int32",), "int32")
        self._scheme = GptqScheme.of(config)
        self._own = _schemes_by_pattern(config)

    def parts(self, names: Collection[str]) -> dict[str, list[str]]:
        return modules_with(names, "qweight", ("qzeros", "scales", "g_idx"))

    def describe(self, module: str, tensors: Tensors) -> Described:
        scheme, levels = self._read(module, tensors)
        has_zeros = common_zero(levels.zeros) is None
        name = grouped_name(scheme.bits, levels.scales.dtype, levels.group, has_zeros=has_zeros)
        return Described((tensors["qweight"].shape[1], levels.num_inputs), name)

    def weight(self, module: str, tensors: Tensors) -> PackedWeight:
        scheme, levels = self._read(module, tensors)
        codes = unpack_bits(tensors["qweight"].T, scheme.bits, levels.num_inputs)
        if levels.permutation is not None:
            codes = codes[:, levels.permutation]
        return grouped_weight(
            GroupedCodes(
                codes, scheme.bits, levels.scales, levels.zeros, levels.group, levels.permutation
            )
        )

    def planned_name(self, module: str) -> str | None:
        scheme = self._get_scheme(module) if QUANTIZED in module else None
        if scheme is None:
            return None
        fp16 = np.dtype(np.float16)
        return grouped_name(
            scheme.bits, fp16, scheme.group or 32, has_zeros=not scheme.is_symmetric
        )

    def _get_scheme(self, module: str) -> GptqScheme | None:
        """Returns a module's scheme; None if the config excludes it from quantization."""
        for pattern, scheme in self._own:
            if pattern.match(module):
                return scheme
        return self._scheme

    def _read(self, module: str, tensors: Tensors) -> tuple[GptqScheme, GptqLevels]:
        scheme = self._get_scheme(module)
        if scheme is None:
            raise WeightMismatch(f"{module} is quantized, but quantization_config excludes it")
        words, scales = (
            get_required(tensors, "qweight", module),
            get_required(tensors, "scales", module),
        )
        if words.ndim != 2 or words.shape[0] * 32 % scheme.bits:
            raise WeightMismatch(
                f"{module}.qweight has shape {words.shape}, expected [in * {scheme.bits} / 32, out]"
            )
        check_type(words, WORDS, "qweight", module)
        num_inputs = words.shape[0] * 32 // scheme.bits
        group = min(scheme.group or num_inputs, num_inputs)
        shape = (-(-num_inputs // group), words.shape[1])
        check_shape(scales, shape, "scales", module, f"groups of {group} inputs")
        check_type(scales, FLOATS, "scales", module)
        zeros = self._zeros(module, get_required(tensors, "qzeros", module), shape, scheme)
        index = tensors.get("g_idx")
        permutation = None if index is None else by_group(index, group, num_inputs, module)
        levels = GptqLevels(np.ascontiguousarray(scales.T), zeros.T, group, permutation, num_inputs)
        return scheme, levels

    def _zeros(
        self, module: str, words: NDArray, shape: tuple[int, int], scheme: GptqScheme
    ) -> NDArray[np.int16]:
        """Returns the zeros, `[groups, out]`."""
        check_type(words, WORDS, "qzeros", module)
        packed = (shape[0], num_words(shape[1], scheme.bits))
        check_shape(words, packed, "qzeros", module, f"{scheme.bits} bits for each of {shape}")
        stored = unpack_bits(words, scheme.bits, shape[1]).astype(np.int16)
        middle = 1 << scheme.bits - 1
        is_second = scheme.is_symmetric and bool((stored == middle).all())
        return stored + np.int16(self._stores_less_one and not is_second)


def by_group(index: NDArray, group: int, num_inputs: int, module: str) -> NDArray[np.int32] | None:
    """Returns the inputs in the order of their groups; None if they already are."""
    check_type(index, INDICES, "g_idx", module)
    check_shape(index, (num_inputs,), "g_idx", module, "a group for each input")
    num_groups = -(-num_inputs // group)
    if num_inputs and not 0 <= int(index.min()) <= int(index.max()) < num_groups:
        raise WeightMismatch(
            f"{module}.g_idx contains the groups {index.min()} to {index.max()}, expected 0 to"
            f" {num_groups - 1}"
        )
    expected = np.arange(num_inputs) // group
    order = np.argsort(index, kind="stable")
    if (index[order] != expected).any():
        raise WeightMismatch(
            f"{module}.g_idx has groups of different sizes, expected {group} inputs in each",
            hint="use another checkpoint of the model",
        )
    return None if (index == expected).all() else order.astype(np.int32)


def _schemes_by_pattern(
    config: Mapping[str, Any],
) -> list[tuple[re.Pattern[str], GptqScheme | None]]:
    """Returns the overrides in `dynamic` by pattern: None for "-:" (not quantized), else the scheme
    of "+:" or no prefix.
    """
    overrides = config.get("dynamic") or {}
    if not isinstance(overrides, dict):
        raise quantization_error(f"dynamic is {shown(overrides)}, expected an object")
    schemes: list[tuple[re.Pattern[str], GptqScheme | None]] = []
    for key, changes in overrides.items():
        text = key[2:] if key[:2] in ("+:", "-:") else key
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise quantization_error(
                f"dynamic holds {shown(key)}, which is not a valid regular expression: {error}"
            ) from None
        if key.startswith("-:"):
            schemes.append((pattern, None))
            continue
        if not isinstance(changes, dict):
            raise quantization_error(
                f"dynamic gives {shown(changes)} for {shown(key)}, expected an object"
            )
        schemes.append((pattern, GptqScheme.of({**config, **changes})))
    return schemes
