"""Attention by Triton's kernels: which calls they take, and how a call is launched.

Rows of requests of one row go to `decode.py` and `merge.py`, the rest to `prefill.py`; both read
the step's arrays on the device alone. Tiles come from the table (`tuning.py`); with `fixed_tiles`
both have the same, so that a row's bits are the same whichever took it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.batch import StepBatch
from octavo.backends.kv import BLOCK_SIZE, SPLIT_KEYS
from octavo.backends.torch.attention.call import AttentionCall, Bias, StepArraysMaker
from octavo.backends.torch.rope_write import RopeWriteCall
from octavo.backends.torch.triton import fit, splits
from octavo.backends.torch.triton.decode import decode_kernel
from octavo.backends.torch.triton.device import device_name
from octavo.backends.torch.triton.merge import merge_kernel
from octavo.backends.torch.triton.numbers import dot_dtype, dot_precision
from octavo.backends.torch.triton.prefill import prefill_kernel
from octavo.backends.torch.triton.rope_write import rope_write
from octavo.backends.torch.triton.shared_prefix import sharing_of
from octavo.backends.torch.triton.tuning import is_measured, tuned
from octavo.program import ops
from octavo.program.program import Op, Program

KV_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)

MOST_STATE_BYTES = 256 << 20
"""Of splits' states at a time: 256 requests of 32 heads of 128 and contexts of 8,192 in one launch;
requests beyond go in one of their own."""

ENOUGH_PROGRAMS = 8192
"""Of a launch of decode: some waves of what a large GPU runs at once. More runs and heads take
fewer programs each, so that a captured launch for the longest context does not consist of programs
without keys."""


class TritonAttention:
    """Implements `attention.AttentionKernels`."""

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
        """`shared_bytes`: that a tile may take (`fit.shared_bytes`), None: any number."""
        self._device = device_name(device)
        self._shared_bytes = shared_bytes
        self.is_invariant = fixed_tiles
        self._share_prefixes = share_prefixes

    def refusal(self, op: Op, kv_dtype: torch.dtype) -> str | None:
        if isinstance(op, ops.MlaAttention) and op.form != "absorbed":
            return "expanded latent attention makes keys of its own, which no kernel reads"
        if kv_dtype not in KV_DTYPES:
            return f"its kernels read no KV cache of {str(kv_dtype).removeprefix('torch.')}"
        if self._shared_bytes is None:
            return None
        assert isinstance(op, ops.Attention | ops.MlaAttention)
        return fit.refusal(
            _tile_widths(*_widths_of(op)), 4 if kv_dtype == torch.float32 else 2, self._shared_bytes
        )

    def attend(self, call: AttentionCall) -> Tensor:
        rows, shape = call.rows, (*call.q.shape[:2], call.v_width)
        alone = rows.singles is None and not rows.spans
        make = torch.empty if alone else torch.zeros
        out = make(shape, dtype=call.q.dtype, device=call.q.device)
        if rows.num_singles:
            self._decode(call, out)
        if rows.spans:
            self._prefill(call, out)
        return out

    def graph_bytes(self, program: Program, num_requests: int, max_context: int) -> int:
        """States of splits: every layer's lie in the same place."""
        shapes = {
            _state_shape(op, program)
            for op in program.ops
            if isinstance(op, ops.Attention | ops.MlaAttention)
        }
        num_splits = -(-max_context // SPLIT_KEYS)
        return max(
            (
                min(MOST_STATE_BYTES, num_requests * _state_bytes(*shape, num_splits))
                for shape in shapes
            ),
            default=0,
        )

    def arrays_of(self, program: Program) -> StepArraysMaker:
        """Who shares which splits, for each kind of mask that the Program's attention has."""
        kinds: dict[str, _Kind] = {}
        for op in program.ops if self._share_prefixes else ():
            if isinstance(op, ops.Attention | ops.MlaAttention):
                kind = _Kind.of(op, program, self._rows_a_run)
                kinds[kind.name] = kind

        def arrays(batch: StepBatch, *, fixed: bool) -> dict[str, NDArray]:
            found: dict[str, NDArray] = {}
            for name, kind in kinds.items():
                found |= kind.arrays(name, batch, fixed=fixed)
            return found

        return arrays

    def rope_write(self, call: RopeWriteCall) -> Tensor:
        return rope_write(call, self._device)

    def _decode(self, call: AttentionCall, out: Tensor) -> None:
        rows = call.rows
        common = _Common.of(call)
        tile = self._tile("decode_attention", call)
        num_heads, num_slots = call.q.shape[1], rows.num_singles
        num_splits = max(1, -(-call.block_tables.shape[1] * BLOCK_SIZE // SPLIT_KEYS))
        at_once = max(1, MOST_STATE_BYTES // _state_bytes(num_heads, call.v_width, num_splits))
        lanes = _Lanes.of(call, tile["BLOCK_M"])
        shared = _Shared.of(call) if at_once >= num_slots else None
        for first in range(0, num_slots, at_once):
            count = min(at_once, num_slots - first)
            states = torch.empty(
                (count, num_heads, num_splits, 2), dtype=torch.float32, device=out.device
            )
            accs = torch.empty(
                (count, num_heads, num_splits, call.v_width), dtype=torch.float32, device=out.device
            )
            where = {
                "row_of": rows.rows,
                "request_of": rows.singles,
                "first_slot": first,
                "num_splits": num_splits,
            }
            tiles = common.num_kv_heads * lanes.parts
            decode_kernel[(count, tiles, _programs(count * tiles, num_splits))](
                states,
                accs,
                run_slots=None,
                run_splits=None,
                own_splits=shared.own_splits if shared else None,
                RUN_ROWS=1,
                **where,
                **lanes.arguments,
                **common.arguments,
                **tile,
            )
            if shared is not None:
                wide = self._tile(self._shared_kernel, call)
                num_runs, rows_a_run = shared.run_slots.shape
                assert rows_a_run * lanes.share <= wide["BLOCK_M"], (
                    "BLOCK_M does not depend on the dtype of the cache"
                )
                decode_kernel[
                    (
                        num_runs,
                        common.num_kv_heads,
                        _programs(num_runs * common.num_kv_heads, num_splits),
                    )
                ](
                    states,
                    accs,
                    run_slots=shared.run_slots,
                    run_splits=shared.run_splits,
                    own_splits=None,
                    RUN_ROWS=rows_a_run,
                    **where,
                    **_Lanes.of(call, wide["BLOCK_M"]).arguments,
                    **common.arguments,
                    **wide,
                )
            self._merge(call, out, states, accs, where, count)

    def _merge(
        self,
        call: AttentionCall,
        out: Tensor,
        states: Tensor,
        accs: Tensor,
        where: dict[str, Any],
        count: int,
    ) -> None:
        tile = self._tile("merge_attention", call)
        num_heads = call.q.shape[1]
        merge_kernel[(count, -(-num_heads // tile["HEADS_A_TILE"]))](
            out,
            states,
            accs,
            call.places,
            call.context_lens,
            sinks=call.sinks,
            HEADS=num_heads,
            WINDOW=call.window or 0,
            FULL=call.full,
            V_WIDTH=call.v_width,
            V_TILE=_tile_width(call.v_width),
            **where,
            **tile,
        )

    def _prefill(self, call: AttentionCall, out: Tensor) -> None:
        common = _Common.of(call)
        tile = self._tile("decode_attention" if self.is_invariant else "prefill_attention", call)
        lanes = _Lanes.of(call, tile["BLOCK_M"])
        starts = call.inputs["query_starts"]
        num_requests = len(starts) - 1
        prefill_kernel[
            (len(call.q) // lanes.rows + num_requests, common.num_kv_heads * lanes.parts)
        ](
            out,
            query_starts=starts,
            sinks=call.sinks,
            num_requests=num_requests,
            ROWS=lanes.rows,
            BY_SPLIT=self.is_invariant,
            **lanes.arguments,
            **common.arguments,
            **tile,
        )

    @property
    def _shared_kernel(self) -> str:
        return "decode_attention" if self.is_invariant else "shared_attention"

    def _rows_a_run(self, k_width: int, v_width: int, share: int) -> int:
        """Whatever the cache's dtype: the arrays are made before any call."""
        launch = tuned(self._shared_kernel, self._device, width=max(k_width, v_width), group=share)
        return self._rows_fitted(launch, _tile_widths(k_width, v_width))["BLOCK_M"] // share

    def _rows_fitted(self, launch: dict[str, int], widths: tuple[int, int]) -> dict[str, int]:
        return (
            launch
            if self._shared_bytes is None
            else fit.fitted_rows(launch, widths, self._shared_bytes)
        )

    def _tile(self, kernel: str, call: AttentionCall) -> dict[str, int]:
        k, v = call.k.numbers, call.v.numbers
        shape: dict[str, int | str] = {
            "width": max(k.shape[-1], call.v_width),
            "group": call.q.shape[1] // k.shape[-2],
            "kv": str(k.dtype).removeprefix("torch."),
        }
        launch, widths = (
            tuned(kernel, self._device, **shape),
            _tile_widths(k.shape[-1], call.v_width),
        )
        if kernel == self._shared_kernel:
            launch = self._rows_fitted(launch, widths)
        if (
            self._shared_bytes is None
            or "BLOCK_N" not in launch
            or is_measured(kernel, self._device, **shape)
        ):
            return launch
        itemsize = dot_dtype(call.q.dtype, k.dtype, v.dtype).primitive_bitwidth // 8
        return fit.fitted(
            launch, widths, itemsize, self._shared_bytes, keep_rows=kernel != "prefill_attention"
        )


@dataclass(frozen=True, slots=True)
class _Kind:
    """Attention ops that see the same keys in tiles of the same rows: one plan of sharing serves
    them all.
    """

    group: int
    window: int | None
    full: bool
    rows_a_run: int

    @staticmethod
    def of(
        op: ops.Attention | ops.MlaAttention,
        program: Program,
        rows_a_run: Callable[[int, int, int], int],
    ) -> _Kind:
        at = program.group_index(op.group)
        group = program.groups[at]
        v_width = op.latent_width if isinstance(op, ops.MlaAttention) else group.v_width
        full = isinstance(op, ops.Attention) and op.mask == "full"
        window = op.window if isinstance(op, ops.Attention) and op.mask == "window" else None
        return _Kind(
            at, window, full, rows_a_run(group.k_width, v_width, op.num_heads // group.num_kv_heads)
        )

    @property
    def name(self) -> str:
        return kind_name(self.group, self.window, self.full)

    def arrays(self, name: str, batch: StepBatch, *, fixed: bool) -> dict[str, NDArray]:
        """Nothing where nobody shares, unless shapes are fixed."""
        most = (len(batch.query_starts) - 1) // 2
        if self.rows_a_run < 2 or not most:
            return {}
        found = sharing_of(
            batch, self.group, window=self.window, full=self.full, rows_a_run=self.rows_a_run
        )
        if fixed:
            found = found.padded(most)
        elif not len(found.run_slots):
            return {}
        return {
            f"{name}, slots": found.run_slots,
            f"{name}, splits": found.run_splits,
            f"{name}, own": found.own_splits,
        }


def _state_shape(op: ops.Attention | ops.MlaAttention, program: Program) -> tuple[int, int]:
    """Query heads, and the width of what is summed for each."""
    return op.num_heads, op.latent_width if isinstance(op, ops.MlaAttention) else program.group(
        op.group
    ).v_width


def _programs(num_tiles: int, num_splits: int) -> int:
    """Of each tile: as many as it has splits, or as make enough together."""
    return min(num_splits, -(-ENOUGH_PROGRAMS // num_tiles))


def _state_bytes(num_heads: int, v_width: int, num_splits: int) -> int:
    """Of one row: m, l and acc of each head and split."""
    return 4 * num_heads * num_splits * (v_width + 2)


def kind_name(group: int, window: int | None, full: bool) -> str:
    return f"sharing of {group}, window {window}, full {full}"


@dataclass(frozen=True, slots=True, eq=False)
class _Shared:
    """`shared_prefix.Sharing` on the device."""

    run_slots: Tensor
    run_splits: Tensor
    own_splits: Tensor

    @staticmethod
    def of(call: AttentionCall) -> _Shared | None:
        name = kind_name(call.group, call.window, call.full)
        if f"{name}, slots" not in call.inputs:
            return None
        return _Shared(*(call.inputs[f"{name}, {part}"] for part in ("slots", "splits", "own")))


@dataclass(frozen=True, slots=True)
class _Lanes:
    """How query heads and rows share a tile: `rows` rows of `heads` heads each; a KV head's query
    heads take `parts` tiles.
    """

    share: int
    heads: int
    rows: int

    @staticmethod
    def of(call: AttentionCall, block_m: int) -> _Lanes:
        share = call.q.shape[1] // call.k.numbers.shape[-2]
        heads = min(share, block_m)
        return _Lanes(share, heads, block_m // heads)

    @property
    def parts(self) -> int:
        return -(-self.share // self.heads)

    @property
    def arguments(self) -> dict[str, int]:
        return {"SHARE": self.share, "PARTS": self.parts, "LANE_HEADS": self.heads}


@dataclass(frozen=True, slots=True)
class _Common:
    """The arguments that both kernels of keys have."""

    num_kv_heads: int
    arguments: dict[str, Any]

    @staticmethod
    def of(call: AttentionCall) -> _Common:
        q = call.q if call.q.stride(-1) == 1 else call.q.contiguous()
        k, v = call.k.numbers, call.v.numbers
        first, rest = _two_widths(k.shape[-1])
        kinds = [q.dtype, k.dtype, v.dtype]
        arguments = {
            "q": q,
            "positions": call.places,
            "context_lens": call.context_lens,
            "block_tables": call.block_tables,
            "k": k,
            "v": v,
            "k_scales": call.k.scales,
            "v_scales": call.v.scales,
            "scale": call.scale / call.softcap if call.softcap else call.scale * splits.LOG2E.value,
            "cap": (call.softcap or 0.0) * splits.LOG2E.value,
            "table_width": call.block_tables.stride(0),
            "q_row": q.stride(0),
            "q_head": q.stride(1),
            "HEADS": q.shape[1],
            "WINDOW": call.window or 0,
            "FULL": call.full,
            "DTYPE": dot_dtype(*kinds),
            "PRECISION": dot_precision(*kinds),
            "KV_HEADS": k.shape[-2],
            "K_STRIDE": k.shape[-1],
            "V_STRIDE": v.shape[-1],
            "K_WIDTH": k.shape[-1],
            "V_WIDTH": call.v_width,
            "K_FIRST": first,
            "K_REST": rest,
            "V_TILE": _tile_width(call.v_width),
            "CAPPED": call.softcap is not None,
        }
        return _Common(k.shape[-2], arguments | _bias(call.bias))


def _bias(bias: Bias | None) -> dict[str, Any]:
    if bias is None:
        return {"bias": None, "BIAS": splits.NO_BIAS.value, "BIAS_LIMIT": 0}
    if bias.slopes is not None:
        return {"bias": bias.slopes, "BIAS": splits.SLOPES.value, "BIAS_LIMIT": 0}
    assert bias.by_distance is not None
    table = bias.by_distance()
    return {"bias": table, "BIAS": splits.BY_DISTANCE.value, "BIAS_LIMIT": table.shape[1] // 2}


def _tile_width(width: int) -> int:
    """A power of two, and no less than a product's tile wants."""
    return max(16, 1 << (width - 1).bit_length())


def _widths_of(op: ops.Attention | ops.MlaAttention) -> tuple[int, int]:
    """Columns of a key and of a value; of latent attention in its absorbed form."""
    if isinstance(op, ops.MlaAttention):
        return op.latent_width + op.rope_width, op.latent_width
    return op.q.width // op.num_heads, op.out.width // op.num_heads


def _tile_widths(k_width: int, v_width: int) -> tuple[int, int]:
    """Columns of a tile of keys, and of values."""
    return sum(_two_widths(k_width)), _tile_width(v_width)


def _two_widths(width: int) -> tuple[int, int]:
    """A row's columns as one tile or two, whichever pads less: 128 is (128, 0), 80 is (64, 16), 192
    is (128, 64), 24 is (32, 0).
    """
    whole = _tile_width(width)
    first = 1 << int(math.log2(width)) if width > 16 else 16
    rest = _tile_width(width - first) if width > first else 0
    return (first, rest) if first + rest < whole else (whole, 0)
