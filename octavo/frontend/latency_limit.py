"""Early rejection: predicts the time to first token and the time per output token of a new request,
and rejects it before anything is computed if a limit would be exceeded.

Runs in the frontend process; reads no clock itself. It tracks sent requests and their outputs, and
gets step costs from the core. Output lengths are estimated from recently finished requests. Source
of the idea: Mooncake (Qin et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.api.errors import Overloaded
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.protocol.outputs import EngineOutput
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step_costs import UNMEASURED, StepCosts
from octavo.frontend.input_processor import ParentRequest

WEIGHT = 0.1
"""Weight of the newest request in the running mean of decode times."""
LEAST_CHUNK = 16
"""Minimum number of prompt tokens per step to assume if a bound on step times leaves fewer."""
FULL_CACHE = 0.9
"""Fraction of used KV blocks above which waiting requests are assumed to wait for blocks."""
SPREAD = 2.0
"""Number of standard deviations by which the expected number of requests that finish in time is
reduced: a request that comes too late has cost others their turn.
"""
RETRY_S = (1.0, 300.0)
"""Minimum and maximum recommended wait, in seconds."""


@dataclass(slots=True)
class SentRequest:
    """An unfinished request that was sent to the engine."""

    num_prompt_tokens: int
    num_tokens: int = 0
    """Number of its output tokens so far."""
    first_s: float = 0.0
    """Time of its first token."""


@dataclass(frozen=True, slots=True)
class PredictedLatency:
    """Predicted latencies of a new request, in seconds."""

    ttft_s: float
    """Time to its first token."""
    tpot_s: float
    """Time per output token while no prompt is computed."""


class LatencyLimit:
    """Limits `max_predicted_ttft_s` and `max_predicted_tpot_s`; either may be None."""

    def __init__(self, options: SchedulerOptions, *, num_engines: int = 1) -> None:
        self._max_ttft_s = options.max_predicted_ttft_s
        self._max_tpot_s = options.max_predicted_tpot_s
        self._chunk = options.max_num_batched_tokens
        self._target_s = None if options.itl_target_ms is None else options.itl_target_ms / 1000
        self._max_rows = options.max_num_seqs
        self._num_engines = num_engines
        self._sent: dict[str, SentRequest] = {}
        self._waiting_tokens = 0
        """Prompt tokens of the requests without output."""
        self._num_waiting = 0
        """Number of requests without output."""
        self._num_keys = 0
        """Prompt and output tokens of the requests with output."""
        self._moved_s = 0.0
        """Time at which the last prompt was completed, or a request came to an idle engine."""
        self._answer_s: float | None = None
        """Mean time from first to last token of a request; None before one has finished."""
        self._costs = UNMEASURED
        self._stats = EngineStats()

    def sent(self, request: ParentRequest, now: float) -> None:
        """Counts a request that was sent to the engine; its samples' prompt is computed once."""
        if not self._num_waiting:
            self._moved_s = now
        num_prompt_tokens = len(request.prompt_token_ids)
        for sample in request.samples:
            self._sent[sample.request_id] = SentRequest(num_prompt_tokens)
            self._waiting_tokens += num_prompt_tokens
            self._num_waiting += 1
            num_prompt_tokens = 0

    def update(
        self,
        outputs: Iterable[EngineOutput],
        stats: EngineStats,
        costs: StepCosts | None,
        now: float,
    ) -> None:
        """Updates the limit by a step's outputs."""
        self._stats = stats
        if costs is not None:
            self._costs = costs
        for output in outputs:
            sent = self._sent.get(output.request_id)
            if sent is None:
                continue
            if output.token_ids:
                self._yielded(sent, len(output.token_ids), now)
            if output.finish_reason is not None:
                del self._sent[output.request_id]
                self._ended(sent, now, counts=output.finish_reason not in ("abort", "error"))

    def check(self, num_prompt_tokens: int, num_rows: int, now: float) -> None:
        """Raises Overloaded if a predicted latency of a new request exceeds its limit."""
        if self._max_ttft_s is None and self._max_tpot_s is None:
            return
        predicted = self.predict(num_prompt_tokens, num_rows, now)
        if predicted is None:
            return
        late_s = 0.0 if self._max_ttft_s is None else predicted.ttft_s - self._max_ttft_s
        if late_s > 0:
            raise self._make_overloaded(
                "first token", predicted.ttft_s, "max_predicted_ttft_s", late_s
            )
        if self._max_tpot_s is not None and predicted.tpot_s > self._max_tpot_s and self._sent:
            wait_s = (self._answer_s or 0.0) / len(self._sent)
            raise self._make_overloaded(
                "each next token", predicted.tpot_s, "max_predicted_tpot_s", wait_s
            )

    def predict(self, num_prompt_tokens: int, num_rows: int, now: float) -> PredictedLatency | None:
        """Returns the predicted latencies of a new request. Returns None before steps were
        measured. With several engines, the load is assumed to be evenly distributed.
        """
        if not self._costs.points:
            return None
        rows = -(-(len(self._sent) + num_rows) // self._num_engines)
        running = min(rows, self._max_rows)
        keys = self._num_keys // self._num_engines
        tpot_s = self._step_s(running, keys + num_prompt_tokens)
        queued = self._waiting_tokens / self._num_engines + num_prompt_tokens
        uncached = max(1.0, queued * self._miss_share)
        prefill_s = self._prefill_s(uncached, max(0, running - num_rows), keys)
        if self._num_waiting:
            # The progress of the step in flight is not known before it ends.
            prefill_s -= min(now - self._moved_s, prefill_s / 2)
        own_s = self._prefill_s(num_prompt_tokens * self._miss_share, 0, keys)
        return PredictedLatency(max(prefill_s, self._queue_s(rows) + own_s), tpot_s)

    def _yielded(self, sent: SentRequest, num_tokens: int, now: float) -> None:
        if not sent.num_tokens:
            self._waiting_tokens -= sent.num_prompt_tokens
            self._num_waiting -= 1
            self._num_keys += sent.num_prompt_tokens
            self._moved_s = sent.first_s = now
        sent.num_tokens += num_tokens
        self._num_keys += num_tokens

    def _ended(self, sent: SentRequest, now: float, *, counts: bool) -> None:
        if not sent.num_tokens:
            self._waiting_tokens -= sent.num_prompt_tokens
            self._num_waiting -= 1
            return
        self._num_keys -= sent.num_prompt_tokens + sent.num_tokens
        if counts:
            took_s = now - sent.first_s
            old = took_s if self._answer_s is None else self._answer_s
            self._answer_s = old + WEIGHT * (took_s - old)

    @property
    def _miss_share(self) -> float:
        """Fraction of prompt tokens that were not in the prefix cache."""
        queries = self._stats.prefix_query_tokens
        return 1 - self._stats.prefix_hit_tokens / queries if queries else 1.0

    def _prefill_s(self, num_tokens: float, num_rows: int, num_keys: int) -> float:
        """Returns the seconds for computing prompt tokens in steps that also decode `num_rows`
        rows.
        """
        chunk = max(LEAST_CHUNK, self._chunk - num_rows)
        while (
            self._target_s is not None
            and chunk > LEAST_CHUNK
            and self._step_s(chunk + num_rows, num_keys) > self._target_s
        ):
            chunk //= 2
        num_whole, rest = divmod(int(num_tokens), chunk)
        seconds = num_whole * self._step_s(chunk + num_rows, num_keys)
        return seconds + (self._step_s(rest + num_rows, num_keys) if rest else 0.0)

    def _queue_s(self, rows: int) -> float:
        """Returns the expected seconds until the last of `rows` unfinished requests can run: during
        the mean duration of a request, as many requests finish as can run at once.
        """
        max_running = self._max_rows
        if self._stats.num_waiting and self._stats.kv_usage > FULL_CACHE:
            max_running = max(1, self._stats.num_running // self._num_engines)
        excess = rows - max_running
        if excess <= 0 or self._answer_s is None:
            return 0.0
        return (excess + SPREAD * math.sqrt(excess)) * self._answer_s / max_running

    def _step_s(self, num_tokens: int, num_keys: int) -> float:
        return self._costs.step_s(max(1, num_tokens), num_keys) or 0.0

    def _make_overloaded(self, what: str, seconds: float, option: str, wait_s: float) -> Overloaded:
        allowed = self._max_ttft_s if option == "max_predicted_ttft_s" else self._max_tpot_s
        low, high = RETRY_S
        return Overloaded(
            f"the engine is too busy: the {what} would take about {seconds:.3g} s, expected"
            f" at most {allowed:g} s",
            hint=f"try again later, or raise {option}",
            retry_after_s=min(max(low, wait_s), high),
        )
