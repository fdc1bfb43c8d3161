"""fp8 (e4m3) weights: codes and scales as a packed weight.

Scales are per tensor, per output or per block (DeepSeek-V3: 128 x 128); all become one scale per
output and input block, which is lossless. Sources: compressed-tensors' "float-quantized" format,
transformers' FineGrainedFP8Config, DeepSeek-V3's README.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.quant.packed import ActivationScheme, Levels, PackedWeight

FP8 = "F8_E4M3"
"""Name of the dtype in safetensors."""
E8M0_BIAS = 127
CODES = np.dtype(ml_dtypes.float8_e4m3fn)
SCALES = ("float16", "bfloat16", "float32", "uint8")
"""Scale dtypes; uint8 holds powers of two as e8m0."""


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Scale layout of a checkpoint's fp8 matrices."""

    block: tuple[int, int] | None
    """Outputs and inputs per scale; None: one scale per output or tensor."""
    activation: ActivationScheme
    """How a matmul may quantize its activations."""

    @property
    def format_name(self) -> str:
        """Format name; with block scales, the block's number of inputs follows a colon."""
        return FP8 if self.block is None else f"{FP8}:{self.block[1]}"


def e8m0(exponents: NDArray[np.uint8], less: int = 0) -> NDArray[np.float32]:
    """Decodes e8m0 powers of two, `less` exponents lower; 255 is NaN."""
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - E8M0_BIAS - less)
    return np.where(exponents == 255, np.float32(np.nan), powers.astype(np.float32))


def fp8_weight(codes: NDArray, scales: NDArray, scheme: Fp8Scheme, name: str) -> PackedWeight:
    """Makes a packed weight from `codes [out, in] float8_e4m3fn` and scales.

    `scales` are floats or e8m0 as uint8, of shape [], [1], [out], [out, 1] or one per block. Raises
    WeightMismatch for other shapes.
    """
    check_fp8(codes, scales, scheme, name)
    outputs, inputs = codes.shape
    wide = e8m0(scales) if scales.dtype == np.uint8 else np.asarray(scales, np.float32)
    if wide.size == 1:
        wide, group = np.broadcast_to(wide.reshape(1, 1), (outputs, 1)), inputs
    elif wide.shape in ((outputs,), (outputs, 1)):
        wide, group = wide.reshape(outputs, 1), inputs
    else:
        assert scheme.block is not None, "scales of blocks were checked"
        wide, group = np.repeat(wide, scheme.block[0], axis=0)[:outputs], scheme.block[1]
    activation: ActivationScheme = (
        "per_group" if scheme.activation != "none" and group < inputs else scheme.activation
    )
    return PackedWeight(
        (outputs, inputs), 8, "e4m3", codes, group, Levels(wide), activation=activation
    )


def check_fp8(codes: NDArray, scales: NDArray, scheme: Fp8Scheme, name: str) -> None:
    """Raises WeightMismatch for dtypes or shapes that `fp8_weight` does not accept, and
    UnsupportedModel if the codes are not a matrix.
    """
    if codes.ndim != 2:
        raise UnsupportedModel(
            f"{name}: fp8 weights are supported as [out, in], got the shape {codes.shape}"
        )
    if codes.dtype != CODES or scales.dtype.name not in SCALES:
        raise WeightMismatch(
            f"{name}: codes of {codes.dtype.name} and scales of {scales.dtype.name}, expected"
            f" {CODES.name} and {', '.join(SCALES)}",
            hint="download the files again, or use another copy of the model",
        )
    outputs, inputs = codes.shape
    block = scheme.block
    if scales.size == 1 or scales.shape in ((outputs,), (outputs, 1)):
        return
    if block is None:
        raise WeightMismatch(
            f"{name}: scales of shape {scales.shape} for a matrix {codes.shape}, and config.json"
            f" has no weight_block_size"
        )
    needed = (-(-outputs // block[0]), -(-inputs // block[1]))
    if scales.shape != needed:
        raise WeightMismatch(
            f"{name}: scales of shape {scales.shape}, expected {needed}: one for each block of"
            f" {block[0]} x {block[1]}"
        )
