"""Reference formulas of row-wise ops, in float64; `ROW_FORMULAS` is the dispatch table.

A formula takes the op and the step and returns the op's outputs in order. `program/ops.py` states
the formulas and sources. Matrix products run row by row as matrix-vector products of fixed shape,
so that no row's bits depend on another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import KvCopies
from octavo.executor.reference.family_formulas import FAMILY_FORMULAS
from octavo.executor.reference.step import Floats, Made, ReferenceStep, matvecs, sparse_rows
from octavo.program import expert_ops, family_ops, ops, rank_ops
from octavo.program.position_tables import position_table
from octavo.program.program import Op, Weight

# -- rows in, rows out -----------------------------------------------------------------------------


def embedding(op: ops.Embedding, step: ReferenceStep) -> Made:
    if op.ids is None:
        ids = step.positions(op.axis) + op.offset
    else:
        ids = np.where(step.live, step.get(op.ids).reshape(-1), 0)
    if op.others_first:
        ids = np.where(ids < op.table.shape[0], ids, 0)
    rows = ids - (op.first_row or 0)
    here = (rows >= 0) & (rows < op.table.shape[0])
    if op.first_row is None:
        here[:] = True
    embedded = np.where(here, rows, 0)
    y = step.weights[op.table][embedded] * op.scale
    y = step.updated(
        y, (op.site, op.table), op.out.axis, lambda update, row: update.a[embedded[row]] * op.scale
    )
    return (np.where(here[:, None], y, 0.0),)


def rms_norm(op: ops.RmsNorm, step: ReferenceStep) -> Made:
    x = step.get(op.x)
    width = op.group_width or x.shape[1]
    groups = x.reshape(len(x), x.shape[1] // width, width)
    weight = step.weights[op.weight].reshape(-1, width) + op.weight_offset
    return (_rms(groups, weight, op.eps).reshape(x.shape),)


def _rms(x: Floats, weight: Floats, eps: float) -> Floats:
    """Divides by the root mean square over the last axis, then multiplies by the weight."""
    normed: Floats = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return normed


def layer_norm(op: ops.LayerNorm, step: ReferenceStep) -> Made:
    x = step.get(op.x)
    width = op.group_width or x.shape[1]
    groups = x.reshape(len(x), x.shape[1] // width, width)
    return (_center(groups, op, step).reshape(x.shape),)


def _center(x: Floats, norm: ops.LayerNorm | ops.PreNorm, step: ReferenceStep) -> Floats:
    x = x - x.mean(axis=-1, keepdims=True)
    weight = step.weights[norm.weight]
    weight = weight.reshape(-1, x.shape[-1]) if x.ndim > 2 else weight
    y = _rms(x, weight + norm.weight_offset, norm.eps)
    return y if norm.bias is None else y + step.weights[norm.bias]


def linear(op: ops.Linear, step: ReferenceStep) -> Made:
    x = step.get(op.x) if op.norm is None else _pre_norm(op.norm, step.get(op.x), step)
    biases = op.biases or (None,) * len(op.weights_)
    sites = op.sites or ("",) * len(op.weights_)
    multiplied = np.where(_below(x, op.threshold, step), 0.0, x) if op.threshold else x
    parts = [
        step.updated(
            step.multiply(step.weights[weight], multiplied),
            (site, weight),
            op.x.axis,
            lambda update, row: update.a @ x[row],
        )
        + (0.0 if bias is None else step.weights[bias])
        for weight, bias, site in zip(op.weights_, biases, sites, strict=True)
    ]
    if op.gate is not None:
        parts = [_predicted(op, gated(parts[0], parts[1], op.gate, step), step)]
    y = np.concatenate(parts, axis=1)
    if op.activation is not None:
        y = ACTIVATIONS[op.activation](y)
    if op.residual is not None:
        y = y + step.get(op.residual)
    return tuple(np.split(y, np.cumsum([out.width for out in op.outs])[:-1], axis=1))


def _below(x: Floats, threshold: float, step: ReferenceStep) -> NDArray[np.bool_]:
    """Returns which values are below a threshold and in a sparse row."""
    is_below: NDArray[np.bool_] = (np.abs(x) < threshold) & sparse_rows(len(x), step)
    return is_below


def _predicted(op: ops.Linear | ops.ActMul, outputs: Floats, step: ReferenceStep) -> Floats:
    """Zeroes an op's outputs with negative scores in sparse rows."""
    if op.scores is None:
        return outputs
    return np.where((step.get(op.scores) < 0) & sparse_rows(len(outputs), step), 0.0, outputs)


def _pre_norm(norm: ops.PreNorm, x: Floats, step: ReferenceStep) -> Floats:
    if norm.centered:
        return _center(x, norm, step)
    return _rms(x, step.weights[norm.weight] + norm.weight_offset, norm.eps)


def add(op: ops.Add, step: ReferenceStep) -> Made:
    return (step.get(op.a) + step.get(op.b),)


def mul(op: ops.Mul, step: ReferenceStep) -> Made:
    return (step.get(op.a) * np.repeat(step.get(op.b), op.a.width // op.b.width, axis=1),)


def scale(op: ops.Scale, step: ReferenceStep) -> Made:
    return (step.get(op.x) * op.factor,)


def soft_cap(op: ops.SoftCap, step: ReferenceStep) -> Made:
    return (op.cap * np.tanh(step.get(op.x) / op.cap),)


def clip(op: ops.Clip, step: ReferenceStep) -> Made:
    return (np.clip(step.get(op.x), -op.limit, op.limit),)


def act(op: ops.Act, step: ReferenceStep) -> Made:
    return (ACTIVATIONS[op.activation](step.get(op.x)),)


def act_mul(op: ops.ActMul, step: ReferenceStep) -> Made:
    output = gated(step.get(op.gate), step.get(op.up), op, step)
    return (_predicted(op, output, step),)


def gated(
    gate: Floats, up: Floats, how: ops.ActMul | ops.Gate, step: ReferenceStep | None = None
) -> Floats:
    """Returns f(gate) * (up + up_offset), with optional clamping."""
    if how.clamp is not None:
        gate, up = np.minimum(gate, how.clamp), np.clip(up, -how.clamp, how.clamp)
    f = (
        gate * sigmoid(how.alpha * gate)
        if how.activation == "silu"
        else ACTIVATIONS[how.activation](gate)
    )
    output = f * (up + how.up_offset)
    if how.threshold and step is not None:
        return np.where(_below(f, how.threshold, step), 0.0, output)
    return output


def sigmoid(x: Floats) -> Floats:
    result: Floats = 1.0 / (1.0 + np.exp(-x))
    return result


def gelu(x: Floats) -> Floats:
    erf = np.array([math.erf(value / math.sqrt(2.0)) for value in x.flat]).reshape(x.shape)
    return 0.5 * x * (1.0 + erf)


def gelu_tanh(x: Floats) -> Floats:
    result: Floats = (
        0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    )
    return result


def relu(x: Floats) -> Floats:
    return np.maximum(x, 0.0)


ACTIVATIONS: dict[ops.Activation, Callable[[Floats], Floats]] = {
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu2": lambda x: relu(x) ** 2,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
    "softplus": lambda x: np.logaddexp(x, 0.0),
}


# -- positions and the cache -----------------------------------------------------------------------


def rope(op: ops.Rope, step: ReferenceStep) -> Made:
    x = step.get(op.x).reshape(-1, op.num_heads, op.head_width)
    axes = op.table.axes or (0,)
    positions = np.stack([step.positions(axis) for axis in axes], axis=1)
    angles, mscale = positions * np.array(op.table.inv_freq), np.array(op.table.mscale)
    if op.table.long is not None:
        long, is_long = op.table.long, positions >= op.table.long.start
        angles = np.where(is_long, (positions - long.start) * np.array(long.inv_freq), angles)
        mscale = np.where(is_long, long.mscale, mscale)
    cos, sin = ((f(angles) * mscale)[:, None, :] for f in (np.cos, np.sin))
    turning = x[:, :, op.rotary_start : op.rotary_start + op.rotary_dim]
    half = op.rotary_dim // 2
    first, second = (
        (slice(0, half), slice(half, None))
        if op.style == "half"
        else (slice(0, None, 2), slice(1, None, 2))
    )
    out = x.copy()
    turned = out[:, :, op.rotary_start : op.rotary_start + op.rotary_dim]
    turned[:, :, first] = turning[:, :, first] * cos - turning[:, :, second] * sin
    turned[:, :, second] = turning[:, :, second] * cos + turning[:, :, first] * sin
    return (out.reshape(len(x), op.x.width),)


def position_scores(op: family_ops.PositionScores, step: ReferenceStep) -> Made:
    table = position_table(op, lambda weight: step.weights[weight])
    x = step.get(op.x).reshape(-1, op.num_heads, table.shape[2])
    heads = [matvecs(rows, x[:, head]) for head, rows in enumerate(table)]
    return (np.stack(heads, axis=1).reshape(len(x), op.out.width),)


def head_linear(op: ops.HeadLinear, step: ReferenceStep) -> Made:
    num_heads, num_out, _ = op.shape
    x = step.get(op.x)
    matrices = step.weights[op.weight].reshape(num_heads, -1, op.weight.shape[1])
    inputs = np.split(x, num_heads, axis=1)
    heads = [
        matvecs(matrix.T if op.transposed else matrix, rows)
        for matrix, rows in zip(matrices, inputs, strict=True)
    ]
    out = np.stack(heads, axis=1).reshape(len(x), num_heads, num_out)
    if op.tail is not None:
        out = np.concatenate([out, step.get(op.tail).reshape(len(x), num_heads, -1)], axis=-1)
    return (out.reshape(len(x), op.out.width),)


def prefetch_neurons(op: ops.PrefetchNeurons, step: ReferenceStep) -> Made:
    """Does nothing: all weights are in memory."""
    return ()


def kv_write(op: ops.KvWrite, step: ReferenceStep) -> Made:
    group = step.program.group_index(op.group)
    arrays, slots = step.kv[group], step.batch.slots[group]
    stored = slots >= 0
    num_heads = step.program.groups[group].num_kv_heads
    parts = [
        step.get(part).reshape(len(slots), num_heads, part.width // num_heads)
        for part in op.k_parts
    ]
    k = arrays.k[op.layer].reshape(-1, num_heads, arrays.k.shape[-1])
    k[slots[stored]] = arrays.round_keys(np.concatenate(parts, axis=-1)[stored])
    written = [k]
    if op.v is not None:
        v = arrays.v[op.layer].reshape(-1, num_heads, arrays.v.shape[-1])
        written.append(v)
        v[slots[stored]] = arrays.round_values(
            step.get(op.v).reshape(len(slots), num_heads, op.v.width // num_heads)[stored]
        )
    if step.batch.copies is not None:
        sources, targets = _copied_slots(slots, step.batch.copies, group)
        for array in written:
            array[targets] = array[sources]
    return ()


def _copied_slots(
    slots: NDArray[np.int32], copies: KvCopies, group: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns the source and target slots of copies in one group."""
    sources = slots.repeat(np.diff(copies.starts))
    copied = copies.slots[group] >= 0
    return sources[copied], copies.slots[group][copied]


# -- experts ---------------------------------------------------------------------------------------


def route(op: expert_ops.Route, step: ReferenceStep) -> Made:
    logits = step.get(op.logits)
    scores = (
        sigmoid(logits)
        if op.score == "sigmoid"
        else softmax(logits)
        if op.score == "softmax"
        else logits
    )
    choice = scores if op.bias is None else scores + step.weights[op.bias]
    if op.num_groups > 1:
        choice = _best_groups(choice, op)
    ids = largest(choice, op.top_k)
    weights = np.take_along_axis(scores, ids, axis=1)
    if op.score == "softmax_top_k":
        weights = softmax(weights)
    elif op.score == "sigmoid_top_k":
        weights = sigmoid(weights)
    elif op.score == "sparsemixer":
        weights = _get_sparsemixer_weight(logits, ids, op.jitter)
    if op.normalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    rows, weights = np.repeat(step.get(op.x), op.top_k, axis=0), weights * op.scale
    if op.factors is not None:
        weights = weights * step.weights[op.factors][ids]
    if op.scales_rows:
        rows, weights = rows * weights.reshape(-1, 1), np.ones_like(weights)
    return rows, ids.astype(np.int32), weights


def _get_sparsemixer_weight(logits: Floats, ids: NDArray[np.intp], jitter: float) -> Floats:
    """Returns each chosen expert's sparsemixer weight among the remaining experts near it."""
    remaining, weights = logits.copy(), np.empty(ids.shape, logits.dtype)
    for j in range(ids.shape[1]):
        chosen = ids[:, j : j + 1]
        best = np.take_along_axis(logits, chosen, axis=1)
        far = best - logits > 2 * jitter * np.maximum(np.abs(logits), best)
        gates = softmax(np.where(far, -np.inf, remaining))
        weights[:, j : j + 1] = np.take_along_axis(gates, chosen, axis=1)
        np.put_along_axis(remaining, chosen, -np.inf, axis=1)
    return weights


def _best_groups(choice: Floats, op: expert_ops.Route) -> Floats:
    """Masks the experts outside the best groups with -inf."""
    groups = choice.reshape(len(choice), op.num_groups, choice.shape[1] // op.num_groups)
    ranked = 2 if op.group_rank == "two_best" else 1
    rank = np.sort(groups, axis=-1)[:, :, -ranked:].sum(axis=-1)
    keep = np.zeros(rank.shape, np.bool_)
    np.put_along_axis(keep, largest(rank, op.top_groups), True, axis=1)
    return np.where(keep[:, :, None], groups, -np.inf).reshape(choice.shape)


def largest(x: Floats, count: int) -> NDArray[np.intp]:
    """Returns the indices of each row's `count` largest values, best first; ties go to the lower
    index.
    """
    return np.argsort(-x, axis=1, kind="stable")[:, :count]


def softmax(x: Floats) -> Floats:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Floats = e / e.sum(axis=-1, keepdims=True)
    return result


def grouped_linear(op: expert_ops.GroupedLinear, step: ReferenceStep) -> Made:
    x, experts = step.get(op.x), step.get(op.ids).reshape(-1)

    def product(weight: Weight, bias: Weight | None) -> Floats:
        matrices = step.weights[weight]
        y = np.zeros((len(x), op.out.width))
        for index in np.flatnonzero(experts >= 0):
            y[index] = matrices[experts[index]] @ x[index]
        return y if bias is None else y + step.weights[bias][experts]

    y = product(op.weight, op.bias)
    if op.up is None or op.gate is None:
        return (y,)
    return (gated(y, product(op.up, op.up_bias), op.gate),)


def dispatch(op: rank_ops.Dispatch, step: ReferenceStep) -> Made:
    ids = step.get(op.ids)
    others: Made = ()
    if op.rows is not None:
        ids = np.concatenate(_gather_engines(step, ids, op.num_engines))
        others = (np.concatenate(_gather_engines(step, step.get(op.rows), op.num_engines)),)
    return (np.where((op.first <= ids) & (ids < op.last), ids - op.first, -1), *others)


def collect(op: rank_ops.Collect, step: ReferenceStep) -> Made:
    own = step.get(op.ids)
    ids = [own] if op.num_engines == 1 else _gather_engines(step, own, op.num_engines)
    parts = np.stack(step.exchange(step.get(op.x)))
    owners = np.searchsorted(op.firsts, np.concatenate(ids).reshape(-1), side="right") - 1
    rows = parts[owners, np.arange(len(owners))]
    engine = next(rank for rank, one in enumerate(ids) if one is own)
    first = sum(one.size for one in ids[:engine])
    return (rows[first : first + own.size],)


def _gather_engines(step: ReferenceStep, x: NDArray, num_engines: int) -> list[NDArray]:
    """Returns each engine's x (equal on all ranks of an engine); this rank's own object is one of
    them.
    """
    parts = step.exchange(x)
    ranks = len(parts) // num_engines
    return [
        next((part for part in parts[start : start + ranks] if part is x), parts[start])
        for start in range(0, len(parts), ranks)
    ]


def combine(op: expert_ops.Combine, step: ReferenceStep) -> Made:
    weights = step.get(op.weights_value)
    x = step.get(op.x).reshape(*weights.shape, op.out.width)
    total = weights[:, 0, None] * x[:, 0]
    for j in range(1, weights.shape[1]):
        total = total + weights[:, j, None] * x[:, j]
    return (total,)


# -- rows chosen -----------------------------------------------------------------------------------


def gather_rows(op: ops.GatherRows, step: ReferenceStep) -> Made:
    return (step.get(op.x)[step.batch.sample_rows],)


def scatter_rows(op: ops.ScatterRows, step: ReferenceStep) -> Made:
    batch = step.batch
    out = (
        np.zeros((len(batch.token_ids), op.out.width))
        if op.base is None
        else step.get(op.base).copy()
    )
    if batch.input_rows is not None and batch.input_row_indices is not None:
        is_replaced = batch.input_row_indices >= 0
        out[is_replaced] = batch.input_rows[batch.input_row_indices[is_replaced], : op.out.width]
    return (out,)


def pool_rows(op: ops.PoolRows, step: ReferenceStep) -> Made:
    x = step.get(op.x)
    pooled = np.zeros((len(step.batch.query_starts) - 1, op.out.width))
    for request, (a, b) in enumerate(pairwise(step.batch.query_starts)):
        if a < b:
            pooled[request] = {"last": x[b - 1], "cls": x[a], "mean": x[a:b].mean(axis=0)}[op.mode]
    return (pooled,)


# -- ranks -----------------------------------------------------------------------------------------


def all_reduce(op: rank_ops.AllReduce, step: ReferenceStep) -> Made:
    first, *rest = step.exchange(step.get(op.x))
    for part in rest:
        first = first + part
    return (first,)


def all_gather(op: rank_ops.AllGather, step: ReferenceStep) -> Made:
    return (np.concatenate(step.exchange(step.get(op.x)), axis=1),)


ROW_FORMULAS: dict[type[Op], Callable[[Any, ReferenceStep], Made]] = {
    ops.Embedding: embedding,
    ops.RmsNorm: rms_norm,
    ops.LayerNorm: layer_norm,
    ops.Linear: linear,
    ops.Add: add,
    ops.Mul: mul,
    ops.Scale: scale,
    ops.SoftCap: soft_cap,
    ops.Clip: clip,
    **FAMILY_FORMULAS,
    family_ops.PositionScores: position_scores,
    ops.HeadLinear: head_linear,
    ops.Act: act,
    ops.ActMul: act_mul,
    ops.Rope: rope,
    ops.KvWrite: kv_write,
    ops.PrefetchNeurons: prefetch_neurons,
    expert_ops.Route: route,
    expert_ops.GroupedLinear: grouped_linear,
    rank_ops.Dispatch: dispatch,
    rank_ops.Collect: collect,
    expert_ops.Combine: combine,
    ops.GatherRows: gather_rows,
    ops.PoolRows: pool_rows,
    ops.ScatterRows: scatter_rows,
    rank_ops.AllReduce: all_reduce,
    rank_ops.AllGather: all_gather,
}
