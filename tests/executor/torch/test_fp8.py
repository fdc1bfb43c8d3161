"""fp8 on the torch backend: products of codes with codes against the same numbers in float64, the
weights that are multiplied this way, packed models against floats, and KV in e4m3 as the reference
stores it.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.api.errors import BackendUnavailable
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.reference.kv_cache import as_fp8
from octavo.executor.torch.backend import TorchBackend
from octavo.executor.torch.kv_cache import TorchKvCache, make_kv_layout
from octavo.executor.torch.weights import fp8
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.executor.torch.weights.program_weights import load_weights
from octavo.models.registry import build_programs
from octavo.program.ops import Linear
from octavo.program.passes.optimize import optimize
from octavo.program.program import CacheGroup
from octavo.quant.online import pack_fp8, pack_int8
from octavo.quant.packed import Levels, PackedWeight
from tests.support.kv_layouts import layouts_of
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model

torch.set_num_threads(1)

CPU = torch.device("cpu")


def normal(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def in_e4m3(rows):
    """Returns each row as its nearest codes times its scale, in float64."""
    scales = abs(rows).max(axis=1, keepdims=True) / np.float32(448)
    return (rows / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 17])
def test_products_are_of_codes_with_codes(num_rows, dtype):
    packed = pack_fp8(normal(48, 64))
    x = torch.from_numpy(normal(num_rows, 64)).to(dtype)
    weight, bias = DeviceWeight.of(packed, CPU, dtype), torch.from_numpy(normal(48)).to(dtype)
    assert weight.is_scaled
    found = weight.product(x, bias)
    wanted = (
        in_e4m3(x.float().numpy()) @ packed.dequantize().T.astype(np.float64)
        + bias.double().numpy()
    )
    assert found.dtype == dtype
    np.testing.assert_allclose(
        found.double().numpy(), wanted, rtol=2e-2 if dtype == torch.bfloat16 else 2e-3, atol=2e-2
    )
    if dtype == torch.float32:
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 17])
def test_the_scales_may_be_left_to_the_matmul(num_rows, monkeypatch):
    """As on CUDA; this PyTorch can do it on a CPU, too."""
    weight = DeviceWeight.of(pack_fp8(normal(48, 64)), CPU, torch.bfloat16)
    x = torch.from_numpy(normal(num_rows, 64)).bfloat16()
    bias = torch.from_numpy(normal(48)).bfloat16()
    wanted = weight.product(x, bias)
    monkeypatch.setattr(fp8, "takes_row_scales", lambda device, dtype: True)
    torch.testing.assert_close(weight.product(x, bias), wanted, rtol=2**-7, atol=2**-7)


def test_rows_do_not_depend_on_each_other_and_bad_ones_stay_theirs():
    weight = DeviceWeight.of(pack_fp8(normal(32, 64)), CPU, torch.float32)
    x = torch.from_numpy(normal(4, 64))
    x[1, 3], x[2] = torch.nan, 0
    found = weight.product(x, None)
    assert found[1].isnan().all() and not found[2].any()
    torch.testing.assert_close(found[3:], weight.product(x[3:], None), rtol=1e-6, atol=1e-6)
    x[0, 0] = torch.inf
    assert weight.product(x, None)[0].isnan().all(), "what is not finite has no scale"


def blocks(packed):
    return PackedWeight(
        packed.shape,
        8,
        "e4m3",
        packed.codes,
        16,
        Levels(np.ones((packed.shape[0], 4), np.float32)),
        activation="per_token",
    )


def test_which_weights_are_multiplied_as_they_are_stored(monkeypatch):
    packed = pack_fp8(normal(48, 64))
    assert fp8.is_scaled(packed, CPU)
    others = (
        pack_fp8(normal(48, 60)),
        pack_fp8(normal(47, 64)),
        pack_fp8(normal(2, 48, 64)),
        pack_int8(normal(48, 64)),
        blocks(packed),
    )
    assert not any(fp8.is_scaled(other, CPU) for other in others)
    floats_only = PackedWeight(packed.shape, 8, "e4m3", packed.codes, 64, packed.scales)
    assert not fp8.is_scaled(floats_only, CPU), "the file says that rows stay floats"
    for capability, has in (
        ((8, 0), False),
        ((8, 6), False),
        ((8, 9), True),
        ((9, 0), True),
        ((12, 0), True),
    ):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        assert fp8.has_scaled_product(torch.device("cuda")) is has
    assert not fp8.has_scaled_product(torch.device("meta"))


def packed_model(dtype="auto", **sizes):
    path = tiny_model("llama", intermediate_size=96, **sizes).path
    checkpoint = open_checkpoint(path)
    return path, WeightReader(
        checkpoint, dtype, "fp8", build_programs(checkpoint.config)["decoder"]
    ).load


def test_a_packed_model_is_near_the_reference_that_keeps_its_rows():
    path, load = packed_model()
    ids = np.random.default_rng(1).integers(0, 320, 50)
    wanted = PagedRunner(path, load=load).logits(ids)
    found = PagedRunner(path, TorchBackend(BackendOptions(num_threads=1)), load=load).logits(ids, 7)
    assert 1e-4 < np.sqrt(np.mean((found - wanted) ** 2)) / abs(wanted).max() < 0.06


def test_where_there_is_no_such_product_the_weights_become_floats(monkeypatch):
    monkeypatch.setattr(fp8, "has_scaled_product", lambda device: False)
    path, load = packed_model()
    ids = np.random.default_rng(1).integers(0, 320, 50)
    wanted = PagedRunner(path, load=load).logits(ids)
    found = PagedRunner(path, TorchBackend(BackendOptions(num_threads=1)), load=load).logits(ids)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * abs(wanted).max())


def test_merged_products_are_one_and_bytes_are_a_quarter():
    path, load = packed_model()
    program = optimize(build_programs(open_checkpoint(path).config)["decoder"])
    weights = load_weights(program, load, torch.device("cpu"), torch.float32)
    *products, head = (weights.product(op) for op in program.ops if isinstance(op, Linear))
    assert {len(product.parts) for product in products} == {1} and head.parts[0].is_plain
    floats = sum(product.parts[0].codes.numel() for product in products)
    assert sum(product.parts[0].num_bytes for product in products) == floats + 4 * sum(
        len(product.parts[0].codes) for product in products
    )


GROUP = CacheGroup("kv", "full", 2, 3, 40, 24)


def test_kv_is_stored_as_the_reference_stores_it():
    cache = TorchKvCache([make_kv_layout(GROUP, torch.float8_e4m3fn)], [4], CPU)
    stored = cache.groups[0].k.layer(1)
    rows = normal(20, 3, 40)
    rows[3], rows[4, 1], rows[5] = 0, rows[4, 1] * 1e-30, rows[5] * 1e30
    slots = torch.from_numpy(np.random.default_rng(0).permutation(64)[:20])
    stored.write(slots, torch.from_numpy(rows))
    found = stored.read(torch.arange(4)[None])[0][slots]
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found.double().numpy(), as_fp8(rows.astype(np.float64)))
    assert not cache.groups[0].k.layer(0).numbers.float().any()


def test_rows_that_are_not_finite_are_nan():
    rows = normal(3, 3, 40)
    rows[0, 1, 2], rows[2, 0, 0] = np.nan, np.inf
    stored = (
        TorchKvCache([make_kv_layout(GROUP, torch.float8_e4m3fn)], [1], CPU).groups[0].k.layer(0)
    )
    stored.write(torch.arange(3), torch.from_numpy(rows))
    found = stored.read(torch.tensor([[0]]))[0, :3].isnan().all(dim=-1).numpy()
    np.testing.assert_array_equal(found, np.isnan(as_fp8(rows.astype(np.float64))).all(axis=-1))
    np.testing.assert_array_equal(np.argwhere(found), [[0, 1], [2, 0]])


@pytest.mark.parametrize("kind", [TorchBackend, ReferenceBackend])
def test_the_layout_names_it(kind):
    (layout,) = layouts_of(kind(BackendOptions(kv_cache_dtype="fp8")), (GROUP,))
    assert layout.dtype == "fp8"
    if kind is TorchBackend:
        assert layout.layer_bytes == 16 * 3 * (40 + 24 + 2 * 2)


def test_native_has_no_fp8_kv():
    with pytest.raises(
        BackendUnavailable,
        match=r"got fp8, the native backend supports auto, fp32, bf16, int8, .*\nhint: use int8",
    ):
        NativeBackend(BackendOptions(kv_cache_dtype="fp8", num_threads=1))
