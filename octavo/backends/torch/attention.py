"""The attention ops over the paged cache: what every choice of kernels is asked
(`AttentionChoice`), and the choice in plain torch.

An `AttentionCall` has all that a kernel needs; a choice says which calls it takes, and `sdpa` takes
them all. Latent attention is the same call over keys and values made of latents. Formulas and
sources: `ops.Attention`, `ops.MlaAttention`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.base import BackendOptions
from octavo.backends.batch import StepBatch
from octavo.backends.torch.flashinfer import flashinfer_on
from octavo.backends.torch.kv_cache import Stored
from octavo.backends.torch.rope_write import RopeWrite, RopeWriteCall
from octavo.backends.torch.row_ops import angles
from octavo.backends.torch.rows import RequestRows, rows_of
from octavo.backends.torch.sdpa import attend
from octavo.backends.torch.step import Made, Step
from octavo.backends.torch.triton.device import is_interpreted
from octavo.backends.torch.triton.device import refusal as triton_refusal
from octavo.errors import BackendUnavailable
from octavo.program import ops
from octavo.program.program import Op, Program

logger = logging.getLogger(__name__)

Read = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Gathered cache rows `k [..., n, K, k_width]`, `v [..., n, K, v_width]` to what is attended to."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One layer's attention of one step. `q [T, H, Dk]`; `k` and `v` of the layer, as stored.

    The group's arrays are on the device: `block_tables [R, B] int32`, `context_lens [R] int32`,
    `positions [T] int32`; `rows` says the same of the requests on the host. `inputs` has all arrays
    of the step. `read` is set where keys and values are made of what is gathered (MLA; of the
    absorbed form `v` is `k`, of which values are the first `v_width` columns).
    """

    op: ops.Attention | ops.MlaAttention
    q: Tensor
    k: Stored
    v: Stored
    block_tables: Tensor
    context_lens: Tensor
    positions: Tensor
    inputs: Mapping[str, Tensor]
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
    """Added to scores: `make(key positions [..., n], query positions [..., M]) -> [..., H, M, n]
    fp32`.

    Either `slopes [H] fp32`, of ALiBi, or `by_distance() [H, 2 d + 1] fp32`, of key position -
    query position from -d on; beyond d it is constant.
    """

    make: Callable[[Tensor, Tensor], Tensor]
    slopes: Tensor | None = None
    by_distance: Callable[[], Tensor] | None = None


class ArraysOf(Protocol):
    def __call__(self, batch: StepBatch, *, fixed: bool) -> dict[str, NDArray]:
        """`fixed`: a captured step, whose arrays' shapes depend on the number of its requests and
        the width of its tables only.
        """
        ...


class AttentionChoice(Protocol):
    """A set of kernels."""

    name: str
    for_graphs: bool
    """Whether it reads contexts' lengths on the device, so that a captured step costs no more than
    it has keys.
    """
    is_invariant: bool
    """A row's result is the same bits in any company."""

    def refusal(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        """Why it cannot take such calls, in words; None where it can. Asked when a Program is
        prepared.
        """
        ...

    def attend(self, call: AttentionCall) -> Tensor:
        """`[T, H, v_width]` in q's dtype; rows of no request are anything."""
        ...

    def graph_bytes(self, program: Program, num_requests: int, max_context: int) -> int:
        """What it takes beside its results in captured steps of so many requests."""
        ...

    def arrays_of(self, program: Program) -> ArraysOf:
        """Makes what its kernels read of a step beside `step_arrays`, to go over in the same
        copy."""
        ...

    @property
    def rope_write(self) -> Callable[[RopeWriteCall], Tensor] | None:
        """Writes keys and values and gives the rotated queries `[T, H, Dk]`; None: an op at a
        time."""
        ...


class Sdpa:
    """Plain torch, on any device: PyTorch's scaled dot product attention, or its formula where an
    attribute asks for more.
    """

    name = "sdpa"
    for_graphs = False
    is_invariant = False
    rope_write = None

    def graph_bytes(self, program: Program, num_requests: int, max_context: int) -> int:
        return 0

    def arrays_of(self, program: Program) -> ArraysOf:
        return lambda batch, *, fixed: {}

    def refusal(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> Tensor:
        return attend(call)


def _triton_on(options: BackendOptions, device: torch.device) -> AttentionChoice:
    """Triton is imported here, and nowhere before."""
    if refused := triton_refusal(device):
        why, hint = refused
        raise BackendUnavailable(f"attention_backend: got 'triton', but {why}", hint=hint)
    from octavo.backends.torch.triton.attention import TritonAttention
    from octavo.backends.torch.triton.fit import shared_bytes

    return TritonAttention(
        device,
        fixed_tiles=options.batch_invariant,
        share_prefixes=options.shared_prefix_attention,
        shared_bytes=None if is_interpreted() else shared_bytes(device),
    )


CHOICES: dict[str, Callable[[BackendOptions, torch.device], AttentionChoice]] = {
    "triton": _triton_on,
    "sdpa": lambda options, device: Sdpa(),
    "flashinfer": lambda options, device: flashinfer_on(device),
}
"""By the name of the option `attention_backend`. BackendUnavailable says why one cannot be."""


def choose_attention(options: BackendOptions, device: torch.device) -> tuple[AttentionChoice, ...]:
    """The one that the options name; "auto": on CUDA triton where it is there, then sdpa for what
    it does not take; elsewhere sdpa.
    """
    if options.attention_backend != "auto":
        return (CHOICES[options.attention_backend](options, device),)
    sdpa = CHOICES["sdpa"](options, device)
    if device.type != "cuda":
        return (sdpa,)
    try:
        return CHOICES["triton"](options, device), sdpa
    except BackendUnavailable as error:
        logger.warning("attention is computed with sdpa: %s", error.message)
        return (sdpa,)


def takes_all(
    choices: Sequence[AttentionChoice], program: Program, kv_dtype: torch.dtype
) -> AttentionChoice:
    """The first choice that takes all of a Program's attention; BackendUnavailable says why none
    does. A worse one is logged.
    """
    refused: list[str] = []
    for choice in choices:
        calls = [op for op in program.ops if isinstance(op, ops.Attention | ops.MlaAttention)]
        reasons = {why for op in calls if (why := choice.refusal(op, kv_dtype)) is not None}
        if not reasons:
            if refused:
                logger.warning(
                    "attention of the %s is computed with %s, for %s",
                    program.name,
                    choice.name,
                    "; ".join(refused),
                )
            return choice
        refused.append(f"{choice.name}: {', '.join(sorted(reasons))}")
    raise BackendUnavailable(
        f"the torch backend cannot run attention with {'; '.join(refused)} (in {program.name})"
    )


def attention(op: ops.Attention, step: Step) -> Made:
    at = step.program.group_index(op.group)
    group, cache = step.program.groups[at], step.kv[at]
    q = step.get(op.q)
    call = AttentionCall(
        op=op,
        q=q.view(len(q), op.num_heads, group.k_width),
        k=cache.k.layer(op.layer),
        v=cache.v.layer(op.layer),
        **_paging(
            step, at, full=op.mask == "full", window=op.window if op.mask == "window" else None
        ),
        scale=op.scale,
        v_width=group.v_width,
        softcap=op.softcap,
        sinks=None if op.sinks is None else step.weights.vector(op.sinks),
        bias=_bias(op.bias, step),
    )
    return (step.attention.attend(call).reshape(len(q), op.out.width),)


def mla_attention(op: ops.MlaAttention, step: Step) -> Made:
    """Absorbed: one shared head of latents, q turned into latent space. Expanded: each head's own
    keys and values.
    """
    at = step.program.group_index(op.group)
    cache = step.kv[at]
    heads = (
        step.weights.matrix(op.kv_b)
        .floats(step.dtype)
        .view(op.num_heads, op.nope_width + op.v_width, op.latent_width)
    )
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
        v=(cache.k if absorbed else cache.v).layer(op.layer),
        **_paging(step, at, full=False, window=None),
        scale=op.scale,
        v_width=op.latent_width if absorbed else op.v_width,
        read=_latents(op) if absorbed else _expanded(op, up_k, up_v),
    )
    out = step.attention.attend(call)
    if absorbed:
        out = torch.einsum("thl,hvl->thv", out, up_v)
    return (out.reshape(len(out), op.out.width),)


def rope_write(op: RopeWrite, step: Step) -> Made:
    at = step.program.group_index(op.group)
    group, cache = step.program.groups[at], step.kv[at]
    cos, sin = step.once(op.table, lambda: angles(op.table, step))
    q, k, v = (step.get(value) for value in (op.q, op.k, op.v))
    assert step.attention.rope_write is not None
    call = RopeWriteCall(
        op,
        q.view(len(q), op.num_heads, op.head_width),
        k.view(len(k), group.num_kv_heads, op.head_width),
        v.view(len(v), group.num_kv_heads, group.v_width),
        cos,
        sin,
        step.inputs["slots"][at],
        cache.k.layer(op.layer),
        cache.v.layer(op.layer),
    )
    return (step.attention.rope_write(call).view(len(q), op.out.width),)


def _paging(step: Step, at: int, *, full: bool, window: int | None) -> dict[str, Any]:
    """A group's tables and rows; the rows are worked out once a step for all layers alike."""
    return {
        "block_tables": step.inputs["block_tables"][at],
        "context_lens": step.inputs["context_lens"][at],
        "positions": step.inputs["positions"],
        "inputs": step.inputs,
        "batch": step.batch,
        "group": at,
        "once": step.once,
        "rows": step.once(
            (at, full, window),
            lambda: rows_of(step.batch, at, full=full, window=window, device=step.device),
        ),
        "window": window,
        "full": full,
    }


def _latents(op: ops.MlaAttention) -> Read:
    return lambda k, _: (k, k[..., : op.latent_width])


def _expanded(op: ops.MlaAttention, up_k: Tensor, up_v: Tensor) -> Read:
    def read(k: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        latents, rope = (
            k[..., : op.latent_width].to(up_k.dtype),
            k[..., op.latent_width :].to(up_k.dtype),
        )
        own = torch.einsum("...nl,hdl->...nhd", latents[..., 0, :], up_k)
        v = torch.einsum("...nl,hvl->...nhv", latents[..., 0, :], up_v)
        return torch.cat([own, rope.expand(*own.shape[:-1], op.rope_width)], dim=-1), v

    return read


def _bias(bias: ops.T5Bias | ops.AlibiBias | None, step: Step) -> Bias | None:
    if isinstance(bias, ops.T5Bias):
        table = step.weights.vector(bias.table)

        def by_distance() -> Tensor:
            far = torch.arange(-bias.max_distance, bias.max_distance + 1, device=step.device)
            return table[t5_buckets(far, bias)].T.contiguous()

        def make(keys: Tensor, queries: Tensor) -> Tensor:
            return table[t5_buckets(_distance(keys, queries), bias)].movedim(-1, -3)

        return Bias(make, by_distance=lambda: step.once(bias, by_distance))
    if isinstance(bias, ops.AlibiBias):
        slopes = step.weights.constant(bias).float()
        return Bias(
            lambda keys, queries: slopes[:, None, None] * _distance(keys, queries)[..., None, :, :],
            slopes=slopes,
        )
    return None


def _distance(keys: Tensor, queries: Tensor) -> Tensor:
    """Key position - query position, `[..., M, n]`."""
    return keys[..., None, :] - queries[..., :, None]


def t5_buckets(distance: Tensor, bias: ops.T5Bias) -> Tensor:
    """As `reference_attention.t5_buckets`."""
    num_buckets = bias.num_buckets // 2 if bias.bidirectional else bias.num_buckets
    right = (
        (distance > 0).long() * num_buckets if bias.bidirectional else torch.zeros_like(distance)
    )
    away = distance.abs() if bias.bidirectional else (-distance).clamp(min=0)
    exact = num_buckets // 2
    spread = torch.tensor(bias.max_distance / exact, dtype=torch.float64).log()
    octaves = (away.clamp(min=exact).double() / exact).log() / spread.item()
    far = (exact + (octaves * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return right + torch.where(away < exact, away, far)


ATTENTION_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ops.Attention: attention,
    ops.MlaAttention: mla_attention,
    RopeWrite: rope_write,
}
