"""Runs a Program op by op over calibration texts, with one op's weights and one layer's keys in
memory at a time. The caller sees the input rows of an op before it is computed, and may replace
weights.

Uses the formulas of the reference backend, except that matmuls and attention process many rows at
once in fp32. Values are kept in fp64 between ops. The state can be saved and restored at points
with few live Values, so a run can continue in another process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.base import LoadWeight
from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.reference.backend import FORMULAS
from octavo.executor.reference.kv_cache import ReferenceKvCache, make_kv_layout
from octavo.executor.reference.step import Floats, ReferenceStep
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import (
    AlibiBias,
    Attention,
    Embedding,
    GatherRows,
    original_context,
)
from octavo.program.program import Op, Program, Value, Weight
from octavo.quant.blocks import StoredWeight

FINISHED_SHARE = 2
"""Maximum size of the live Values when a state is saved, as a multiple of the residual stream."""


class CalibrationRun:
    """One run over `token_ids [texts, length]`; `op` is the next op, None at the end."""

    def __init__(self, program: Program, load: LoadWeight, token_ids: NDArray[np.int32]) -> None:
        num_texts, length = token_ids.shape
        if length % BLOCK_SIZE:
            raise ValueError(f"texts of {length} tokens, expected multiples of {BLOCK_SIZE}")
        self._program, self._layers = _with_few_layers(program)
        self._load = load
        self._texts = (num_texts, length)
        batch = _whole_texts(token_ids, self._program)
        counts = [
            num_texts if group.kind == "state" else batch.block_tables.max(initial=0) + 1
            for group in self._program.groups
        ]
        kv = ReferenceKvCache([make_kv_layout(group) for group in self._program.groups], counts)
        self._step = ReferenceStep(self._program, {}, batch, kv.groups, multiply=multiply)
        self._unread = Counter(value.name for op in self._program.ops for value in op.inputs)
        self._last_read = {
            value.name: index for index, op in enumerate(self._program.ops) for value in op.inputs
        }
        self.index = 0

    @property
    def op(self) -> Op | None:
        ops = self._program.ops
        return ops[self.index] if self.index < len(ops) else None

    @property
    def ops(self) -> tuple[Op, ...]:
        return self._program.ops

    def rows(self, value: Value) -> NDArray:
        """Returns the rows of a Value that the next op reads, `[T, width]`."""
        return self._step.get(value)

    def advance(self, weights: Mapping[Weight, NDArray] | None = None) -> None:
        """Computes the next op, with `weights` instead of the model's own."""
        op = self.op
        assert op is not None, "the run is at its end"
        with np.errstate(all="ignore"):
            for value, array in zip(op.outputs, self._made(op, weights or {}), strict=True):
                wide = array.astype(np.float64) if array.dtype == np.float32 else array
                self._step.values[value.name] = wide
        self._step.weights = {}
        self._forget(op)
        self.index += 1

    def state(self) -> dict[str, NDArray] | None:
        """Returns the state to resume from. Returns None if it is too large to save at this op."""
        alive = {
            name: array
            for name, array in self._step.values.items()
            if self._unread[name] and self._last_read.get(name, -1) >= self.index
        }
        floats = [array for array in alive.values() if array.dtype == np.float64]
        has_keys = any(self.index <= last for last in self._layers.values_at(self.index))
        return None if has_keys or len(floats) > FINISHED_SHARE else alive

    def restore(self, index: int, values: Mapping[str, NDArray]) -> None:
        """Continues at op `index` with a saved state."""
        for op in self._program.ops[:index]:
            self._unread.subtract(value.name for value in op.inputs)
        self._step.values = dict(values)
        self.index = index

    def _made(self, op: Op, weights: Mapping[Weight, NDArray]) -> tuple[NDArray, ...]:
        if isinstance(op, GatherRows):
            return (self._step.get(op.x),)
        if isinstance(op, Embedding) and op.ids is not None:
            table = _floats(self._load(op.table).rows(self._step.get(op.ids)))
            self._step.weights = {op.table: table}
            op = replace(op, ids=None, by_position=True)
            return (_rows_in_order(op, table),)
        self._step.weights = {
            weight: weights[weight] if weight in weights else _floats(self._load(weight))
            for weight in op.weights
        }
        if isinstance(op, Attention) and _is_plain(op):
            return (self._attention(op),)
        if isinstance(op, GroupedLinear) and op.up is None:
            return (self._group(op),)
        return tuple(FORMULAS[type(op)](op, self._step))

    def _group(self, op: GroupedLinear) -> Floats:
        """Multiplies the rows of each expert at once."""
        x, experts = self._step.get(op.x), self._step.get(op.ids).reshape(-1)
        matrices = self._step.weights[op.weight]
        outputs = np.zeros((len(x), op.out.width))
        for expert in np.unique(experts):
            own = experts == expert
            outputs[own] = multiply(matrices[expert], x[own])
        return outputs if op.bias is None else outputs + self._step.weights[op.bias][experts]

    def _attention(self, op: Attention) -> Floats:
        """Computes attention text by text, with all rows of a text at once."""
        num_texts, length = self._texts
        group = self._program.group(op.group)
        arrays = self._step.kv[self._program.group_index(op.group)]
        q = self._step.get(op.q).reshape(num_texts, length, op.num_heads, group.k_width)
        k, v = (
            each[op.layer].reshape(-1, group.num_kv_heads, each.shape[-1])[: num_texts * length]
            for each in (arrays.k, arrays.v)
        )
        mask = _mask(op, length)
        outputs = np.empty((num_texts, length, op.num_heads, group.v_width))
        sinks = None if op.sinks is None else self._step.weights[op.sinks]
        repeat = op.num_heads // group.num_kv_heads
        for text in range(num_texts):
            own = slice(text * length, (text + 1) * length)
            keys, values = (
                np.repeat(each[own].transpose(1, 0, 2), repeat, axis=0).astype(np.float32)
                for each in (k, v)
            )
            scores = q[text].transpose(1, 0, 2).astype(np.float32) * np.float32(op.scale)
            scores = scores @ keys.transpose(0, 2, 1)
            shares = _shares(scores, op, mask, sinks)
            outputs[text] = (shares @ values).transpose(1, 0, 2)
        return outputs.reshape(num_texts * length, -1)

    def _forget(self, op: Op) -> None:
        """Frees values that no later op reads."""
        self._unread.subtract(value.name for value in op.inputs)
        for value in (*op.inputs, *op.outputs):
            if not self._unread[value.name]:
                self._step.values.pop(value.name, None)


class _LayerLives:
    """The range of ops in which each layer of a cache group is in use."""

    def __init__(self, spans: Mapping[tuple[str, int], tuple[int, int]]) -> None:
        self._spans = spans

    def values_at(self, index: int) -> list[int]:
        """Returns the last readers of the layers that are written before op `index`."""
        return [last for first, last in self._spans.values() if first < index <= last]


def _with_few_layers(program: Program) -> tuple[Program, _LayerLives]:
    """Returns the Program with cache groups that have only as many layers as are in use at once;
    later layers reuse the memory of finished ones.
    """
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    for index, op in enumerate(program.ops):
        key = _get_layer(op)
        if key is not None:
            spans[key] = (spans.get(key, (index, index))[0], index)
    layer_indices: dict[tuple[str, int], int] = {}
    free_from: dict[str, list[int]] = {group.name: [] for group in program.groups}
    for key, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        ends = free_from[key[0]]
        index = next((at for at, end in enumerate(ends) if end < first), len(ends))
        ends[index : index + 1] = [last]
        layer_indices[key] = index
    groups = tuple(
        replace(group, num_layers=max(1, len(free_from[group.name]))) for group in program.groups
    )
    ops = tuple(_renumber_layer(op, layer_indices) for op in program.ops)
    return replace(program, ops=ops, groups=groups), _LayerLives(spans)


def _get_layer(op: Op) -> tuple[str, int] | None:
    """Returns the (cache group, layer) that an op writes or reads. Returns None for other ops."""
    group, layer = getattr(op, "group", None), getattr(op, "layer", None)
    return None if group is None or layer is None else (group, layer)


def _renumber_layer(op: Any, layer_indices: Mapping[tuple[str, int], int]) -> Op:
    key = _get_layer(op)
    renumbered: Op = op if key is None else replace(op, layer=layer_indices[key])
    return renumbered


def _rows_in_order(op: Embedding, table: NDArray) -> Floats:
    rows: Floats = table.astype(np.float64) * op.scale
    return rows


def _is_plain(op: Attention) -> bool:
    """Returns whether attention over complete texts may be computed at once."""
    return (
        op.latent_width == 0
        and op.mask in ("causal", "window", "chunk", "full")
        and (op.bias is None or isinstance(op.bias, AlibiBias))
    )


def _mask(op: Attention, length: int) -> NDArray[np.bool_]:
    """Returns which keys each row of a text attends to, `[length, length]`."""
    behind = np.arange(length)[:, None] - np.arange(length)
    if op.mask == "full":
        return np.ones((length, length), np.bool_)
    seen: NDArray[np.bool_] = behind >= 0
    if op.mask == "window" and op.window is not None:
        seen &= behind < op.window
    if op.mask == "chunk" and op.window is not None:
        chunk = np.arange(length) // op.window
        seen &= chunk[:, None] == chunk
    return seen


def _shares(
    scores: NDArray[np.float32], op: Attention, mask: NDArray[np.bool_], sinks: Floats | None
) -> NDArray[np.float32]:
    """Returns the softmax of scores, `[H, length, length]`."""
    if op.softcap is not None:
        scores = np.float32(op.softcap) * np.tanh(scores / np.float32(op.softcap))
    if isinstance(op.bias, AlibiBias):
        length = scores.shape[-1]
        ahead = np.arange(length) - np.arange(length)[:, None]
        scores = scores + np.asarray(op.bias.slopes, np.float32)[:, None, None] * ahead
    scores = np.where(mask, scores, np.float32(-np.inf))
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks.astype(np.float32)[:, None, None])
    powers = np.exp(scores - top)
    total = powers.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float32)[:, None, None] - top)
    shares: NDArray[np.float32] = powers / total
    return shares


def multiply(matrix: NDArray, x: Floats) -> Floats:
    """Multiplies `matrix [out, in]` by the rows of `x [T, in]` in fp32; returns `[T, out]`."""
    product: Floats = (x.astype(np.float32) @ matrix.astype(np.float32, copy=False).T).astype(
        np.float64
    )
    return product


def _floats(packed: StoredWeight) -> NDArray:
    """Returns vectors in fp64, and matrices in fp32."""
    array = packed.dequantize()
    return array.astype(np.float64) if array.ndim == 1 else array


def _whole_texts(token_ids: NDArray[np.int32], program: Program) -> StepBatch:
    """Returns all texts as prompts of one step."""
    num_texts, length = token_ids.shape
    last_axis = max((op.axis for op in program.ops if isinstance(op, Embedding)), default=0)
    key_indices = np.tile(np.arange(length, dtype=np.int32), num_texts)
    first = original_context(program).first_position(length)
    rows = np.arange(token_ids.size, dtype=np.int32)
    tables = np.arange(token_ids.size // BLOCK_SIZE, dtype=np.int32).reshape(num_texts, -1)
    own = np.broadcast_to(np.arange(num_texts, dtype=np.int32)[:, None], tables.shape)
    num_groups = len(program.groups)
    return StepBatch(
        token_ids=np.ascontiguousarray(token_ids).reshape(-1),
        key_indices=key_indices,
        positions=np.stack([key_indices + first, *[np.zeros_like(key_indices)] * last_axis]),
        query_starts=np.arange(num_texts + 1, dtype=np.int32) * length,
        context_lens=np.full((num_groups, num_texts), length, np.int32),
        slots=np.tile(rows, (num_groups, 1)),
        block_tables=np.stack([own if g.kind == "state" else tables for g in program.groups])
        if num_groups
        else np.zeros((0, num_texts, 1), np.int32),
        sample_rows=rows,
    )
