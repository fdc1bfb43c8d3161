"""Two work queues of a device: one computes, the side queue copies between device and host.

Each queue keeps its order; waits between them are explicit. `CudaStreams` uses two CUDA streams,
`SerialStreams` is for devices with one queue (the CPU). Tests use streams that reorder work as far
as allowed.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Work = Callable[[], object]


class Streams(Protocol):
    def compute(self, work: Work) -> None:
        """Queues work on the compute stream."""
        ...

    def side(self, work: Work) -> None:
        """Queues work on the copy stream."""
        ...

    def side_waits(self) -> None:
        """Makes later copies wait for all compute work queued so far."""
        ...

    def compute_waits(self) -> None:
        """Makes later compute work wait for all copies queued so far."""
        ...

    def staging(self, num_blocks: int, num_bytes: int, *, on_side: bool) -> Tensor:
        """Returns a `[blocks, bytes] uint8` device buffer, valid until both queues are done with
        it.

        `on_side`: the side queue uses it first.
        """
        ...

    def pinned(self, num_blocks: int, num_bytes: int) -> Tensor:
        """Returns `[blocks, bytes] uint8` of pinned host memory."""
        ...

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pins host memory for its lifetime; if that fails, blocks are copied through pinned
        buffers.
        """
        ...

    def is_pinned(self, memory: Tensor) -> bool: ...

    def indices(self, block_ids: list[int]) -> Tensor:
        """Returns block ids as `[blocks] int64` on the device."""
        ...

    def drain(self) -> float:
        """Waits for all copies; returns the seconds that they took since the last call, or 0 if not
        measured.
        """
        ...


class SerialStreams:
    """Runs all work immediately, in call order."""

    def compute(self, work: Work) -> None:
        work()

    def side(self, work: Work) -> None:
        work()

    def side_waits(self) -> None:
        """Does nothing: work runs in order."""

    def compute_waits(self) -> None:
        """Does nothing: work runs in order."""

    def staging(self, num_blocks: int, num_bytes: int, *, on_side: bool) -> Tensor:
        return torch.empty(num_blocks, num_bytes, dtype=torch.uint8)

    def pinned(self, num_blocks: int, num_bytes: int) -> Tensor:
        return torch.empty(num_blocks, num_bytes, dtype=torch.uint8)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Does nothing: the CPU reads all memory."""

    def is_pinned(self, memory: Tensor) -> bool:
        return True

    def indices(self, block_ids: list[int]) -> Tensor:
        return torch.tensor(block_ids)

    def drain(self) -> float:
        return 0.0


class CudaStreams:
    """Two CUDA streams: the current one computes, a second one copies.

    Events order them, and memory used by one is not reused before the other is done with it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._spans: list[tuple[Any, Any]] = []

    @property
    def _computing(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def compute(self, work: Work) -> None:
        work()

    def side(self, work: Work) -> None:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record(self._side)
        with torch.cuda.stream(self._side):
            work()
        ended.record(self._side)
        self._spans.append((began, ended))

    def side_waits(self) -> None:
        self._side.wait_stream(self._computing)  # type: ignore[no-untyped-call]

    def compute_waits(self) -> None:
        self._computing.wait_stream(self._side)  # type: ignore[no-untyped-call]

    def staging(self, num_blocks: int, num_bytes: int, *, on_side: bool) -> Tensor:
        with torch.cuda.stream(self._side if on_side else self._computing):
            buffer = torch.empty(num_blocks, num_bytes, dtype=torch.uint8, device=self.device)
        buffer.record_stream(self._computing if on_side else self._side)
        return buffer

    def pinned(self, num_blocks: int, num_bytes: int) -> Tensor:
        return torch.empty(num_blocks, num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pins memory until it is freed.

        It must be unpinned when it is freed; otherwise later memory at the same address would count
        as pinned.
        """
        if not memory.nbytes:
            return
        runtime, address = torch.cuda.cudart(), memory.ctypes.data  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
            warnings.warn(
                f"{memory.nbytes:,} bytes of host memory cannot be pinned; swaps are slower",
                stacklevel=2,
            )
            with contextlib.suppress(
                RuntimeError
            ):  # CUDA reports an error again at the next launch, which must not be a step's
                torch.zeros(1, device=self.device)
            return
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False

    def is_pinned(self, memory: Tensor) -> bool:
        return memory.is_pinned()

    def indices(self, block_ids: list[int]) -> Tensor:
        return on_device(np.array(block_ids, np.int64), self.device)

    def drain(self) -> float:
        self._side.synchronize()
        spans, self._spans = self._spans, []
        return float(sum(began.elapsed_time(ended) for began, ended in spans)) / 1e3


def on_device(array: NDArray, device: torch.device) -> Tensor:
    """Copies an array to the device asynchronously, after queued compute work."""
    if device.type != "cuda":
        return torch.from_numpy(array)
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def make_streams(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else SerialStreams()
