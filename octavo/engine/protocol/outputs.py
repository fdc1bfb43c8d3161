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
    """Cumulative logprob divided by length ** length_penalty."""
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] = []
    """One entry for each token if logprobs are requested, else empty."""


class EngineOutput(msgspec.Struct, omit_defaults=True):
    """New tokens or the end of one request after a step. Only the last output of a request has a
    finish_reason.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    """One entry for each of `token_ids`; None if logprobs are not requested."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Logprobs of the prompt tokens from the second one on, all at once with the first output
    token.
    """
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
    """Mirostat's mu after `token_ids`, for a core that resumes the request."""
    pooled: bytes | None = None
    """Pooled row of a pooling request, in fp32; set with the finish_reason."""
    beams: list[BeamOutput] | None = None
    """Sequences found by a beam search, set with the finish_reason; a beam search outputs no tokens
    before.
    """
    timings: Timings | None = None
    """Timings of the request; set with the finish_reason, and in each output if a stop string may
    end the request.
    """


class CoreOutputs(msgspec.Struct):
    """The outputs of one step, or of one of its decode steps."""

    outputs: list[EngineOutput]
    stats: EngineStats
    view: EngineView | None = None
    """View of the engine after the step; set at intervals while the engine is watched, else
    None.
    """
    block_events: list[BlockEvent] = []
    """Block events of the prefix cache, if the engine logs them."""
    engine: int = 0
    """Index of the engine among its frontend's engines."""
    costs: StepCosts | None = None
    """Measured step costs; set at intervals, else None."""
