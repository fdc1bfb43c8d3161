"""LoRA adapters on a PyTorch device: updates of matmul rows and embedding rows, by adapter slot.

    A [1 + slots, R, in], B [1 + slots, out, R]  of each Linear, in the step's dtype
    row t with slot s:   y[t] + B[1 + s] (A[1 + s] x[t]);   matrices 0 are zero, for rows without

Both matmuls are those of experts, where the expert of a row is its slot: shapes do not depend on
which rows have adapters, so that a CUDA graph can contain them. Updates with a gain or bias, and of
embedding tables, are applied outside of graphs. The scales are part of B; on a Linear of several
matrices, A stacks theirs, and B is block diagonal (docs/decisions/0043-adapters-as-experts.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.base import PackedAdapter
from octavo.executor.torch.kernels import Kernels
from octavo.executor.torch.weights.device_weight import DeviceWeight
from octavo.program import ops
from octavo.program.low_rank import Site, Updates
from octavo.program.program import Op, Program

RANK_STEP = 16
"""Ranks are padded to a multiple, so that rows of B are aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class OpUpdate:
    """One adapter's update of all outputs of an op, y = gain * (W x + b (a x)) + bias; the gain
    leaves out the base model's bias.
    """

    a: Tensor
    """`[r, in]`; for a table `[V, r]`."""
    b: Tensor
    """`[out, r]`"""
    gain: Tensor | None
    bias: Tensor | None

    @property
    def has_gains(self) -> bool:
        """Whether it is more than b (a x)."""
        return self.gain is not None or self.bias is not None

    @property
    def num_bytes(self) -> int:
        tensors = (self.a, self.b, self.gain, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class AdapterRows(NamedTuple):
    """Adapters of some rows."""

    matrices: Tensor
    """Index of each row's matrices, `[T] int64`: 1 + slot, 0 for none."""
    layout: Any
    """`Kernels.rows_of_experts`."""


@dataclass(slots=True, eq=False)
class AdapterStack:
    """The updates of one Linear by all adapters."""

    a: Tensor
    b: Tensor
    gains: tuple[Tensor, Tensor] | None = None
    """Gain and bias of each adapter, `[1 + slots, out] fp32`, once one has either."""

    @staticmethod
    def zeros(
        num: int, rank: int, widths: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> AdapterStack:
        """Returns `num` zero matrices for `widths` inputs and outputs."""
        a = torch.zeros(num, rank, widths[0], dtype=dtype, device=device)
        return AdapterStack(a, torch.zeros(num, widths[1], rank, dtype=dtype, device=device))

    def grown(self, num: int, rank: int) -> AdapterStack:
        """Returns a stack of at least `num` matrices of this rank; itself if it is one."""
        old_num, old_rank, inputs = self.a.shape
        if num <= old_num and rank <= old_rank:
            return self
        widths = (inputs, self.b.shape[1])
        made = AdapterStack.zeros(
            max(num, old_num), max(rank, old_rank), widths, self.a.dtype, self.a.device
        )
        made.a[:old_num, :old_rank] = self.a
        made.b[:old_num, :, :old_rank] = self.b
        if self.gains is not None:
            made.gains = made._no_gains()
            for new, old in zip(made.gains, self.gains, strict=True):
                new[:old_num] = old
        return made

    def put(self, index: int, update: OpUpdate | None) -> None:
        """Sets the matrices of one adapter; None: no update."""
        self.a[index], self.b[index] = 0, 0
        if update is not None:
            rank = len(update.a)
            self.a[index, :rank] = update.a.to(self.a.device)
            self.b[index, :, :rank] = update.b.to(self.b.device)
        has_gains = update is not None and update.has_gains
        if has_gains and self.gains is None:
            self.gains = self._no_gains()
        if self.gains is not None:
            gain, bias = self.gains
            gain[index] = 1 if update is None or update.gain is None else update.gain
            bias[index] = 0 if update is None or update.bias is None else update.bias

    def _no_gains(self) -> tuple[Tensor, Tensor]:
        gain = torch.ones(self.b.shape[:2], dtype=torch.float32, device=self.b.device)
        return gain, torch.zeros_like(gain)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.a, self.b, *(self.gains or ())))


class TorchAdapters:
    """Adapters of a Program, by slot. Implements `base.AdapterSlots`."""

    def __init__(self, program: Program, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is the compute dtype of matmuls."""
        self._device, self._dtype = device, dtype
        self._linears = {
            id(op): op for op in program.ops if isinstance(op, ops.Linear) and op.sites
        }
        self._sites_of_ops = {
            id(op): _get_column_ranges(op) for op in program.ops if _get_column_ranges(op)
        }
        self._stacks: dict[int, AdapterStack] = {}
        self._num_slots, self._rank = 0, 0
        self._tables: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        """A `[V, r]` and B of embedding tables, by op and slot."""
        self._not_in_graphs: set[int] = set()
        """Slots of adapters whose steps replay no graph."""

    def reserve(self, num_slots: int, rank: int, *, now: bool) -> None:
        """Sets the number of slots and the highest rank, so that matrices have the same shapes
        from the first adapter on; with `now` allocates all of them, at addresses that do not
        change.
        """
        self._num_slots, self._rank = num_slots, rank
        for op in self._linears.values() if now and num_slots else ():
            self._stack(op, len(op.weights_) * rank)

    def pack(self, updates: Updates) -> PackedAdapter:
        parts: dict[int, OpUpdate] = {}
        for op, sites in self._sites_of_ops.items():
            if any(site in updates for site, _, _ in sites):
                is_table = op not in self._linears
                parts[op] = _pack(updates, sites, torch.float32 if is_table else self._dtype)
        return PackedAdapter(sum(update.num_bytes for update in parts.values()), parts)

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        self.drop(slot)
        parts: dict[int, OpUpdate] = adapter.parts
        self._num_slots = max(self._num_slots, slot + 1)
        for key, op in self._linears.items():
            update = parts.get(key)
            if update is not None or key in self._stacks:
                rank = 0 if update is None else len(update.a)
                self._stack(op, max(rank, len(op.weights_) * self._rank)).put(slot + 1, update)
        for key, update in parts.items():
            if key not in self._linears:
                pair = (update.a.to(self._device), update.b.to(self._device))
                self._tables.setdefault(key, {})[slot] = pair
            if key not in self._linears or update.has_gains:
                self._not_in_graphs.add(slot)

    def drop(self, slot: int) -> None:
        self._not_in_graphs.discard(slot)
        for by_slot in self._tables.values():
            by_slot.pop(slot, None)

    @property
    def num_bytes(self) -> int:
        tables = [pair for by_slot in self._tables.values() for pair in by_slot.values()]
        return sum(a.nbytes + b.nbytes for a, b in tables) + sum(
            stack.num_bytes for stack in self._stacks.values()
        )

    def are_in_graphs(self, slots: NDArray[np.int32] | None) -> bool:
        """Returns whether graphs with adapters compute what the adapters of rows `[T]` update."""
        return slots is None or self._not_in_graphs.isdisjoint(np.unique(slots).tolist())

    def rows(self, slots: Tensor, kernels: Kernels) -> AdapterRows:
        """Returns the adapters of rows with these slots `[T]`; -1: none."""
        matrices = slots.long() + 1
        return AdapterRows(matrices, kernels.rows_of_experts(matrices, self._num_slots + 1))

    def product(
        self,
        op: ops.Linear,
        x: Tensor,
        y: Tensor,
        *,
        rows: AdapterRows,
        bias: Tensor | None,
        kernels: Kernels,
    ) -> Tensor:
        """Applies updates to the matmul output y `[T, out]` of x `[T, in]`, which includes the base
        model's `bias [out]`.
        """
        stack = self._stacks.get(id(op))
        if stack is None:
            return y
        h = kernels.grouped(x, rows.layout, _plain(stack.a), None)
        added = kernels.grouped(h, rows.layout, _plain(stack.b), None)
        if stack.gains is None:
            return y + added
        base = 0.0 if bias is None else bias.float()
        gain, more = (part[rows.matrices] for part in stack.gains)
        return ((y.float() - base + added.float()) * gain + base + more).to(y.dtype)

    def table(self, op: ops.Embedding, ids: Tensor, y: Tensor, rows: AdapterRows) -> Tensor:
        """Applies updates, which have no gains, to embedding rows y `[T, W]`, in fp32."""
        for slot, (a, b) in self._tables.get(id(op), {}).items():
            at = (rows.matrices == slot + 1).nonzero()[:, 0]
            y[at] += (a[ids[at]] * op.scale) @ b.T
        return y

    def _stack(self, op: ops.Linear, rank: int) -> AdapterStack:
        """Returns the stack of an op, for all slots and at least this rank."""
        num, rank = self._num_slots + 1, -(-rank // RANK_STEP) * RANK_STEP
        stack = self._stacks.get(id(op))
        if stack is None:
            widths = (op.x.width, sum(weight.shape[0] for weight in op.weights_))
            stack = AdapterStack.zeros(num, rank, widths, self._dtype, self._device)
        self._stacks[id(op)] = stack = stack.grown(num, rank)
        return stack


def _plain(matrices: Tensor) -> DeviceWeight:
    return DeviceWeight(matrices, matrices.shape[-1], 8 * matrices.dtype.itemsize)


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


def _pack(updates: Updates, sites: Sequence[tuple[Site, int, int]], dtype: torch.dtype) -> OpUpdate:
    """Joins the updates of an op's matrices."""
    num_outputs = sites[-1][2]
    found = [(updates[site], start, end) for site, start, end in sites if site in updates]
    rank = sum(update.rank for update, _, _ in found)
    b = np.zeros((num_outputs, rank), np.float32)
    first = 0
    for update, start, end in found:
        b[start:end, first : first + update.rank] = _floats(update.b) * update.scales
        first += update.rank
    gain = bias = None
    if any(update.gain is not None for update, _, _ in found):
        gain = np.ones(num_outputs, np.float32)
    if any(update.bias is not None for update, _, _ in found):
        bias = np.zeros(num_outputs, np.float32)
    for update, start, end in found:
        if gain is not None and update.gain is not None:
            gain[start:end] = update.gain
        if bias is not None and update.bias is not None:
            bias[start:end] = update.bias
    a = np.concatenate([_floats(update.a) for update, _, _ in found])
    return OpUpdate(
        torch.from_numpy(a).to(dtype),
        torch.from_numpy(b).to(dtype),
        gain=None if gain is None else torch.from_numpy(gain),
        bias=None if bias is None else torch.from_numpy(bias),
    )


def _floats(array: NDArray) -> NDArray[np.float32]:
    return array.astype(np.float32)
