"""Attention with FlashInfer: paged decode and ragged paged prefill, planned once per step.

Steps with one row per request use the decode wrapper, others the prefill wrapper for all requests.
Layers with the same cache group, mask, heads, scale and soft cap share a plan. With a window,
blocks before the first visible key are omitted from the tables. Source: docs.flashinfer.ai,
`flashinfer.decode` and `flashinfer.prefill`.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.api.errors import BackendUnavailable
from octavo.executor.batch import StepBatch
from octavo.executor.devices import require_flashinfer
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.attention.call import AttentionCall, StepArraysMaker
from octavo.program import ops
from octavo.program.program import Op, Program

WORKSPACE_BYTES = 128 << 20
"""Workspace size that FlashInfer recommends for split states of long contexts. Plans run one at a
time and share it."""

HEAD_WIDTHS = (64, 128, 256)
"""Head sizes that FlashInfer supports on every device."""

KV_DTYPES = (torch.float16, torch.bfloat16)
LAYOUT = "NHD"
"""FlashInfer's name for blocks `[page, token, head, width]`, the layout of `KvTensor`."""


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """Pages and rows of the n requests with both rows and keys, in FlashInfer's format."""

    query_starts: NDArray[np.int32]
    """First row of each request among `rows`, and the end, `[n + 1]`."""
    starts: NDArray[np.int32]
    """First entry of each request in `blocks`, and the end, `[n + 1]`."""
    blocks: NDArray[np.int32]
    """Block ids of all requests, concatenated."""
    last_lens: NDArray[np.int32]
    """Keys in each request's last block, `[n]`."""
    rows: NDArray[np.int64] | None
    """Step rows of these requests; None: all rows."""

    @property
    def is_decode(self) -> bool:
        return len(self.last_lens) == int(self.query_starts[-1])


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWrapper:
    """A FlashInfer wrapper with a plan for this step."""

    wrapper: Any
    """FlashInfer's wrapper; None if no request has pages."""
    rows: Tensor | None
    """`Pages.rows` on the device."""


class FlashInfer:
    """FlashInfer's kernels on one device. Implements `AttentionKernels`."""

    name = "flashinfer"
    for_graphs = False
    is_invariant = False
    rope_write = None

    def __init__(self, kernels: Any, device: torch.device) -> None:
        """`kernels` is the package `flashinfer`; tests pass a substitute."""
        self._kernels = kernels
        self._device = device
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[Hashable, Any] = {}

    def graph_bytes(self, program: Program, num_requests: int, max_context: int) -> int:
        return 0

    def get_arrays_maker(self, program: Program) -> StepArraysMaker:
        return lambda batch, *, fixed: {}

    def refusal(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        if not isinstance(op, ops.Attention):
            return "MLA is not supported"
        if op.sinks is not None or op.bias is not None:
            return (
                "attention sinks are not supported"
                if op.sinks is not None
                else f"no support for {type(op.bias).__name__}"
            )
        if op.sees_ahead or op.mask == "chunk":
            return f"it knows no {'tokens that see later ones' if op.sees_ahead else 'chunks'}"
        k_width, v_width = op.q.width // op.num_heads, op.out.width // op.num_heads
        if k_width != v_width or k_width not in HEAD_WIDTHS:
            return (
                f"heads are {k_width} wide (values {v_width}), it has"
                f" {', '.join(map(str, HEAD_WIDTHS))}"
            )
        if kv_dtype not in KV_DTYPES:
            name = str(kv_dtype).removeprefix("torch.")
            return f"K and V are in {name}, supported: bfloat16 and float16"
        return None

    def attend(self, call: AttentionCall) -> Tensor:
        plan: PlannedWrapper = call.once(("flashinfer", *_kind(call)), lambda: self._plan(call))
        if plan.wrapper is None:
            return torch.zeros_like(call.q)
        q = call.q if plan.rows is None else call.q[plan.rows]
        attended: Tensor = plan.wrapper.run(
            q.to(call.k.numbers.dtype).contiguous(), (call.k.numbers, call.v.numbers)
        ).to(q.dtype)
        return (
            attended
            if plan.rows is None
            else torch.zeros_like(call.q).index_copy_(0, plan.rows, attended)
        )

    def _plan(self, call: AttentionCall) -> PlannedWrapper:
        pages = make_pages(call.batch, call.group, full=call.full, window=call.window)
        if not len(pages.last_lens):
            return PlannedWrapper(None, None)
        kv_dtype = call.k.numbers.dtype
        tables = [
            torch.from_numpy(array) for array in (pages.starts, pages.blocks, pages.last_lens)
        ]
        sizes = (call.q.shape[1], call.k.numbers.shape[2], call.v_width, BLOCK_SIZE)
        options = {
            "sm_scale": call.scale,
            "window_left": -1 if call.window is None else call.window - 1,
            "logits_soft_cap": call.softcap or 0.0,
            "q_data_type": kv_dtype,
            "kv_data_type": kv_dtype,
        }
        wrapper = self._wrapper(pages.is_decode, _kind(call))
        if pages.is_decode:
            wrapper.plan(*tables, *sizes, **options)
        else:
            wrapper.plan(
                torch.from_numpy(pages.query_starts),
                *tables,
                *sizes,
                causal=not call.full,
                **options,
            )
        return PlannedWrapper(
            wrapper, None if pages.rows is None else torch.from_numpy(pages.rows).to(self._device)
        )

    def _wrapper(self, is_decode: bool, kind: Hashable) -> Any:
        """Returns the wrapper of a kind of layers; a wrapper holds a single plan."""
        key = (is_decode, kind)
        if key not in self._wrappers:
            kernels = self._kernels
            self._wrappers[key] = (
                kernels.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, LAYOUT, use_tensor_cores=True
                )
                if is_decode
                else kernels.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)
            )
        return self._wrappers[key]


def flashinfer_on(device: torch.device) -> FlashInfer:
    """Returns the kernels; raises BackendUnavailable without CUDA or the package."""
    if device.type != "cuda":
        hint = "--attention-backend sdpa computes on any device"
        raise BackendUnavailable(
            f"attention_backend: flashinfer requires a CUDA device, got {device.type}", hint=hint
        )
    return FlashInfer(require_flashinfer(), device)


def make_pages(batch: StepBatch, group: int, *, full: bool, window: int | None) -> Pages:
    starts = batch.query_starts
    context = batch.context_lens[group]
    places = batch.places
    live = np.flatnonzero((np.diff(starts) > 0) & (context > 0))
    first_rows, num_rows = starts[:-1][live], np.diff(starts)[live]
    last_keys = (
        context[live] if full else np.minimum(places[first_rows + num_rows - 1] + 1, context[live])
    )
    first_keys = (
        np.zeros_like(last_keys)
        if window is None
        else np.maximum(0, places[first_rows] + 1 - window)
    )
    first_blocks = first_keys // BLOCK_SIZE
    num_blocks = -(-last_keys // BLOCK_SIZE) - first_blocks
    owners = np.repeat(np.arange(len(live)), num_blocks)
    ends = np.cumsum(num_blocks)
    within = np.arange(len(owners)) - np.repeat(ends - num_blocks, num_blocks)
    rows = np.repeat(first_rows - (np.cumsum(num_rows) - num_rows), num_rows) + np.arange(
        num_rows.sum()
    )
    return Pages(
        query_starts=_starts(num_rows),
        starts=_starts(num_blocks),
        blocks=batch.block_tables[group][live[owners], first_blocks[owners] + within].astype(
            np.int32
        ),
        last_lens=((last_keys - 1) % BLOCK_SIZE + 1).astype(np.int32),
        rows=None if len(rows) == len(batch.token_ids) else rows.astype(np.int64),
    )


def _starts(counts: NDArray[Any]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _kind(call: AttentionCall) -> tuple[Hashable, ...]:
    """Returns the key by which layers share a plan."""
    return (call.group, call.full, call.window, call.q.shape[1], call.scale, call.softcap)
