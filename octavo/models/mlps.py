"""Common MLPs: plain, gated, and routed experts."""

from __future__ import annotations

from octavo.models.matrix_rows import Rows, linear_part
from octavo.program.builder import Builder
from octavo.program.ops import Activation
from octavo.program.program import Value, Weight


def plain_mlp(
    b: Builder,
    x: Value,
    name: str,
    width: int,
    activation: Activation,
    *,
    names: tuple[str, str] = ("fc1", "fc2"),
    bias: bool = True,
) -> Value:
    """Appends second(f(first(x))) with inner size `width`."""
    inner = b.act(b.linear(x, f"{name}.{names[0]}", width, bias=bias), activation)
    return b.linear(inner, f"{name}.{names[1]}", x.width, bias=bias)


def stacked_gated_mlp(
    b: Builder,
    x: Value,
    name: str,
    width: int,
    activation: Activation,
    *,
    names: tuple[str, str] = ("gate_up_proj", "down_proj"),
) -> Value:
    """Appends a gated MLP with gate and up projection in one module, gate first."""
    gate, up = (
        linear_part(b, x, f"{name}.{names[0]}", Rows(width, 2 * width, start))
        for start in (0, width)
    )
    return b.linear(b.act_mul(gate, up, activation), f"{name}.{names[1]}", x.width)


def gated_mlp(
    b: Builder, x: Value, name: str, width: int, activation: Activation, *, bias: bool = False
) -> Value:
    """Appends down(f(gate(x)) * up(x)) with inner size `width`."""
    gate = b.linear(x, f"{name}.gate_proj", width, bias=bias)
    up = b.linear(x, f"{name}.up_proj", width, bias=bias)
    return b.linear(b.act_mul(gate, up, activation), f"{name}.down_proj", x.width, bias=bias)


def gated_experts(
    b: Builder,
    routed: tuple[Value, Value, Value],
    name: str,
    *,
    num_experts: int,
    width: int,
    activation: Activation,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Value:
    """Appends the chosen experts' gated MLPs, weighted and summed.

    Checkpoints have a tensor per expert and projection; `names` are those of gate, up and down.
    """
    rows, ids, weights = routed
    hidden_size = rows.width

    def weight(projection: str, out_width: int, in_width: int) -> Weight:
        sources = tuple(f"{name}.{e}.{projection}.weight" for e in range(num_experts))
        return Weight(f"{name}.{projection}.weight", (num_experts, out_width, in_width), sources)

    gate = b.grouped_linear(rows, ids, weight(names[0], width, hidden_size))
    up = b.grouped_linear(rows, ids, weight(names[1], width, hidden_size))
    down = b.grouped_linear(
        b.act_mul(gate, up, activation), ids, weight(names[2], hidden_size, width)
    )
    return b.combine(down, weights)


def stacked_experts(
    b: Builder,
    routed: tuple[Value, Value, Value],
    name: str,
    *,
    num_experts: int,
    width: int,
    activation: Activation,
) -> Value:
    """Appends the chosen experts' gated MLPs, weighted and summed.

    Checkpoints have two input-major tensors: `gate_up_proj [E, in, 2 * width]`, gates first, and
    `down_proj [E, width, in]`.
    """
    rows, ids, weights = routed
    gate, up = (
        Weight(
            f"{name}.gate_up_proj",
            (num_experts, width, rows.width),
            transposed=True,
            source_rows=2 * width,
            row_start=start,
        )
        for start in (0, width)
    )
    down = Weight(f"{name}.down_proj", (num_experts, rows.width, width), transposed=True)
    h = b.act_mul(b.grouped_linear(rows, ids, gate), b.grouped_linear(rows, ids, up), activation)
    return b.combine(b.grouped_linear(h, ids, down), weights)
