"""The ops that take each row by itself, in plain torch on any device; `ROW_FORMULAS` is the dispatch table.

Each takes the op and the step and returns what the op makes, in the order of its outputs. `ops.py` states the formulas. Values have
the step's dtype; norms, activations and rotations are computed in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.backends.torch.step import Made, Step
from octavo.program import ops
from octavo.program.program import Op, Weight


def embedding(op: ops.Embedding, step: Step) -> Made:
    ids = step.inputs["positions"] + op.offset if op.ids is None else step.get(op.ids)
    rows = step.weights.matrix(op.table).take(ids).floats(torch.float32)
    return ((rows * op.scale).to(step.dtype),)


def rms_norm(op: ops.RmsNorm, step: Step) -> Made:
    x = step.get(op.x)
    width = op.group_width or x.shape[1]
    groups = x.float().view(len(x), x.shape[1] // width, width)
    normed = _rms(groups, step.weights.vector(op.weight) + op.weight_offset, op.eps)
    return (normed.view(x.shape).to(step.dtype),)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last axis, in fp32."""
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


def layer_norm(op: ops.LayerNorm, step: Step) -> Made:
    return (_centered(step.get(op.x).float(), op.weight, op.bias, op.eps, step).to(step.dtype),)


def _centered(x: Tensor, weight: Weight, bias: Weight | None, eps: float, step: Step) -> Tensor:
    normed = _rms(x - x.mean(dim=-1, keepdim=True), step.weights.vector(weight), eps)
    return normed if bias is None else normed + step.weights.vector(bias)


def linear(op: ops.Linear, step: Step) -> Made:
    x = step.get(op.x) if op.norm is None else _pre_norm(op.norm, step.get(op.x), step)
    y = step.weights.product(op)(x)
    if op.gate is not None:
        half = y.shape[1] // 2
        y = gated(y[:, :half], y[:, half:], op.gate)
    if op.activation is not None:
        y = activated(y, op.activation)
    if op.residual is not None:
        y = y + step.get(op.residual)
    return torch.split(y, [out.width for out in op.outs], dim=1) if len(op.outs) > 1 else (y,)


def _pre_norm(norm: ops.PreNorm, x: Tensor, step: Step) -> Tensor:
    if norm.centered:
        return _centered(x.float(), norm.weight, norm.bias, norm.eps, step).to(step.dtype)
    return _rms(x.float(), step.weights.vector(norm.weight) + norm.weight_offset, norm.eps).to(step.dtype)


def add(op: ops.Add, step: Step) -> Made:
    return (step.get(op.a) + step.get(op.b),)


def mul(op: ops.Mul, step: Step) -> Made:
    return (step.get(op.a) * step.get(op.b),)


def scale(op: ops.Scale, step: Step) -> Made:
    return (step.get(op.x) * op.factor,)


def soft_cap(op: ops.SoftCap, step: Step) -> Made:
    x = step.get(op.x).float()
    return ((op.cap * torch.tanh(x / op.cap)).to(step.dtype),)


def act(op: ops.Act, step: Step) -> Made:
    return (activated(step.get(op.x), op.activation),)


def act_mul(op: ops.ActMul, step: Step) -> Made:
    return (gated(step.get(op.gate), step.get(op.up), op),)


def activated(x: Tensor, activation: ops.Activation) -> Tensor:
    return ACTIVATIONS[activation](x.float()).to(x.dtype)


def gated(gate: Tensor, up: Tensor, how: ops.ActMul | ops.Gate) -> Tensor:
    """f(gate) * (up + up_offset)."""
    dtype, gate, up = gate.dtype, gate.float(), up.float()
    if how.clamp is not None:
        gate, up = gate.clamp(max=how.clamp), up.clamp(-how.clamp, how.clamp)
    f = gate * torch.sigmoid(how.alpha * gate) if how.activation == "silu" else ACTIVATIONS[how.activation](gate)
    return (f * (up + how.up_offset)).to(dtype)


ACTIVATIONS: dict[ops.Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def rope(op: ops.Rope, step: Step) -> Made:
    cos, sin = step.once(op.table, lambda: _angles(op.table, step))
    x = step.get(op.x)
    x = x.view(len(x), op.num_heads, op.head_width)
    turning = x[:, :, op.rotary_start : op.rotary_start + op.rotary_dim].float()
    if op.style == "half":
        first, second = turning.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    out = x.clone()
    out[:, :, op.rotary_start : op.rotary_start + op.rotary_dim] = turned.to(step.dtype)
    return (out.view(len(x), op.x.width),)


def _angles(table: ops.RopeTable, step: Step) -> tuple[Tensor, Tensor]:
    """cos and sin `[T, 1, rotary_dim / 2] fp32`; angles in fp64, for a position of 100,000 leaves fp32 two digits behind the point."""
    angles = step.inputs["positions"].double()[:, None, None] * step.weights.constant(table)
    return (torch.cos(angles) * table.mscale).float(), (torch.sin(angles) * table.mscale).float()


def kv_write(op: ops.KvWrite, step: Step) -> Made:
    at = step.program.group_index(op.group)
    tensors, slots = step.kv[at], step.inputs["slots"][at]
    num_heads = step.program.groups[at].num_kv_heads
    parts = [step.get(part).view(len(slots), num_heads, -1) for part in op.k_parts]
    tensors.k.layer(op.layer).write(slots, parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1))
    if op.v is not None:
        tensors.v.layer(op.layer).write(slots, step.get(op.v).view(len(slots), num_heads, -1))
    return ()


def gather_rows(op: ops.GatherRows, step: Step) -> Made:
    return (step.get(op.x)[step.inputs["sample_rows"]],)


def pool_rows(op: ops.PoolRows, step: Step) -> Made:
    x = step.get(op.x)
    pooled = torch.zeros(len(step.batch.query_starts) - 1, op.out.width, dtype=step.dtype, device=step.device)
    for request, (a, b) in enumerate(pairwise(step.batch.query_starts.tolist())):
        if a < b:
            pooled[request] = x[b - 1] if op.mode == "last" else x[a] if op.mode == "cls" else x[a:b].float().mean(dim=0).to(step.dtype)
    return (pooled,)


ROW_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ops.Embedding: embedding,
    ops.RmsNorm: rms_norm,
    ops.LayerNorm: layer_norm,
    ops.Linear: linear,
    ops.Add: add,
    ops.Mul: mul,
    ops.Scale: scale,
    ops.SoftCap: soft_cap,
    ops.Act: act,
    ops.ActMul: act_mul,
    ops.Rope: rope,
    ops.KvWrite: kv_write,
    ops.GatherRows: gather_rows,
    ops.PoolRows: pool_rows,
}
