"""Ops that few model families use. Shapes use the alphabet of `ops.py`."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.program.ops import PreNorm
from octavo.program.program import Op, Value, Weight


@dataclass(frozen=True, slots=True)
class MatchMagnitude(Op):
    """Rescales x to the magnitude of another row: out = x * sqrt(mean(like^2) / max(mean(x^2),
    least)) (Gemma 3n).

    `x [T, W]`, `like [T, W]`.
    """

    x: Value
    like: Value
    out: Value
    least: float


@dataclass(frozen=True, slots=True)
class KeepLargest(Op):
    """Sparsifies a row by its own statistics: out = max(x - mean - deviations * std, 0), with the
    biased deviation.

    For normally distributed values this keeps a fixed fraction of them (Gemma 3n).
    """

    x: Value
    out: Value
    deviations: float


@dataclass(frozen=True, slots=True)
class Xielu(Op):
    """Activation with trained parameters (Apertus): out = positive * x^2 + beta * x if x > 0, else
    negative * (exp(min(x, eps)) - 1 - x) + beta * x, with positive = softplus(alpha_p) and negative
    = beta + softplus(alpha_n). Huang and Schlag 2024.

    `x [T, W]`; the weights are `[1]`.
    """

    x: Value
    out: Value
    alpha_p: Weight
    alpha_n: Weight
    beta: Weight
    eps: Weight


@dataclass(frozen=True, slots=True)
class Mix(Op):
    """Per-row weighted sums: outs[i] = bases[i] + sum over k of (coefs[:, i * K + k] + offset) *
    xs[k].

    There are K `xs`, all `[T, W]`; `coefs [T, I * K]`. AltUp (Baykal et al. 2023), and
    interpolated position embeddings.
    """

    xs: tuple[Value, ...]
    bases: tuple[Value, ...]
    coefs: Value
    outs: tuple[Value, ...]
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """Concatenates columns: out = [xs[0], xs[1], ...], `xs[i] [T, W_i]`."""

    xs: tuple[Value, ...]
    out: Value


@dataclass(frozen=True, slots=True)
class SelectColumns(Op):
    """Selects columns: out = x[:, start : start + W]."""

    x: Value
    out: Value
    start: int


@dataclass(frozen=True, slots=True)
class PositionScores(Op):
    """Product of each head with a projected relative position table: out[t, h, r] = x[t, h] . (W[h]
    norm(table[r]) + b[h]).

    `x [T, H * D]`, `table [R, W]`, `weight [H * D, W]`, `bias [H * D]`, `out [T, H * R]`. He et al.
    2021, section 3.1.
    """

    x: Value
    out: Value
    table: Weight
    weight: Weight
    bias: Weight
    num_heads: int
    norm: PreNorm | None = None
    """Layer norm of the table's rows; None: no norm."""
