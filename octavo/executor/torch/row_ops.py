"""Row-wise ops in plain PyTorch on any device; `ROW_FORMULAS` is the dispatch table.

A formula takes the op and the step and returns the op's outputs in order. `ops.py` states the
formulas. Values have the step's dtype; norms, activations and rotations are computed in fp32 and
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.executor.torch.full_vectors import by_full_vectors
from octavo.executor.torch.plain import ACTIVATIONS, Norm
from octavo.executor.torch.step import Made, NormOp, Step
from octavo.program import family_ops, ops
from octavo.program.program import Op, Value


def embedding(op: ops.Embedding, step: Step) -> Made:
    ids = step.inputs["positions"][op.axis] + op.offset if op.ids is None else step.get(op.ids)
    if op.others_first:
        ids = ids.where(ids < op.table.shape[0], 0)
    here = None
    if op.first_row is not None:
        ids = ids - op.first_row
        here = (ids >= 0) & (ids < op.table.shape[0])
        ids = ids.where(here, 0)
    rows = step.weights.matrix(op.table).take(ids).floats(torch.float32) * op.scale
    if step.adapters is not None and op.site:
        adapter_rows = step.adapter_rows(step.adapters, op.out)
        rows = step.adapters.table(op, ids, rows, adapter_rows)
    return ((rows if here is None else rows.where(here[:, None], 0.0)).to(step.dtype),)


def norm(op: ops.RmsNorm | ops.LayerNorm, step: Step) -> Made:
    return (_get_norm(op, op.x, step),)


def _get_norm(norm: NormOp, x: Value, step: Step) -> Tensor:
    """Returns the norm of `x`, unless the producer of `x` has already computed it."""
    norm_value = step.normed.pop(x.name, None)
    return (
        step.kernels.norm(step.get(x), _numbers(norm, step)) if norm_value is None else norm_value
    )


def _numbers(norm: NormOp, step: Step) -> Norm:
    weight = step.weights.vector(norm.weight)
    if isinstance(norm, ops.RmsNorm):
        return Norm(weight, norm.eps, norm.weight_offset, norm.group_width)
    bias = None if norm.bias is None else step.weights.vector(norm.bias)
    if isinstance(norm, ops.LayerNorm):
        width = norm.group_width
        return Norm(weight, norm.eps, norm.weight_offset, width, bias=bias, centered=True)
    return Norm(weight, norm.eps, norm.weight_offset, bias=bias, centered=norm.centered)


def _sum(a: Tensor, b: Tensor, out: Value, step: Step) -> Tensor:
    """Adds two Values, together with the following norm if the next op starts with it."""
    norm = step.norms_ahead.get(out.name)
    if norm is None:
        return a + b
    total, step.normed[out.name] = step.kernels.add_norm(a, b, _numbers(norm, step))
    return total


def norms_ahead(body: Sequence[Op]) -> dict[str, NormOp]:
    """Finds sums whose full-row norm is the first computation of the next op; returns the norms by
    the sum's name.
    """
    norms: dict[str, NormOp] = {}
    for producer, reader in pairwise(body):
        if isinstance(producer, ops.Add) or (
            isinstance(producer, ops.Linear) and producer.residual is not None
        ):
            norm = _first_norm(reader, producer.outputs[0])
            if norm is not None:
                norms[producer.outputs[0].name] = norm
    return norms


def _first_norm(op: Op, x: Value) -> NormOp | None:
    if isinstance(op, ops.Linear):
        return op.norm if op.x == x else None
    if isinstance(op, ops.LayerNorm | ops.RmsNorm) and op.group_width in (0, op.x.width):
        return op if op.x == x else None
    return None


def linear(op: ops.Linear, step: Step) -> Made:
    x = step.get(op.x) if op.norm is None else _get_norm(op.norm, op.x, step)
    product = step.weights.product(op)
    y = step.kernels.product(x, product)
    if step.adapters is not None and op.sites:
        y = step.adapters.product(
            op,
            x,
            y,
            rows=step.adapter_rows(step.adapters, op.x),
            bias=product.bias,
            kernels=step.kernels,
        )
    if op.gate is not None:
        half = y.shape[1] // 2
        y = step.kernels.gated(y[:, :half], y[:, half:], op.gate)
    if op.activation is not None:
        y = activated(y, op.activation)
    if op.residual is not None:
        y = _sum(y, step.get(op.residual), op.outs[0], step)
    return torch.split(y, [out.width for out in op.outs], dim=1) if len(op.outs) > 1 else (y,)


def add(op: ops.Add, step: Step) -> Made:
    return (_sum(step.get(op.a), step.get(op.b), op.out, step),)


def mul(op: ops.Mul, step: Step) -> Made:
    a, b = step.get(op.a), step.get(op.b)
    if op.b.width in (1, op.a.width):
        return (a * b,)
    heads = a.view(len(a), op.b.width, op.a.width // op.b.width)
    return ((heads * b[:, :, None]).flatten(1),)


def scale(op: ops.Scale, step: Step) -> Made:
    return (step.get(op.x) * op.factor,)


def soft_cap(op: ops.SoftCap, step: Step) -> Made:
    x = step.get(op.x).float()
    return ((op.cap * torch.tanh(x / op.cap)).to(step.dtype),)


def clip(op: ops.Clip, step: Step) -> Made:
    return (step.get(op.x).clamp(-op.limit, op.limit),)


def match_magnitude(op: family_ops.MatchMagnitude, step: Step) -> Made:
    x, like = (step.get(value).float() for value in (op.x, op.like))
    own, its = (value.square().mean(dim=-1, keepdim=True) for value in (x, like))
    return ((x * torch.sqrt(its / own.clamp(min=op.least))).to(step.dtype),)


def keep_largest(op: family_ops.KeepLargest, step: Step) -> Made:
    x = step.get(op.x).float()
    spread = x.std(dim=-1, keepdim=True, unbiased=False)
    cutoff = x.mean(dim=-1, keepdim=True) + op.deviations * spread
    return (torch.relu(x - cutoff).to(step.dtype),)


def concat(op: family_ops.Concat, step: Step) -> Made:
    return (torch.cat([step.get(x) for x in op.xs], dim=1),)


def columns(op: family_ops.SelectColumns, step: Step) -> Made:
    return (step.get(op.x)[:, op.start : op.start + op.out.width].contiguous(),)


def xielu(op: family_ops.Xielu, step: Step) -> Made:
    x, vector = step.get(op.x).float(), step.weights.vector
    beta, eps = vector(op.beta), vector(op.eps)
    positive, negative = F.softplus(vector(op.alpha_p)), beta + F.softplus(vector(op.alpha_n))
    low = negative * (by_full_vectors(torch.expm1, torch.minimum(x, eps)) - x)
    return ((torch.where(x > 0, positive * x * x, low) + beta * x).to(step.dtype),)


def mix(op: family_ops.Mix, step: Step) -> Made:
    xs = torch.stack([step.get(x).float() for x in op.xs], dim=1)
    bases = torch.stack([step.get(base).float() for base in op.bases], dim=1)
    coefs = step.get(op.coefs).float() + op.offset
    coefs = coefs.view(len(coefs), len(op.outs), len(op.xs), 1)
    mixed = bases + (coefs * xs[:, None]).sum(dim=2)
    return tuple(part.to(step.dtype).contiguous() for part in mixed.unbind(dim=1))


def act(op: ops.Act, step: Step) -> Made:
    return (activated(step.get(op.x), op.activation),)


def act_mul(op: ops.ActMul, step: Step) -> Made:
    return (step.kernels.gated(step.get(op.gate), step.get(op.up), op),)


def activated(x: Tensor, activation: ops.Activation) -> Tensor:
    return by_full_vectors(ACTIVATIONS[activation], x.float()).to(x.dtype)


def rope(op: ops.Rope, step: Step) -> Made:
    cos, sin = step.once(op.table, lambda: angles(op.table, step))
    x = step.get(op.x)
    x = x.view(len(x), op.num_heads, op.head_width)
    turning = x[:, :, op.rotary_start : op.rotary_start + op.rotary_dim].float()
    if op.style == "half":
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack(
            [first * cos - second * sin, second * cos + first * sin], dim=-1
        ).flatten(-2)
    out = x.clone()
    out[:, :, op.rotary_start : op.rotary_start + op.rotary_dim] = turned.to(step.dtype)
    return (out.view(len(x), op.x.width),)


def angles(table: ops.RopeTable, step: Step) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, `[T, 1, rotary_dim / 2] fp32`.

    Angles are computed in fp64: at position 100,000 fp32 has two decimal digits left.
    """
    positions = step.inputs["positions"]
    axis_positions = positions[list(table.axes)].T if table.axes else positions[0][:, None]
    axis_positions = axis_positions.double()[:, None, :]
    angles = axis_positions * step.weights.constant(table)
    cos, sin = torch.cos(angles) * table.mscale, torch.sin(angles) * table.mscale
    if table.long is not None:
        is_long = axis_positions >= table.long.start
        angles = (axis_positions - table.long.start) * step.weights.constant(table.long)
        cos = torch.where(is_long, torch.cos(angles) * table.long.mscale, cos)
        sin = torch.where(is_long, torch.sin(angles) * table.long.mscale, sin)
    return cos.float(), sin.float()


def position_scores(op: family_ops.PositionScores, step: Step) -> Made:
    table = step.weights.constant(op)
    x = step.get(op.x).view(-1, op.num_heads, table.shape[2])
    scores = torch.einsum("thd,hrd->thr", x.float(), table)
    return (scores.to(step.dtype).reshape(len(x), op.out.width),)


def head_linear(op: ops.HeadLinear, step: Step) -> Made:
    num_heads, _, num_in = op.shape
    x = step.get(op.x).view(-1, num_heads, num_in)
    matrices = step.weights.vector(op.weight).view(num_heads, -1, op.weight.shape[1])
    terms = "thi,hio->tho" if op.transposed else "thi,hoi->tho"
    out = torch.einsum(terms, x.float(), matrices).to(step.dtype)
    if op.tail is not None:
        out = torch.cat([out, step.get(op.tail).view(len(x), num_heads, -1)], dim=-1)
    return (out.reshape(len(x), op.out.width),)


def kv_write(op: ops.KvWrite, step: Step) -> Made:
    group_index = step.program.group_index(op.group)
    tensors, slots = step.kv[group_index], step.inputs["slots"][group_index]
    num_heads = step.program.groups[group_index].num_kv_heads
    parts = [step.get(part).view(len(slots), num_heads, -1) for part in op.k_parts]
    tensors.k.layer(op.layer).write(
        slots, parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    )
    if op.v is not None:
        tensors.v.layer(op.layer).write(slots, step.get(op.v).view(len(slots), num_heads, -1))
    step.copy_written(group_index, op.layer)
    return ()


def gather_rows(op: ops.GatherRows, step: Step) -> Made:
    return (step.get(op.x)[step.inputs["sample_rows"]],)


def scatter_rows(op: ops.ScatterRows, step: Step) -> Made:
    count = len(step.inputs["key_indices"])
    if op.base is None:
        out = torch.zeros(count, op.out.width, dtype=step.dtype, device=step.device)
    else:
        out = step.get(op.base)
    if "input_rows" not in step.inputs:
        return (out,)
    rows = step.inputs["input_row_indices"]
    input_rows = step.inputs["input_rows"][:, : op.out.width]
    external = input_rows.to(step.dtype)[rows.clamp(min=0)]
    return (torch.where((rows >= 0)[:, None], external, out),)


def pool_rows(op: ops.PoolRows, step: Step) -> Made:
    x = step.get(op.x)
    pooled = torch.zeros(
        len(step.batch.query_starts) - 1, op.out.width, dtype=step.dtype, device=step.device
    )
    for request, (a, b) in enumerate(pairwise(step.batch.query_starts.tolist())):
        if a < b:
            pooled[request] = (
                x[b - 1]
                if op.mode == "last"
                else x[a]
                if op.mode == "cls"
                else x[a:b].float().mean(dim=0).to(step.dtype)
            )
    return (pooled,)


ROW_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ops.Embedding: embedding,
    ops.RmsNorm: norm,
    ops.LayerNorm: norm,
    ops.Linear: linear,
    ops.Add: add,
    ops.Mul: mul,
    ops.Scale: scale,
    ops.SoftCap: soft_cap,
    ops.Clip: clip,
    family_ops.MatchMagnitude: match_magnitude,
    family_ops.Xielu: xielu,
    family_ops.KeepLargest: keep_largest,
    family_ops.Mix: mix,
    family_ops.Concat: concat,
    family_ops.SelectColumns: columns,
    family_ops.PositionScores: position_scores,
    ops.HeadLinear: head_linear,
    ops.Act: act,
    ops.ActMul: act_mul,
    ops.Rope: rope,
    ops.KvWrite: kv_write,
    ops.GatherRows: gather_rows,
    ops.PoolRows: pool_rows,
    ops.ScatterRows: scatter_rows,
}
