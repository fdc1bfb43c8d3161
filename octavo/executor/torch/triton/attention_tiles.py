"""Tile sizes of the attention kernels on one device: from the table (`tuning.py`), or, if they were
not measured on this device, reduced to fit its shared memory (`fit.py`).

With fixed tiles, prefill and shared prefixes use decode's tile, so that a row's bits do not depend
on the kernel.
"""

from __future__ import annotations

import torch

from octavo.executor.torch.attention.call import AttentionCall
from octavo.executor.torch.triton import fit
from octavo.executor.torch.triton.attention_arguments import tile_width, two_widths
from octavo.executor.torch.triton.device import device_name
from octavo.executor.torch.triton.numbers import dot_dtype
from octavo.executor.torch.triton.tuning import is_measured, tuned


class AttentionTiles:
    """Tile sizes of one device."""

    def __init__(
        self, device: torch.device, *, fixed_tiles: bool, shared_bytes: int | None
    ) -> None:
        """`shared_bytes` is the shared memory per program; None: unlimited."""
        self._device = device_name(device)
        self._shared_bytes = shared_bytes
        self._prefill = "decode_attention" if fixed_tiles else "prefill_attention"
        self._shared = "decode_attention" if fixed_tiles else "shared_attention"
        self._fixed_merge = {"SPLITS": 1} if fixed_tiles else {}

    def unsupported_reason(self, k_width: int, v_width: int, kv_dtype: torch.dtype) -> str | None:
        """Returns the reason why no tile of such heads fits into shared memory, or None."""
        if self._shared_bytes is None:
            return None
        itemsize = 4 if kv_dtype == torch.float32 else 2
        return fit.unsupported_reason(_tile_widths(k_width, v_width), itemsize, self._shared_bytes)

    def decode(self, call: AttentionCall) -> dict[str, int]:
        return self._tile("decode_attention", call)

    def shared(self, call: AttentionCall) -> dict[str, int]:
        return self._tile(self._shared, call)

    def merge(self, call: AttentionCall) -> dict[str, int]:
        return self._tile("merge_attention", call) | self._fixed_merge

    def prefill(self, call: AttentionCall) -> dict[str, int]:
        return self._tile(self._prefill, call)

    def rows_per_run(self, k_width: int, v_width: int, share: int) -> int:
        """Returns the rows of a shared-prefix run, each with `share` query heads per KV head.

        Independent of the cache's dtype, because runs are planned before any call.
        """
        launch = tuned(self._shared, self._device, width=max(k_width, v_width), group=share)
        return self._fitted_rows(launch, _tile_widths(k_width, v_width))["BLOCK_M"] // share

    def _fitted_rows(self, launch: dict[str, int], widths: tuple[int, int]) -> dict[str, int]:
        if self._shared_bytes is None:
            return launch
        return fit.fitted_rows(launch, widths, self._shared_bytes)

    def _tile(self, kernel: str, call: AttentionCall) -> dict[str, int]:
        k, v = call.k.numbers, call.v.numbers
        shape: dict[str, int | str] = {
            "width": max(k.shape[-1], call.v_width),
            "group": call.q.shape[1] // k.shape[-2],
            "kv": str(k.dtype).removeprefix("torch."),
        }
        launch = tuned(kernel, self._device, **shape)
        widths = _tile_widths(k.shape[-1], call.v_width)
        if kernel == self._shared:
            launch = self._fitted_rows(launch, widths)
        measured = is_measured(kernel, self._device, **shape)
        if self._shared_bytes is None or "BLOCK_N" not in launch or measured:
            return launch
        itemsize = dot_dtype(call.q.dtype, k.dtype, v.dtype).primitive_bitwidth // 8
        keep_rows = kernel != "prefill_attention"
        return fit.fitted(launch, widths, itemsize, self._shared_bytes, keep_rows=keep_rows)


def _tile_widths(k_width: int, v_width: int) -> tuple[int, int]:
    """Returns the widths of a key tile and of a value tile."""
    return sum(two_widths(k_width)), tile_width(v_width)
