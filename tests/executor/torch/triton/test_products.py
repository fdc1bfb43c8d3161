"""Triton's products with packed weights and of experts, in its interpreter.

An unpacked weight is bit for bit the packed weight's floats; sums lie within rounding of the
product in float64; a row is bitwise the same alone, among others, and beside rows of NaN.
"""

import numpy as np
import pytest
import torch

from octavo.executor.torch.plain import Norm, PlainKernels
from octavo.executor.torch.triton import grouped_linear, packed_linear
from octavo.executor.torch.triton.device import device_name, is_interpreted
from octavo.executor.torch.triton.grouped_linear import ExpertRows
from octavo.executor.torch.triton.kernels import TritonKernels
from octavo.executor.torch.triton.packed_linear import PackedProducts, ProductTiles
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.executor.torch.weights.program_weights import Product
from octavo.quant.packed import PackedWeight
from tests.executor.torch.triton.device import DEVICE
from tests.executor.torch.triton.packed_weights import kinds, uncarried

pytestmark = (
    pytest.mark.slow
)  # Triton's interpreter takes its time; test_models.py and test_rows.py always run

PLAIN, TRITON = PlainKernels(), TritonKernels(DEVICE)
PACKED = PackedProducts(DEVICE)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = {"fp32": 2e-6, "bf16": 8e-3, "fp16": 1e-3}


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def on_device(packed, dtype=torch.float32):
    return DeviceWeight.of(packed, DEVICE, dtype)


def tiles_of(outputs, row_bytes, splits=1):
    return ProductTiles({"BLOCK_N": outputs, "BLOCK_B": row_bytes}, splits)


def multiplied(x, weight, tiles, bias=None):
    out = torch.empty(len(x), weight.codes.shape[0], dtype=x.dtype, device=DEVICE)
    PACKED.multiply(x, weight, bias, out, tiles)
    return out


def assert_unpacked(found, wanted):
    """Asserts the same floats. Those of 16 bits are rounded from sums in another order, and a GPU
    multiplies a code and adds a min with one rounding.
    """
    if is_interpreted() and found.dtype == torch.float32:
        assert torch.equal(found, wanted)
    else:
        rtol, atol = torch.finfo(found.dtype).eps, 1e-6 if found.dtype == torch.float32 else 1e-5
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def assert_product(found, x, floats, dtype, bias=0.0):
    """Asserts that a product lies within the dtype's rounding of the largest sum."""
    wanted = x.double() @ floats.double().T + bias
    assert (found.double() - wanted).abs().max() <= ROUNDING[dtype] * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", kinds())
def test_rows_of_the_identity_pick_the_weight_s_columns(kind, dtype):
    packed = kinds()[kind]
    wanted = torch.from_numpy(packed.dequantize()).to(DEVICE, DTYPES[dtype])
    weight, width = on_device(packed), packed.shape[1]
    for start in range(0, width, 80):
        x = torch.eye(width, dtype=DTYPES[dtype], device=DEVICE)[start : start + 16]
        assert_unpacked(multiplied(x, weight, tiles_of(32, 32)), wanted[:, start : start + 16].T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("Q4_0", 1),
        ("Q4_K", 16),
        ("Q6_K", 3),
        ("pairs", 7),
        ("int8, odd width", 5),
        ("int4, narrow", 2),
    ],
)
def test_products_merged_with_a_bias(kind, rows, dtype):
    packed = kinds()[kind]
    parts = (on_device(packed), on_device(packed.rows(slice(5, 38))))
    x, bias = (
        drawn(rows, packed.shape[1] + 9, dtype=DTYPES[dtype])[:, 4 : 4 + packed.shape[1]],
        drawn(103, dtype=DTYPES[dtype]),
    )
    product = Product(parts, bias)
    assert packed_linear.supports(x, product)
    floats = torch.cat([part.floats(x.dtype) for part in parts])
    assert_product(TRITON.product(x, product), x, floats, dtype, bias.double())


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_K", "int8"])
def test_splits_of_the_inputs(kind, splits):
    """A product may have more splits than there are tiles."""
    packed = kinds(512, 33)[kind]
    x = drawn(4, 512)
    for row_bytes in (16, 64, 256):
        assert_product(
            multiplied(x, on_device(packed), tiles_of(16, row_bytes, splits)),
            x,
            torch.from_numpy(packed.dequantize()).to(DEVICE),
            "fp32",
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_a_row_is_the_same_in_any_company(kind, dtype):
    """A row is bitwise the same at any place and beside rows of NaN."""
    weight = on_device(kinds(512)[kind])
    x, tiles = drawn(16, 512, dtype=DTYPES[dtype]), tiles_of(64, 64, 2)
    whole = multiplied(x, weight, tiles)
    for rows in ([3], [15, 0], [7, 8, 9, 1, 2]):
        assert torch.equal(multiplied(x[rows], weight, tiles), whole[rows])
    x[1::2] = torch.nan
    found = multiplied(x, weight, tiles)
    assert torch.equal(found[::2], whole[::2]) and found[1::2].isnan().all()


FIXED = TritonKernels(DEVICE, fixed_tiles=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["Q4_K", *uncarried()])
def test_fixed_tiles_take_any_number_of_rows_and_every_weight(kind, dtype):
    """With fixed tiles the kernel takes plain floats, and weights that it does not carry are
    computed row by row: bitwise the same in any company.
    """
    weight = on_device((kinds() | uncarried())[kind], DTYPES[dtype])
    x, product = (
        drawn(37, 256, dtype=DTYPES[dtype]),
        Product((weight,), drawn(70, dtype=DTYPES[dtype])),
    )
    whole = FIXED.product(x, product)
    assert_product(whole, x, weight.floats(x.dtype), dtype, product.bias.double())
    x[1::4] = torch.nan
    for rows in (torch.arange(3), torch.tensor([36]), torch.arange(30, 4, -1)):
        sane = rows % 4 != 1
        assert torch.equal(FIXED.product(x[rows], product)[sane], whole[rows][sane])


def test_fixed_tiles_of_experts_norms_and_sums():
    matrix, x = on_device(PackedWeight.plain(drawn(2, 24, 64).cpu().numpy())), drawn(90, 128)
    experts, how = experts_of(90, 2), Norm(drawn(128), 1e-5)
    assert (
        FIXED.rows_of_experts(experts, 2).tile_rows == 16
        and TRITON.rows_of_experts(experts, 2).tile_rows == 64
    )

    def grouped(x, ids):
        return FIXED.grouped(x, FIXED.rows_of_experts(ids, 2), matrix, None)

    turned = x.T.contiguous().T
    for make in (
        lambda at: grouped(x[at, :64], experts[at]),
        lambda at: grouped(x[at][:, ::2], experts[at]),
        lambda at: FIXED.norm(turned[at], how),
        lambda at: FIXED.sums(x[at].double()),
    ):
        whole = make(slice(None))
        for at in (slice(0, 1), slice(89, 90), slice(11, 60)):
            assert torch.equal(make(at), whole[at])


def test_splits_depend_on_the_weight_alone():
    assert ProductTiles.of(on_device(kinds(256)["Q4_0"]), "a GPU").splits == 1
    long = DeviceWeight(torch.zeros(64, 8192, dtype=torch.uint8), 8192, 8)
    assert ProductTiles.of(long, "a GPU").splits == 16
    many = DeviceWeight(torch.zeros(64000, 8192, dtype=torch.uint8), 8192, 8)
    assert ProductTiles.of(many, "a GPU").splits == 1


@pytest.mark.parametrize("kind", ["Q4_1", "int8"])
def test_few_rows_in_smaller_tiles(kind):
    """Rows have the same bits in tiles of 8 rows as in tiles of 16."""
    weight, x = on_device(kinds(512)[kind]), drawn(8, 512, dtype=torch.bfloat16)
    assert packed_linear.get_tile_rows(8) == 8 and packed_linear.get_tile_rows(9) == 16
    found = [
        PACKED.product(x[rows], Product((weight,), None), tile_rows)
        for rows, tile_rows in ((slice(8), 16), (slice(8), 8), (slice(2, 5), 8))
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0][2:5], found[2])


def test_splits_are_counted_for_some_rows_at_a_time(monkeypatch):
    """More rows than there are counts go in several launches, and every count ends at zero."""
    weight, x = on_device(kinds(512, 33)["Q4_1"]), drawn(40, 512)
    whole = multiplied(x, weight, tiles_of(16, 32, 4))
    assert torch.equal(multiplied(x, weight, tiles_of(16, 32, 4)), whole), "a count is left"
    monkeypatch.setattr(packed_linear, "MOST_ARRIVALS", 3)
    assert torch.equal(multiplied(x, weight, tiles_of(16, 32, 4)), whole)


@pytest.mark.parametrize("kind", kinds())
def test_weights_of_one_form_are_one_product(kind):
    packed = kinds()[kind]
    parts = [on_device(packed), on_device(packed.rows(slice(5, 38)))]
    assert parts[1].joins(parts[0])
    floats = torch.cat([part.floats(torch.float32) for part in parts])
    assert torch.equal(DeviceWeight.joined(parts).floats(torch.float32), floats)
    same = {"Q4_1", "int4"}
    for name, other in kinds().items():
        assert on_device(other).joins(parts[0]) == (name == kind or {name, kind} == same)


@pytest.mark.parametrize("rows", [17, 32, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_take_several_tiles(rows, dtype):
    """A row is bitwise the same as alone."""
    weight = on_device(kinds(512)["Q4_K"])
    x, product = drawn(rows, 512, dtype=DTYPES[dtype]), Product((weight,), None)
    assert packed_linear.gains(x, product) and packed_linear.get_tile_rows(rows) == 16
    found = TRITON.product(x, product)
    assert_product(found, x, weight.floats(x.dtype), dtype)
    assert torch.equal(found[-1:], TRITON.product(x[-1:], product))


@pytest.mark.parametrize("kind", uncarried())
def test_what_the_kernels_do_not_carry_is_multiplied_plainly(kind):
    weight = on_device(uncarried()[kind])
    x, product = drawn(3, 256), Product((weight,), None)
    assert not packed_linear.supports(x, product) or (
        weight.is_plain and not packed_linear.gains(x, product)
    )
    assert torch.equal(TRITON.product(x, product), PLAIN.product(x, product))
    carried = Product((on_device(kinds()["Q4_0"]),), None)
    assert packed_linear.supports(drawn(16, 256), carried)
    for rows in (0, 65):
        x = drawn(rows, 256)
        assert not packed_linear.supports(x, carried) or not packed_linear.gains(x, carried)
        assert torch.equal(TRITON.product(x, carried), PLAIN.product(x, carried))


def experts_of(rows, num_experts, seed=0):
    """Returns an expert for each row; some experts have no row, one has many."""
    ids = np.random.default_rng(seed).integers(0, num_experts, rows)
    ids[::3] = num_experts - 1
    return torch.from_numpy(ids).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "num_experts", "tile_rows"),
    [(1, 4, 16), (8, 3, 16), (70, 5, 16), (150, 2, 64), (9, 40, 64)],
)
def test_experts_with_plain_weights(rows, num_experts, tile_rows, dtype):
    matrix = on_device(PackedWeight.plain(drawn(num_experts, 70, 100).cpu().numpy()), DTYPES[dtype])
    x, experts, bias = (
        drawn(rows, 100, dtype=DTYPES[dtype]),
        experts_of(rows, num_experts),
        drawn(num_experts, 70, seed=3),
    )
    found = grouped_linear.grouped_product(
        x, ExpertRows.of(experts, num_experts, tile_rows), matrix, bias, device_name(DEVICE)
    )
    wanted = torch.einsum("ri,roi->ro", x.double(), matrix.codes[experts].double()) + bias[experts]
    assert (found.double() - wanted).abs().max() <= ROUNDING[dtype] * wanted.abs().max()


@pytest.mark.parametrize("kind", kinds(256, 20, (3,)))
def test_experts_with_packed_weights(kind):
    packed = kinds(256, 20, (3,))[kind]
    matrix, x, experts = on_device(packed), drawn(21, packed.shape[2]), experts_of(21, 3)
    assert grouped_linear.supports(x, matrix)
    found = TRITON.grouped(x, TRITON.rows_of_experts(experts, 3), matrix, None)
    wanted = np.einsum(
        "ri,roi->ro",
        x.cpu().numpy().astype(np.float64),
        packed.dequantize()[experts.cpu()].astype(np.float64),
    )
    np.testing.assert_allclose(found.cpu(), wanted, rtol=0, atol=2e-6 * abs(wanted).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_s_row_is_the_same_in_any_company(dtype):
    matrix = on_device(PackedWeight.plain(drawn(4, 33, 130).cpu().numpy()), DTYPES[dtype])
    x, experts = drawn(60, 130, dtype=DTYPES[dtype]), experts_of(60, 4)

    def product(rows):
        return grouped_linear.grouped_product(
            x[rows], ExpertRows.of(experts[rows], 4, 16), matrix, None, device_name(DEVICE)
        )

    whole = product(torch.arange(60))
    x[1::4] = torch.nan
    for rows in (torch.tensor([5]), torch.arange(0, 60, 2), torch.arange(59, -1, -1)):
        found, sane = product(rows), rows % 4 != 1
        assert torch.equal(found[sane], whole[rows][sane]) and found[~sane].isnan().all()


def test_the_tiles_of_experts():
    """Tiles have each row once, one expert a tile, in order; there are as many tiles as there can
    be, the last ones empty.
    """
    experts = torch.tensor([2, 0, 2, 2, 5, 2, 0])
    rows = ExpertRows.of(experts, 6, 2)
    assert rows.order.tolist() == [1, 6, 0, 2, 3, 5, 4]
    assert len(rows.tile_experts) == 6 and rows.tile_experts.tolist() == [0, 2, 2, 5, 6, 6]
    assert [
        rows.order[a:b].tolist()
        for a, b in zip(rows.tile_starts[:4], rows.tile_stops[:4], strict=True)
    ] == [
        [1, 6],
        [0, 2],
        [3, 5],
        [4],
    ]
    assert grouped_linear.get_tile_rows(64, 2) == 16 and grouped_linear.get_tile_rows(65, 2) == 64


def test_experts_that_the_kernel_does_not_carry_are_multiplied_plainly():
    matrix = on_device(PackedWeight.plain(drawn(3, 8, 16).cpu().numpy()))
    x, experts = drawn(12, 32)[:, ::2], experts_of(12, 3)
    assert not grouped_linear.supports(x, matrix) and not grouped_linear.supports(
        x.contiguous().bfloat16(), matrix
    )
    wanted = PLAIN.grouped(x, experts, matrix, None)
    assert torch.equal(TRITON.grouped(x, TRITON.rows_of_experts(experts, 3), matrix, None), wanted)
    assert TRITON.grouped(
        x[:0].contiguous(), TRITON.rows_of_experts(experts[:0], 3), matrix, None
    ).shape == (0, 8)
