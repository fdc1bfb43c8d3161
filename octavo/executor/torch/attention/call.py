"""What an attention call is made of, and what a set of attention kernels must offer.

An `AttentionCall` carries everything that kernels read of one layer in one step; latent attention
is the same call over keys and values made of latents. The kernels (`sdpa`, `flashinfer`,
`triton.attention`) import this file; `choose` stands above them. Knows no formula: these stand in
`ops.Attention` and `ops.MlaAttention`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.batch import StepBatch
from octavo.executor.torch.attention.query_rows import QueryRows
from octavo.executor.torch.kv_cache import KvTensor
from octavo.executor.torch.rope_write import RopeWriteCall
from octavo.program import ops
from octavo.program.program import Op, Program

ExpandKv = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Makes keys and values out of gathered cache rows: `k [..., n, K, k_width]` and
`v [..., n, K, v_width]` in, what queries attend to out."""


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """A bias added to scores, as a function and in the form that kernels can read."""

    make: Callable[[Tensor, Tensor], Tensor]
    """Makes the bias `[..., H, M, n] fp32` of key places `[..., n]` and query places
    `[..., M]`."""
    slopes: Tensor | None = None
    """ALiBi's slopes `[H] fp32`; None for a bias by distance."""
    by_distance: Callable[[], Tensor] | None = None
    """Makes the table `[H, 2 d + 1] fp32` of a bias that depends on key place - query place
    alone, from -d to d; beyond d the bias is constant."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One layer's attention in one step."""

    op: ops.Attention | ops.MlaAttention
    q: Tensor
    """Queries `[T, H, Dk]`."""
    k: KvTensor
    """Keys of this layer, as stored."""
    v: KvTensor
    """Values of this layer, as stored; the absorbed form of latent attention has `k` here, the
    first `v_width` columns of which are its values."""
    block_tables: Tensor
    """Block tables of the cache group on the device, `[R, B] int32`."""
    context_lens: Tensor
    """Numbers of keys by request, on the device, `[R] int32`."""
    places: Tensor
    """Place of each row, which is its key index, on the device, `[T] int32`."""
    inputs: Mapping[str, Tensor]
    """All arrays of the step on the device, by name."""
    rows: QueryRows
    """Rows by request, worked out on the host."""
    batch: StepBatch
    """The step on the host, with all of its cache groups."""
    group: int
    """Index of this layer's cache group."""
    once: Callable[[Any, Callable[[], Any]], Any]
    """`Step.once`, which keeps what several layers share for the length of the step."""
    scale: float
    v_width: int
    window: int | None = None
    """Keys up to its own that a row sees, or with `chunks` the length of a chunk."""
    chunks: bool = False
    """Whether a row sees the keys of its own chunk."""
    full: bool = False
    """Whether a row sees every key of its request, whatever the key's place."""
    limits: Tensor | None = None
    """One past the last key that each row sees, on the device, `[T] int32`; None: its place + 1."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """Attention sinks, one logit a query head, `[H] fp32`."""
    bias: Bias | None = None
    expand: ExpandKv | None = None
    """Set where keys and values are made of the gathered cache rows (latent attention)."""


class StepArraysMaker(Protocol):
    """Makes the arrays that a set of kernels reads of a step beside `step_arrays`."""

    def __call__(self, batch: StepBatch, *, fixed: bool) -> dict[str, NDArray]:
        """Returns the arrays by name. `fixed` is set for a captured step: then shapes may depend
        only on the number of its requests and the width of its block tables.
        """
        ...


class AttentionKernels(Protocol):
    """A set of kernels that compute attention."""

    name: str
    for_graphs: bool
    """Whether the kernels read context lengths on the device, so that a captured step costs no more
    than its keys."""
    is_invariant: bool
    """Whether a row's result has the same bits whatever rows stand beside it."""

    def refusal(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        """Says in words why the kernels cannot compute this op, or None where they can. Called when
        a Program is prepared.
        """
        ...

    def attend(self, call: AttentionCall) -> Tensor:
        """Computes `[T, H, v_width]` in q's dtype. Rows that belong to no request hold anything."""
        ...

    def graph_bytes(self, program: Program, num_requests: int, max_context: int) -> int:
        """Returns the bytes of scratch memory that captured steps of `num_requests` take."""
        ...

    def arrays_of(self, program: Program) -> StepArraysMaker:
        """Returns what makes the kernels' own arrays of a step; they go to the device in the same
        copy as `step_arrays`.
        """
        ...

    @property
    def rope_write(self) -> Callable[[RopeWriteCall], Tensor] | None:
        """A kernel that writes keys and values and returns the rotated queries `[T, H, Dk]`; None
        where these stay separate ops."""
        ...
