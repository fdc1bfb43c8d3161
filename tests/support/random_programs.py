"""Random small Programs of row ops, products and gathered rows, which passes and executors must
treat right whatever a family writes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.program import ops
from octavo.program.program import CacheGroup, Op, Program, Value, Weight

WIDTHS = (4, 8, 20)
NUM_ROWS = 70
"""Number of rows of each table: more than a chunk of sampled rows (64)."""

ACTIVATIONS = ("silu", "gelu_tanh", "relu", "sigmoid", "tanh", "softplus")


@dataclass
class RandomProgram:
    """A Program and its weights by name (embeddings too, whose last row is NaN)."""

    program: Program
    weights: dict[str, NDArray[np.float32]]


@dataclass
class _Growing:
    """The Values of one axis so far, and the ops that made them."""

    draw: st.DrawFn
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def fresh(self, like: Value, width: int | None = None) -> Value:
        made = sum(len(op.outputs) for op in self.ops)
        return Value(f"v{made}", like.axis, like.width if width is None else width)

    def weight(self, *shape: int) -> Weight:
        """Draws a weight that is small enough for chains of products to stay near one."""
        name = f"w{len(self.weights)}"
        scale = 1.0 if len(shape) == 1 else 1 / shape[-1] ** 0.5
        self.weights[name] = (
            np.random.default_rng(len(self.weights)).normal(size=shape) * scale
        ).astype(np.float32)
        return Weight(name, shape)

    def add(self, op: Op) -> None:
        self.ops.append(op)
        self.values += op.outputs

    def pick(self, *, like: Value | None = None) -> Value:
        """Picks a Value, recent ones more often, as real Programs read them."""
        fitting = [
            v for v in self.values if like is None or (v.width, v.axis) == (like.width, like.axis)
        ]
        return fitting[max(len(fitting) - 1 - self.draw(st.integers(0, 4)), 0)]


def _row_op(g: _Growing, x: Value) -> None:
    y = g.fresh(x)
    kinds = ["scale", "softcap", "clip", "act", "add", "mul", "gate", "rms", "heads", "layer"]
    kinds += ["mul by heads"] if x.width % 2 == 0 else []
    kind = g.draw(st.sampled_from(kinds))
    if kind == "scale":
        g.add(ops.Scale(x, y, 0.8))
    elif kind == "softcap":
        g.add(ops.SoftCap(x, y, 2.0))
    elif kind == "clip":
        g.add(ops.Clip(x, y, 1.5))
    elif kind == "act":
        g.add(ops.Act(x, y, g.draw(st.sampled_from(ACTIVATIONS))))
    elif kind == "add":
        g.add(ops.Add(x, g.pick(like=x), y))
    elif kind == "mul":
        capped = g.fresh(x)
        g.add(ops.Act(x, capped, "tanh"))
        g.add(ops.Mul(g.pick(like=x), capped, g.fresh(x)))
    elif kind == "mul by heads":
        gate = g.fresh(x, 2)
        g.add(ops.Linear(x, (gate,), (g.weight(2, x.width),)))
        opened = g.fresh(gate)
        g.add(ops.Act(gate, opened, "sigmoid"))
        g.add(ops.Mul(x, opened, g.fresh(x)))
    elif kind == "gate":
        g.add(ops.ActMul(x, g.pick(like=x), y, "sigmoid"))
    elif kind == "rms":
        g.add(ops.RmsNorm(x, y, g.weight(x.width), 1e-5))
    elif kind == "heads":
        g.add(ops.RmsNorm(x, y, g.weight(x.width // 2), 1e-5, 1.0, x.width // 2))
    else:
        g.add(ops.LayerNorm(x, y, g.weight(x.width), g.weight(x.width), 1e-5))


def _linear(g: _Growing, x: Value) -> None:
    heights = g.draw(st.lists(st.sampled_from(WIDTHS), min_size=1, max_size=3))
    outs = tuple(Value(g.fresh(x).name + f".{i}", x.axis, width) for i, width in enumerate(heights))
    biases = tuple(g.weight(height) if g.draw(st.booleans()) else None for height in heights)
    activation = g.draw(st.sampled_from([None, None, None, "silu"]))
    g.add(
        ops.Linear(
            x,
            outs,
            tuple(g.weight(height, x.width) for height in heights),
            biases if any(biases) else (),
            activation,
        )
    )


def _mlp(g: _Growing, x: Value) -> None:
    """Adds a norm, two products of it, their gate, a product back and a sum: what the fuse pass
    looks for.
    """
    normed, inner = g.fresh(x), g.draw(st.sampled_from(WIDTHS))
    g.add(ops.RmsNorm(x, normed, g.weight(x.width), 1e-5))
    halves = []
    for _ in range(2):
        halves.append(g.fresh(x, inner))
        g.add(ops.Linear(normed, (halves[-1],), (g.weight(inner, x.width),)))
    gated = g.fresh(x, inner)
    g.add(ops.ActMul(*halves, gated, "silu"))
    down = g.fresh(x)
    g.add(ops.Linear(gated, (down,), (g.weight(x.width, inner),)))
    g.add(ops.Add(x, down, g.fresh(x)))


def _skip(g: _Growing, x: Value) -> None:
    """Adds a product of rows and the sum with these very rows."""
    made = g.fresh(x)
    g.add(ops.Linear(x, (made,), (g.weight(x.width, x.width),)))
    g.add(ops.Add(made, x, g.fresh(x)))


STEPS = (_row_op, _row_op, _linear, _mlp, _skip)


@st.composite
def random_programs(draw: st.DrawFn) -> RandomProgram:
    """Draws a Program of rows of tokens, then of samples; sometimes tokens go on after rows of them
    were gathered.
    """
    g = _Growing(draw)
    ids = Value("ids", "tokens", 1, "int")
    for width in WIDTHS:
        value = Value(f"in{width}", "tokens", width)
        g.weights[value.name] = (
            np.random.default_rng(width).normal(size=(NUM_ROWS + 1, width)).astype(np.float32)
        )
        g.weights[value.name][-1] = np.nan
        g.add(ops.Embedding(value, Weight(value.name, (NUM_ROWS + 1, width)), ids))
    for _ in range(draw(st.integers(1, 6))):
        draw(st.sampled_from(STEPS))(g, g.pick())
    tokens = list(g.values)
    for _ in range(draw(st.integers(1, 4))):
        x = draw(st.sampled_from(tokens[-5:]))
        g.add(ops.GatherRows(x, Value(g.fresh(x).name, "samples", x.width)))
        for _ in range(draw(st.integers(0, 2))):
            draw(st.sampled_from(STEPS))(g, g.pick())
    logits = next(value for value in reversed(g.values) if value.axis == "samples")
    groups = (CacheGroup("kv", "full", 1, 1, 2, 2),)
    program = Program(
        "random", {"token_ids": ids}, {"logits": logits}, tuple(g.ops), groups, logits.width
    )
    program.check()
    return RandomProgram(program, g.weights)
