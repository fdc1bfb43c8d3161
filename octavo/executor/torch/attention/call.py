"""Attention calls and the interface of attention kernels.

An `AttentionCall` contains everything that kernels read of one layer in one step; latent attention
is the same call over keys and values expanded from latents. The kernels (`sdpa`,
`triton.attention`) import this file, `choose` imports them. Formulas: `ops.Attention` and
`ops.MlaAttention`.
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
"""Expands gathered cache rows `k [..., n, K, k_width]`, `v [..., n, K, v_width]` to the keys and
values that queries attend to."""


@dataclass(frozen=True, slots=True, eq=False)
class Bias:
    """A bias added to scores, as a function and in forms that kernels can read."""

    make: Callable[[Tensor, Tensor], Tensor]
    """Computes the bias `[..., H, M, n] fp32` from key indices `[..., n]` and query indices
    `[..., M]`.
    """
    slopes: Tensor | None = None
    """ALiBi slopes `[H] fp32`; None for other biases."""
    by_distance: Callable[[], Tensor] | None = None
    """Makes the table `[H, 2 d + 1] fp32` of a bias that depends only on the distance, from -d to
    d; the bias is constant beyond d.
    """


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One layer's attention in one step."""

    op: ops.Attention | ops.MlaAttention
    q: Tensor
    """`[T, H, Dk]`"""
    k: KvTensor
    """Keys of this layer, as stored."""
    v: KvTensor
    """Values of this layer, as stored; absorbed latent attention passes `k` here, whose first
    `v_width` columns are the values."""
    block_tables: Tensor
    """`[R, B] int32`, on the device"""
    context_lens: Tensor
    """Keys per request, `[R] int32`, on the device."""
    key_indices: Tensor
    """Key index of each row, `[T] int32`, on the device."""
    inputs: Mapping[str, Tensor]
    """All device arrays of the step, by name."""
    rows: QueryRows
    """Rows by request, computed on the host."""
    batch: StepBatch
    """The step on the host, with all cache groups."""
    group: int
    """Index of this layer's cache group."""
    once: Callable[[Any, Callable[[], Any]], Any]
    """`Step.once`, which caches values shared by several layers of the step."""
    scale: float
    v_width: int
    window: int | None = None
    """Number of keys that a row sees, including its own; with `chunks`, the chunk length."""
    chunks: bool = False
    """Whether a row sees only its own chunk."""
    full: bool = False
    """Whether a row sees every key of its request."""
    limits: Tensor | None = None
    """One past the last visible key of each row, `[T] int32`, on the device; None: the row's key
    index + 1.
    """
    softcap: float | None = None
    sinks: Tensor | None = None
    """Attention sinks: one logit per query head, `[H] fp32`."""
    bias: Bias | None = None
    expand: ExpandKv | None = None
    """Set if keys and values are expanded from gathered cache rows (latent attention)."""


class StepArraysMaker(Protocol):
    """Makes the step arrays that only one kernel set reads, in addition to `step_arrays`."""

    def __call__(self, batch: StepBatch, *, fixed: bool) -> dict[str, NDArray]:
        """Returns arrays by name.

        With `fixed` the step will be captured, so shapes may depend only on the number of requests
        and the width of the block tables.
        """
        ...


class AttentionKernels(Protocol):
    """Interface of attention kernels."""

    name: str
    for_graphs: bool
    """Whether kernels read context lengths on the device, so that a captured step is not slower
    than its context requires."""
    is_invariant: bool
    """Whether a row's bits are independent of other rows."""

    def unsupported_reason(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        """Returns the reason why the kernels cannot compute this op; None if they can. Called when
        a Program is prepared.
        """
        ...

    def attend(self, call: AttentionCall) -> Tensor:
        """Computes `[T, H, v_width]` in q's dtype. Rows without a request are undefined."""
        ...

    def graph_bytes(self, program: Program, num_requests: int, max_context: int) -> int:
        """Returns the scratch memory of captured steps of `num_requests`, in bytes."""
        ...

    def get_arrays_maker(self, program: Program) -> StepArraysMaker:
        """Returns a function that makes the kernels' own step arrays, which are copied along with
        `step_arrays`.
        """
        ...

    @property
    def rope_write(self) -> Callable[[RopeWriteCall], Tensor] | None:
        """Kernel that writes keys and values and returns rotated queries `[T, H, Dk]`; None:
        separate ops.
        """
        ...
