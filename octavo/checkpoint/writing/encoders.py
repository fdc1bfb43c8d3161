"""Encoders of quantized matrices for GPTQ, AWQ and compressed-tensors, with their
`quantization_config`. The readers are in `checkpoint/formats`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.formats.awq import PER_WORD, PLACES
from octavo.checkpoint.writing.safetensors_file import TensorSpec
from octavo.quant.bitstream import num_words, pack_bits
from octavo.quant.making.grid import RoundedMatrix
from octavo.quant.making.recipe import Recipe

Arrays = dict[str, NDArray]

WORD_BITS = 32
OWN_ORDER = np.argsort(PLACES)
HEAD = "lm_head"
"""Module of the output layer; other software treats it as a separate linear even if it is tied to
the embeddings.
"""


class Encoder(Protocol):
    """Encoder of matrices in one format."""

    def supports(self, outputs: int, inputs: int, bits: int) -> bool:
        """Returns whether the format supports a matrix of this shape."""
        ...

    def specs(self, module: str, outputs: int, inputs: int, bits: int) -> list[TensorSpec]: ...

    def tensors(self, matrix: RoundedMatrix, bits: int) -> Arrays:
        """Returns the tensors by the suffixes of their names."""
        ...

    def config(self, left: Sequence[str], bits_of: dict[str, int]) -> dict[str, Any]:
        """Returns the `quantization_config`; `left` are the modules of linears that are not
        quantized, `bits_of` gives the bits of modules whose bits differ from the recipe's.
        """
        ...


class GptqEncoder:
    """GPTQ as saved by AutoGPTQ, version 1 (zeros minus 1). Implements `Encoder`."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def supports(self, outputs: int, inputs: int, bits: int) -> bool:
        group = self._recipe.grid(bits).get_group_size(inputs)
        return not (outputs * bits % WORD_BITS or inputs * bits % WORD_BITS or inputs % group)

    def specs(self, module: str, outputs: int, inputs: int, bits: int) -> list[TensorSpec]:
        groups = inputs // self._recipe.grid(bits).get_group_size(inputs)
        return [
            TensorSpec(f"{module}.g_idx", "I32", (inputs,)),
            TensorSpec(f"{module}.qweight", "I32", (num_words(inputs, bits), outputs)),
            TensorSpec(f"{module}.qzeros", "I32", (groups, num_words(outputs, bits))),
            TensorSpec(f"{module}.scales", "F16", (groups, outputs)),
        ]

    def tensors(self, matrix: RoundedMatrix, bits: int) -> Arrays:
        zeros = _zeros(matrix).T - 1
        return {
            "g_idx": _groups(matrix),
            "qweight": np.ascontiguousarray(pack_bits(_own_order(matrix), bits).T),
            "qzeros": pack_bits(zeros.astype(np.uint8), bits),
            "scales": np.ascontiguousarray(matrix.grid.scales.values.T),
        }

    def config(self, left: Sequence[str], bits_of: dict[str, int]) -> dict[str, Any]:
        recipe = self._recipe
        found: dict[str, Any] = {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": recipe.bits,
            "group_size": recipe.group or -1,
            "sym": recipe.symmetric or recipe.bits == 8,
            "desc_act": recipe.desc_act,
            "static_groups": not recipe.desc_act,
            "true_sequential": True,
            "damp_percent": recipe.damp_percent / 100,
            "lm_head": False,
            "pack_dtype": "int32",
            "meta": {"quantizer": "octavo", "method": recipe.method},
        }
        dynamic: dict[str, Any] = {
            f"+:^{re.escape(module)}$": {"bits": bits, "sym": True}
            for module, bits in bits_of.items()
        }
        dynamic |= {f"-:^{re.escape(module)}$": {} for module in left}
        return found | ({"dynamic": dynamic} if dynamic else {})


class AwqEncoder:
    """AWQ as saved by AutoAWQ, version "gemm". Implements `Encoder`."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def supports(self, outputs: int, inputs: int, bits: int) -> bool:
        return not (outputs % PER_WORD or inputs % self._recipe.grid(bits).get_group_size(inputs))

    def specs(self, module: str, outputs: int, inputs: int, bits: int) -> list[TensorSpec]:
        groups = inputs // self._recipe.grid(bits).get_group_size(inputs)
        return [
            TensorSpec(f"{module}.qweight", "I32", (inputs, outputs // PER_WORD)),
            TensorSpec(f"{module}.qzeros", "I32", (groups, outputs // PER_WORD)),
            TensorSpec(f"{module}.scales", "F16", (groups, outputs)),
        ]

    def tensors(self, matrix: RoundedMatrix, bits: int) -> Arrays:
        return {
            "qweight": _interleave(matrix.codes.T),
            "qzeros": _interleave(_zeros(matrix).T.astype(np.uint8)),
            "scales": np.ascontiguousarray(matrix.grid.scales.values.T),
        }

    def config(self, left: Sequence[str], bits_of: dict[str, int]) -> dict[str, Any]:
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": self._recipe.bits,
            "group_size": self._recipe.group or -1,
            "zero_point": not self._recipe.symmetric,
            "modules_to_not_convert": list(left) or None,
        }


class CompressedTensorsEncoder:
    """compressed-tensors: "pack-quantized", or "int-quantized" if activations are quantized too.
    Implements `Encoder`.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe

    def supports(self, outputs: int, inputs: int, bits: int) -> bool:
        return not (
            outputs * bits % WORD_BITS or inputs % self._recipe.grid(bits).get_group_size(inputs)
        )

    def specs(self, module: str, outputs: int, inputs: int, bits: int) -> list[TensorSpec]:
        spec = self._recipe.grid(bits)
        groups = inputs // spec.get_group_size(inputs)
        scale = TensorSpec(f"{module}.weight_scale", "F16", (outputs, groups))
        if self._recipe.rows_are_int8:
            return [TensorSpec(f"{module}.weight", "I8", (outputs, inputs)), scale]
        specs = [
            TensorSpec(f"{module}.weight_packed", "I32", (outputs, num_words(inputs, bits))),
            scale,
            TensorSpec(f"{module}.weight_shape", "I64", (2,)),
        ]
        if spec.kind == "zero":
            words = (num_words(outputs, bits), groups)
            specs.append(TensorSpec(f"{module}.weight_zero_point", "I32", words))
        return specs

    def tensors(self, matrix: RoundedMatrix, bits: int) -> Arrays:
        codes, scales = matrix.codes, matrix.grid.scales.values
        if self._recipe.rows_are_int8:
            signed = codes.astype(np.int16) - matrix.grid.zero_point
            return {"weight": signed.astype(np.int8), "weight_scale": scales}
        tensors = {
            "weight_packed": pack_bits(codes, bits),
            "weight_scale": scales,
            "weight_shape": np.array(codes.shape, np.int64),
        }
        if matrix.grid.zeros is not None:
            zeros = matrix.grid.zeros.astype(np.uint8)
            tensors["weight_zero_point"] = np.ascontiguousarray(pack_bits(zeros.T, bits).T)
        return tensors

    def config(self, left: Sequence[str], bits_of: dict[str, int]) -> dict[str, Any]:
        recipe = self._recipe
        wide = list(bits_of)
        groups = {"group_0": self._group(recipe.bits, ["Linear"])}
        if wide:
            names = [f"re:^{re.escape(module)}$" for module in wide]
            groups["group_1"] = self._group(max(bits_of.values()), names)
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if recipe.rows_are_int8 else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(dict.fromkeys([*left, HEAD])),
            "kv_cache_scheme": None,
        }

    def _group(self, bits: int, targets: Collection[str]) -> dict[str, Any]:
        spec = self._recipe.grid(bits)
        weights = {
            "num_bits": bits,
            "type": "int",
            "symmetric": spec.kind == "middle",
            "strategy": "group" if spec.group else "channel",
            "group_size": spec.group or None,
            "actorder": None,
            "dynamic": False,
        }
        rows = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
        return {
            "targets": list(targets),
            "weights": weights,
            "input_activations": rows if self._recipe.rows_are_int8 else None,
            "output_activations": None,
        }


def make_encoder(recipe: Recipe) -> Encoder:
    """Returns the encoder of the recipe's output format."""
    encoders: dict[str, Callable[[Recipe], Encoder]] = {
        "gptq": GptqEncoder,
        "awq": AwqEncoder,
        "compressed-tensors": CompressedTensorsEncoder,
    }
    return encoders[recipe.output_format](recipe)


def _zeros(matrix: RoundedMatrix) -> NDArray[np.int16]:
    grid = matrix.grid
    if grid.zeros is not None:
        return grid.zeros
    return np.full(grid.scales.values.shape, grid.zero_point, np.int16)


def _own_order(matrix: RoundedMatrix) -> NDArray[np.uint8]:
    """Returns the codes with the inputs in their original order."""
    if matrix.permutation is None:
        return matrix.codes
    own = np.empty_like(matrix.codes)
    own[:, matrix.permutation] = matrix.codes
    return own


def _groups(matrix: RoundedMatrix) -> NDArray[np.int32]:
    inputs = matrix.codes.shape[1]
    groups = (np.arange(inputs) // matrix.grid.group).astype(np.int32)
    if matrix.permutation is None:
        return groups
    own = np.empty_like(groups)
    own[matrix.permutation] = groups
    return own


def _interleave(numbers: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Packs each row in AWQ's order: `[n, out]` to `[n, out / 8]`."""
    words = numbers.reshape(len(numbers), -1, PER_WORD)[..., OWN_ORDER]
    return pack_bits(words.reshape(len(numbers), -1), 4)
