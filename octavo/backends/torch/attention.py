"""The attention ops over the paged cache: what every choice of kernels is asked (`AttentionChoice`), and the choice in plain torch.

An `AttentionCall` has all that a kernel needs; a choice says which calls it takes, and `sdpa` takes them all. Latent attention is the
same call over keys and values made of latents. Formulas and sources: `ops.Attention`, `ops.MlaAttention`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.backends.base import StepBatch
from octavo.backends.torch.flashinfer import flashinfer_on
from octavo.backends.torch.kv_cache import Stored
from octavo.backends.torch.rows import RequestRows, rows_of
from octavo.backends.torch.sdpa import attend
from octavo.backends.torch.step import Made, Step
from octavo.program import ops
from octavo.program.program import Op

Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gathered cache rows `k [..., n, K, k_width]`, `v [..., n, K, v_width]` to what is attended to."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One layer's attention of one step. `q [T, H, Dk]`; `k` and `v` of the layer, as stored.

    The group's arrays are on the device: `block_tables [R, B] int32`, `context_lens [R] int32`, `positions [T] int32`; `rows` says the
    same of the requests on the host. `read` is set where keys and values are made of what is gathered (MLA).
    """

    op: ops.Attention | ops.MlaAttention
    q: Tensor
    k: Stored
    v: Stored
    block_tables: Tensor
    context_lens: Tensor
    positions: Tensor
    rows: RequestRows
    batch: StepBatch
    """The step on the host; this attention's part of it is that of `group`."""
    group: int
    once: Callable[[Any, Callable[[], Any]], Any]
    """`Step.once`: what several layers need alike."""
    scale: float
    v_width: int
    window: int | None = None
    full: bool = False
    """Every key of the request is seen, whatever its position."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """`[H] fp32`"""
    bias: Bias | None = None
    read: Read | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """Added to scores: `make(key positions [..., n], query positions [..., M]) -> [..., H, M, n] fp32`."""

    make: Callable[[Tensor, Tensor], Tensor]


class AttentionChoice(Protocol):
    """A set of kernels."""

    name: str
    for_graphs: bool
    """Whether it reads contexts' lengths on the device, so that a captured step costs no more than it has keys."""

    def refusal(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        """Why it cannot take such calls, in words; None where it can. Asked when a Program is prepared."""
        ...

    def attend(self, call: AttentionCall) -> Tensor:
        """`[T, H, v_width]` in q's dtype; rows of no request are anything."""
        ...


class Sdpa:
    """Plain torch, on any device: PyTorch's scaled dot product attention, or its formula where an attribute asks for more."""

    name = "sdpa"
    for_graphs = False

    def refusal(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> Tensor:
        return attend(call)


CHOICES: dict[str, Callable[[torch.device], AttentionChoice]] = {"sdpa": lambda device: Sdpa(), "flashinfer": flashinfer_on}
"""By the name of the option `attention_backend`, the one that "auto" means first."""


def choose_attention(wanted: str, device: torch.device) -> AttentionChoice:
    """BackendUnavailable says why it cannot be."""
    return CHOICES[next(iter(CHOICES)) if wanted == "auto" else wanted](device)


def attention(op: ops.Attention, step: Step) -> Made:
    at = step.program.group_index(op.group)
    group, cache = step.program.groups[at], step.kv[at]
    q = step.get(op.q)
    call = AttentionCall(
        op=op,
        q=q.view(len(q), op.num_heads, group.k_width),
        k=cache.k.layer(op.layer),
        v=cache.v.layer(op.layer),
        **_paging(step, at, full=op.mask == "full", window=op.window if op.mask == "window" else None),
        scale=op.scale,
        v_width=group.v_width,
        softcap=op.softcap,
        sinks=None if op.sinks is None else step.weights.vector(op.sinks),
        bias=_bias(op.bias, step),
    )
    return (step.attention.attend(call).reshape(len(q), op.out.width),)


def mla_attention(op: ops.MlaAttention, step: Step) -> Made:
    """Absorbed: one shared head of latents, q turned into latent space. Expanded: each head's own keys and values."""
    at = step.program.group_index(op.group)
    cache = step.kv[at]
    heads = step.weights.matrix(op.kv_b).floats(step.dtype).view(op.num_heads, op.nope_width + op.v_width, op.latent_width)
    up_k, up_v = heads[:, : op.nope_width], heads[:, op.nope_width :]
    q_nope, q_rope = step.get(op.q_nope), step.get(op.q_rope)
    q_nope = q_nope.view(len(q_nope), op.num_heads, op.nope_width)
    q_rope = q_rope.view(len(q_rope), op.num_heads, op.rope_width)
    absorbed = op.form == "absorbed"
    if absorbed:
        q_nope = torch.einsum("thn,hnl->thl", q_nope, up_k)
    call = AttentionCall(
        op=op,
        q=torch.cat([q_nope, q_rope], dim=-1),
        k=cache.k.layer(op.layer),
        v=cache.v.layer(op.layer),
        **_paging(step, at, full=False, window=None),
        scale=op.scale,
        v_width=op.latent_width if absorbed else op.v_width,
        read=_latents(op) if absorbed else _expanded(op, up_k, up_v),
    )
    out = step.attention.attend(call)
    if absorbed:
        out = torch.einsum("thl,hvl->thv", out, up_v)
    return (out.reshape(len(out), op.out.width),)


def _paging(step: Step, at: int, *, full: bool, window: int | None) -> dict[str, Any]:
    """A group's tables and rows; the rows are worked out once a step for all layers alike."""
    return {
        "block_tables": step.inputs["block_tables"][at],
        "context_lens": step.inputs["context_lens"][at],
        "positions": step.inputs["positions"],
        "batch": step.batch,
        "group": at,
        "once": step.once,
        "rows": step.once((at, full, window), lambda: rows_of(step.batch, at, full=full, window=window, device=step.device)),
        "window": window,
        "full": full,
    }


def _latents(op: ops.MlaAttention) -> Read:
    return lambda k, _: (k, k[..., : op.latent_width])


def _expanded(op: ops.MlaAttention, up_k: Tensor, up_v: Tensor) -> Read:
    def read(k: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        latents, rope = k[..., : op.latent_width].to(up_k.dtype), k[..., op.latent_width :].to(up_k.dtype)
        own = torch.einsum("...nl,hdl->...nhd", latents[..., 0, :], up_k)
        v = torch.einsum("...nl,hvl->...nhv", latents[..., 0, :], up_v)
        return torch.cat([own, rope.expand(*own.shape[:-1], op.rope_width)], dim=-1), v

    return read


def _bias(bias: ops.T5Bias | ops.AlibiBias | None, step: Step) -> Bias | None:
    if isinstance(bias, ops.T5Bias):
        table = step.weights.vector(bias.table)
        return Bias(lambda keys, queries: table[t5_buckets(_distance(keys, queries), bias)].movedim(-1, -3))
    if isinstance(bias, ops.AlibiBias):
        slopes = step.weights.constant(bias).float()
        return Bias(lambda keys, queries: slopes[:, None, None] * _distance(keys, queries)[..., None, :, :])
    return None


def _distance(keys: Tensor, queries: Tensor) -> Tensor:
    """Key position - query position, `[..., M, n]`."""
    return keys[..., None, :] - queries[..., :, None]


def t5_buckets(distance: Tensor, bias: ops.T5Bias) -> Tensor:
    """As `reference_attention.t5_buckets`."""
    num_buckets = bias.num_buckets // 2 if bias.bidirectional else bias.num_buckets
    right = (distance > 0).long() * num_buckets if bias.bidirectional else torch.zeros_like(distance)
    away = distance.abs() if bias.bidirectional else (-distance).clamp(min=0)
    exact = num_buckets // 2
    spread = torch.tensor(bias.max_distance / exact, dtype=torch.float64).log()
    octaves = (away.clamp(min=exact).double() / exact).log() / spread.item()
    far = (exact + (octaves * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return right + torch.where(away < exact, away, far)


ATTENTION_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ops.Attention: attention,
    ops.MlaAttention: mla_attention,
}
