"""fp8 (e4m3) conversion, and matmuls with e4m3 weights through PyTorch's scaled matmul.

If a weight has one scale per output and its activations may be quantized (`is_scaled`), a Linear
quantizes each row to e4m3 and multiplies codes. This needs a device with scaled matmul (CUDA
capability 8.9 or newer, CPU) and widths that are multiples of 16. Everything else (block scales,
experts, tables, latent attention, other devices) is converted to the step's dtype when read.

On CUDA in bf16 the matmul applies both scales and rounds once. CUDA's kernels with a scale for each
row write bf16 only, and not every PyTorch has one for a CPU: elsewhere the scales are applied to
fp32 sums afterwards. Source of the limits: torch._scaled_mm
(aten/src/ATen/native/cuda/ScaledBlas.cpp and RowwiseScaledMM.cu).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quant.packed import PackedWeight

E4M3 = torch.float8_e4m3fn
TOP = 448.0
"""Largest e4m3 value."""

WIDTHS = 16
"""Required alignment of inputs and outputs for PyTorch's scaled matmul."""

LEAST_CAPABILITY = (8, 9)


def is_scaled(packed: PackedWeight, device: torch.device) -> bool:
    """Returns whether a Linear multiplies this weight's codes directly."""
    if (
        packed.code != "e4m3"
        or packed.activation != "per_token"
        or len(packed.shape) != 2
        or packed.group < packed.shape[1]
    ):
        return False
    return has_scaled_product(device) and all(width % WIDTHS == 0 for width in packed.shape)


def has_scaled_product(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    return device.type == "cpu"


def takes_row_scales(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether PyTorch's scaled matmul is given the scales of rows and outputs."""
    return device.type == "cuda" and dtype == torch.bfloat16


def scaled_product(
    rows: Tensor,
    row_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    *,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Multiplies `rows [T, in] e4m3` with `row_scales [T, 1] fp32` by `codes [out, in] e4m3` with
    `scales [out, 1] fp32` and adds `bias [out]`: `[T, out]` in `dtype`.

    On CUDA sums have fewer bits than fp32 (`use_fast_accum`), as in other engines.
    """
    if takes_row_scales(rows.device, dtype):
        product = torch._scaled_mm(
            rows,
            codes.t(),
            scale_a=row_scales,
            scale_b=scales.t(),
            out_dtype=dtype,
            use_fast_accum=True,
        )
    else:
        one = torch.ones((), dtype=torch.float32, device=rows.device)
        sums = torch._scaled_mm(rows, codes.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
        product = sums * row_scales * scales[:, 0]
    return (product if bias is None else product + bias).to(dtype)


def as_e4m3(rows: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns e4m3 codes of `rows [..., width] fp32` and scales `[..., 1]`: absmax / 448, rounded
    to `scale_dtype`; NaN if a row's absmax is not finite.
    """
    absmax = (
        rows.abs().amax(dim=-1, keepdim=True)
        if rows.shape[-1]
        else rows.new_zeros(*rows.shape[:-1], 1)
    )
    scales = torch.where(absmax.isfinite(), absmax / TOP, torch.nan).to(scale_dtype)
    wide = scales.float()
    codes = torch.where(wide > 0, (rows / wide).clamp(-TOP, TOP), 0.0)
    return codes.to(E4M3), scales
