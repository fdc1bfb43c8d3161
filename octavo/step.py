"""What crosses between the control plane and the execution plane: a StepPlan goes down, a StepResult comes back.

Plain ids and numbers only: no tensor, no request object, no text. Both are msgpack-friendly (msgspec structs of builtins).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from octavo.sampling_params import SamplingParams

FROM_DEVICE = -1
"""As a token id of a plan: the token that this row sampled last, which the worker knows."""


class NewRow(msgspec.Struct):
    """A request the worker does not know (new, or returning after a preemption, swapped or not): it gets a permanent row."""

    request_id: str
    token_ids: list[int]
    """All tokens known so far (prompt, and what was generated before a preemption)."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    """64-bit seed, always set: an unseeded request gets one at admission."""
    sample_index: int = 0
    """Which of the n samples this row is; part of the Philox counter."""
    end_token_ids: list[int] = []
    """Ids that end the request (end of sequence unless ignored, stop_token_ids): banned until `params.min_tokens` are generated."""


class ScheduledRow(msgspec.Struct):
    """One request's share of a step: `num_tokens` tokens from position `start` on are computed."""

    request_id: str
    start: int
    num_tokens: int
    new_block_ids: list[list[int]]
    """Per cache group: block ids appended to the row's table since the last step; [] where no group gained any."""
    replaced_blocks: list[tuple[int, int, int]] = []
    """(group, index in the table, new block id): entries changed by copy-on-write."""
    samples: bool = False
    """The last of the tokens yields logits from which one token is drawn."""
    num_prompt_logprobs: int | None = None
    """Set while a prompt's own logprobs are wanted: how many top alternatives per position."""


class BlockMove(msgspec.Struct):
    """A whole block of one group, in every layer, copied before the step computes; a plan's moves are made in their order.

    "copy": on the device. "swap_out": `target` is a host block. "swap_in": `source` is one.
    """

    group: int
    source: int
    target: int
    kind: Literal["copy", "swap_out", "swap_in"] = "copy"


class StepPlan(msgspec.Struct):
    """All of one step, in the order the worker acts: free rows, add rows, move blocks, compute."""

    step: int
    freed_rows: list[str]
    new_rows: list[NewRow]
    moves: list[BlockMove]
    rows: list[ScheduledRow]

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class TokenLogprobs(msgspec.Struct):
    """Logprobs of one position: the token's own first, then the best `k`, each with its rank (1 = most likely)."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class RowResult(msgspec.Struct):
    """What one row of the plan yielded. `token_ids` is empty where it did not sample."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Of this chunk: the entry i belongs to the prompt token at `start + 1 + i`."""
    failure: str | None = None
    """Set where this row alone failed (NaN logits ...): the scheduler ends the request with it."""


class StepResult(msgspec.Struct):
    """The rows in the plan's order, and how long the device was busy, moves included."""

    step: int
    rows: list[RowResult]
    busy_s: float = 0.0
    moved_s: float = 0.0
    """Of it, time spent moving blocks to the host and back."""
