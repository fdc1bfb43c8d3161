"""Combines RoPE of queries and keys with the KV write into one op, which attention kernels may
compute in one launch.

Such combinations are found in a prepared Program from the producers and readers of Values. Only
used if the chosen kernels support it (`AttentionKernels.rope_write`), so other backends never see
this op.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from octavo.executor.torch.kv_cache import KvTensor
from octavo.program import ops
from octavo.program.program import Op, Value


@dataclass(frozen=True, slots=True)
class RopeWrite(Op):
    """`Rope` of q (to `out`) and of k with these attributes, and `KvWrite` of the rotated k and of
    v.
    """

    q: Value
    k: Value
    v: Value
    out: Value
    group: str
    layer: int
    num_heads: int
    head_width: int
    rotary_dim: int
    rotary_start: int
    table: ops.RopeTable
    style: Literal["half", "interleaved"]


@dataclass(frozen=True, slots=True, eq=False)
class RopeWriteCall:
    """Arrays of a `RopeWrite`; q, k and v have one dtype and arbitrary row strides."""

    op: RopeWrite
    q: Tensor
    """`[T, H, Dk]`"""
    k: Tensor
    """`[T, K, Dk]`"""
    v: Tensor
    """`[T, K, Dv]`"""
    cos: Tensor
    """`[T, rotary_dim / 2] fp32`"""
    sin: Tensor
    """`[T, rotary_dim / 2] fp32`"""
    slots: Tensor
    """Slot of each row, `[T] int64`; -1 for none."""
    k_stored: KvTensor
    v_stored: KvTensor


def with_rope_writes(body: Sequence[Op], kept_names: Collection[str]) -> list[Op]:
    """Replaces ropes followed by a KV write with one `RopeWrite` where possible. `kept_names` names
    Values that are read outside of `body`.
    """
    producers = {value.name: index for index, op in enumerate(body) for value in op.outputs}
    read: dict[str, list[int]] = {}
    for index, op in enumerate(body):
        for value in op.inputs:
            read.setdefault(value.name, []).append(index)
    replaced: dict[int, RopeWrite | None] = {}
    for index, op in enumerate(body):
        if not isinstance(op, ops.KvWrite) or op.v is None or len(op.k_parts) != 1:
            continue
        k_at = producers.get(op.k_parts[0].name, -1)
        k = body[k_at]
        if (
            k_at < 0
            or not isinstance(k, ops.Rope)
            or read[k.out.name] != [index]
            or k.out.name in kept_names
        ):
            continue
        q_at = next(
            (
                q
                for q in range(index - 1, -1, -1)
                if q != k_at and q not in replaced and _is_same_rotation(body[q], k)
            ),
            None,
        )
        if q_at is None:
            continue
        q = body[q_at]
        assert isinstance(q, ops.Rope)
        if min(read.get(q.out.name, [index])) < index:
            continue
        replaced |= {q_at: None, k_at: None}
        replaced[index] = RopeWrite(
            q=q.x,
            k=k.x,
            v=op.v,
            out=q.out,
            group=op.group,
            layer=op.layer,
            num_heads=q.num_heads,
            head_width=q.head_width,
            rotary_dim=q.rotary_dim,
            rotary_start=q.rotary_start,
            table=q.table,
            style=q.style,
        )
    ordered = [replaced.get(index, op) for index, op in enumerate(body)]
    return [op for op in ordered if op is not None]


def _is_same_rotation(op: Op, k: ops.Rope) -> bool:
    """Returns whether an op is a Rope with the same head size and rotation as k's."""
    if not isinstance(op, ops.Rope):
        return False
    mine, its = ((r.head_width, r.rotary_dim, r.rotary_start, r.table, r.style) for r in (op, k))
    return mine == its
