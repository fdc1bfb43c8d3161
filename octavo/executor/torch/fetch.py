"""A step's results on their way to the host: copied into pinned memory behind the step's kernels,
and waited for when they are asked for.

The host can launch the next step before this one is computed; a plain copy to the host would wait
for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.executor.batch import StepOutput
from octavo.executor.torch.sampling import Drawn


class Fetch:
    """The copies of one step's results. On the CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def take(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the host, whose contents are there once the step is computed."""
        if not self._is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def take_drawn(self, drawn: Drawn) -> Drawn:
        logprobs = None
        if drawn.logprobs is not None:
            own, ranks, best, theirs = drawn.logprobs
            logprobs = (self.take(own), self.take(ranks), self.take(best), self.take(theirs))
        bits = None if drawn.surprises is None else self.take(drawn.surprises)
        return Drawn(self.take(drawn.token_ids), self.take(drawn.failed), logprobs, bits)

    def then(self, finish: Callable[[], StepOutput]) -> PendingStep:
        """Returns the step in flight; `finish` makes its output once all copies have arrived."""
        copied: Any = None
        if self._is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return PendingStep(finish, copied)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that the device may still be computing. Implements `base.Computing`."""

    finish: Callable[[], StepOutput]
    copied: Any
    """The event behind the last copy; None on the CPU."""

    def result(self) -> StepOutput:
        with out_of_memory_named():
            if self.copied is not None:
                self.copied.synchronize()
            return self.finish()


@contextmanager
def out_of_memory_named() -> Iterator[None]:
    """Raises PyTorch's out-of-memory error as Python's MemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
