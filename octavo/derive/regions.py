"""Identifies what a region of the graph computes, by probing it with numbers.

Each `find_` function takes a region as a function of its inputs and parameters and returns what the
region is, or None. Everything runs in float64, so that two formulas that differ are told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from octavo.derive.curves import Curve, are_equal, identify_curve

Tensors = Mapping[str, Any]
Region = Callable[[Any, Tensors], Any]
"""A region's output for its input and parameters."""


@dataclass(frozen=True)
class NormRegion:
    """An RMS norm, or a layer norm if `centered`, over the last axis."""

    eps: float
    centered: bool
    weight: str | None
    offset: float
    """What is added to the weight; the weight itself if there is no parameter."""
    bias: str | None


@dataclass(frozen=True)
class Rotation:
    """A rotary position embedding of the last axis."""

    start: int
    width: int
    style: Literal["half", "interleaved"]
    inv_freq: tuple[float, ...]
    mscale: float


def draw(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def with_other_row(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns x with other values in the first row of an axis."""
    changed = x.clone()
    changed.select(axis, 0).add_(1.0)
    return changed


def draw_parameters(shapes: Mapping[str, tuple[int, ...]], seed: int = 1) -> dict[str, Any]:
    return {
        name: draw(shape, seed + index) + 0.5 for index, (name, shape) in enumerate(shapes.items())
    }


def find_curve(region: Region, shape: tuple[int, ...]) -> Curve | None:
    """Identifies a function of each element."""
    size = torch.Size(shape).numel()

    def function(x: torch.Tensor) -> torch.Tensor:
        count = -(-len(x) // size)
        padded = torch.cat((x, x[:1].expand(count * size - len(x))))
        parts = [region(part.reshape(shape), {}) for part in padded.split(size)]
        if any(part.shape != shape for part in parts):
            return torch.full_like(x, torch.nan)
        return torch.cat([part.reshape(-1) for part in parts])[: len(x)]

    curve = identify_curve(function)
    x = draw(shape, 3) * 4
    return curve if curve is not None and are_equal(region(x, {}), curve(x)) else None


def find_gate(
    region: Callable[[Any, Any], Any], shape: tuple[int, ...], other: tuple[int, ...]
) -> tuple[Curve | None, bool] | None:
    """Identifies f(a) * b, with b of the same shape or one column; f is None if it is a itself.

    The bool tells whether b is the function's argument instead.
    """
    if len(shape) != len(other) or any(n not in (1, m) for m, n in zip(shape, other, strict=True)):
        return None
    a, b = draw(shape, 4), draw(other, 5)
    result = region(a, b)
    if result.shape not in (a.shape, b.shape):
        return None
    if are_equal(result, a * b):
        return None, False
    if a.shape != b.shape:
        return None
    for swapped in (False, True):

        def function(x: torch.Tensor, swapped: bool = swapped) -> torch.Tensor:
            size = a.numel()
            count = -(-len(x) // size)
            padded = torch.cat((x, x[:1].expand(count * size - len(x))))
            parts = []
            for part in padded.split(size):
                arguments = [part.reshape(shape), torch.ones(shape, dtype=torch.float64)]
                parts.append(region(*(arguments[::-1] if swapped else arguments)).reshape(-1))
            return torch.cat(parts)[: len(x)]

        curve = identify_curve(function)
        if curve is not None:
            x, y = (b, a) if swapped else (a, b)
            if are_equal(result, curve(x * 1.0) * y):
                return curve, swapped
    return None


def find_norm(
    region: Region,
    shape: tuple[int, ...],
    shapes: Mapping[str, tuple[int, ...]],
    literals: Sequence[float],
) -> NormRegion | None:
    """Identifies a norm over the last axis; `literals` are the numbers among which eps is."""
    if len(shapes) > 2 or shape[-1] < 2:
        return None
    parameters = draw_parameters(shapes)
    x = draw(shape, 6)
    result = region(x * 1e6, parameters)
    if result.shape != x.shape:
        return None
    centered = are_equal(region(x * 1e6 + 3e6, parameters) + 1.0, result + 1.0)
    for eps in sorted({e for e in literals if 0 < e < 1e-2}):
        for weight, bias in _assignments(shapes, shape[-1]):
            for offset in (0.0, 1.0) if weight else (1.0,):
                found = NormRegion(eps, centered, weight, offset, bias)
                if all(
                    are_equal(
                        region(x * scale, parameters),
                        apply_norm(found, x * scale, parameters),
                    )
                    for scale in (1e-4, 1e-2, 1.0, 1e3)
                ):
                    return found
    return None


def _assignments(
    shapes: Mapping[str, tuple[int, ...]], width: int
) -> list[tuple[str | None, str | None]]:
    """Returns which parameter may be the weight, and which the bias."""
    names = [name for name, shape in shapes.items() if shape[-1] == width]
    if len(names) != len(shapes):
        return []
    if not names:
        return [(None, None)]
    if len(names) == 1:
        return [(names[0], None)]
    return [(names[0], names[1]), (names[1], names[0])]


def apply_norm(norm: NormRegion, x: Any, parameters: Tensors) -> Any:
    if norm.centered:
        x = x - x.mean(-1, keepdim=True)
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    weight = parameters[norm.weight] + norm.offset if norm.weight else norm.offset
    return scaled * weight + (parameters[norm.bias] if norm.bias else 0.0)


def find_rotation(region: Region, shape: tuple[int, ...], axis: int) -> Rotation | None:
    """Identifies a rotary embedding of the last axis by position, which is the index on `axis`."""
    width = shape[-1]
    if width > 1024 or axis == len(shape) - 1:
        return None
    columns = []
    for column in range(width):
        x = torch.zeros(shape, dtype=torch.float64)
        x[..., column] = 1.0
        y = region(x, {})
        if y.shape != x.shape:
            return None
        columns.append(_one_head(y, axis))
    maps = torch.stack(columns, -1)
    """`[T, out, in]`"""
    identity = torch.eye(width, dtype=torch.float64)
    turned = ((maps - identity).abs() > 1e-12).any(0).any(0).nonzero().reshape(-1).tolist()
    if not turned:
        return None
    start, count = turned[0], turned[-1] - turned[0] + 1
    for style in ("half", "interleaved"):
        found = _rotation(maps, start, count, style)
        if found is None:
            continue
        x = draw(shape, 7)
        if are_equal(region(x, {}), rotate(found, x, axis)):
            return found
    return None


def _one_head(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns the rows `[T, D]` of the first head."""
    moved = tensor.movedim(axis, 0)
    return moved.reshape(moved.shape[0], -1, tensor.shape[-1])[:, 0]


def _rotation(maps: Any, start: int, count: int, style: Any) -> Rotation | None:
    if count % 2:
        return None
    half = count // 2
    first = [start + (i if style == "half" else 2 * i) for i in range(half)]
    second = [start + (i + half if style == "half" else 2 * i + 1) for i in range(half)]
    mscale = float(maps[0, first[0], first[0]])
    if mscale <= 0:
        return None
    angles = torch.atan2(maps[1, second, first], maps[1, first, first])
    return Rotation(start, count, style, tuple(angles.tolist()), mscale)


def rotate(rotation: Rotation, x: Any, axis: int, first: int = 0) -> Any:
    """Rotates rows at consecutive positions, the first of which is `first`."""
    half = rotation.width // 2
    places = first + torch.arange(x.shape[axis], dtype=torch.float64)
    angles = places[:, None] * torch.tensor(rotation.inv_freq, dtype=torch.float64)
    shape = [1] * x.dim()
    shape[axis], shape[-1] = x.shape[axis], half
    cos = (angles.cos() * rotation.mscale).reshape(shape)
    sin = (angles.sin() * rotation.mscale).reshape(shape)
    inner = x[..., rotation.start : rotation.start + rotation.width]
    out = x.clone()
    target = out[..., rotation.start : rotation.start + rotation.width]
    if rotation.style == "half":
        a, b = inner[..., :half], inner[..., half:]
        target[..., :half], target[..., half:] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = inner[..., ::2], inner[..., 1::2]
        target[..., ::2], target[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    return out
