"""Rows quantized to e4m3 by Triton, in its interpreter, bit for bit as plain torch quantizes them,
and matmuls of them.
"""

import pytest
import torch

from octavo.executor.torch.plain import PlainKernels
from octavo.executor.torch.triton import fp8_rows
from octavo.executor.torch.triton.kernels import TritonKernels
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.executor.torch.weights.fp8 import as_e4m3
from octavo.executor.torch.weights.program_weights import Product
from octavo.quant.online import pack_fp8
from tests.executor.torch.triton.device import DEVICE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape, dtype=torch.float32):
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return numbers.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 144, 257])
def test_codes_and_scales_are_those_of_plain_torch(width, dtype):
    x = normal(9, width, dtype=dtype)
    x[1], x[2, 3], x[3, 0], x[4, 1:] = 0, torch.nan, torch.inf, x[4, 1:] * 1e-3
    codes, scales = fp8_rows.quantized(x)
    wanted, wanted_scales = as_e4m3(x.float())
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    torch.testing.assert_close(scales, wanted_scales, rtol=0, atol=0, equal_nan=True)


def test_every_step_of_the_codes_is_rounded_to_even():
    """Numbers halfway between two codes, next to them, and subnormal ones."""
    steps = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (steps[1:] + steps[:-1]) / 2
    around = [steps, halves, halves.nextafter(steps[1:]), halves.nextafter(steps[:-1])]
    row = torch.cat([*around, *(-part for part in around)])[None].to(DEVICE)
    codes, scales = fp8_rows.quantized(row)
    assert scales.item() == 1.0
    assert torch.equal(codes.view(torch.uint8), row.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_matmuls(dtype, has_bias):
    weight = DeviceWeight.of(pack_fp8(normal(48, 64).cpu().numpy()), DEVICE, dtype)
    product = Product((weight,), normal(48, dtype=dtype) if has_bias else None)
    x = normal(17, 80, dtype=dtype)[:, 8:72]
    found = TritonKernels(DEVICE).product(x, product)
    torch.testing.assert_close(found, PlainKernels().product(x, product))
    one_by_one = TritonKernels(DEVICE, fixed_tiles=True).product(x, product)
    torch.testing.assert_close(one_by_one, found)


def test_no_rows():
    codes, scales = fp8_rows.quantized(normal(0, 32))
    assert codes.shape == (0, 32) and scales.shape == (0, 1)
