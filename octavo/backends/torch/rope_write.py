"""Queries and keys rotated, keys and values written, as one op: what a choice of attention kernels
may compute in one launch.

Found among a prepared Program's ops by who makes and who reads a Value, like the fuse pass does;
made only where the choice has such a kernel (`attention.AttentionKernels.rope_write`), so no other
backend meets it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from octavo.backends.torch.kv_cache import KvTensor
from octavo.program import ops
from octavo.program.program import Op, Value


@dataclass(frozen=True, slots=True)
class RopeWrite(Op):
    """`Rope` of q (to `out`) and of k, both with these attributes, and `KvWrite` of the rotated k
    and of v.
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
    """`q [T, H, Dk]`, `k [T, K, Dk]`, `v [T, K, Dv]` in one dtype, rows at any stride; `cos`, `sin
    [T, rotary_dim / 2] fp32`.

    `slots [T] int64`: where a row's k and v go, -1: nowhere.
    """

    op: RopeWrite
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
    k_stored: KvTensor
    v_stored: KvTensor


def with_rope_writes(body: Sequence[Op], kept: Collection[str]) -> list[Op]:
    """The ops with every rope, rope and write that can be one made one, where the write stood.
    `kept`: Values read outside of them.
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
            q.x,
            k.x,
            op.v,
            q.out,
            op.group,
            op.layer,
            q.num_heads,
            q.head_width,
            q.rotary_dim,
            q.rotary_start,
            q.table,
            q.style,
        )
    ordered = [taken.get(at, op) for at, op in enumerate(body)]
    return [op for op in ordered if op is not None]


def _alike(op: Op, k: ops.Rope) -> bool:
    """Another Rope that turns heads of the same width in the same way."""
    if not isinstance(op, ops.Rope):
        return False
    mine, its = ((r.head_width, r.rotary_dim, r.rotary_start, r.table, r.style) for r in (op, k))
    return mine == its
