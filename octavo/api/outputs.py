"""Outputs of a request, and the profile of an engine. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from octavo.api.lora_request import LoRARequest

SHORT_S = 0.001
"""Waits shorter than this (seconds) are not reported."""

FinishReason = Literal["stop", "length", "abort", "error", "repetition"]


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's probability, before penalties and temperature. Rank 1 is the
    most likely.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None
    """Score in a beam search: cumulative logprob / length ** length_penalty; None without a search.
    """
    num_reasoning_tokens: int = 0
    """Number of reasoning tokens, including the reasoning markers."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Timestamps of the monotonic clock, in seconds."""

    arrival_time: float = 0.0
    scheduled_ts: float | None = None
    token_times: list[float] = field(default_factory=list)
    """Timestamp of each step that produced tokens, for any of the n samples."""
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
    """Breakdown of a finished request's time. For several samples: the maximum of times, the sum of
    counts.
    """

    queued_s: float
    """Seconds from arrival to the first step."""
    prefill_s: float
    """Seconds from the first step to the first token."""
    decode_s: float
    """Seconds from the first token to the last."""
    preempted_s: float
    """Seconds of prefill and decode during which the request was preempted."""
    num_steps: int
    """Number of steps that included the request."""
    mean_batch_size: float
    """Mean number of requests in these steps, itself included."""
    max_batch_size: int
    waits: dict[str, float]
    """Seconds in the queue, by reason."""
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache at the first start."""
    num_preemptions: int = 0
    num_swaps: int = 0
    """Number of preemptions by swapping to host memory."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    streamed_bytes: int = 0
    """Bytes of weights read from a file during its steps, divided among the requests of each step.
    """
    neurons_found: int = 0
    """Number of neurons found in memory during its steps, divided among the requests of each step.
    """
    neurons_read: int = 0
    """Number of neurons read from the file during its steps, divided likewise."""

    @property
    def reason(self) -> str:
        """Explanation of the waits, such as "waited 1.2 s: KV full"; "" if all were under a
        millisecond.
        """
        texts = [
            f"waited {_seconds(seconds)}: {reason}"
            for reason, seconds in sorted(self.waits.items(), key=lambda wait: -wait[1])
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
        if len(parts) == 1:
            return parts[0]
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


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.3f} s"


@dataclass(slots=True)
class RequestOutput:
    """Outputs of a request. `error` is set if the request failed (finish_reason "error")."""

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
    """Pooled output of a pooling request: little-endian fp32."""
    timings: Timings | None = None
    """None until the request has finished."""
    lora_request: LoRARequest | None = None
    """Adapter of the request; None for the base model."""


@dataclass(frozen=True, slots=True)
class OpProfile:
    """Totals for one kind of op. `num_bytes` counts the weights or KV that it reads at least; 0 if
    not counted.
    """

    name: str
    code: str
    """Storage format of the weights ("u4", "bf16", ...); "" if there are none."""
    calls: int
    seconds: float
    num_bytes: float
    operations: float
    """Number of multiplications and additions: two for each multiply-add."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Time of each kind of op over some steps, with the machine's peak rates.

    Source: the roofline model of Williams et al. 2009.
    """

    ops: list[OpProfile]
    bandwidth: float
    """Bytes per second over a working set of the weights' size."""
    rates: dict[str, float]
    """Peak operations per second for many rows, by weight format, with operands in the nearest
    cache.
    """
    hop_s: float = 0.0
    """Latency of a cache line between the cores of two compute threads, in seconds; 0 with one
    thread.
    """

    def bound_s(self, op: OpProfile) -> float:
        """Returns the lower bound of the op's time on this machine, in seconds; 0 if nothing is
        counted.
        """
        compute = op.operations / self.rates[op.code] if op.code in self.rates else 0.0
        return max(op.num_bytes / self.bandwidth, compute)
