"""Products of the native backend at every level and weight format, plain and merged, against an
exact emulation of the documented arithmetic (`tests/support/native_products.py`).
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from octavo.program import ops
from octavo.program.program import Value, Weight
from octavo.quant.gguf import BLOCK_TYPES
from octavo.quant.packed import Levels, PackedWeight
from tests.support.native_harness import (
    NUM_ROWS,
    Case,
    check_rows,
    levels,
    normal,
    plain,
    rng,
)
from tests.support.native_products import (
    FLOAT_CODES,
    FLOATS,
    FORMATS,
    GGUF,
    check_product,
    product,
    rows_of,
    tamed,
    two_terms,
    weight_of,
)

# -- every format ----------------------------------------------------------------------------------


@cache
def plain_product(kind, n, k, *, two_terms=False):
    x, weight = rows_of(k), weight_of(kind, n, k)
    case = Case(
        {"x": x},
        lambda v: [ops.Linear(v["x"], (Value("y", "tokens", n),), (Weight("w", (n, k)),))],
        {"w": weight},
    )
    return case, *product(weight, x, two_terms=two_terms)


def shapes(kind):
    """`(n, k)`: outputs that fill no tile, inputs that fill no group where the format allows it."""
    if kind in GGUF and BLOCK_TYPES[GGUF[kind]].block_size == 256:
        return [(5, 256), (50, 768)]
    if kind == "pairs of 128":
        return [(5, 128), (50, 640)]
    if kind in GGUF or kind == "int4":
        return [(16, 32), (5, 96), (50, 160), (33, 576)]
    if kind == "groups of 16":
        return [(5, 48), (50, 160)]
    if kind in FLOAT_CODES:
        return [(1, 2), (5, 96), (50, 100), (33, 576)]
    return [(1, 1), (7, 37), (50, 100), (33, 576)]


GRID = [(kind, *shape) for kind in FORMATS for shape in shapes(kind)]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(("kind", "n", "k"), GRID, ids=str)
def test_product(level, kind, n, k):
    case, *rest = plain_product(kind, n, k, two_terms=two_terms(level))
    check_product(case, level, *rest)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(17, 1536), (200, 768), (1024, 2048)])
def test_large_products(level, kind, n, k):
    if kind == "pairs of 128":
        n += 3
    case, *rest = plain_product(kind, n, k, two_terms=two_terms(level))
    check_product(case, level, *rest)


# -- merged ----------------------------------------------------------------------------------------


@cache
def merged(kinds, out, *, two_terms, one_out=False, with_residual=False):
    """Weights of 5, 20 and 33 rows side by side; outs that match them, or cut elsewhere, or one."""
    heights, k = (5, 20, 33), 256
    x, residual = rows_of(k), normal(NUM_ROWS, 58, seed=8)
    weights = {
        f"w{i}": weight_of(kind, n, k, seed=i)
        for i, (kind, n) in enumerate(zip(kinds, heights, strict=True))
    }
    weights = {
        name: tamed(weight) if not weight.is_float else weight for name, weight in weights.items()
    }
    cuts = (58,) if one_out else (12, 46) if out >= 3 else heights
    outs = tuple(Value(f"y{i}", "tokens", width) for i, width in enumerate(cuts))

    def make(v):
        named = tuple(Weight(f"w{i}", (n, k)) for i, n in enumerate(heights))
        biases = (None, Weight("b", (20,)), None)
        return [ops.Linear(v["x"], outs, named, biases, residual=v["r"] if with_residual else None)]

    bias = normal(20, seed=9)
    parts = [product(weight, x, two_terms=two_terms) for weight in weights.values()]
    y, terms, drift = (np.concatenate([part[i] for part in parts], axis=1) for i in range(3))
    y[:, 5:25] += bias
    y += residual if with_residual else 0
    index = out % 3
    columns = slice(sum(cuts[:index]), sum(cuts[: index + 1]))
    case = Case({"x": x, "r": residual}, make, {**weights, **plain({"b": bias})}, out=index)
    return case, y[:, columns], terms[:, columns] + 5, drift[:, columns]


@pytest.mark.parametrize(
    "kinds",
    [
        ("fp32",) * 3,
        ("Q4_K", "Q4_K", "Q6_K"),
        ("int8", "bf16", "int8"),
        ("fp32", "fp16", "Q5_1"),
        ("e4m3 rows", "bf16", "nf4 of 64"),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("out", range(5))
def test_merged(level, kinds, out):
    """Also of formats whose rows are read in different types. Outs 0 to 2 match the weights; 3 and
    4 are two cut across them.
    """
    case, *rest = merged(kinds, out, two_terms=two_terms(level))
    check_product(case, level, *rest)


@pytest.mark.parametrize("kinds", [("fp32",) * 3, ("int8", "bf16", "int8")], ids="+".join)
def test_merged_into_one_with_a_residual(level, kinds):
    case, *rest = merged(kinds, 0, two_terms=two_terms(level), one_out=True, with_residual=True)
    check_product(case, level, *rest)


# -- exact sums ------------------------------------------------------------------------------------


def extreme_weight(bits, signed, fill, n, k):
    """Returns a weight whose codes are all lowest, all highest, or either at random; scales are
    powers of two, so that fp32 arithmetic is exact.
    """
    top = 255 if bits == 8 else 31 if bits == 5 else 15
    codes = {
        "lowest": np.zeros((n, k)),
        "highest": np.full((n, k), top),
        "mixed": rng(1).choice([0, top], (n, k)),
    }[fill].astype(np.uint8)
    zero_point = 8 if bits == 4 else 0
    scales = Levels((2.0 ** rng(2).integers(-2, 3, (n, k // 32))).astype(np.float16))
    if bits == 4:
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        return PackedWeight(
            (n, k), 4, "uint", packed, 32, scales, zero_point=zero_point, activation="per_group"
        )
    if signed:
        codes = (codes.astype(np.int16) - (top + 1) // 2).astype(np.int8)
    return PackedWeight(
        (n, k), bits, "int" if signed else "uint", codes, 32, scales, activation="per_group"
    )


@cache
def extreme(bits, signed, fill):
    """Rows of +-127 * 2^e: their scale is 2^e and their codes +-127, all of one sign or mixed."""
    n, k = 20, 96
    signs = np.where(rng(4).integers(0, 2, (NUM_ROWS, k)), 1, -1)
    signs[:3], signs[3:6] = 1, -1
    x = (signs * 127 * 2.0 ** rng(5).integers(-1, 2, (NUM_ROWS, 1))).astype(np.float32)
    weight = extreme_weight(bits, signed, fill, n, k)
    case = Case(
        {"x": x},
        lambda v: [ops.Linear(v["x"], (Value("y", "tokens", n),), (Weight("w", (n, k)),))],
        {"w": weight},
        rtol=0,
        atol=0,
    )
    exact = x.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    assert (exact == exact.astype(np.float32)).all()
    return case


@pytest.mark.parametrize("fill", ["lowest", "highest", "mixed"])
@pytest.mark.parametrize(("bits", "signed"), [(4, False), (5, True), (8, True), (8, False)])
def test_integer_sums_are_exact(level, bits, signed, fill):
    """Bitwise equal to the exact product at each level, so no dot product saturates and all levels
    make the same int32.
    """
    check_rows(extreme(bits, signed, fill), level)


@cache
def tiny_numbers():
    x = normal(NUM_ROWS, 64) * np.float32(1e-38)
    x[1::2] = np.float32(1e-45)
    return Case(
        {"x": x},
        lambda v: [ops.Linear(v["x"], (Value("y", "tokens", 9),), (Weight("w", (9, 64)),))],
        {"w": weight_of("int8", 9, 64)},
    )


def test_rows_near_zero(level):
    """Where 127 / absmax is not finite."""
    case = tiny_numbers()
    np.testing.assert_allclose(case.run(case.native(level), NUM_ROWS), 0, atol=1e-30)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4", "groups of 16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows_in_its_row_alone(level, kind, bad):
    x = rows_of(96)
    x[7, 50] = bad
    clean = plain_product(kind, 5, 96)[0]
    case = Case({"x": x}, clean.make, clean.weights)
    found, wanted = case.run(case.native(level), NUM_ROWS), clean.run(clean.native(level), NUM_ROWS)
    assert not np.isfinite(found[7]).any()
    np.testing.assert_array_equal(np.delete(found, 7, 0), np.delete(wanted, 7, 0))


def test_others_may_use_the_tile_unit_between_steps(level):
    """The tile unit is configured again where PyTorch's bf16 products have changed its
    configuration.
    """
    torch.set_num_threads(1)
    case = plain_product("bf16", 50, 100)[0]
    runnable = case.native(level)
    wanted = case.run(runnable, 16)
    for rows in (16, 100):
        torch.ones(rows, 512, dtype=torch.bfloat16) @ torch.ones(512, 512, dtype=torch.bfloat16)
        np.testing.assert_array_equal(case.run(runnable, 16), wanted)


# -- embeddings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_embedding_is_dequantize(level, kind):
    """Bitwise, from every format."""
    width = 256 if kind in GGUF or kind == "pairs of 128" else 64 if kind == "int4" else 100
    weight = weight_of(kind, 40, width)
    case = Case(
        {"x": normal(NUM_ROWS, 1)},
        lambda v: [
            ops.Embedding(Value("y", "tokens", width), Weight("e", (40, width)), by_position=True)
        ],
        {"e": weight},
        positions=(np.arange(NUM_ROWS, dtype=np.int32) * 7) % 40,
    )
    found = case.run(case.native(level), NUM_ROWS)
    np.testing.assert_array_equal(found, weight.dequantize()[case.positions])


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_every_half_is_read_right(level, kind):
    """All 65,536 bit patterns, subnormals, infinities and NaN among them."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(FLOATS[kind]).reshape(256, 256)
    case = Case(
        {"x": normal(256, 1)},
        lambda v: [
            ops.Embedding(Value("y", "tokens", 256), Weight("e", (256, 256)), by_position=True)
        ],
        {"e": PackedWeight.plain(halves)},
        positions=np.arange(256, dtype=np.int32),
    )
    np.testing.assert_array_equal(case.run(case.native(level), 256), halves.astype(np.float32))


def test_there_is_a_portable_level():
    assert levels()[0] == "portable"


def test_refuses_mins_beside_a_zero_point():
    weight = replace(weight_of("Q4_1", 16, 64).packed(), zero_point=8)
    case = Case(
        {"x": rows_of(64)},
        lambda v: [ops.Linear(v["x"], (Value("y", "tokens", 16),), (Weight("w", (16, 64)),))],
        {"w": weight},
    )
    with pytest.raises(ValueError, match="have mins or a zero point, got both"):
        case.native("portable")
