"""Copies a step's results asynchronously to pinned host memory and waits for them on demand.

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
from octavo.executor.torch.sampling import SamplerOutput


class Fetch:
    """Result copies of one step; no-op on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def take(self, tensor: Tensor) -> Tensor:
        """Returns a host copy whose contents are valid once the step is computed."""
        if not self._is_cuda:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def copy_sampled(self, sampled: SamplerOutput) -> SamplerOutput:
        logprobs = None
        if sampled.logprobs is not None:
            own, ranks, best, theirs = sampled.logprobs
            logprobs = (self.take(own), self.take(ranks), self.take(best), self.take(theirs))
        bits = None if sampled.surprises is None else self.take(sampled.surprises)
        return SamplerOutput(
            self.take(sampled.token_ids), self.take(sampled.failed), logprobs, bits
        )

    def then(self, finish: Callable[[], StepOutput]) -> PendingStep:
        """Returns the step in flight; `finish` makes its output once all copies have arrived."""
        copied: Any = None
        if self._is_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        return PendingStep(finish, copied)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A launched step that may still be computing. Implements `base.Computing`."""

    finish: Callable[[], StepOutput]
    copied: Any
    """Event after the last copy; None on the CPU."""

    def result(self) -> StepOutput:
        with translate_out_of_memory():
            if self.copied is not None:
                self.copied.synchronize()
            return self.finish()


@contextmanager
def translate_out_of_memory() -> Iterator[None]:
    """Converts PyTorch's out-of-memory error to MemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
