"""Rotating queries and keys and writing keys and values as one op, which attention kernels may
compute in one launch.

Found in a prepared Program by which op makes and which reads a Value, as the fuse pass does. Made
only where the chosen kernels have such a launch (`AttentionKernels.rope_write`), so no other
backend meets it.
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
    """The `Rope` of q (to `out`) and of k, both with these attributes, and the `KvWrite` of the
    rotated k and of v.
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
    """The arrays of a `RopeWrite`; q, k and v have one type, and rows at any stride."""

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
    """Slot that each row's k and v are written to, `[T] int64`; -1 for none."""
    k_stored: KvTensor
    v_stored: KvTensor


def with_rope_writes(body: Sequence[Op], kept: Collection[str]) -> list[Op]:
    """Replaces each pair of ropes and a write that can be one `RopeWrite`, at the place of the
    write. `kept` names Values that are read outside of `body`.
    """
    made = {value.name: at for at, op in enumerate(body) for value in op.outputs}
    read: dict[str, list[int]] = {}
    for at, op in enumerate(body):
        for value in op.inputs:
            read.setdefault(value.name, []).append(at)
    taken: dict[int, RopeWrite | None] = {}
    for at, op in enumerate(body):
        if not isinstance(op, ops.KvWrite) or op.v is None or len(op.k_parts) != 1:
            continue
        k_at = made.get(op.k_parts[0].name, -1)
        k = body[k_at]
        if (
            k_at < 0
            or not isinstance(k, ops.Rope)
            or read[k.out.name] != [at]
            or k.out.name in kept
        ):
            continue
        q_at = next(
            (
                q
                for q in range(at - 1, -1, -1)
                if q != k_at and q not in taken and _alike(body[q], k)
            ),
            None,
        )
        if q_at is None:
            continue
        q = body[q_at]
        assert isinstance(q, ops.Rope)
        if min(read.get(q.out.name, [at])) < at:
            continue
        taken |= {q_at: None, k_at: None}
        taken[at] = RopeWrite(
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
    ordered = [taken.get(at, op) for at, op in enumerate(body)]
    return [op for op in ordered if op is not None]


def _alike(op: Op, k: ops.Rope) -> bool:
    """Returns whether an op is a Rope with the same head width and rotation as k's."""
    if not isinstance(op, ops.Rope):
        return False
    mine, its = ((r.head_width, r.rotary_dim, r.rotary_start, r.table, r.style) for r in (op, k))
    return mine == its
