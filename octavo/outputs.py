"""What a request gives back. Names are vLLM's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's probability before penalties and temperature; rank 1 is the most likely."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n samples so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Moments on the monotonic clock, in seconds."""

    arrival_time: float = 0.0
    scheduled_ts: float | None = None
    token_times: list[float] = field(default_factory=list)
    """One for each step that yielded tokens, whichever of the n samples they belong to."""
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    @property
    def first_token_ts(self) -> float | None:
        return self.token_times[0] if self.token_times else None

    @property
    def last_token_ts(self) -> float | None:
        return self.token_times[-1] if self.token_times else None

    @property
    def first_token_latency(self) -> float | None:
        return None if self.first_token_ts is None else self.first_token_ts - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request's outputs, in the order of their index. `error` is set where the engine failed it (finish_reason "error")."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class OpProfile:
    """All runs of one kind of op. `num_bytes`: of weights, or of K and V, that it had to read at least; 0 where none are counted."""

    name: str
    code: str
    """How its weights are stored ("u4", "bf16", ...), "" where it has none."""
    calls: int
    seconds: float
    num_bytes: float
    operations: float
    """Multiplications and additions, two for each product of two numbers."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Where the time of some steps went, and what the machine could have done. Source: the roofline of Williams et al. 2009."""

    ops: list[OpProfile]
    bandwidth: float
    """Bytes per second, read from a working set of the weights' size."""
    rates: dict[str, float]
    """Operations per second of many rows by code of the weights, operands in the nearest cache."""

    def bound_s(self, op: OpProfile) -> float:
        """The least time that the op's bytes or operations take on this machine; 0 where neither is counted."""
        compute = op.operations / self.rates[op.code] if op.code in self.rates else 0.0
        return max(op.num_bytes / self.bandwidth, compute)
