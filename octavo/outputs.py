"""What a request gives back. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

SHORT_S = 0.001
"""Waits that are not worth a word."""

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's probability before penalties and temperature; rank 1 is the
    most likely.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's samples so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    """Of a beam search, whose outputs are ranked by it: the cumulative logprob over the length to
    the power of length_penalty.
    """

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


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of a request that has ended went. Of several samples together: the longest
    times, the sums of counts.
    """

    queued_s: float
    """From its arrival to its first step."""
    prefill_s: float
    """From there to its first token."""
    decode_s: float
    """From there to its last."""
    preempted_s: float
    """Of prefill and decode, without its KV blocks on the device."""
    num_steps: int
    """In which it ran."""
    mean_batch_size: float
    """Requests in these steps, itself included."""
    max_batch_size: int
    waits: dict[str, float]
    """Of the time in the queue, seconds by what it waited for."""
    cached_tokens: int = 0
    """Of the prompt, found computed when it first started."""
    num_preemptions: int = 0
    num_swaps: int = 0
    """Of the preemptions, those to host memory."""

    @property
    def reason(self) -> str:
        """For people: "waited 1.2 s: KV full"; "" where nothing held it up for a millisecond."""
        texts = [
            f"waited {_seconds(seconds)}: {reason}"
            for reason, seconds in _longest_first(self.waits)
            if seconds >= SHORT_S
        ]
        if self.num_preemptions:
            how = (
                f"{self.num_swaps} of {self.num_preemptions} by swap"
                if self.num_swaps
                else "computed again"
            )
            texts.append(f"preempted for {_seconds(self.preempted_s)} ({how}): KV full")
        return "; ".join(texts)

    @staticmethod
    def merged(parts: Sequence[Timings]) -> Timings:
        """Of at least one."""
        num_steps = sum(part.num_steps for part in parts)
        waits: dict[str, float] = {}
        for part in parts:
            waits |= {
                reason: max(seconds, waits.get(reason, 0.0))
                for reason, seconds in part.waits.items()
            }
        return Timings(
            queued_s=max(part.queued_s for part in parts),
            prefill_s=max(part.prefill_s for part in parts),
            decode_s=max(part.decode_s for part in parts),
            preempted_s=max(part.preempted_s for part in parts),
            cached_tokens=sum(part.cached_tokens for part in parts),
            num_preemptions=sum(part.num_preemptions for part in parts),
            num_swaps=sum(part.num_swaps for part in parts),
            num_steps=num_steps,
            mean_batch_size=sum(part.mean_batch_size * part.num_steps for part in parts) / num_steps
            if num_steps
            else 0.0,
            max_batch_size=max(part.max_batch_size for part in parts),
            waits=waits,
        )


def _longest_first(waits: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(waits.items(), key=lambda wait: -wait[1])


def _seconds(seconds: float) -> str:
    """ "1.2 s", "0.034 s"."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"


@dataclass(slots=True)
class RequestOutput:
    """A request's outputs, in the order of their index. `error` is set where the engine failed it
    (finish_reason "error").
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    timings: Timings | None = None
    """Of a finished one."""


@dataclass(frozen=True, slots=True)
class OpProfile:
    """All runs of one kind of op. `num_bytes`: of weights, or of K and V, that it had to read at
    least; 0 where none are counted.
    """

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
    """Where the time of some steps went, and what the machine could have done. Source: the roofline
    of Williams et al. 2009.
    """

    ops: list[OpProfile]
    bandwidth: float
    """Bytes per second, read from a working set of the weights' size."""
    rates: dict[str, float]
    """Operations per second of many rows by code of the weights, operands in the nearest cache."""
    hop_s: float = 0.0
    """Seconds that a cache line takes from one compute thread's core to another's; 0 where there is
    no other.
    """

    def bound_s(self, op: OpProfile) -> float:
        """The least time that the op's bytes or operations take on this machine; 0 where neither is
        counted.
        """
        compute = op.operations / self.rates[op.code] if op.code in self.rates else 0.0
        return max(op.num_bytes / self.bandwidth, compute)
