"""Native products with what is fused around them, at every level: bias, activation, residual, gate,
and the norm before it, against an exact emulation (`tests/support/native_products.py`).
"""

from functools import cache

import numpy as np
import pytest

from octavo.program import ops
from octavo.program.program import Value, Weight
from tests.support.native_harness import (
    NUM_ROWS,
    Case,
    normal,
    plain,
)
from tests.support.native_products import (
    GGUF,
    TOLERANCE,
    check_product,
    product,
    rows_of,
    tamed,
    two_terms,
    weight_of,
)

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


@pytest.mark.sampled(one_in=2)
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
    """`kinds`: formats of the gate and its up projection."""
    n, k = 37, 256
    x, weights = (
        rows_of(k),
        [weight_of(kind, n, k, seed=seed) for kind, seed in zip(kinds, (0, 20), strict=True)],
    )
    gate, up = (
        tamed(weight) if kind in GGUF else weight
        for kind, weight in zip(kinds, weights, strict=True)
    )
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
