"""Two queues of work for a device: one computes, the side one copies between device and host.

Each queue keeps its own order; one waits for the other only where it is told to. `CudaStreams` has
two CUDA streams. `SerialStreams` is for devices with one queue (the CPU). Tests have streams that
do the work in any order that the calls allow.
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
        """Queues work behind all computing so far."""
        ...

    def side(self, work: Work) -> None:
        """Queues work behind all copies so far."""
        ...

    def side_waits(self) -> None:
        """Makes the copies queued from now on wait for all computing queued so far."""
        ...

    def compute_waits(self) -> None:
        """Makes the computing queued from now on wait for all copies queued so far."""
        ...

    def staging(self, num_blocks: int, num_bytes: int, *, on_side: bool) -> Tensor:
        """Lends `[blocks, bytes] uint8` on the device until both queues have passed their use of
        it. `on_side` says which queue uses it first.
        """
        ...

    def pinned(self, num_blocks: int, num_bytes: int) -> Tensor:
        """Returns `[blocks, bytes] uint8` of host memory that the device reads and writes by
        itself.
        """
        ...

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pins host memory for its lifetime. Where the system refuses, blocks are copied through
        pinned buffers instead.
        """
        ...

    def is_pinned(self, memory: Tensor) -> bool: ...

    def indices(self, block_ids: list[int]) -> Tensor:
        """Returns block ids as `[blocks] int64` on the device."""
        ...

    def drain(self) -> float:
        """Waits for all copies. Returns the seconds they took since the last call, or 0 where these
        are not measured.
        """
        ...


class SerialStreams:
    """Does all work at once, in the order of the calls."""

    def compute(self, work: Work) -> None:
        work()

    def side(self, work: Work) -> None:
        work()

    def side_waits(self) -> None:
        """Does nothing: work is done in order."""

    def compute_waits(self) -> None:
        """Does nothing: work is done in order."""

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
    """Two CUDA streams: the current one computes, a second one copies. Events order them, and
    memory that one uses is not reused before the other is done with it.
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
            made = torch.empty(num_blocks, num_bytes, dtype=torch.uint8, device=self.device)
        made.record_stream(self._computing if on_side else self._side)
        return made

    def pinned(self, num_blocks: int, num_bytes: int) -> Tensor:
        return torch.empty(num_blocks, num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Pins memory until it is freed; it must be unpinned then, or other memory at its address
        would pass for pinned.
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
            ):  # CUDA names an error again at the next launch, which must not be a step's
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
    """Copies an array to the device, queued behind what computes there and not waited for."""
    if device.type != "cuda":
        return torch.from_numpy(array)
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else SerialStreams()
