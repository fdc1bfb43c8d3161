"""Common parts of state-space families: Mamba and Mamba-2 mixers and their cache groups.

A mixer stores its convolution's previous rows and its recurrent state. Source: Gu and Dao 2023
(Mamba), Dao and Gu 2024 (Mamba-2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.matrix_rows import Rows, linear_part
from octavo.program.build_mixers import selective_scan, short_conv
from octavo.program.builder import Builder
from octavo.program.ops import Activation
from octavo.program.program import CacheGroup, Value

MAX_TAPS = 64
"""Maximum kernel size of a convolution; published models use 4."""

CONV, STATE = "conv", "state"
"""Names of the cache groups of convolutions and recurrences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Sizes and options of both kinds of mixer."""

    inner: int
    """Inner size."""
    num_heads: int
    state_size: int
    taps: int
    activation: Activation
    bias: bool
    conv_bias: bool
    num_runs: int = 1
    """Groups of b and c, each shared by several heads."""

    @property
    def conv_width(self) -> int:
        """Columns of Mamba-2's convolution: x, b and c."""
        return self.inner + 2 * self.num_runs * self.state_size

    def groups(self, num_layers: int, conv_width: int) -> tuple[CacheGroup, CacheGroup]:
        columns = self.inner // self.num_heads
        return (
            CacheGroup(CONV, "conv", num_layers, 1, conv_width, 0, window=self.taps),
            CacheGroup(STATE, "state", num_layers, self.num_heads, columns, self.state_size),
        )


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Mamba's mixer; each column is a head: x, gate = in(rows); x = f(conv(x)); dt, b, c =
    x_proj(x); out(scan(x, dt_proj(dt), b, c) * f(gate)).
    """

    sizes: StateSpace
    rank: int
    """Low-rank size of dt."""
    module: str
    """Module name template of layer i: `backbone.layers.{}.mixer`."""
    index: Sequence[int]
    """Index of each layer within the cache groups."""
    norm_eps: float | None = None
    """Epsilon of the norms of dt, b and c (Jamba); None: no norms."""

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        sizes = self.sizes
        name = self.module.format(layer)
        at = self.index[layer]
        inner, state = sizes.inner, sizes.state_size
        rows, gate = (
            linear_part(
                b, x, f"{name}.in_proj", Rows(inner, 2 * inner, part * inner), bias=sizes.bias
            )
            for part in range(2)
        )
        (mixed,) = short_conv(
            b,
            rows,
            f"{name}.conv1d",
            CONV,
            at,
            bias=sizes.conv_bias,
            activation=sizes.activation,
        )
        dt, left, right = self._append_selection(b, mixed, name)
        dt = b.linear(dt, f"{name}.dt_proj", inner, bias=True)
        scanned = selective_scan(
            b, (mixed, dt, left, right), name, STATE, at, state_size=state, by_state=True
        )
        gated = b.act_mul(gate, scanned, "silu")
        return b.linear(gated, f"{name}.out_proj", x.width, bias=sizes.bias)

    def _append_selection(self, b: Builder, x: Value, name: str) -> tuple[Value, Value, Value]:
        """Appends dt, b and c from the convolved rows."""
        state, total = self.sizes.state_size, self.rank + 2 * self.sizes.state_size
        starts = (0, self.rank, self.rank + state)
        dt, left, right = (
            linear_part(b, x, f"{name}.x_proj", Rows(width, total, start))
            for width, start in zip((self.rank, state, state), starts, strict=True)
        )
        if self.norm_eps is None:
            return dt, left, right
        eps = self.norm_eps
        return (
            b.rms_norm(dt, f"{name}.dt_layernorm", eps),
            b.rms_norm(left, f"{name}.b_layernorm", eps),
            b.rms_norm(right, f"{name}.c_layernorm", eps),
        )


@dataclass(frozen=True, slots=True)
class MixerFactors:
    """Scaling factors of a Mamba-2 mixer's inputs and projections (Falcon-H1)."""

    rows: float = 1.0
    gate: float = 1.0
    convolved: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Factors on x, b and c before the convolution."""
    dt: float = 1.0


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Mamba-2's mixer: gate, xbc, dt = in(rows); x, b, c = f(conv(xbc)); out(norm(scan(x, dt, b, c)
    * silu(gate))).
    """

    sizes: StateSpace
    module: str
    """Module name template of layer i: `backbone.layers.{}.mixer`."""
    index: Sequence[int]
    """Index of each layer within the cache groups."""
    limits: tuple[float, float] = (0.0, float("inf"))
    """Bounds of the step size."""
    norm_eps: float | None = 1e-5
    """Epsilon of the norm after the scan; None: no norm."""
    norm_width: int = 0
    """Columns normalized together; 0: all."""
    norms_first: bool = False
    """Whether the norm precedes the gate."""
    factors: MixerFactors = MixerFactors()
    out_bias: bool | None = None
    """Whether the output projection has a bias; None: the same as the input projection."""

    def __call__(self, b: Builder, x: Value, layer: int) -> Value:
        sizes = self.sizes
        name = self.module.format(layer)
        at = self.index[layer]
        widths = (sizes.inner, sizes.conv_width, sizes.num_heads)
        starts = (0, sizes.inner, sizes.inner + sizes.conv_width)
        x = b.scale(x, self.factors.rows)
        gate, rows, dt = (
            linear_part(b, x, f"{name}.in_proj", Rows(width, sum(widths), start), bias=sizes.bias)
            for width, start in zip(widths, starts, strict=True)
        )
        run = sizes.num_runs * sizes.state_size
        mixed, left, right = short_conv(
            b,
            rows,
            f"{name}.conv1d",
            CONV,
            at,
            bias=sizes.conv_bias,
            activation=sizes.activation,
            widths=(sizes.inner, run, run),
            factors=self.factors.convolved,
        )
        gate, dt = b.scale(gate, self.factors.gate), b.scale(dt, self.factors.dt)
        scanned = selective_scan(
            b,
            (mixed, dt, left, right),
            name,
            STATE,
            at,
            state_size=sizes.state_size,
            dt_bias=True,
            limits=self.limits,
        )
        gated = self._append_gate(b, gate, scanned, f"{name}.norm")
        bias = sizes.bias if self.out_bias is None else self.out_bias
        return b.linear(gated, f"{name}.out_proj", x.width, bias=bias)

    def _append_gate(self, b: Builder, gate: Value, x: Value, name: str) -> Value:
        """Appends the gate and its norm."""

        def norm(rows: Value) -> Value:
            if self.norm_eps is None:
                return rows
            return b.rms_norm(
                rows, name, self.norm_eps, group_width=self.norm_width, each_group=True
            )

        if self.norms_first:
            return b.act_mul(gate, norm(x), "silu")
        return norm(b.act_mul(gate, x, "silu"))


def step_limits(config: HfConfig) -> tuple[float, float]:
    """Reads the bounds of the step size; unbounded if missing."""
    given = config.values.get("time_step_limit")
    if given is None:
        return 0.0, float("inf")
    numbers = [_number(entry) for entry in given] if isinstance(given, list | tuple) else []
    if len(numbers) != 2 or None in numbers:
        raise UnsupportedModel(
            f"config.json: time_step_limit is {given!r}, expected a list of a minimum and a maximum"
        )
    low, high = numbers
    assert low is not None and high is not None
    return low, high


def _number(entry: object) -> float | None:
    """Parses a JSON number; transformers 5 writes infinity as an object."""
    if isinstance(entry, dict):
        entry = entry.get("__float__")
    if isinstance(entry, str) and entry.lower() in ("infinity", "inf"):
        return float("inf")
    return float(entry) if isinstance(entry, int | float) else None
