"""AWQ (Lin et al. 2024) as saved by AutoAWQ, with 4-bit codes.

Version "gemm" has `qweight [in, out / 8]`, `qzeros [groups, out / 8]` and `scales [groups, out]`; a
word holds eight outputs in the order 0 2 4 6 1 3 5 7. Version "gemv" has `qweight [out, in / 8]` in
the order of the inputs, and padded `qzeros` and `scales [out, groups]`. Versions "exllama" and
"ipex" have the layout of "gemm". Zeros are stored without an offset. Older configs use `w_bit` for
the bits and `q_group_size` for the group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.formats.format import (
    FLOATS,
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
from octavo.quant.bitstream import unpack_bits
from octavo.quant.grouped import GroupedCodes, common_zero, grouped_name, grouped_weight
from octavo.quant.packed import PackedWeight

BITS = 4
PER_WORD = 8
PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])
"""Position of each of the eight outputs within a word."""
VERSIONS = ("gemm", "gemv", "exllama", "ipex")
LAYOUT_KEYS = ("checkpoint_format", "version", "format")
"""Keys that name the layout, in order of precedence."""
OTHER_LAYOUT = "llm-awq"
QUANTIZED = "_proj"


class AwqLevels(NamedTuple):
    """Scales, zeros and shape of a module."""

    scales: NDArray
    zeros: NDArray[np.int16]
    group: int
    num_inputs: int


class Awq(ByModule):
    """Implements `QuantizedFormat`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._by_output = layout(config, LAYOUT_KEYS, VERSIONS) == "gemv"
        if config.get("backend") == OTHER_LAYOUT:
            raise quantization_error(f"backend is {OTHER_LAYOUT}, whose layout is not supported")
        for key in ("bits", "w_bit"):
            choice(config, key, (BITS,), BITS)
        self._has_zeros = flag(config, "zero_point", default=True)
        key = "q_group_size" if "q_group_size" in config else "group_size"
        self._group = group_size({"group_size": USUAL_GROUP, **config}, key)
        self._excluded = config.get("modules_to_not_convert") or []

    def parts(self, names: Collection[str]) -> dict[str, list[str]]:
        return modules_with(names, "qweight", ("qzeros", "scales"))

    def describe(self, module: str, tensors: Tensors) -> Described:
        levels = self._read(module, tensors)
        has_zeros = common_zero(levels.zeros) is None
        name = grouped_name(BITS, levels.scales.dtype, levels.group, has_zeros=has_zeros)
        return Described((levels.scales.shape[0], levels.num_inputs), name)

    def weight(self, module: str, tensors: Tensors) -> PackedWeight:
        levels, words = self._read(module, tensors), tensors["qweight"]
        codes = (
            unpack_bits(words, BITS, levels.num_inputs)
            if self._by_output
            else np.ascontiguousarray(_by_word(words).T)
        )
        return grouped_weight(GroupedCodes(codes, BITS, levels.scales, levels.zeros, levels.group))

    def planned_name(self, module: str) -> str | None:
        if QUANTIZED not in module or any(str(one) in module for one in self._excluded):
            return None
        fp16 = np.dtype(np.float16)
        return grouped_name(BITS, fp16, self._group or 32, has_zeros=self._has_zeros)

    def _read(self, module: str, tensors: Tensors) -> AwqLevels:
        words, scales = (
            get_required(tensors, "qweight", module),
            get_required(tensors, "scales", module),
        )
        zeros = get_required(tensors, "qzeros", module)
        check_type(words, WORDS, "qweight", module)
        check_type(zeros, WORDS, "qzeros", module)
        if words.ndim != 2:
            raise WeightMismatch(f"{module}.qweight has shape {words.shape}, expected two dims")
        if self._by_output:
            num_inputs = words.shape[1] * PER_WORD
            group = min(self._group or num_inputs, num_inputs)
            num_groups = -(-num_inputs // group)
            padded = (words.shape[0], zeros.shape[-1] * PER_WORD)
            check_shape(scales, padded, "scales", module, "eight for each word of qzeros")
            if padded[1] < num_groups:
                raise WeightMismatch(
                    f"{module}.scales has {padded[1]} groups, expected {num_groups} of {group}"
                )
            check_type(scales, FLOATS, "scales", module)
            own = unpack_bits(zeros, BITS, num_groups).astype(np.int16)
            return AwqLevels(scales[:, :num_groups], own, group, num_inputs)
        num_inputs, num_words = words.shape
        group = min(self._group or num_inputs, num_inputs)
        num_groups, why = -(-num_inputs // group), f"groups of {group} inputs"
        check_shape(scales, (num_groups, num_words * PER_WORD), "scales", module, why)
        check_shape(zeros, (num_groups, num_words), "qzeros", module, why)
        check_type(scales, FLOATS, "scales", module)
        own = _by_word(zeros).T.astype(np.int16)
        return AwqLevels(np.ascontiguousarray(scales.T), own, group, num_inputs)


def _by_word(words: NDArray) -> NDArray[np.uint8]:
    """Unpacks each row in the order of the outputs: `[n, words]` to `[n, out]`."""
    numbers = unpack_bits(words, BITS, words.shape[1] * PER_WORD)
    return numbers.reshape(*words.shape, PER_WORD)[..., PLACES].reshape(len(words), -1)
