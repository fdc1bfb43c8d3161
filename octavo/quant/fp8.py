"""fp8 (e4m3) checkpoints: a config's `quantization_config`, and a matrix of codes with its scales,
as a packed weight.

Three layouts of scales, all multiplied with the codes: one for the matrix, one for each output, one
for each block of the matrix (DeepSeek-V3: 128 x 128). Scales become one for each output and block
of inputs, which is lossless. Knows nothing of files. Sources: compressed-tensors' "float-quantized"
format, transformers' FineGrainedFP8Config, DeepSeek-V3's README.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import UnsupportedModel, WeightMismatch
from octavo.quant.packed import ActivationScheme, Levels, PackedWeight

FP8 = "F8_E4M3"
"""Name of the format in safetensors."""

SCALE_SUFFIXES = ("_scale_inv", "_scale")
"""Suffixes of a weight's name that name its scales; both kinds are multiplied with the codes."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Scales of a checkpoint's fp8 matrices."""

    block: tuple[int, int] | None
    """Outputs and inputs that share a scale; None: one scale for each output or matrix."""
    activation: ActivationScheme
    """How products may quantise their rows."""

    @property
    def format_name(self) -> str:
        """Name of the format: with one scale for each output, or behind a colon the number of
        inputs that share one.
        """
        return FP8 if self.block is None else f"{FP8}:{self.block[1]}"


def fp8_scheme(config: Mapping[str, Any]) -> Fp8Scheme | None:
    """Reads the scheme from config.json; None without a `quantization_config`, UnsupportedModel
    where that is anything but fp8.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method == "fp8":
        return _fine_grained(found)
    if method == "compressed-tensors":
        return _compressed_tensors(found)
    raise _refused(
        f"quant_method is {method!r}, supported are 'fp8' and 'compressed-tensors'"
        " (float-quantized)"
    )


def fp8_weight(codes: NDArray, scales: NDArray, scheme: Fp8Scheme, name: str) -> PackedWeight:
    """Makes the packed weight of `codes [out, in] float8_e4m3fn` and `scales` [], [1], [out], [out,
    1] or of each block; WeightMismatch where they are of other shapes.
    """
    if codes.ndim != 2:
        raise UnsupportedModel(
            f"{name}: fp8 weights are supported as [out, in], got the shape {codes.shape}"
        )
    outputs, inputs = codes.shape
    wide = np.asarray(scales, np.float32)
    if wide.size == 1:
        wide, group = np.broadcast_to(wide.reshape(1, 1), (outputs, 1)), inputs
    elif wide.shape in ((outputs,), (outputs, 1)):
        wide, group = wide.reshape(outputs, 1), inputs
    else:
        wide, group = _of_blocks(wide, codes.shape, scheme.block, name)
    activation: ActivationScheme = (
        "per_group" if scheme.activation != "none" and group < inputs else scheme.activation
    )
    return PackedWeight(
        (outputs, inputs), 8, "e4m3", codes, group, Levels(wide), activation=activation
    )


def _of_blocks(
    scales: NDArray[np.float32], shape: tuple[int, int], block: tuple[int, int] | None, name: str
) -> tuple[NDArray[np.float32], int]:
    """Returns a scale for each output and block of inputs, and the number of inputs in a block."""
    if block is None:
        raise WeightMismatch(
            f"{name}: scales of shape {scales.shape} for a matrix {shape}, and config.json names no"
            " weight_block_size"
        )
    wanted = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if scales.shape != wanted:
        raise WeightMismatch(
            f"{name}: scales of shape {scales.shape}, expected {wanted}: one for each block of"
            f" {block[0]} x {block[1]}"
        )
    return np.repeat(scales, block[0], axis=0)[: shape[0]], block[1]


def _fine_grained(found: Mapping[str, Any]) -> Fp8Scheme:
    if found.get("fmt", "e4m3") != "e4m3":
        raise _refused(f"fmt is {found['fmt']!r}, supported is 'e4m3'")
    block = found.get("weight_block_size")
    if block is None:
        return Fp8Scheme(None, "per_token")
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(type(size) is int and size > 0 for size in block)
    ):
        raise _refused(f"weight_block_size is {block!r}, allowed are two whole numbers above 0")
    return Fp8Scheme((block[0], block[1]), "per_token")


def _compressed_tensors(found: Mapping[str, Any]) -> Fp8Scheme:
    """Reads the scheme of compressed-tensors: all groups must be e4m3 by tensor, channel or block;
    activations may stay as they are.
    """
    if found.get("format") != "float-quantized":
        raise _refused(
            f"format is {found.get('format')!r} of compressed-tensors, supported is"
            " 'float-quantized'"
        )
    groups = found.get("config_groups")
    if (
        not isinstance(groups, dict)
        or not groups
        or not all(isinstance(group, dict) for group in groups.values())
    ):
        raise _refused("config_groups is missing")
    block, activation = None, "none"
    for group in groups.values():
        weights = group.get("weights")
        if not isinstance(weights, dict) or (weights.get("type"), weights.get("num_bits")) != (
            "float",
            8,
        ):
            raise _refused("weights of compressed-tensors are supported as floats of 8 bits")
        if weights.get("strategy") not in ("tensor", "channel", "block"):
            raise _refused(
                f"strategy is {weights.get('strategy')!r}, supported are 'tensor', 'channel' and"
                " 'block'"
            )
        if weights.get("strategy") == "block":
            block = _fine_grained({"weight_block_size": weights.get("block_structure")}).block
        activation = "per_token" if group.get("input_activations") is not None else activation
    return Fp8Scheme(block, "per_token" if activation == "per_token" else "none")


def _refused(what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"config.json: quantization_config: {what}",
        hint="use a checkpoint in bf16 with --quantization, or a GGUF file",
    )
