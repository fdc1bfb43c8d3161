"""fp8 (e4m3) numbers, and products with e4m3 weights through PyTorch's scaled matrix product.

The rule stands in one place (`is_scaled`): where a weight has one scale an output and its rows may
be quantised, a Linear turns each row into e4m3 by a scale of its own and multiplies codes with
codes. That takes a device with such a product (CUDA of capability 8.9 or more, the CPU) and widths
in multiples of 16. Everything else (blocks of scales, experts, tables, latent attention, other
devices) becomes floats of the step's dtype where it is read.

The product itself takes no scales: its sums come back in fp32 and are multiplied by both scales,
which is the same on every device and in every PyTorch from 2.9 on. Source of the limits:
torch._scaled_mm (aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quant.packed import PackedWeight

E4M3 = torch.float8_e4m3fn
TOP = 448.0
"""Largest e4m3 number."""

WIDTHS = 16
"""PyTorch's scaled product takes inputs and outputs in multiples of this."""

LEAST_CAPABILITY = (8, 9)


def is_scaled(packed: PackedWeight, device: torch.device) -> bool:
    """Returns whether a Linear multiplies with this weight as it is stored."""
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


def scaled_product(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Multiplies `x [T, in]` with `codes [out, in] e4m3` of `scales [out, 1] fp32`: `[T, out]
    fp32`.
    """
    rows, row_scales = as_e4m3(x.float())
    one = torch.ones((), dtype=torch.float32, device=x.device)
    sums = torch._scaled_mm(rows, codes.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return sums * row_scales * scales[:, 0]


def as_e4m3(rows: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Returns e4m3 codes of `rows [..., width] fp32` and scales `[..., 1]`: absmax / 448, rounded
    to `scale_dtype`, or NaN where a row's absmax is not finite.
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
