"""Identifies the op that a region of the graph corresponds to, by evaluating both on the same
numbers.

A region is a function of rows `[T, W]` and parameters. Each `find_` function returns the op between
its input and output Values, or None if no op matches. The op's weights are named after parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import Any, Literal, get_args

import torch

from octavo.derive.formulas import are_equal, evaluate
from octavo.program.family_ops import Xielu
from octavo.program.ops import (
    Act,
    Activation,
    ActMul,
    Add,
    Clip,
    LayerNorm,
    Mul,
    RmsNorm,
    Rope,
    RopeTable,
    Scale,
    SoftCap,
)
from octavo.program.program import Growth, Op, PowerGrowth, Sinusoids, Value, Weight

Region = Callable[[Any, Mapping[str, Any]], Any]
"""A region's output `[T, W]` for its input `[T, W]` and parameters by name."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of parameters by name."""


def draw(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)


def draw_parameters(shapes: Shapes) -> dict[str, Any]:
    return {name: draw(shape, 1 + i) + 0.5 for i, (name, shape) in enumerate(shapes.items())}


def draw_wide(num_tokens: int, width: int) -> Iterator[torch.Tensor]:
    """Yields rows of test values: both signs from 1e-6 to 1e6, and many around zero."""
    sizes = torch.logspace(-6, 6, 241, dtype=torch.float64)
    around_zero = torch.linspace(-9, 9, 361, dtype=torch.float64)
    numbers = torch.cat((-sizes, around_zero, sizes, draw((97,), 3)))
    count = num_tokens * width
    repeats = -(-count // len(numbers)) if count > len(numbers) else 1
    numbers = numbers.repeat(repeats)
    for start in range(0, len(numbers), count):
        yield numbers[torch.arange(start, start + count) % len(numbers)].reshape(-1, width)


def find_activation(function: Callable[[Any], Any]) -> Act | None:
    """Returns the activation that an element-wise function computes, between placeholders; None if
    there is none.
    """
    x = Value("x", "tokens", 8)
    op = find_elementwise(lambda rows, _: function(rows), x, Value("out", "tokens", 8), 7)
    return op if isinstance(op, Act) else None


def find_elementwise(region: Region, x: Value, out: Value, num_tokens: int) -> Op | None:
    """Finds an element-wise op: a factor, an activation, a soft cap or a clip."""

    def at(number: float) -> float:
        return float(region(torch.full((num_tokens, x.width), number).double(), {})[0, 0])

    factor, large = at(1.0), at(1e6)
    candidates: list[Op] = [Act(x, out, name) for name in get_args(Activation)]
    if math.isfinite(factor) and factor:
        candidates.insert(0, Scale(x, out, factor))
    if math.isfinite(large) and large > 0:
        candidates += [SoftCap(x, out, large), Clip(x, out, large)]
    cases = [(rows, region(rows, {})) for rows in draw_wide(num_tokens, x.width)]
    return next(
        (
            op
            for op in candidates
            if all(are_equal(evaluate(op, {x: rows})[0], result) for rows, result in cases)
        ),
        None,
    )


def find_norm(  # noqa: PLR0917  # a region, its Values, and what its norm may be made of
    region: Region, x: Value, out: Value, group: int, shapes: Shapes, numbers: Sequence[float]
) -> RmsNorm | LayerNorm | None:
    """Finds a norm over groups of `group` columns; `numbers` contain the candidates for eps."""
    parameters = draw_parameters(shapes)
    rows = draw((7, x.width), 6)
    cases = [(rows * scale, region(rows * scale, parameters)) for scale in (1e-4, 1e-2, 1.0, 1e3)]
    for op in _norms(x, out, group, shapes, numbers):
        weights = {
            weight: torch.full(weight.shape, float(str(weight.fill))).double()
            if weight.fill is not None
            else parameters[weight.name]
            for weight in op.weights
        }
        if all(are_equal(evaluate(op, {x: case}, weights)[0], result) for case, result in cases):
            return op
    return None


def find_xielu(region: Region, x: Value, out: Value, shapes: Shapes) -> Xielu | None:
    """Finds an xIELU activation with four trained numbers."""
    vectors = [name for name, shape in shapes.items() if shape == (1,)]
    numbers = [name for name, shape in shapes.items() if shape == ()]
    if len(shapes) != 4 or len(vectors) != 2 or len(numbers) != 2:
        return None
    cases = []
    for seed, eps in enumerate((-1e-6, -0.3)):
        parameters = {name: draw((), 14 + seed + i) + 0.5 for i, name in enumerate(shapes)}
        cases.append((draw((7, x.width), 18 + seed) * 2, parameters, eps))
    for pair, (beta, eps_name) in product(permutations(vectors), permutations(numbers)):
        roles = (*pair, beta, eps_name)
        op = Xielu(x, out, *(Weight(name, (1,)) for name in roles))
        for rows, parameters, eps in cases:
            given = {**parameters, eps_name: torch.tensor(eps, dtype=torch.float64)}
            own = {weight: given[weight.name].reshape(1) for weight in op.weights}
            shaped = {name: given[name].reshape(shape) for name, shape in shapes.items()}
            if not are_equal(evaluate(op, {x: rows}, own)[0], region(rows, shaped)):
                break
        else:
            return op
    return None


def _norms(
    x: Value, out: Value, group: int, shapes: Shapes, numbers: Sequence[float]
) -> Iterator[RmsNorm | LayerNorm]:
    """Yields the norms that a region with these parameters and numbers could compute."""
    if group < 2 or any(shape != (group,) for shape in shapes.values()):
        return
    names = [*shapes]
    pairs: list[tuple[Weight, Weight | None]] = [(Weight("norm", (group,), fill=1.0), None)]
    if len(names) == 1:
        pairs = [(Weight(names[0], (group,)), None)]
    elif names:
        one, two = (Weight(name, (group,)) for name in names[:2])
        pairs = [(one, two), (two, one)]
    if len(names) > 2:
        return
    for eps in sorted({each for each in numbers if 0 < each < 1e-2}):
        for weight, bias in pairs:
            for offset in (0.0,) if weight.fill else (0.0, 1.0):
                norm = LayerNorm(x, out, weight, bias, eps, offset)
                norm = replace(norm, group_width=0 if group == x.width else group)
                yield norm
                if bias is None:
                    yield RmsNorm(x, out, weight, eps, offset, norm.group_width)


def find_rope(region: Region, x: Value, out: Value, head_width: int, num_tokens: int) -> Op | None:
    """Finds a rotary embedding of heads; the rows have positions 0, 1, 2 ..."""
    if head_width > 1024 or num_tokens < 2:
        return None
    num_heads = x.width // head_width
    columns = []
    for column in range(head_width):
        rows = torch.zeros((num_tokens, num_heads, head_width), dtype=torch.float64)
        rows[:, :, column] = 1.0
        columns.append(region(rows.reshape(num_tokens, -1), {})[:, :head_width])
    maps = torch.stack(columns, -1)
    """`[T, out, in]` of the first head"""
    identity = torch.eye(head_width, dtype=torch.float64)
    turned = ((maps - identity).abs() > 1e-12).any(0).any(0).nonzero().reshape(-1).tolist()
    if not turned:
        return None
    rows = draw((num_tokens, x.width), 7)
    styles: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")
    spans = {(turned[0], turned[-1] - turned[0] + 1), (0, head_width)}  # some angles may be 0
    for (start, rotary_dim), style in product(sorted(spans, reverse=True), styles):
        if rotary_dim % 2:
            continue
        half = rotary_dim // 2
        first = [start + (i if style == "half" else 2 * i) for i in range(half)]
        second = [start + (i + half if style == "half" else 2 * i + 1) for i in range(half)]
        angles = torch.atan2(maps[1, second, first], maps[1, first, first])
        table = RopeTable(tuple(angles.tolist()), float(maps[0, first[0], first[0]]))
        op = Rope(x, out, num_heads, head_width, rotary_dim, start, table=table, style=style)
        if are_equal(evaluate(op, {x: rows})[0], region(rows, {})):
            return op
    return None


def find_combination(  # noqa: PLR0917  # a region, its Values, and candidates for numbers
    region: Callable[[Any, Any], Any],
    x: Value,
    y: Value,
    out: Value,
    num_tokens: int,
    numbers: Sequence[float] = (),
) -> Op | None:
    """Finds a sum, a product or a gate of two Values; `y` may have a single column. `numbers` are
    the candidates for a gate's clamp and alpha.
    """
    cases = []
    for spread in (3, 0.3, 30):
        a, b = draw((num_tokens, x.width), 4) * spread, draw((num_tokens, y.width), 5) * spread
        cases.append((a, b, region(a, b)))
    candidates: list[Op] = [Mul(x, y, out)]
    if x.width == y.width:
        candidates.insert(0, Add(x, y, out))
        candidates += [*_gates(x, y, out, numbers), *_gates(y, x, out, numbers)]
    return next(
        (
            op
            for op in candidates
            if all(are_equal(evaluate(op, {x: a, y: b})[0], result) for a, b, result in cases)
        ),
        None,
    )


def _gates(gate: Value, up: Value, out: Value, numbers: Sequence[float]) -> Iterator[ActMul]:
    """Yields the gates that a region with these numbers could compute, the simplest first."""
    positive = sorted({float(number) for number in numbers if 0 < number < 1e3})
    for clamp in (None, *positive):
        for offset in (0.0, 1.0):
            for name in get_args(Activation):
                yield ActMul(gate, up, out, name, clamp=clamp, up_offset=offset)
            for alpha in positive:
                plain = ActMul(gate, up, out, "silu", clamp=clamp, up_offset=offset)
                yield replace(plain, alpha=alpha)


def find_expert_gate(
    function: Callable[[Any], Any], numbers: Sequence[float]
) -> tuple[ActMul, bool] | None:
    """Identifies the gate of a function of `[T, 2 * W]`. Returns the op, between placeholders, and
    whether gate and up are the halves of a row (True) or alternate (False); None if no op matches.
    """
    width = 6
    gate, up, out = (Value(name, "tokens", width) for name in ("gate", "up", "out"))
    for are_halves in (True, False):

        def region(a: Any, b: Any, are_halves: bool = are_halves) -> Any:
            pair = torch.cat((a, b), 1) if are_halves else torch.stack((a, b), -1)
            return function(pair.reshape(len(a), 2 * width))

        found = find_combination(region, gate, up, out, 7, numbers)
        if isinstance(found, ActMul) and found.gate == gate:
            return found, are_halves
    return None


def find_sinusoids(near: Any, far: Any, far_position: int) -> tuple[Sinusoids, int] | None:
    """Identifies a table of sines followed by cosines, given its rows `[T, W]` at the first
    positions and from `far_position` on. Returns it and the row of the first position; None if no
    table matches.
    """
    count, width = near.shape
    if width % 2:
        return None
    half = width // 2
    for denominator in (half, half - 1):
        steps = torch.exp(torch.arange(half).double() * (-math.log(10000) / max(denominator, 1)))
        for offset in (0, 1, 2):
            for rows, first in ((near, offset), (far, far_position + offset)):
                angles = torch.arange(first, first + count).double()[:, None] * steps
                expected = torch.cat((angles.sin(), angles.cos()), 1)
                if not bool(((expected - rows).abs() < 1e-9).all()):
                    break
            else:
                return Sinusoids(denominator), offset
    return None


def find_growth(
    near: Any, far: Any, far_position: int, numbers: Sequence[float]
) -> Growth | PowerGrowth | None:
    """Identifies factors that grow with the position, given as rows `[T, W]` at the first positions
    and from `far_position` on. `numbers` are the candidates for the settings. Returns None if none
    match.
    """
    count = len(near)
    for floor in sorted({int(each) for each in numbers if each > 1 and each == int(each)}):
        for slope in sorted({each for each in numbers if 0 < each < 10}):
            for shift in (0, 1):
                cases = [(near, 0), (far, far_position)]
                if all(
                    are_equal(rows, _grown(first + torch.arange(count), floor, slope, shift, rows))
                    for rows, first in cases
                ):
                    return Growth(floor, slope, shift)
    return _find_power(near, far, far_position)


def _find_power(near: Any, far: Any, far_position: int) -> PowerGrowth | None:
    """Identifies factors that are a power of the position, as in `find_growth`."""
    count = len(near)
    for shift in (0, 1):
        first, last = count - 1 + shift, far_position + count - 1 + shift
        grown = float(far[-1, 0].log()), float(near[-1, 0].log())
        if min(grown) <= 0:
            return None
        low, high = 0.0, 40.0  # logarithm of the start, which raises the ratio of the factors
        for _ in range(100):
            middle = (low + high) / 2
            ratio = math.log1p(last / math.exp(middle)) / math.log1p(first / math.exp(middle))
            low, high = (middle, high) if ratio < grown[0] / grown[1] else (low, middle)
        start = round(math.exp(low))
        exponent = round(grown[0] / math.log1p(last / start), 12)
        cases = ((near, 0), (far, far_position))
        if all(
            are_equal(rows, _powers(begin + torch.arange(count) + shift, start, exponent, rows))
            for rows, begin in cases
        ):
            return PowerGrowth(start, exponent, shift)
    return None


def _powers(positions: Any, start: int, exponent: float, like: Any) -> Any:
    return torch.exp(exponent * torch.log1p(positions.double() / start))[:, None].expand(like.shape)


def _grown(positions: Any, floor: int, slope: float, shift: int, like: Any) -> Any:
    """Returns the factors of positions, in the shape of `like`."""
    factors = 1 + slope * torch.log1p(((positions + shift) // floor).double())
    return factors[:, None].expand(like.shape)


def numbers_in(config: Mapping[str, Any]) -> list[float]:
    """Returns the numbers of a config and the tables within it."""
    found: list[float] = []
    for value in config.values():
        if isinstance(value, Mapping):
            found += numbers_in(value)
        elif type(value) in (int, float):
            found.append(value)
    return found
