"""fp8 (e4m3) numbers, and products with weights of them through PyTorch's scaled matrix product.

The rule, in one place (`is_scaled`): a Linear whose weight is e4m3 with one scale an output, and
whose rows may be quantised (`PackedWeight.activation` is "per_token"), turns each row into e4m3 by
a scale of its own and multiplies codes with codes, where the device has such a product (a CUDA
device of capability 8.9 or more; the CPU) and both widths are multiples of 16. Everything else
(blocks of scales, experts, tables, latent attention, other devices) is turned into floats of the
step's dtype where it is read. The product itself takes no scales: its sums come back in fp32 and
are multiplied by both scales there, which is the same on every device and in every PyTorch from 2.9
on. Source of the limits: torch._scaled_mm (aten/src/ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.quant.packed import PackedWeight

E4M3 = torch.float8_e4m3fn
TOP = 448.0
"""The largest e4m3."""

WIDTHS = 16
"""The library's product wants inputs and outputs in multiples of it."""

LEAST_CAPABILITY = (8, 9)


def is_scaled(packed: PackedWeight, device: torch.device) -> bool:
    """Whether a Linear multiplies with this weight as it is stored."""
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
    """`x [T, in]` times `codes [out, in] e4m3` with `scales [out, 1] fp32`: `[T, out] fp32`."""
    rows, row_scales = as_e4m3(x.float())
    one = torch.ones((), dtype=torch.float32, device=x.device)
    sums = torch._scaled_mm(rows, codes.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    return sums * row_scales * scales[:, 0]


def as_e4m3(rows: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Codes of `rows [..., width] fp32`, and scales `[..., 1]`: absmax / 448, rounded to
    `scale_dtype`; NaN where a row has none that is finite."""
    absmax = (
        rows.abs().amax(dim=-1, keepdim=True)
        if rows.shape[-1]
        else rows.new_zeros(*rows.shape[:-1], 1)
    )
    scales = torch.where(absmax.isfinite(), absmax / TOP, torch.nan).to(scale_dtype)
    wide = scales.float()
    codes = torch.where(wide > 0, (rows / wide).clamp(-TOP, TOP), 0.0)
    return codes.to(E4M3), scales
