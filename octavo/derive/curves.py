"""Identifies functions of one number by their values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from octavo.program.ops import Activation

TOLERANCE = 1e-9
"""Largest difference of two equal functions, relative to their values, in float64."""

FUNCTIONS: dict[Activation, Callable[[Any], Any]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
"""The activations of Programs, in PyTorch."""


@dataclass(frozen=True)
class Curve:
    """What a function of one number is: one of these is set."""

    activation: Activation | None = None
    factor: float | None = None
    """f(x) = factor * x"""
    cap: float | None = None
    """f(x) = cap * tanh(x / cap)"""
    limit: float | None = None
    """f(x) = min(max(x, -limit), limit)"""

    def __call__(self, x: Any) -> Any:
        if self.activation is not None:
            return FUNCTIONS[self.activation](x)
        if self.factor is not None:
            return x * self.factor
        if self.cap is not None:
            return torch.tanh(x / self.cap) * self.cap
        assert self.limit is not None
        return x.clamp(-self.limit, self.limit)


def grid() -> torch.Tensor:
    """Returns arguments of both signs from 1e-6 to 1e6, and many around zero."""
    sizes = torch.logspace(-6, 6, 241, dtype=torch.float64)
    return torch.cat((-sizes.flip(0), torch.linspace(-9, 9, 361, dtype=torch.float64), sizes))


def are_equal(a: Any, b: Any) -> bool:
    """Whether two arrays are the same but for rounding in float64."""
    if not (a.is_floating_point() and b.is_floating_point()):
        return torch.equal(a, b)
    if a.shape != b.shape or not bool(torch.isfinite(a).all() & torch.isfinite(b).all()):
        return False
    return bool(((a - b).abs() <= TOLERANCE * (1e-3 + torch.maximum(a.abs(), b.abs()))).all())


def identify_curve(function: Callable[[Any], Any]) -> Curve | None:
    """Returns what the function is; None if it is nothing that Programs have."""
    x = grid()
    y = function(x)
    large = float(y[-1])
    one = float(function(torch.ones(1, dtype=torch.float64)))
    curves = [Curve(activation=name) for name in FUNCTIONS]
    if math.isfinite(one) and one:
        curves.append(Curve(factor=one))
    if math.isfinite(large) and large > 0:
        curves += [Curve(cap=large), Curve(limit=large)]
    return next((curve for curve in curves if are_equal(y, curve(x))), None)
