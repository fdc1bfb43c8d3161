"""Products of the native backend at every level and weight format, against an exact emulation of
the documented arithmetic.

Codes of 8 bits or fewer: each group of 32 inputs of a row is quantised to d = absmax / 127 and q =
round-half-even(x * (127 / absmax)) in fp32, and y = sum over groups of scale * d * sum(code q) +
min * d * sum(q). On the tile unit rows have two int8 terms: beside 4 bits d = absmax / 1016, and
with one scale an output the whole row is a group, with d = absmax / 16319. bf16: the row is rounded
to bf16. Native stays within 2e-6 of the sum of the terms' magnitudes from that, and within what the
rounding of the rows implies from the reference.
"""

from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.program import ops
from octavo.program.program import Value, Weight
from octavo.quant.gguf import BLOCK_TYPES
from octavo.quant.online import pack_int4, pack_int8
from octavo.quant.packed import Levels, PackedWeight
from tests.quant.test_gguf import random_blocks
from tests.support.native_harness import (
    NUM_ROWS,
    ROWS,
    Case,
    check_rows,
    levels,
    normal,
    plain,
    rng,
)

GGUF = {kind.name: number for number, kind in BLOCK_TYPES.items() if kind.dtype is None}
FLOATS = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
OTHERS = ("int8", "int4", "int8 groups", "uint8", "groups of 16", "pairs of 128")
FORMATS = (*FLOATS, *GGUF, *OTHERS)

GROUP = 32
TOLERANCE = 2e-6


def weight_of(kind, n, k, seed=0):
    """Returns a random weight `[n, k]` of a format; GGUF's are random bytes, so that every code and
    scale occurs.
    """
    if kind in FLOATS:
        return PackedWeight.plain(normal(n, k, seed=seed).astype(FLOATS[kind]))
    if kind in GGUF:
        return BLOCK_TYPES[GGUF[kind]].tensor(random_blocks(GGUF[kind], (n, k), seed), (n, k))
    if kind in ("int8", "int4"):
        return (pack_int8 if kind == "int8" else pack_int4)(normal(n, k, seed=seed))
    group = {"uint8": 32, "int8 groups": 32, "groups of 16": 16, "pairs of 128": 128}[kind]
    scales = Levels(normal(n, -(-k // group), seed=seed + 1))
    if kind == "pairs of 128":
        codes = rng(seed).integers(0, 256, (n, k // 2), dtype=np.uint8)
        return PackedWeight(
            (n, k), 4, "uint", codes, group, scales, zero_point=8, activation="per_group"
        )
    if kind == "uint8":
        mins = Levels(normal(n, -(-k // group), seed=seed + 2))
        codes = rng(seed).integers(0, 256, (n, k), dtype=np.uint8)
        return PackedWeight((n, k), 8, "uint", codes, group, scales, mins, activation="per_group")
    return PackedWeight(
        (n, k),
        8,
        "int",
        rng(seed).integers(-128, 128, (n, k), dtype=np.int8),
        group,
        scales,
        activation="per_group",
    )


def quantised(x, largest_code, group):
    """`q [T, groups, group]` and `d [T, groups]` of rows `x [T, K]`, in fp32 as the kernels do."""
    groups = (
        np.pad(x, ((0, 0), (0, -x.shape[1] % group))).reshape(len(x), -1, group).astype(np.float32)
    )
    largest = abs(groups).max(axis=-1)
    inverse = np.divide(
        np.float32(largest_code), largest, out=np.zeros_like(largest), where=largest > 0
    )
    return np.rint(groups * inverse[..., None]).astype(np.float64), (
        largest / np.float32(largest_code)
    ).astype(np.float64)


def with_outliers(x):
    """`q [T, 1, K]` and `d [T, 1]` of rows whose largest numbers have a second int8 term (decision
    0018), in fp32 and in the kernels' order.
    """
    magnitudes = np.pad(abs(x), ((0, 0), (0, -x.shape[1] % 16))).astype(np.float32)
    lanes = magnitudes.reshape(len(x), -1, 16)
    sums = np.add.accumulate(lanes, axis=1, dtype=np.float32)[:, -1]
    for width in (8, 4, 2, 1):
        sums = sums[:, :width] + sums[:, width : 2 * width]
    largest, f32 = magnitudes.max(axis=1), np.float32
    d = np.minimum(
        largest / f32(127),
        np.maximum(f32(6) / f32(127) * sums[:, 0] / f32(x.shape[1]), largest / f32(127 * 256)),
    )
    inverse = np.divide(f32(1), d, out=np.zeros_like(d), where=d > 0)
    return (
        np.rint(x.astype(np.float32) * inverse[:, None]).astype(np.float64)[:, None],
        d.astype(np.float64)[:, None],
    )


def two_terms(level):
    """Returns whether rows beside 4-bit codes, and beside codes with one scale an output, have two
    int8 terms (decisions 0017 and 0018).
    """
    return level == "amx"


def as_multiplied(weight, x, *, two_terms):
    """Returns the rows as the product reads them, `[T, K] fp64`, and the largest allowed difference
    from x.
    """
    if weight.code == "bf16":
        rounded = x.astype(ml_dtypes.bfloat16).astype(np.float64)
        return rounded, abs(x) * 2.0**-8
    if weight.is_float:
        return x.astype(np.float64), np.zeros(x.shape)
    if weight.activation == "per_token":
        group = x.shape[1]
        q, d = quantised(x, 16319, group) if two_terms else with_outliers(x)
    else:
        group = GROUP
        q, d = quantised(x, 1016 if weight.bits == 4 and two_terms else 127, group)
    seen = (q * d[..., None]).reshape(len(x), -1)[:, : x.shape[1]]
    return seen, np.repeat(d, group, axis=1)[:, : x.shape[1]] * 0.5001


def product(weight, x, *, two_terms):
    """(y, sum of the terms' magnitudes, how far y may lie from the unrounded product): `[T, N]`
    each.
    """
    weight = weight.packed()
    seen, error = as_multiplied(weight, x, two_terms=two_terms)
    values = weight.dequantize().astype(np.float64)
    terms = abs(seen) @ abs(values).T
    if weight.scales is not None:
        codes = abs(weight.unpacked_codes().astype(np.float64) - weight.zero_point)
        spread = [
            np.repeat(abs(level.expand()), weight.group, axis=-1)[:, : x.shape[1]]
            for level in (weight.scales, weight.mins)
            if level
        ]
        terms = abs(seen) @ (codes * spread[0] + (spread[1] if len(spread) > 1 else 0)).T
    return seen @ values.T, terms, error @ abs(values).T


def check_product(case, level, wanted, terms, drift=0.0):
    """`wanted` is what the kernels should make; the reference is at most `drift` away from it."""
    runnable = case.native(level)
    whole = case.run(runnable, NUM_ROWS, pad=3)
    assert (abs(whole - wanted) <= TOLERANCE * terms + 1e-30).all(), (
        abs(whole - wanted) / (terms + 1e-30)
    ).max()
    assert (abs(whole - case.expected) <= drift + 2 * TOLERANCE * terms + 1e-30).all()
    for rows in ROWS:
        np.testing.assert_array_equal(
            case.run(runnable, rows, pad=rows % 3), whole[:rows], err_msg=f"{rows} rows"
        )


def rows_of(k, seed=3):
    """Rows of many sizes; one of zeros, one that has a group of zeros, and two with outliers."""
    x = normal(NUM_ROWS, k, seed=seed) * np.exp(rng(seed).normal(size=(NUM_ROWS, 1))).astype(
        np.float32
    )
    x[4] = 0
    x[6, :GROUP] = 0
    x[7, ::5] *= 60  # more numbers beyond the others than one int8 term holds
    x[8, k // 2] *= 1e4
    return x


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
    return [(1, 1), (7, 37), (50, 100), (33, 576)]


GRID = [(kind, *shape) for kind in FORMATS for shape in shapes(kind)]


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


# -- what stands around a product ------------------------------------------------------------------

AROUND = ("fp32", "bf16", "Q4_1", "int8", "Q6_K")


def sigmoid(x):
    return (1 + np.tanh(x / 2)) / 2


def activated(kind, x):
    return {
        "silu": lambda: x * sigmoid(x),
        "gelu_tanh": lambda: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "relu2": lambda: np.maximum(x, 0) ** 2,
    }[kind]()


@cache
def epilogue(kind, activation, *, with_residual, two_terms):
    n, k = 37, 256
    x, residual, weight = rows_of(k), normal(NUM_ROWS, n, seed=8), weight_of(kind, n, k)
    if kind in GGUF:
        weight = tamed(weight)
    bias = normal(n, seed=9)

    def make(v):
        return [
            ops.Linear(
                v["x"],
                (Value("y", "tokens", n),),
                (Weight("w", (n, k)),),
                (Weight("b", (n,)),),
                activation,
                v["r"] if with_residual else None,
            )
        ]

    y, terms, drift = product(weight, x, two_terms=two_terms)
    y = y + bias
    if activation:
        y, terms, drift = (
            activated(activation, y),
            (terms + 1) * (2 + 2 * abs(y)),
            drift * (2 + 2 * abs(y) + drift),
        )
    case = Case({"x": x, "r": residual}, make, {"w": weight, **plain({"b": bias})})
    return case, y + residual if with_residual else y, terms + abs(residual) + 2, drift


def tamed(weight):
    """Random scales range over all of fp16's exponents; these are about one, so that biases and
    activations matter.
    """
    weight = weight.packed()
    scales, mins = (
        normal(*weight.scales.values.shape, seed=5, scale=0.02),
        normal(*weight.scales.values.shape, seed=6, scale=0.1),
    )
    return replace(weight, scales=Levels(scales), mins=Levels(mins) if weight.mins else None)


@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.parametrize("activation", [None, "silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("with_residual", [False, True])
def test_bias_activation_residual(level, kind, activation, with_residual):
    case, *rest = epilogue(
        kind, activation, with_residual=with_residual, two_terms=two_terms(level)
    )
    check_product(case, level, *rest)


@cache
def gated(kinds, activation, clamp, alpha, up_offset, *, bias, two_terms):
    """`kinds`: of the gate and of its up projection. Where they read their rows otherwise than each
    other, 4-bit codes lie in bytes.
    """
    n, k = 37, 256
    x, weights = (
        rows_of(k),
        [weight_of(kind, n, k, seed=seed) for kind, seed in zip(kinds, (0, 20), strict=True)],
    )
    gate, up = (
        tamed(weight) if kind in GGUF else weight
        for kind, weight in zip(kinds, weights, strict=True)
    )
    two_terms = two_terms and (gate.bits == 4) == (up.bits == 4)
    biases = plain({"gb": normal(n, seed=9), "ub": normal(n, seed=10)})

    def make(v):
        how = ops.Gate(activation, clamp, alpha, up_offset)
        pair = (Weight("g", (n, k)), Weight("u", (n, k)))
        return [
            ops.Linear(
                v["x"],
                (Value("y", "tokens", n),),
                pair,
                (Weight("gb", (n,)), Weight("ub", (n,))) if bias else (),
                gate=how,
            )
        ]

    (g, g_terms, g_drift), (u, u_terms, u_drift) = (
        product(weight, x, two_terms=two_terms) for weight in (gate, up)
    )
    if bias:
        g, u = g + biases["gb"].codes, u + biases["ub"].codes
    clamped = (np.minimum(g, clamp), np.clip(u, -clamp, clamp)) if clamp else (g, u)
    opened = (
        clamped[0] * sigmoid(alpha * clamped[0])
        if activation == "silu"
        else activated(activation, clamped[0])
    )
    y = opened * (clamped[1] + up_offset)
    # |f(g)| <= |g| and |f'| <= 1.2 for both activations: errors of either side, times the other
    terms = (g_terms + 1) * (abs(u) + 2) * 1.2 + (u_terms + 1) * (abs(g) + 1)
    drift = g_drift * (abs(u) + abs(up_offset)) * 1.2 + u_drift * abs(g) + 1.2 * g_drift * u_drift
    return Case({"x": x}, make, {"g": gate, "u": up, **biases}), y, terms, drift


@pytest.mark.parametrize("kind", AROUND)
@pytest.mark.parametrize(
    ("activation", "clamp", "alpha", "up_offset", "bias"),
    [
        ("silu", None, 1.0, 0.0, False),
        ("gelu_tanh", None, 1.0, 0.0, True),
        ("silu", 1.5, 1.702, 1.0, True),
    ],
    ids=["silu", "gelu_tanh", "as gpt_oss"],
)
def test_gate(level, kind, activation, clamp, alpha, up_offset, bias):
    case, *rest = gated(
        (kind, kind), activation, clamp, alpha, up_offset, bias=bias, two_terms=two_terms(level)
    )
    check_product(case, level, *rest)


@pytest.mark.parametrize(
    "kinds",
    [
        ("Q4_0", "Q4_1"),
        ("Q4_1", "int4"),
        ("Q8_0", "Q6_K"),
        ("Q4_K", "Q6_K"),
        ("Q6_K", "Q4_0"),
        ("fp32", "fp16"),
        ("fp16", "fp32"),
    ],
    ids="+".join,
)
def test_gate_and_up_in_two_formats(level, kinds):
    """A gate and its up projection may have two formats, as in files whose layers differ in
    quality.
    """
    case, *rest = gated(kinds, "silu", None, 1.0, 0.0, bias=False, two_terms=two_terms(level))
    check_product(case, level, *rest)


@cache
def normed(kind, centered, *, two_terms):
    """Returns a product that applies a norm; it may round otherwise than NumPy's, so that quantised
    rows may differ by one code.
    """
    n, k = 20, 160
    x, weight, scale, shift = (
        rows_of(k) + 1,
        weight_of(kind, n, k),
        normal(k, seed=11),
        normal(k, seed=12),
    )
    norm = ops.PreNorm(
        Weight("s", (k,)),
        1e-5,
        Weight("c", (k,)) if centered else None,
        0.0 if centered else 1.0,
        centered,
    )
    wide = x.astype(np.float64)
    wide = wide - wide.mean(axis=1, keepdims=True) if centered else wide
    rows = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * (
        scale + (0 if centered else 1)
    ) + (shift if centered else 0)
    y, terms, drift = product(weight, rows.astype(np.float32), two_terms=two_terms)

    def make(v):
        return [ops.Linear(v["x"], (Value("y", "tokens", n),), (Weight("w", (n, k)),), norm=norm)]

    case = Case({"x": x}, make, {"w": weight, **plain({"s": scale, "c": shift})})
    slack = 0 if weight.code == "fp32" else drift / TOLERANCE / 8
    return case, y, terms * 3 + slack, drift


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("centered", [False, True])
def test_norm_before(level, kind, centered):
    case, *rest = normed(kind, centered, two_terms=two_terms(level))
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
    [("fp32",) * 3, ("Q4_K", "Q4_K", "Q6_K"), ("int8", "bf16", "int8"), ("fp32", "fp16", "Q5_1")],
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
