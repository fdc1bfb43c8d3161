"""Times of each kind of op over several steps. On CUDA every op is synchronized while profiling,
and graphs are not replayed.

Bytes and operations are counted for matmuls only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.api.outputs import OpProfile, Profile
from octavo.executor.torch.rates import measured_ceilings, wait_for
from octavo.executor.torch.weights.program_weights import ProgramWeights
from octavo.program.ops import Linear
from octavo.program.program import Op

CODES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(slots=True)
class _Times:
    calls: int = 0
    seconds: float = 0.0
    num_bytes: float = 0.0
    operations: float = 0.0


class OpTimes:
    """Accumulated times and work of ops. `dtype` is the compute dtype of matmuls."""

    def __init__(self, weights: ProgramWeights, device: torch.device, dtype: torch.dtype) -> None:
        self._weights = weights
        self._device = device
        self._dtype = dtype
        self._times: dict[tuple[str, str], _Times] = {}

    def run(self, op: Op, num_rows: int, run: Callable[[], None]) -> None:
        wait_for(self._device)
        began = time.perf_counter()
        run()
        wait_for(self._device)
        linear = isinstance(op, Linear)
        times = self._times.setdefault((op.kind, CODES[self._dtype] if linear else ""), _Times())
        times.calls, times.seconds = times.calls + 1, times.seconds + time.perf_counter() - began
        if isinstance(op, Linear):
            times.num_bytes += sum(part.num_bytes for part in self._weights.product(op).parts)
            times.operations += (
                2 * num_rows * sum(math.prod(weight.shape) for weight in op.weights_)
            )

    def result(self, weight_bytes: int) -> Profile:
        ops = [
            OpProfile(name, code, t.calls, t.seconds, t.num_bytes, t.operations)
            for (name, code), t in self._times.items()
        ]
        ceilings = measured_ceilings(weight_bytes, self._dtype, self._device)
        return Profile(ops, ceilings.bandwidth, {CODES[self._dtype]: ceilings.operations})
