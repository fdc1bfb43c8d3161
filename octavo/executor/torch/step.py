"""One step on the device: the batch's arrays in one staging buffer, computed Values, and data
shared by layers.

Inputs are copied in one transfer, asynchronously from pinned memory on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.base import BackendOptions
from octavo.executor.batch import KvCopies, StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.adapters import AdapterRows, TorchAdapters
from octavo.executor.torch.attention.call import AttentionKernels
from octavo.executor.torch.kernels import Kernels
from octavo.executor.torch.kv_cache import GroupTensors
from octavo.executor.torch.ranks import TorchRanks
from octavo.executor.torch.weights.program_weights import ProgramWeights
from octavo.program import ops
from octavo.program.program import Program, Value

Made = tuple[Tensor, ...]
"""Outputs of an op, in order."""
NormOp = ops.RmsNorm | ops.LayerNorm | ops.PreNorm
Shared = TypeVar("Shared")

ALIGN_BYTES = 64
OF_GROUPS = ("slots", "context_lens", "block_tables")
"""Arrays whose first axis is the cache group. Each group's part is aligned, since Triton compiles a
kernel again for a pointer that is not a multiple of 16 bytes.
"""

SHARING_BYTES = 36
"""Bytes per request and cache group for the arrays of shared prefixes and context lengths."""

TYPES: dict[str, torch.dtype] = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.bool,
}


class Staging:
    """A host buffer and a device buffer for copying a step's arrays in one transfer."""

    def __init__(self, device: torch.device, num_bytes: int = 1 << 16) -> None:
        self._device = device
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._make(num_bytes)

    def put(self, arrays: Mapping[str, NDArray]) -> dict[str, Tensor]:
        """Copies arrays to the device and returns views, valid until the next call.

        Arrays of equal shapes always get equal addresses.
        """
        offsets, end = _get_offsets(arrays)
        if end > len(self._host):
            self._make(max(end, 2 * len(self._host)))
        if self._copied is not None:
            self._copied.synchronize()
        host = self._host.numpy()
        for name, array in arrays.items():
            parts, num_bytes = _get_parts(name, array)
            pitch, start = _align(num_bytes), offsets[name]
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(parts, num_bytes)
            host[start : start + parts * pitch].reshape(parts, pitch)[:, :num_bytes] = data
        if self._on_device is not self._host:
            self._on_device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return {name: self._view(name, offsets[name], array) for name, array in arrays.items()}

    def fits(self, arrays: Mapping[str, NDArray]) -> bool:
        """Returns whether `put` can keep its buffer, whose addresses captured graphs contain."""
        return _get_offsets(arrays)[1] <= len(self._host)

    def _view(self, name: str, start: int, array: NDArray) -> Tensor:
        parts, num_bytes = _get_parts(name, array)
        pitch, dtype = _align(num_bytes), TYPES[array.dtype.name]
        if parts == 1 or not num_bytes:
            return self._on_device[start : start + array.nbytes].view(dtype).view(array.shape)
        rows = self._on_device[start : start + parts * pitch].view(parts, pitch)
        return rows[:, :num_bytes].view(dtype).view(array.shape)

    def _make(self, num_bytes: int = 1 << 16) -> None:
        cuda = self._device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=cuda)
        self._on_device = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) if cuda else self._host
        )


def staging_bytes(options: BackendOptions, num_groups: int) -> int:
    """Returns twice the bytes of the largest step's arrays: sampling arrays are estimated as large
    as the rest. Token masks and biases are not counted.
    """
    table = options.max_requests * -(-options.max_context // BLOCK_SIZE)
    of_requests = SHARING_BYTES * options.max_requests
    return 2 * (
        options.max_tokens * (12 + 8 * num_groups)
        + 4 * num_groups * (table + of_requests)
        + (64 << 10)
    )


def _get_offsets(arrays: Mapping[str, NDArray]) -> tuple[dict[str, int], int]:
    """Returns the offset of each array in the buffer, and the end."""
    offsets, end = {}, 0
    for name, array in arrays.items():
        offsets[name] = end
        parts, num_bytes = _get_parts(name, array)
        end += parts * _align(num_bytes)
    return offsets, end


def _get_parts(name: str, array: NDArray) -> tuple[int, int]:
    """Returns how many parts of an array are aligned, and the bytes of each."""
    parts = len(array) if name in OF_GROUPS else 1
    return parts, array.nbytes // max(parts, 1)


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def step_arrays(batch: StepBatch, num_blocks: list[int]) -> dict[str, NDArray]:
    """Returns the arrays of a batch that ops read.

    A padded row gets token id, key index and positions 0, and a slot in the spare block of each
    group.
    """
    live = live_rows(batch)
    spare = np.array(num_blocks, np.int32)[:, None] * BLOCK_SIZE
    arrays: dict[str, NDArray] = {
        "token_ids": np.where(live, batch.token_ids, 0),
        "key_indices": np.where(live, batch.key_indices, 0),
        "positions": np.where(live, batch.positions, 0),
        "slots": np.where(batch.slots < 0, spare, batch.slots).astype(np.int64),
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "block_tables": np.maximum(batch.block_tables, 0),
        "sample_rows": batch.sample_rows,
    }
    if batch.hidden is not None:
        arrays["hidden"] = batch.hidden
    if batch.input_rows is not None and batch.input_row_indices is not None:
        arrays["input_rows"] = batch.input_rows
        arrays["input_row_indices"] = batch.input_row_indices.astype(np.int32)
    if batch.limits is not None:
        arrays["limits"] = batch.limits
    if batch.adapter_rows is not None:
        arrays["adapter_rows"] = batch.adapter_rows.astype(np.int32)
    return arrays if batch.copies is None else arrays | _copy_arrays(batch.slots, batch.copies)


def _copy_arrays(slots: NDArray[np.int32], copies: KvCopies) -> dict[str, NDArray]:
    """Returns for each cache group the source and target slots of copies."""
    arrays: dict[str, NDArray] = {}
    for group, own in enumerate(slots):
        copied = copies.slots[group] >= 0
        sources = own.repeat(np.diff(copies.starts))[copied]
        arrays[f"{group}/copy sources"] = sources.astype(np.int64)
        arrays[f"{group}/copy targets"] = copies.slots[group][copied].astype(np.int64)
    return arrays


def live_rows(batch: StepBatch) -> NDArray[np.bool_]:
    """Returns which rows are not padding, `[T]`: those with a slot in any cache group."""
    live: NDArray[np.bool_] = (
        np.any(batch.slots >= 0, axis=0)
        if len(batch.slots)
        else np.ones(len(batch.token_ids), np.bool_)
    )
    return live


@dataclass(slots=True)
class Step:
    """One run of a Program: its inputs and the Values computed so far."""

    program: Program
    weights: ProgramWeights
    dtype: torch.dtype
    """Dtype of Values."""
    device: torch.device
    batch: StepBatch
    kv: list[GroupTensors]
    inputs: dict[str, Tensor]
    """`step_arrays` on the device, plus the arrays of attention kernels and sampling."""
    attention: AttentionKernels
    kernels: Kernels
    norms_ahead: Mapping[str, NormOp]
    """`row_ops.norms_ahead` of the Program."""
    ranks: TorchRanks | None = None
    """Ranks that share the Program; None with one rank."""
    adapters: TorchAdapters | None = None
    """Adapters of the step's rows, if any row has one."""
    values: dict[str, Tensor] = field(default_factory=dict)
    normed: dict[str, Tensor] = field(default_factory=dict)
    """Norms computed together with their sum, by the sum's name, until they are read."""
    _shared: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.program.inputs.items():
            self.values[value.name] = (
                self.inputs["token_ids"]
                if name == "token_ids"
                else self.inputs["hidden"].to(self.dtype)
            )

    def get(self, value: Value) -> Tensor:
        return self.values[value.name]

    def adapter_rows(self, adapters: TorchAdapters, value: Value) -> AdapterRows:
        """Returns the adapters of the rows of a Value."""
        slots = self.inputs["adapter_rows"]
        if value.axis == "samples":
            return adapters.rows(slots[self.inputs["sample_rows"]], self.kernels)
        if value.axis == "requests":
            slots = slots[(self.inputs["query_starts"][1:] - 1).clamp(min=0)]
        return self.once(("adapters", value.axis), lambda: adapters.rows(slots, self.kernels))

    def copy_written(self, group: int, layer: int) -> None:
        """Copies K and V written to a layer to the rows' additional slots in a group, if there are
        any.
        """
        targets = self.inputs.get(f"{group}/copy targets")
        if targets is not None:
            sources = self.inputs[f"{group}/copy sources"]
            for tensor in (self.kv[group].k, self.kv[group].v):
                tensor.layer(layer).copy(sources, targets)

    def once(self, key: Any, make: Callable[[], Shared]) -> Shared:
        """Returns `make()`, computed once per step and `key`."""
        if key not in self._shared:
            self._shared[key] = make()
        shared: Shared = self._shared[key]
        return shared
