"""Select_keys pass: generated rows read only the key blocks with the most attention, predicted from
the previous layer.

For each attention except the first ones, stores some key columns in a separate cache group and
computes the same columns of the queries from the previous attention's input. Sets
`Attention.partial_q` and `Attention.selection`. Runs on the complete Program, before the other
passes. Source: InfiniGen (Lee et al. 2024, arXiv 2406.19707), which picks columns by SVD; here they
are the slowest RoPE frequencies, which carry content rather than position.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from octavo.api.errors import ConfigError
from octavo.program.key_selection import KeySelection
from octavo.program.ops import (
    Attention,
    KvWrite,
    LayerNorm,
    Linear,
    MlaAttention,
    RmsNorm,
    Rope,
    RopeTable,
)
from octavo.program.program import CacheGroup, Op, Program, Value, Weight

GROUP = "partial_keys"

WHOLE_LAYERS = 2
"""Number of first attentions that read all keys, because their attention is predicted badly: 0.45
of the mass for SmolLM2's second layer, compared with 0.91 later.
"""

KEY_SHARE = 0.3
"""Fraction of the key columns that are stored separately."""


@dataclass(frozen=True, slots=True)
class _Turned:
    """Queries or keys: the matmul that computes them and the RoPE applied to them."""

    linear: Linear
    rope: Rope

    @property
    def pairs(self) -> int:
        """Number of columns selected from each half of a head: those with the slowest
        frequencies.
        """
        return max(1, round(KEY_SHARE * len(self.rope.table.inv_freq)))

    def part(self, x: Value, name: str) -> tuple[Value, list[Op]]:
        """Returns the selected columns computed from x with RoPE, and the ops that compute them."""
        rope, pairs = self.rope, self.pairs
        weight = self.linear.weights_[0]
        width = rope.num_heads * 2 * pairs
        flat, out = Value(f"{name}.flat", x.axis, width), Value(name, x.axis, width)
        (bias,) = self.linear.biases or (None,)
        part = self._rows(weight, (width, weight.shape[1]))
        of_bias = () if bias is None else (self._rows(bias, (width,)),)
        turned = replace(
            rope,
            x=flat,
            out=out,
            head_width=2 * pairs,
            rotary_dim=2 * pairs,
            table=_slowest(rope.table, pairs),
        )
        return out, [Linear(x, (flat,), (part,), of_bias), turned]

    def _rows(self, weight: Weight, shape: tuple[int, ...]) -> Weight:
        """Returns the weight rows of the selected columns: a contiguous run in each half of each
        head.
        """
        half = self.rope.head_width // 2
        return replace(
            weight,
            name=f"{weight.name}.partial",
            shape=shape,
            sources=weight.sources or (weight.name,),
            source_rows=weight.source_rows or weight.shape[0],
            row_start=weight.row_start + half - self.pairs,
            row_step=half,
            row_run=self.pairs,
        )


def select_keys(program: Program, budget: float) -> Program:
    """Returns a Program in which generated rows read only the fraction `budget` of the key blocks.

    Raises ConfigError if the Program does not support it.
    """
    makers = {value: op for op in program.ops for value in op.outputs}
    attentions = [op for op in program.ops if isinstance(op, Attention | MlaAttention)]
    changes = _Changes(program, makers, budget)
    for before, op in zip(attentions[WHOLE_LAYERS - 1 :], attentions[WHOLE_LAYERS:], strict=False):
        if isinstance(op, MlaAttention) or isinstance(before, MlaAttention) or op.latent_width:
            raise _config_error(program, "it keeps latents, of which no head has keys of its own")
        if op.mask == "causal":
            changes.select(op, before)
    if not changes.num_layers:
        raise _config_error(program, f"no attention behind the first {WHOLE_LAYERS} reads all keys")
    return changes.build()


class _Changes:
    """Collects inserted ops and replaced attentions of a Program."""

    def __init__(self, program: Program, makers: Mapping[Value, Op], budget: float) -> None:
        self._program, self._makers, self._budget = program, makers, budget
        self._in_front: dict[int, list[Op]] = {}
        self._replaced: dict[int, Attention] = {}
        self._group: CacheGroup | None = None
        self.num_layers = 0
        """Attentions that select keys."""

    def select(self, op: Attention, before: Attention) -> None:
        """Changes an attention to select keys, predicted from the input of the previous
        attention.
        """
        program = self._program
        group = program.group(op.group)
        if op.bias is not None:
            raise _config_error(program, "its scores depend on the positions of keys")
        queries = self._turned(op.q, "queries")
        write = self._write(op)
        keys = self._turned(write.k_parts[0], "keys")
        width = 2 * keys.pairs
        index = self.num_layers
        self.num_layers += 1
        if self._group is None:
            self._group = CacheGroup(GROUP, "full", 0, group.num_kv_heads, width, 0)
        if (self._group.num_kv_heads, self._group.k_width) != (group.num_kv_heads, width):
            raise _config_error(program, "its layers have keys of several shapes")
        x, normed = self._make_query_input(queries.linear, before)
        partial_q, ops_q = queries.part(x, f"{op.out.name}.partial_q")
        partial_k, ops_k = keys.part(keys.linear.x, f"{op.out.name}.partial_k")
        self._insert(before, [*normed, *ops_q])
        self._insert(write, [*ops_k, KvWrite((partial_k,), None, GROUP, index)])
        at = program.ops.index(op)
        selection = KeySelection(GROUP, index, self._budget)
        self._replaced[at] = replace(op, partial_q=partial_q, selection=selection)

    def build(self) -> Program:
        assert self._group is not None, "there are such layers"
        ops: list[Op] = []
        for index, op in enumerate(self._program.ops):
            ops += self._in_front.get(index, [])
            ops.append(self._replaced.get(index, op))
        group = replace(self._group, num_layers=self.num_layers)
        result = replace(self._program, ops=tuple(ops), groups=(*self._program.groups, group))
        result.check()
        return result

    def _insert(self, in_front_of: Op, ops: list[Op]) -> None:
        self._in_front.setdefault(self._program.ops.index(in_front_of), []).extend(ops)

    def _write(self, op: Attention) -> KvWrite:
        """Returns the KvWrite of the keys that an attention reads."""
        for each in self._program.ops:
            if isinstance(each, KvWrite) and (each.group, each.layer) == (op.group, op.layer):
                if len(each.k_parts) == 1 and each.v is not None:
                    return each
                break
        raise _config_error(self._program, "its keys are several parts")

    def _turned(self, value: Value, what: str) -> _Turned:
        """Returns the matmul and the RoPE that compute queries or keys."""
        rope = self._makers.get(value)
        if not isinstance(rope, Rope) or rope.style != "half" or rope.table.axes:
            raise _config_error(
                self._program, f"its {what} are not rotated by one position, in halves"
            )
        if rope.rotary_start or rope.rotary_dim != rope.head_width:
            raise _config_error(self._program, f"its {what} are turned in part")
        linear = self._makers.get(rope.x)
        if not isinstance(linear, Linear) or len(linear.outs) != 1:
            raise _config_error(self._program, f"its {what} are normed or bounded before they turn")
        weight = linear.weights_[0]
        if weight.stored_as or weight.kernel or (weight.row_step, weight.row_run) != (1, 1):
            raise _config_error(
                self._program, f"rows of the matrix of its {what} do not lie in order"
            )
        return _Turned(linear, rope)

    def _make_query_input(self, queries: Linear, before: Attention) -> tuple[Value, list[Op]]:
        """Returns the input for predicted queries, and the norm op that computes it from the
        previous attention's input.
        """
        earlier = self._turned(before.q, "queries").linear.x
        own, its = self._makers.get(queries.x), self._makers.get(earlier)
        if isinstance(own, RmsNorm | LayerNorm) and isinstance(its, RmsNorm | LayerNorm):
            out = replace(own.out, name=f"{own.out.name}.guessed")
            return out, [replace(own, x=its.x, out=out)]
        return earlier, []


def _slowest(table: RopeTable, pairs: int) -> RopeTable:
    """Returns the RoPE table of the slowest frequencies, which are the last ones."""
    long = table.long and replace(table.long, inv_freq=table.long.inv_freq[-pairs:])
    return replace(table, inv_freq=table.inv_freq[-pairs:], long=long)


def _config_error(program: Program, why: str) -> ConfigError:
    return ConfigError(
        f"kv_selection: not supported by {program.name}: {why}", hint="remove kv_selection"
    )
