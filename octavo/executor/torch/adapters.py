"""LoRA adapters on a PyTorch device: updates of matmul rows and embedding rows, by adapter slot.

Sums are in fp32 and rounded once. Rows with the same adapter are computed together; rows without
one are unchanged. In a step with a single row, its bits depend only on that row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.base import PackedAdapter
from octavo.executor.torch.full_vectors import linear_by_tiles
from octavo.executor.torch.weights.device_weight import to_device
from octavo.program import ops
from octavo.program.low_rank import LowRank, Site, Updates
from octavo.program.program import Op, Program


@dataclass(frozen=True, slots=True, eq=False)
class TorchUpdate:
    """A LowRank as tensors, for some columns of a matmul's output or for a table."""

    start: int
    """First output column."""
    end: int
    a: Tensor
    b: Tensor
    scales: Tensor
    gain: Tensor | None
    bias: Tensor | None

    def on(self, device: torch.device) -> TorchUpdate:
        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return TorchUpdate(
            self.start,
            self.end,
            self.a.to(device),
            self.b.to(device),
            self.scales.to(device),
            gain=moved(self.gain),
            bias=moved(self.bias),
        )

    def change(self, y: Tensor, base_bias: Tensor | None, h: Tensor) -> Tensor:
        """Returns y `[rows, out]` with the update, given A x `[rows, r]`, all in fp32.

        `base_bias` is included in y but not scaled by the gain.
        """
        added = linear_by_tiles(self.scales * h, self.b.float())
        if self.gain is None:
            y = y + added
        elif base_bias is None:
            y = (y + added) * self.gain
        else:
            y = (y - base_bias + added) * self.gain + base_bias
        return y if self.bias is None else y + self.bias

    @property
    def num_bytes(self) -> int:
        tensors = (self.a, self.b, self.scales, self.gain, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


OpUpdates = Mapping[int, tuple[TorchUpdate, ...]]
"""Updates of one adapter, by op id."""


class TorchAdapters:
    """Adapters of a Program, by slot. Implements `base.AdapterSlots`."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.by_slot: dict[int, OpUpdates] = {}
        self._device = device
        self._sites_of_ops = {
            id(op): _get_column_ranges(op) for op in program.ops if _get_column_ranges(op)
        }

    def pack(self, updates: Updates) -> PackedAdapter:
        parts: dict[int, tuple[TorchUpdate, ...]] = {}
        for op, sites in self._sites_of_ops.items():
            site_updates = tuple(
                _pack(updates[site], start, end) for site, start, end in sites if site in updates
            )
            if site_updates:
                parts[op] = site_updates
        num_bytes = sum(update.num_bytes for some in parts.values() for update in some)
        return PackedAdapter(num_bytes, parts)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self.by_slot[slot] = {
            op: tuple(update.on(self._device) for update in updates)
            for op, updates in adapter.parts.items()
        }

    def drop(self, slot: int) -> None:
        self.by_slot.pop(slot, None)

    @property
    def num_bytes(self) -> int:
        return sum(
            update.num_bytes
            for updates in self.by_slot.values()
            for some in updates.values()
            for update in some
        )


@dataclass(frozen=True, slots=True)
class StepAdapters:
    by_slot: Mapping[int, OpUpdates]
    slots: tuple[int, ...]
    """Adapter slots that the step uses."""

    @staticmethod
    def of(adapters: TorchAdapters, rows: NDArray[np.int32] | None) -> StepAdapters | None:
        """Returns the adapters of rows `[T]`; None if no row has one."""
        if rows is None:
            return None
        slots = tuple(int(slot) for slot in np.unique(rows) if slot >= 0)
        return StepAdapters(adapters.by_slot, slots) if slots else None

    def product(
        self, op: ops.Linear, x: Tensor, y: Tensor, rows: Tensor, bias: Tensor | None
    ) -> Tensor:
        """Applies updates to the matmul output y `[T, out]` of x `[T, in]`; `rows [T]` are adapter
        slots.
        """
        for slot in self.slots:
            for update in self.by_slot[slot].get(id(op), ()):
                indices = (rows == slot).nonzero()[:, 0]
                columns = slice(update.start, update.end)
                h = x[indices].float() @ update.a.float().T
                base_bias = None if bias is None else bias[columns].float()
                changed = update.change(y[indices, columns].float(), base_bias, h)
                y[indices, columns] = changed.to(y.dtype)
        return y

    def table(self, op: ops.Embedding, ids: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        """Applies updates to embedding rows y `[T, W]`, in fp32."""
        for slot in self.slots:
            for update in self.by_slot[slot].get(id(op), ()):
                indices = (rows == slot).nonzero()[:, 0]
                h = update.a[ids[indices]].float() * op.scale
                y[indices] = update.change(y[indices], None, h)
        return y


def _get_column_ranges(op: Op) -> list[tuple[Site, int, int]]:
    if isinstance(op, ops.Embedding):
        return [((op.site, op.table), 0, op.table.shape[1])] if op.site else []
    if not isinstance(op, ops.Linear) or not op.sites:
        return []
    ranges, start = [], 0
    for site, weight in zip(op.sites, op.weights_, strict=True):
        end = start + weight.shape[0]
        ranges.append(((site, weight), start, end))
        start = end
    return ranges


def _pack(update: LowRank, start: int, end: int) -> TorchUpdate:
    host = torch.device("cpu")

    def tensor(array: NDArray | None) -> Tensor | None:
        return None if array is None else to_device(array, host)

    return TorchUpdate(
        start,
        end,
        to_device(update.a, host),
        to_device(update.b, host),
        to_device(update.scales.astype(np.float32), host),
        gain=tensor(update.gain),
        bias=tensor(update.bias),
    )
