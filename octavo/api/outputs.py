"""What a request gives back, and what a profile of the engine holds. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from octavo.api.lora_request import LoRARequest

SHORT_S = 0.001
"""Wait below which nothing is said of it, in seconds."""

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


@dataclass(slots=True)
class Logprob:
    """A token's logprob: the natural logarithm of its probability before penalties and temperature.
    Rank 1 is the most likely.
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
    """Score by which a beam search ranks its outputs: the cumulative logprob over the length to the
    power of length_penalty; None without a search.
    """
    num_reasoning_tokens: int = 0
    """Number of its tokens that are reasoning, its marks included."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Moments on the monotonic clock, in seconds."""

    arrival_time: float = 0.0
    scheduled_ts: float | None = None
    token_times: list[float] = field(default_factory=list)
    """Moment of each step that yielded tokens, whichever of the n samples they belong to."""
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
    """Account of where a finished request's time went. For several samples together it holds the
    longest times and the sums of counts.
    """

    queued_s: float
    """Seconds from its arrival to its first step."""
    prefill_s: float
    """Seconds from its first step to its first token."""
    decode_s: float
    """Seconds from its first token to its last."""
    preempted_s: float
    """Seconds of prefill and decode in which it was preempted, without KV blocks on the device."""
    num_steps: int
    """Number of steps in which it ran."""
    mean_batch_size: float
    """Mean number of requests, itself included, in the steps in which it ran."""
    max_batch_size: int
    waits: dict[str, float]
    """Seconds in the queue, by what it waited for."""
    cached_tokens: int = 0
    """Number of prompt tokens found computed when it first started."""
    num_preemptions: int = 0
    num_swaps: int = 0
    """Number of preemptions that went to host memory."""
    draft_tokens: int = 0
    """Number of guessed tokens that were verified (speculation)."""
    accepted_tokens: int = 0
    """Number of guessed tokens that were right (speculation)."""
    streamed_bytes: int = 0
    """Bytes of weights read from a file for its steps, a share of each step's where others ran in
    it too."""
    neurons_found: int = 0
    """Share of the neurons that were in memory when the steps used them that it ran in."""
    neurons_read: int = 0
    """Share of the neurons that were read for these steps."""

    @property
    def reason(self) -> str:
        """Explanation of its waits for people, as "waited 1.2 s: KV full"; "" where nothing held it
        up for a millisecond.
        """
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
        """Merges the timings of one or more samples."""
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
            draft_tokens=sum(part.draft_tokens for part in parts),
            accepted_tokens=sum(part.accepted_tokens for part in parts),
            streamed_bytes=sum(part.streamed_bytes for part in parts),
            neurons_found=sum(part.neurons_found for part in parts),
            neurons_read=sum(part.neurons_read for part in parts),
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
    """A request's outputs, by index. `error` is set where the engine failed it (finish_reason
    "error").
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
    pooled: bytes | None = None
    """The pooled row of a request that wanted one, in fp32, little-endian."""
    timings: Timings | None = None
    """Account of a finished request's time; None before its end."""
    lora_request: LoRARequest | None = None
    """Adapter that the request named; None for the plain model."""


@dataclass(frozen=True, slots=True)
class OpProfile:
    """Sum of all runs of one kind of op. `num_bytes` counts the bytes of weights, or of K and V,
    that it had to read at least; 0 where none are counted.
    """

    name: str
    code: str
    """Storage of its weights ("u4", "bf16", ...); "" where it has none."""
    calls: int
    seconds: float
    num_bytes: float
    operations: float
    """Number of multiplications and additions, two for each product of two numbers."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Account of where the time of some steps went, beside what the machine could have done.
    Source: the roofline of Williams et al. 2009.
    """

    ops: list[OpProfile]
    bandwidth: float
    """Bytes per second, read from a working set of the weights' size."""
    rates: dict[str, float]
    """Operations per second on many rows, by the code of the weights, with operands in the nearest
    cache.
    """
    hop_s: float = 0.0
    """Seconds that a cache line takes from one compute thread's core to another's; 0 where there is
    no other.
    """

    def bound_s(self, op: OpProfile) -> float:
        """Returns the least time that the op's bytes or operations take on this machine, in
        seconds; 0 where neither is counted.
        """
        compute = op.operations / self.rates[op.code] if op.code in self.rates else 0.0
        return max(op.num_bytes / self.bandwidth, compute)
