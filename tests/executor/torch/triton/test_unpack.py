"""Packed weights unpacked by a kernel, in Triton's interpreter: bit for bit the floats of plain
torch; and products of many rows with them.
"""

import pytest
import torch
import torch.nn.functional as F

from octavo.executor.torch.plain import PlainKernels
from octavo.executor.torch.triton import unpack
from octavo.executor.torch.triton.device import device_name, is_interpreted
from octavo.executor.torch.triton.kernels import TritonKernels
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.executor.torch.weights.program_weights import Product
from octavo.quant.packed import PackedWeight
from tests.executor.torch.triton.device import DEVICE
from tests.executor.torch.triton.packed_weights import kinds, uncarried

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def on_device(packed):
    return DeviceWeight.of(packed, DEVICE, torch.float32)


def assert_floats(found, wanted):
    """Asserts the same floats, up to the one rounding by which a GPU multiplies a code and adds a
    min.
    """
    if is_interpreted():
        assert torch.equal(found, wanted)
    else:
        torch.testing.assert_close(found, wanted, rtol=torch.finfo(found.dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", kinds())
def test_the_same_floats(kind, dtype):
    weight = on_device(kinds()[kind])
    assert unpack.supports((weight,), dtype)
    assert_floats(unpack.unpacked((weight,), dtype, device_name(DEVICE)), weight.floats(dtype))


def test_tiles_that_end_within_a_row(monkeypatch):
    monkeypatch.setattr(unpack, "tuned", lambda *_, **__: {"BLOCK_N": 32, "BLOCK_B": 32})
    for kind in ("Q4_K", "Q6_K", "pairs", "lookup", "int8, odd width", "int4, narrow"):
        weight = on_device(kinds()[kind])
        assert_floats(
            unpack.unpacked((weight,), torch.float32, device_name(DEVICE)),
            weight.floats(torch.float32),
        )


def test_parts_of_several_formats_are_one_product():
    made = kinds()
    parts = tuple(on_device(made[kind]) for kind in ("int4", "int8", "Q4_K"))
    floats = torch.cat([part.floats(torch.float32) for part in parts])
    assert_floats(unpack.unpacked(parts, torch.float32, device_name(DEVICE)), floats)
    x, bias = torch.randn(65, 256, device=DEVICE), torch.randn(len(floats), device=DEVICE)
    found = TritonKernels(DEVICE).product(x, Product(parts, bias))
    torch.testing.assert_close(found, F.linear(x, floats, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", uncarried())
def test_what_it_does_not_carry_is_unpacked_plainly(kind):
    weight = on_device(uncarried()[kind])
    assert not unpack.supports((weight,), torch.float32) and not unpack.supports(
        (on_device(kinds()["int4"]), weight), torch.float32
    )
    x, product = torch.randn(65, 256, device=DEVICE), Product((weight,), None)
    assert torch.equal(
        TritonKernels(DEVICE).product(x, product), PlainKernels().product(x, product)
    )


def test_experts_are_no_matrix():
    packed = kinds(256, 20, (3,))["Q4_0"]
    assert not unpack.supports((on_device(packed),), torch.float32)
    assert not unpack.supports((on_device(PackedWeight.plain(packed.dequantize())),), torch.float32)
