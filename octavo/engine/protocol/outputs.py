"""Outputs of the engine core after each step.

Data only; sent between processes.
"""

from __future__ import annotations

import msgspec

from octavo.api.outputs import FinishReason, Timings
from octavo.engine.protocol.block_events import BlockEvent
from octavo.engine.protocol.stats import EngineStats
from octavo.engine.protocol.step import TokenLogprobs
from octavo.engine.protocol.step_costs import StepCosts
from octavo.engine.protocol.view import EngineView


class BeamOutput(msgspec.Struct, omit_defaults=True):
    """A finished sequence of a beam search, without the prompt."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    """Cumulative logprob over the length to the power of the length penalty."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = []
    """One entry for each token if logprobs are wanted, else empty."""


class EngineOutput(msgspec.Struct, omit_defaults=True):
    """New tokens or the end of one request after a step. Only the last output of a request has a
    finish_reason.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """Logprobs, one entry for each of `token_ids`; None if they are not wanted."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Logprobs of the prompt tokens from the second on, all at once with the first token."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """Token of `stop_token_ids` that ended the request."""
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    """Preemptions that moved its blocks to host memory."""
    scheduled_ts: float | None = None
    mirostat_mu: float | None = None
    """Bound of mirostat after `token_ids`, for a core that may replace this one."""
    pooled: bytes | None = None
    """The pooled row of a request that wants one, in fp32, with the finish_reason."""
    beams: list[BeamOutput] | None = None
    """Sequences found by a beam search, all with the finish_reason; it yields no tokens before."""
    timings: Timings | None = None
    """Timings; set with the finish_reason, and if a stop string may end the request."""


class CoreOutputs(msgspec.Struct):
    """The outputs of one step, or of one of its decode steps."""

    outputs: list[EngineOutput]
    stats: EngineStats
    view: EngineView | None = None
    """The engine after the step, now and then while it is watched."""
    block_events: list[BlockEvent] = []
    """Block events of the prefix cache, if the engine logs them."""
    engine: int = 0
    """Index of the engine among its frontend's engines."""
    costs: StepCosts | None = None
    """Costs of steps as measured so far, now and then."""
