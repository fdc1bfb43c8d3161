"""One step on the device: the batch's arrays in one staging buffer, the Values made so far, what
attention layers share.

Owns the copy of a step's inputs: one transfer, asynchronous from pinned memory on CUDA. Knows
shapes and no formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.base import BackendOptions
from octavo.backends.batch import StepBatch
from octavo.backends.kv import BLOCK_SIZE
from octavo.backends.torch.kernels import Kernels
from octavo.backends.torch.kv_cache import GroupTensors
from octavo.backends.torch.weights import Weights
from octavo.program import ops
from octavo.program.program import Program, Value

Made = tuple[Tensor, ...]
NormOp = ops.RmsNorm | ops.LayerNorm | ops.PreNorm
Shared = TypeVar("Shared")

ALIGN_BYTES = 64

SHARING_BYTES = 36
"""A request's part of who shares a prefix with whom, and the length of its context: numbers of 4
bytes in each group.
"""

TYPES: dict[str, torch.dtype] = {
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
    "float64": torch.float64,
    "bool": torch.bool,
}


class Staging:
    """A buffer on the host and one on the device; `put` fills the first and copies it over."""

    def __init__(self, device: torch.device, num_bytes: int = 1 << 16) -> None:
        self._device = device
        self._copied: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._make(num_bytes)

    def put(self, arrays: Mapping[str, NDArray]) -> dict[str, Tensor]:
        """The arrays on the device, views of the buffer: good until the next call. Equal shapes lie
        at equal addresses.
        """
        places, end = _places(arrays)
        if end > len(self._host):
            self._make(max(end, 2 * len(self._host)))
        if self._copied is not None:
            self._copied.synchronize()
        host = self._host.numpy()
        for name, array in arrays.items():
            host[places[name] : places[name] + array.nbytes] = (
                np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            )
        if self._on_device is not self._host:
            self._on_device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return {name: self._view(places[name], array) for name, array in arrays.items()}

    def fits(self, arrays: Mapping[str, NDArray]) -> bool:
        """Without a new buffer, which would leave graphs with the old one."""
        return _places(arrays)[1] <= len(self._host)

    def _view(self, start: int, array: NDArray) -> Tensor:
        return (
            self._on_device[start : start + array.nbytes]
            .view(TYPES[array.dtype.name])
            .view(array.shape)
        )

    def _make(self, num_bytes: int = 1 << 16) -> None:
        cuda = self._device.type == "cuda"
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=cuda)
        self._on_device = (
            torch.zeros(num_bytes, dtype=torch.uint8, device=self._device) if cuda else self._host
        )


def staging_bytes(options: BackendOptions, num_groups: int) -> int:
    """Of the arrays of the largest step, and as much again for how to draw, a mask or a bias
    aside."""
    table = options.max_requests * -(-options.max_context // BLOCK_SIZE)
    of_requests = SHARING_BYTES * options.max_requests
    return 2 * (
        options.max_tokens * (8 + 8 * num_groups)
        + 4 * num_groups * (table + of_requests)
        + (64 << 10)
    )


def _places(arrays: Mapping[str, NDArray]) -> tuple[dict[str, int], int]:
    """Where each begins, and where they end."""
    places, end = {}, 0
    for name, array in arrays.items():
        places[name] = end
        end += -(-array.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return places, end


def step_arrays(batch: StepBatch, num_blocks: list[int]) -> dict[str, NDArray]:
    """What the ops read of a batch. Padded rows get the id 0, the position 0 and a slot in the
    block behind each group's last.
    """
    live = live_rows(batch)
    spare = np.array(num_blocks, np.int32)[:, None] * BLOCK_SIZE
    arrays: dict[str, NDArray] = {
        "token_ids": np.where(live, batch.token_ids, 0),
        "positions": np.where(live, batch.positions[0], 0),
        "slots": np.where(batch.slots < 0, spare, batch.slots).astype(np.int64),
        "query_starts": batch.query_starts,
        "context_lens": batch.context_lens,
        "block_tables": np.maximum(batch.block_tables, 0),
        "sample_rows": batch.sample_rows,
    }
    if batch.hidden is not None:
        arrays["hidden"] = batch.hidden
    return arrays


def live_rows(batch: StepBatch) -> NDArray[np.bool_]:
    """[T]: those that are no padding."""
    live: NDArray[np.bool_] = (
        np.any(batch.slots >= 0, axis=0)
        if len(batch.slots)
        else np.ones(len(batch.token_ids), np.bool_)
    )
    return live


@dataclass(slots=True)
class Step:
    """One run: what ops read, and the Values made so far."""

    program: Program
    weights: Weights
    dtype: torch.dtype
    """Of Values."""
    device: torch.device
    batch: StepBatch
    kv: list[GroupTensors]
    inputs: dict[str, Tensor]
    """`step_arrays` on the device."""
    attention: Any
    """The chosen `attention.AttentionChoice`."""
    kernels: Kernels
    norms_ahead: Mapping[str, NormOp]
    """`row_ops.norms_ahead` of the Program."""
    ranks: Any = None
    """`ranks.TorchRanks`, where there are several."""
    values: dict[str, Tensor] = field(default_factory=dict)
    normed: dict[str, Tensor] = field(default_factory=dict)
    """Norms of Values that were made with them, until the next op takes them."""
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

    def once(self, key: Any, make: Callable[[], Shared]) -> Shared:
        """What several layers need alike is made by the first of them."""
        if key not in self._shared:
            self._shared[key] = make()
        found: Shared = self._shared[key]
        return found
