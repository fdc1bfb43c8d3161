"""compressed-tensors (llm-compressor's format), whose config specifies the weight format for groups
of modules.

    pack-quantized    integers of 1 to 8 bits: `weight_packed [out, words]` along the inputs, signed
                      numbers plus 2 ** (bits - 1); `weight_scale [out, groups]`, `weight_shape`,
                      `weight_zero_point [words, groups]` along the outputs, `weight_g_idx`
    int-quantized     int8 as `weight`, `weight_scale`, `weight_zero_point`
    float-quantized   e4m3 as `weight`, `weight_scale`
    nvfp4-pack-quantized, mxfp4-pack-quantized
                      e2m1 pairs as `weight_packed [out, in / 2] u8`, scales as e4m3 (divided by
                      `weight_global_scale`) or e8m0

Activation scales are ignored: rows are quantized with their own scales.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import WeightMismatch, shown
from octavo.checkpoint.formats.e2m1 import describe_e2m1, e2m1_name, read_e2m1
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
from octavo.checkpoint.formats.fp8 import SCALES, describe_fp8, parse_block, read_fp8
from octavo.checkpoint.formats.gptq import by_group
from octavo.checkpoint.formats.options import choice, flag, group_size, quantization_error
from octavo.quant.bitstream import num_words, unpack_bits
from octavo.quant.fp8 import Fp8Scheme
from octavo.quant.grouped import GroupedCodes, common_zero, grouped_name, grouped_weight
from octavo.quant.packed import Levels, PackedWeight

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
CLASSES = ("Linear", "Module")
"""Module classes that a target may name."""
NOT_READ = ("sparsity_config", "transform_config", "moe_sparsity_config")
"""Config sections that change the meaning of weights or rotate activations."""
DENSE = (None, "dense")
MODULE_TENSORS = ("weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale")
QUANTIZED = "_proj"
MAX_BITS = 8


@dataclass(frozen=True, slots=True)
class IntScheme:
    """Integer weights of a group of modules."""

    bits: int
    group: int | None
    """Inputs per scale; None: one scale per row or per tensor."""
    is_symmetric: bool


@dataclass(frozen=True, slots=True)
class E2m1Scheme:
    """4-bit float weights of a group of modules."""

    group: int


@dataclass(frozen=True, slots=True)
class ConfigGroup:
    """A scheme and the modules that it applies to."""

    name: str
    targets: tuple[str, ...]
    scheme: IntScheme | Fp8Scheme | E2m1Scheme

    def get_specificity(self, module: str) -> int:
        """Returns how specifically a target matches `module`: 3 by name, 2 by pattern, 1 by class,
        0 not at all.
        """
        return max((_get_specificity(target, module) for target in self.targets), default=0)


class CompressedTensors(ByModule):
    """Implements `QuantizedFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        groups = config.get("config_groups")
        # A config may only quantize the KV cache; like activation scales, this is ignored.
        if groups or not isinstance(config.get("kv_cache_scheme"), dict):
            choice(config, "format", FORMATS, None)
            if not isinstance(groups, dict) or not groups:
                raise quantization_error("config_groups is missing")
        if not all(isinstance(group, dict) for group in (groups or {}).values()):
            raise quantization_error("config_groups contains an entry that is not an object")
        for part in NOT_READ:
            found = config.get(part)
            if found and not (isinstance(found, dict) and found.get("format", "") in DENSE):
                raise quantization_error(f"{part} is {shown(found)}, supported: models without it")
        self._groups = [_group(name, group) for name, group in (groups or {}).items()]
        self._ignored = _patterns(config.get("ignore") or (), "ignore")

    def parts(self, names: Collection[str]) -> dict[str, list[str]]:
        packed = modules_with(names, "weight_packed", (*SCALES, *MODULE_TENSORS))
        plain = modules_with(names, "weight", (*SCALES, *MODULE_TENSORS))
        suffixes = packed | {
            module: rests for module, rests in plain.items() if set(rests) & set(SCALES)
        }
        for group in self._groups:
            named = [target for target in group.targets if target not in CLASSES]
            if named and not any(map(group.get_specificity, suffixes)):
                raise WeightMismatch(
                    f"quantization_config: {group.name}: its targets {', '.join(named)} match none"
                    f" of the quantized modules",
                    hint="config.json and the weights belong to different models",
                )
        return suffixes

    def describe(self, module: str, tensors: Tensors) -> Described:
        scheme = self._get_scheme(module)
        if isinstance(scheme, Fp8Scheme):
            return describe_fp8(module, tensors, scheme)
        if isinstance(scheme, E2m1Scheme):
            return describe_e2m1(module, tensors, scheme.group)
        codes = _read(module, tensors, scheme)
        if _has_whole_rows(scheme, codes):
            return Described(codes.shape, "I8")
        has_zeros = common_zero(codes.zeros) is None
        name = grouped_name(scheme.bits, codes.scales.dtype, codes.group, has_zeros=has_zeros)
        return Described(codes.shape, name)

    def weight(self, module: str, tensors: Tensors) -> PackedWeight:
        scheme = self._get_scheme(module)
        if isinstance(scheme, Fp8Scheme):
            return read_fp8(module, tensors, scheme)
        if isinstance(scheme, E2m1Scheme):
            return read_e2m1(module, tensors, scheme.group)
        levels = _read(module, tensors, scheme)
        codes = _codes(module, tensors, scheme.bits, levels.shape[1])
        if _has_whole_rows(scheme, levels):
            return PackedWeight(
                levels.shape,
                MAX_BITS,
                "int",
                (codes ^ np.uint8(1 << MAX_BITS - 1)).view(np.int8),
                levels.shape[1],
                Levels(levels.scales),
                activation="per_token",
            )
        if levels.permutation is not None:
            codes = codes[:, levels.permutation]
        return grouped_weight(
            GroupedCodes(
                codes, scheme.bits, levels.scales, levels.zeros, levels.group, levels.permutation
            )
        )

    def planned_name(self, module: str) -> str | None:
        is_ignored = any(_get_specificity(one, module) for one in self._ignored)
        if QUANTIZED not in module or is_ignored or not self._groups:
            return None
        scheme = self._get_scheme(module)
        if isinstance(scheme, Fp8Scheme):
            return scheme.format_name
        if isinstance(scheme, E2m1Scheme):
            return e2m1_name(scheme.group)
        if scheme.bits == MAX_BITS and scheme.group is None and scheme.is_symmetric:
            return "I8"
        bf16 = np.dtype(ml_dtypes.bfloat16)
        return grouped_name(
            scheme.bits, bf16, scheme.group or 32, has_zeros=not scheme.is_symmetric
        )

    def _get_scheme(self, module: str) -> IntScheme | Fp8Scheme | E2m1Scheme:
        """Returns the scheme of the most specific matching group."""
        target_group = max(
            self._groups, key=lambda group: group.get_specificity(module), default=None
        )
        if target_group is None or not target_group.get_specificity(module):
            raise WeightMismatch(
                f"{module} is quantized, but is not a target of quantization_config"
            )
        return target_group.scheme


@dataclass(frozen=True, slots=True)
class IntLevels:
    """Scales, zeros, groups and shape of a module's integers."""

    shape: tuple[int, int]
    scales: NDArray
    """`[out, groups]`."""
    zeros: NDArray[np.int16]
    """Zeros of codes that start at 0, `[out, groups]`."""
    group: int
    permutation: NDArray[np.int32] | None


def _read(module: str, tensors: Tensors, scheme: IntScheme) -> IntLevels:
    """Reads and checks all tensors except the codes."""
    shape = _shape(module, tensors, scheme)
    outputs, inputs = shape
    group = min(scheme.group or inputs, inputs)
    groups = -(-inputs // group)
    scales = get_required(tensors, "weight_scale", module)
    check_type(scales, FLOATS, "weight_scale", module)
    if scales.size == 1 and groups == 1:
        scales = np.broadcast_to(scales.reshape(1, 1), (outputs, 1))
    if scales.shape == (outputs,) and groups == 1:
        scales = scales[:, None]
    check_shape(scales, (outputs, groups), "weight_scale", module, f"groups of {group} inputs")
    index = tensors.get("weight_g_idx")
    has_order = index is not None and index.size > 0 and int(index.min()) >= 0
    return IntLevels(
        shape,
        np.ascontiguousarray(scales),
        _zeros(module, tensors, scheme, (outputs, groups)),
        group,
        by_group(index, group, inputs, module) if index is not None and has_order else None,
    )


def _shape(module: str, tensors: Tensors, scheme: IntScheme) -> tuple[int, int]:
    """Returns the numbers of outputs and inputs."""
    if "weight" in tensors:
        stored_shape = tensors["weight"].shape
        if len(stored_shape) != 2 or tensors["weight"].dtype != np.int8:
            kind = tensors["weight"].dtype.name
            raise WeightMismatch(
                f"{module}.weight is {kind} of shape {stored_shape}, expected int8 [out, in]",
                hint="config.json and the weights belong to different models, or the file is"
                " damaged",
            )
        return stored_shape[0], stored_shape[1]
    check_type(tensors["weight_packed"], WORDS, "weight_packed", module)
    stored = get_required(tensors, "weight_shape", module)
    check_type(stored, INDICES, "weight_shape", module)
    if stored.shape != (2,) or stored.min() < 1:
        raise WeightMismatch(
            f"{module}.weight_shape is {shown(stored.tolist())}, expected two integers of at"
            " least 1"
        )
    outputs, inputs = map(int, stored)
    words = (outputs, num_words(inputs, scheme.bits))
    why = f"{scheme.bits} bits for each of {outputs} x {inputs}"
    check_shape(tensors["weight_packed"], words, "weight_packed", module, why)
    return outputs, inputs


def _zeros(
    module: str, tensors: Tensors, scheme: IntScheme, shape: tuple[int, int]
) -> NDArray[np.int16]:
    middle = 1 << scheme.bits - 1
    if scheme.is_symmetric:
        return np.full(shape, middle, np.int16)
    stored = get_required(tensors, "weight_zero_point", module)
    check_type(stored, ("int8", *INDICES), "weight_zero_point", module)
    if stored.dtype == np.int32:  # packed along the outputs
        words = (num_words(shape[0], scheme.bits), shape[1])
        check_shape(stored, words, "weight_zero_point", module, f"{scheme.bits} bits for each")
        return unpack_bits(stored.T, scheme.bits, shape[0]).T.astype(np.int16)
    check_shape(stored, shape, "weight_zero_point", module, "one for each scale")
    _check_range(stored, scheme.bits, "weight_zero_point", module)
    return stored.astype(np.int16) + np.int16(middle)


def _check_range(numbers: NDArray, bits: int, rest: str, module: str) -> None:
    """Raises WeightMismatch if a number does not fit into `bits` signed bits."""
    middle = 1 << bits - 1
    if numbers.size and not -middle <= int(numbers.min()) <= int(numbers.max()) < middle:
        raise WeightMismatch(
            f"{module}.{rest} has values from {numbers.min()} to {numbers.max()}, expected {bits}"
            f" bits:"
            f" {-middle} to {middle - 1}",
            hint="config.json and the weights belong to different models, or the file is damaged",
        )


def _codes(module: str, tensors: Tensors, bits: int, inputs: int) -> NDArray[np.uint8]:
    """Returns the codes as unsigned numbers, `[out, in]`."""
    if "weight_packed" in tensors:
        return unpack_bits(tensors["weight_packed"], bits, inputs)
    if bits < MAX_BITS:
        _check_range(tensors["weight"], bits, "weight", module)
    moved: NDArray[np.uint8] = (tensors["weight"].astype(np.int16) + (1 << bits - 1)).astype(
        np.uint8
    )
    return moved


def _has_whole_rows(scheme: IntScheme, levels: IntLevels) -> bool:
    """Returns whether the matrix has signed bytes and one scale per output."""
    return scheme.bits == MAX_BITS and scheme.is_symmetric and levels.scales.shape[1] == 1


# -- the config ------------------------------------------------------------------------------------


def _group(name: str, group: Mapping[str, Any]) -> ConfigGroup:
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise quantization_error(f"{name}: weights is {shown(weights)}, expected an object")
    targets = _patterns(group.get("targets") or CLASSES, "targets")
    return ConfigGroup(name, targets, _scheme(weights, group.get("input_activations") is not None))


def _scheme(weights: Mapping[str, Any], quantises_rows: bool) -> IntScheme | Fp8Scheme | E2m1Scheme:
    kind, bits, strategy = (weights.get(key) for key in ("type", "num_bits", "strategy"))
    if kind == "float" and bits == 4:
        choice(weights, "strategy", ("group", "tensor_group"), None)
        return E2m1Scheme(group_size(weights) or 16)
    if kind == "float":
        if bits != MAX_BITS:
            raise quantization_error("supported compressed-tensors floats have 8 or 4 bits")
        choice(weights, "strategy", ("tensor", "channel", "block"), None)
        block = parse_block(weights.get("block_structure")) if strategy == "block" else None
        return Fp8Scheme(block, "per_token" if quantises_rows else "none")
    if kind not in ("int", None):
        raise quantization_error(f"type is {shown(kind)}, supported: 'int' and 'float'")
    choice(weights, "num_bits", range(1, MAX_BITS + 1), None)
    choice(weights, "strategy", ("tensor", "channel", "group"), None)
    group = group_size(weights) if strategy == "group" else None
    return IntScheme(int(bits or 0), group, flag(weights, "symmetric", default=True))


def _patterns(values: Any, key: str) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(one, str) for one in values):
        raise quantization_error(f"{key} is {shown(values)}, expected a list of names")
    for one in values:
        if one.startswith("re:"):
            try:
                re.compile(one[3:])
            except re.error as error:
                raise quantization_error(f"{key} holds {shown(one)}: {error}") from None
    return tuple(values)


def _get_specificity(target: str, module: str) -> int:
    """Returns 3 if the target is the module's name or a suffix of it, 2 if it is a matching
    pattern, 1 if it is a class name, else 0.
    """
    if target.startswith("re:"):
        return 2 if re.match(target[3:], module) else 0
    if module == target or module.endswith(f".{target}"):
        return 3
    return int(target in CLASSES)
