"""Ops that mix a request's rows without attention: short convolutions and recurrences.

Shapes use the alphabet of `ops.py`, plus `P` columns of a head and `N` state values per column. The
state of earlier tokens is kept in a separate cache group.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.program.ops import Activation
from octavo.program.program import Op, Value, Weight


@dataclass(frozen=True, slots=True)
class ShortConv(Op):
    """Causal convolution over the rows of each request, per column: out[t] = f(sum over j of
    weight[:, 0, j] * row(index of t - n + 1 + j) + bias).

    n taps, oldest first. The current row is `x [T, W]`; earlier ones are read from a cache group of
    kind `conv`, filled by a preceding KvWrite; rows before the first are zero. `weight [W, 1, n]`,
    `bias [W]`; `outs` are consecutive columns of the result. Precision: at least fp32, added in
    this order, so results do not depend on how a request was chunked.
    """

    x: Value
    outs: tuple[Value, ...]
    weight: Weight
    bias: Weight | None
    group: str
    layer: int
    activation: Activation | None = None
    """Activation f; None: identity."""
    factors: tuple[float, ...] = ()
    """Multiplier of the weights of each output; empty: 1."""


@dataclass(frozen=True, slots=True)
class SelectiveScan(Op):
    """Recurrence of a selective state space, for each head h, its columns p and state numbers n:
    s[p, n] = exp(-d * exp(a_log[h, n])) * s[p, n] + d * x[h, p] * b[n]; out[h, p] = (sum over n of
    c[n] * s[p, n]) + skip[h] * x[h, p]; d = softplus(dt[h] + dt_bias[h]), kept within `low` and
    `high`. With `beta` (the gated delta rule), the update is not d * x but the difference between x
    and what the decayed state returns for b: s[p, n] += beta[h] * (x[h, p] - sum over m of b[m] *
    s[p, m]) * b[n]. Its step sizes d[h, n] may differ by state number; dt and dt_bias then have H *
    N columns.

    `x [T, H * P]`, `dt [T, H]`, `b` and `c [T, G * N]`, of which head h reads group h * G // H;
    `a_log [H, N]`, or `[H]` if it is the same for all n; `beta [T, H]`, `skip` and `dt_bias [H]`,
    with skip 0 if it is absent. The state `[H, P, N]` is stored in a group of kind `state` and is
    zero at a request's first token. Precision: at least fp32, token by token, so results do not
    depend on how a request was chunked. Mamba: Gu and Dao 2023 (P = 1); Mamba-2: Dao and Gu 2024;
    Gated DeltaNet: Yang et al. 2024; Kimi Delta Attention: Kimi Team 2025.
    """

    x: Value
    dt: Value
    b: Value
    c: Value
    out: Value
    a_log: Weight
    skip: Weight | None
    group: str
    layer: int
    state_size: int
    """N, the number of state values per column."""
    dt_bias: Weight | None = None
    low: float = 0.0
    high: float = float("inf")
    beta: Value | None = None

    @property
    def num_heads(self) -> int:
        return self.a_log.shape[0]

    @property
    def steps_by_state(self) -> bool:
        """Whether each state number has its own step size."""
        return self.dt.width != self.num_heads

    @property
    def num_runs(self) -> int:
        """Number of `b` and `c` groups, each shared by several heads."""
        return self.b.width // self.state_size
