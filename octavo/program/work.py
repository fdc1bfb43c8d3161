"""Counts the multiplications of a step: per token, per sampled row, and per query-key pair.

Covers matmuls and attention.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import Attention, Linear, MlaAttention
from octavo.program.program import Program, Weight


@dataclass(frozen=True, slots=True)
class Work:
    """Multiply-adds of a step."""

    per_token: int
    per_sample: int
    per_pair: dict[int | None, int]
    """Multiplications per query-key pair, over all layers of each window (None: no window)."""
    read_by_all: tuple[Weight, ...]
    """Weights that every step reads."""
    read_by_some: tuple[tuple[Weight, float], ...]
    """Expert weights, and the fraction of them that one token reads."""

    def pairs(self, first: int, end: int) -> int:
        """Counts the attention multiplications for tokens `first` to `end - 1` of one request."""
        return sum(
            count * _num_pairs(first, end, window) for window, count in self.per_pair.items()
        )


def count_work(program: Program) -> Work:
    per_axis = Counter[str]()
    per_pair = Counter[int | None]()
    dense: dict[Weight, None] = {}
    experts: dict[Weight, float] = {}
    for op in program.ops:
        if isinstance(op, Linear):
            dense |= dict.fromkeys(op.weights_)
            per_axis[op.x.axis] += op.x.width * sum(weight.shape[0] for weight in op.weights_)
        elif isinstance(op, GroupedLinear):
            own, out, inputs = op.weight.shape
            num_experts = op.weight.whole.shape[0]  # counts all ranks
            experts[op.weight] = op.ids.width / num_experts
            per_axis["tokens"] += op.ids.width * out * inputs * own // num_experts
        elif isinstance(op, Attention):
            per_pair[op.window] += op.q.width + op.out.width
        elif isinstance(op, MlaAttention):
            dense[op.kv_b] = None
            per_axis["tokens"] += op.num_heads * (op.nope_width + op.v_width) * op.latent_width
            per_pair[None] += op.num_heads * (2 * op.latent_width + op.rope_width)
    return Work(
        per_axis["tokens"],
        per_axis["samples"],
        dict(per_pair),
        tuple(dense),
        tuple(experts.items()),
    )


def _num_pairs(first: int, end: int, window: int | None) -> int:
    """Counts pairs of queries `first` to `end - 1` and their visible keys, including their own."""

    def up_to(num_tokens: int) -> int:
        inside = num_tokens if window is None else min(num_tokens, window)
        return inside * (inside + 1) // 2 + (num_tokens - inside) * inside

    return up_to(end) - up_to(first)
