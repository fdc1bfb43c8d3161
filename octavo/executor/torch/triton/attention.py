"""Triton attention kernels: supported ops and launches.

Requests with one row use `decode.py` and `merge.py`, others `prefill.py`, or on CUDA PyTorch's
attention (`attention/prompts.py`) if they have many rows. Triton's kernels read the step's arrays
on the device only, so a captured launch works for any lengths. Tile sizes come from
`attention_tiles.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE, SPLIT_KEYS
from octavo.executor.torch.attention import prompts
from octavo.executor.torch.attention.call import AttentionCall, StepArraysMaker
from octavo.executor.torch.rope_write import RopeWriteCall
from octavo.executor.torch.triton.attention_arguments import (
    HeadTile,
    Mask,
    PagedKv,
    Queries,
    Requests,
    Runs,
    Scoring,
    Slots,
    SplitStates,
    Widths,
)
from octavo.executor.torch.triton.attention_tiles import AttentionTiles
from octavo.executor.torch.triton.decode import decode_kernel
from octavo.executor.torch.triton.device import device_name
from octavo.executor.torch.triton.merge import merge_kernel
from octavo.executor.torch.triton.prefill import prefill_kernel
from octavo.executor.torch.triton.rope_write import rope_write
from octavo.executor.torch.triton.shared_prefix import PrefixMask, array_names
from octavo.executor.torch.weights.fp8 import E4M3
from octavo.program import ops
from octavo.program.program import Op, Program

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, E4M3)

MOST_STATE_BYTES = 256 << 20
"""Maximum number of bytes of split states of one launch: enough for 256 requests of 32 heads of 128
with contexts of 8,192. More requests use additional launches.
"""

ENOUGH_PROGRAMS = 8192
"""Number of programs beyond which a decode launch is not split further: a few waves on a large GPU.
With more runs and heads, each uses fewer programs, so that a captured launch for the longest
context has few idle programs.
"""

ENOUGH_SHARED_PROGRAMS = 2048
"""The same for runs over shared prefixes, most of which are empty in a captured step."""


class TritonAttention:
    """Triton's attention kernels on one device. Implements `AttentionKernels`."""

    name = "triton"
    for_graphs = True

    def __init__(
        self,
        device: torch.device,
        *,
        fixed_tiles: bool = False,
        share_prefixes: bool = True,
        shared_bytes: int | None = None,
    ) -> None:
        """`shared_bytes` is the shared memory per program (`fit.shared_bytes`); None: unlimited."""
        self._device = device_name(device)
        self._tiles = AttentionTiles(device, fixed_tiles=fixed_tiles, shared_bytes=shared_bytes)
        self.is_invariant = fixed_tiles
        self._uses_sdpa = device.type == "cuda" and not fixed_tiles
        self._share_prefixes = share_prefixes

    def unsupported_reason(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        if isinstance(op, ops.MlaAttention) and op.form != "absorbed":
            return "expanded latent attention is not supported"
        if kv_dtype not in KV_DTYPES:
            return f"its kernels read no KV cache of {str(kv_dtype).removeprefix('torch.')}"
        if isinstance(op, ops.Attention) and op.sees_ahead:
            return "its kernels know no tokens that see later ones"
        assert isinstance(op, ops.Attention | ops.MlaAttention)
        return self._tiles.unsupported_reason(*_get_head_widths(op), kv_dtype)

    def attend(self, call: AttentionCall) -> Tensor:
        rows, shape = call.rows, (*call.q.shape[:2], call.v_width)
        all_singles = rows.singles is None and not rows.spans
        make = torch.empty if all_singles else torch.zeros
        out = make(shape, dtype=call.q.dtype, device=call.q.device)
        if rows.num_singles:
            self._decode(call, out)
        if rows.spans and self._uses_sdpa and prompts.gains(call):
            prompts.attend(call, out)
        elif rows.spans:
            self._prefill(call, out)
        return out

    def graph_bytes(self, program: Program, num_requests: int, max_context: int) -> int:
        """Returns the bytes of split states; all layers share the memory."""
        shapes = {
            _state_shape(op, program)
            for op in program.ops
            if isinstance(op, ops.Attention | ops.MlaAttention)
        }
        num_splits = -(-max_context // SPLIT_KEYS)
        sizes = [num_requests * _state_bytes(*shape, num_splits) for shape in shapes]
        return min(MOST_STATE_BYTES, max(sizes, default=0))

    def get_arrays_maker(self, program: Program) -> StepArraysMaker:
        """Returns a function that finds shared-prefix runs for each mask in the Program's
        attention.
        """
        masks: dict[str, PrefixMask] = {}
        for op in program.ops if self._share_prefixes else ():
            if isinstance(op, ops.Attention | ops.MlaAttention):
                mask = PrefixMask.of(op, program, self._tiles.rows_per_run)
                masks[mask.name] = mask

        def arrays(batch: StepBatch, *, fixed: bool) -> dict[str, NDArray]:
            arrays_by_name: dict[str, NDArray] = {}
            for mask in masks.values():
                arrays_by_name |= mask.arrays(batch, fixed=fixed)
            return arrays_by_name

        return arrays

    def rope_write(self, call: RopeWriteCall) -> Tensor:
        return rope_write(call, self._device)

    def _decode(self, call: AttentionCall, out: Tensor) -> None:
        num_heads, num_slots = call.q.shape[1], call.rows.num_singles
        num_splits = max(1, -(-call.block_tables.shape[1] * BLOCK_SIZE // SPLIT_KEYS))
        at_once = max(1, MOST_STATE_BYTES // _state_bytes(num_heads, call.v_width, num_splits))
        # Shared runs refer to slots of the entire step, so all states must be in one launch.
        own, shared = _make_runs(call) if at_once >= num_slots else (_own_runs(None), None)
        for first in range(0, num_slots, at_once):
            count = min(at_once, num_slots - first)
            shape = (count, num_heads, num_splits)
            states = SplitStates(
                sums=torch.empty((*shape, 2), dtype=torch.float32, device=out.device),
                accs=torch.empty((*shape, call.v_width), dtype=torch.float32, device=out.device),
            )
            slots = Slots(
                key_indices=call.key_indices,
                context_lens=call.context_lens,
                row_of=call.rows.rows,
                request_of=call.rows.singles,
            )
            launch = DecodeLaunch(call, states, slots, first, num_splits)
            launch.decode(own, count, self._tiles.decode(call))
            if shared is not None and shared.slots is not None:
                tile = self._tiles.shared(call)
                launch.decode(shared, len(shared.slots), tile)
            launch.merge(out, count, self._tiles.merge(call))

    def _prefill(self, call: AttentionCall, out: Tensor) -> None:
        tile = self._tiles.prefill(call)
        heads = HeadTile.of(call, tile["BLOCK_M"])
        starts = call.inputs["query_starts"]
        num_requests = len(starts) - 1
        num_tiles = len(call.q) // heads.ROWS.value + num_requests
        prefill_kernel[(num_tiles, call.k.numbers.shape[-2] * heads.PARTS.value)](
            out,
            q=Queries.of(call),
            kv=PagedKv.of(call),
            scoring=Scoring.of(call),
            mask=Mask.of(call),
            widths=Widths.of(call),
            heads=heads,
            requests=Requests(call.key_indices, call.context_lens, starts),
            sinks=call.sinks,
            table_width=call.block_tables.stride(0),
            num_requests=num_requests,
            BY_SPLIT=self.is_invariant,
            **tile,
        )


class DecodeLaunch(NamedTuple):
    """Arguments of `decode.py` and `merge.py` for the same slots."""

    call: AttentionCall
    states: SplitStates
    slots: Slots
    first_slot: int
    num_splits: int

    def decode(self, runs: Runs, num_runs: int, tile: dict[str, int]) -> None:
        """Writes the split states of the runs."""
        call = self.call
        heads = HeadTile.of(call, tile["BLOCK_M"])
        assert runs.ROWS.value <= heads.ROWS.value, "BLOCK_M does not depend on the cache's dtype"
        num_tiles = call.k.numbers.shape[-2] * heads.PARTS.value
        enough = ENOUGH_PROGRAMS if runs.slots is None else ENOUGH_SHARED_PROGRAMS
        num_programs = programs_per_tile(num_runs * num_tiles, self.num_splits, enough)
        decode_kernel[(num_runs, num_tiles, num_programs)](
            states=self.states,
            q=Queries.of(call),
            kv=PagedKv.of(call),
            scoring=Scoring.of(call),
            mask=Mask.of(call),
            widths=Widths.of(call),
            heads=heads,
            slots=self.slots,
            runs=runs,
            table_width=call.block_tables.stride(0),
            first_slot=self.first_slot,
            num_splits=self.num_splits,
            **tile,
        )

    def merge(self, out: Tensor, count: int, tile: dict[str, int]) -> None:
        """Merges the states of `count` slots into `out [T, H, V]`."""
        num_heads = self.call.q.shape[1]
        merge_kernel[(count, -(-num_heads // tile["HEADS_A_TILE"]))](
            out,
            states=self.states,
            slots=self.slots,
            mask=Mask.of(self.call),
            widths=Widths.of(self.call),
            sinks=self.call.sinks,
            first_slot=self.first_slot,
            num_splits=self.num_splits,
            HEADS=num_heads,
            **tile,
        )


def programs_per_tile(num_tiles: int, num_splits: int, enough: int) -> int:
    """Returns how many programs share a tile's splits: one per split, unless fewer make `enough`
    programs.
    """
    return min(num_splits, -(-enough // num_tiles))


def _own_runs(own_splits: Tensor | None) -> Runs:
    """Returns runs of one slot each, which start at split `own_splits`."""
    return Runs(slots=None, splits=None, own_splits=own_splits, ROWS=tl.constexpr(1))


def _make_runs(call: AttentionCall) -> tuple[Runs, Runs | None]:
    """Returns the runs of one slot each, and those over shared prefixes, if any."""
    names = array_names(call.group, call.window, full=call.full)
    if names.slots not in call.inputs:
        return _own_runs(None), None
    slots, splits = call.inputs[names.slots], call.inputs[names.splits]
    shared = Runs(slots, splits, own_splits=None, ROWS=tl.constexpr(slots.shape[1]))
    return _own_runs(call.inputs[names.own_splits]), shared


def _get_head_widths(op: ops.Attention | ops.MlaAttention) -> tuple[int, int]:
    """Returns the key and value widths; for latent attention those of the absorbed form."""
    if isinstance(op, ops.MlaAttention):
        return op.latent_width + op.rope_width, op.latent_width
    return op.q.width // op.num_heads, op.out.width // op.num_heads


def _state_shape(op: ops.Attention | ops.MlaAttention, program: Program) -> tuple[int, int]:
    """Returns the number of query heads, and the accumulator width of each."""
    if isinstance(op, ops.MlaAttention):
        return op.num_heads, op.latent_width
    return op.num_heads, program.group(op.group).v_width


def _state_bytes(num_heads: int, v_width: int, num_splits: int) -> int:
    """Returns the bytes of one row's states: m, l and acc of each head and split."""
    return 4 * num_heads * num_splits * (v_width + 2)
