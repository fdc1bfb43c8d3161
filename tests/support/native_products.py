"""Weights of every format, and an exact emulation of the documented arithmetic of native products.

Codes of 8 bits or fewer: each group of 32 inputs of a row is quantised to d = absmax / 127 and q =
round-half-even(x * (127 / absmax)) in fp32, and y = sum over groups of scale * d * sum(code q) +
min * d * sum(q). On the tile unit rows have two int8 terms: beside 4 bits d = absmax / 1016, and
with one scale an output the whole row is a group, with d = absmax / 16319. bf16 and e4m3: the row
is rounded to bf16. Codes of 4 bits that stand for floats: the row stays as it is. Native stays
within 2e-6 of the sum of the terms' magnitudes from that, and within what the rounding of the rows
implies from the reference.
"""

from dataclasses import replace

import ml_dtypes
import numpy as np

from octavo.quant.gguf import BLOCK_TYPES
from octavo.quant.online import pack_int4, pack_int8
from octavo.quant.packed import Levels, PackedWeight
from tests.quant.test_gguf import random_blocks
from tests.support.native_harness import (
    NUM_ROWS,
    ROWS,
    normal,
    rng,
)

GGUF = {kind.name: number for number, kind in BLOCK_TYPES.items() if kind.layout is not None}
"""Numbers of the types of GGUF that native packs from their blocks, by name; others it decodes."""
FLOATS = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
OTHERS = ("int8", "int4", "int8 groups", "uint8", "groups of 16", "pairs of 128")
FLOAT_CODES = {"nf4 of 64": 64, "nf4 of 32": 32, "e4m3 of 128": 128, "e4m3 rows": 0}
"""Inputs of a group by the name of a format whose codes stand for floats; 0: all."""
FORMATS = (*FLOATS, *GGUF, *OTHERS, *FLOAT_CODES)

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
    if kind in FLOAT_CODES:
        return _float_codes(kind, n, k, seed)
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


def _float_codes(kind, n, k, seed):
    group = FLOAT_CODES[kind] or k
    scales = Levels(normal(n, -(-k // group), seed=seed + 1))
    codes = rng(seed).integers(0, 256, (n, -(-k // 2) if "nf4" in kind else k), dtype=np.uint8)
    if "nf4" in kind:
        table = normal(16, seed=seed + 2)
        return PackedWeight((n, k), 4, "lookup", codes, group, scales, lookup=table)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    return PackedWeight(
        (n, k),
        8,
        "e4m3",
        codes.view(ml_dtypes.float8_e4m3fn),
        group,
        scales,
        activation="per_token",
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
    """Returns whether rows for codes with one scale per output have two int8 terms (decisions 0017
    and 0018).
    """
    return level == "amx"


def as_multiplied(weight, x, *, two_terms):
    """Returns the rows as the product reads them, `[T, K] fp64`, and the largest allowed difference
    from x.
    """
    if weight.code in ("bf16", "e4m3"):
        rounded = x.astype(ml_dtypes.bfloat16).astype(np.float64)
        return rounded, abs(x) * 2.0**-8
    if weight.is_float or weight.code == "lookup":
        return x.astype(np.float64), np.zeros(x.shape)
    if weight.activation == "per_token":
        group = x.shape[1]
        q, d = quantised(x, 16319, group) if two_terms else with_outliers(x)
    else:
        group = GROUP
        q, d = quantised(x, 127, group)
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
    if weight.scales is not None and weight.code in ("int", "uint"):
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
