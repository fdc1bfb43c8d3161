"""Limits on the length of a prompt, checked by the frontend before a request is queued and by the
scheduler for each request it receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class AllocStatus(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


class AdmissionDecision(NamedTuple):
    """Whether a request may start, and the reason if not."""

    status: AllocStatus
    reason: str = ""
    """Resource that the request waits for, or the exceeded limit with the actual and allowed
    values.
    """
    hint: str | None = None
    num_tokens: int = 0
    """Length of a prompt that is too long, in tokens; the actual length may be greater."""
    max_tokens: int = 0
    """Allowed length of a prompt that is too long."""


OK = AdmissionDecision(AllocStatus.OK)


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits on a prompt. The context and the KV cache must have room for one more token if the
    request generates.
    """

    max_prompt_len: int | None
    max_model_len: int
    kv_capacity_tokens: int
    max_whole_prompt: int | None = None
    """Maximum tokens of a step if prompts are not chunked; otherwise None."""
    max_num_seqs: int = 1 << 30
    block_size: int = 16
    shares_blocks: bool = True
    """Whether several rows may hold the same block, as beams do."""

    def most_tokens(self, num_needed: int) -> int:
        """Returns the length of the longest prompt for which `judge(..., num_needed=num_needed)` is
        OK.
        """
        max_tokens = min(self.max_model_len, self.kv_capacity_tokens) - num_needed
        limits = (self.max_prompt_len, self.max_whole_prompt)
        return min([max_tokens, *(limit for limit in limits if limit is not None)])

    def max_num_tokens(self, num_prompt_tokens: int, num_seqs: int = 1) -> int:
        """Returns the maximum number of tokens of each row of a request with `num_seqs` rows, which
        share only the full blocks of the prompt.
        """
        num_blocks = self.kv_capacity_tokens // self.block_size
        num_shared = num_prompt_tokens // self.block_size
        return min(
            self.max_model_len,
            (num_shared + (num_blocks - num_shared) // num_seqs) * self.block_size,
        )

    def judge(
        self,
        num_prompt_tokens: int,
        beam_width: int | None = None,
        *,
        at_least: bool = False,
        num_needed: int = 1,
    ) -> AdmissionDecision:
        """Returns OK or NEVER for a prompt of `num_prompt_tokens` tokens (with `at_least`: this
        many or more). `beam_width` is None without beam search. `num_needed`: number of tokens that
        must fit after the prompt.
        """
        num_tokens = num_prompt_tokens
        got = f"at least {num_tokens}" if at_least else str(num_tokens)
        if self.max_prompt_len is not None and num_tokens > self.max_prompt_len:
            limit = f"The prompt limit is {self.max_prompt_len} tokens"
            return _never(limit, num_tokens, got, self.max_prompt_len, "raise max_prompt_len")
        if num_tokens + num_needed > self.max_model_len:
            limit = f"This model's maximum context length is {self.max_model_len} tokens"
            return _never(limit, num_tokens, got, self.max_model_len - num_needed)
        if beam_width is not None:
            decision = self._judge_beams(num_tokens, beam_width)
            if decision is not OK:
                return decision
        elif num_tokens + num_needed > self.kv_capacity_tokens:
            limit = f"The KV cache holds {self.kv_capacity_tokens} tokens"
            allowed = self.kv_capacity_tokens - num_needed
            return _never(limit, num_tokens, got, allowed, "raise kv_cache_memory_bytes")
        if self.max_whole_prompt is not None and num_tokens > self.max_whole_prompt:
            limit = (
                f"The batch limit is {self.max_whole_prompt} tokens a step, without chunked prefill"
            )
            hint = "raise max_num_batched_tokens, or enable chunked prefill"
            return _never(limit, num_tokens, got, self.max_whole_prompt, hint)
        return OK

    def _judge_beams(self, num_prompt_tokens: int, beam_width: int) -> AdmissionDecision:
        if not self.shares_blocks:
            hint = "set kv_layout to paged and enable kv_cache"
            return AdmissionDecision(
                AllocStatus.NEVER,
                f"beam_width: got {beam_width}, but beam search requires shared KV blocks, which"
                f" this engine disables",
                hint,
            )
        if beam_width > self.max_num_seqs:
            what = (
                f"beam_width: got {beam_width}, expected at most {self.max_num_seqs} sequences"
                " at once (max_num_seqs)"
            )
            return AdmissionDecision(AllocStatus.NEVER, what, "raise max_num_seqs")
        if self.kv_capacity_tokens == 0:  # a group has fewer states than there are beams
            return AdmissionDecision(
                AllocStatus.NEVER,
                f"beam_width: got {beam_width}, but the KV cache has no room for {beam_width}"
                " sequences at once",
                "raise kv_cache_memory_bytes",
            )
        if num_prompt_tokens + 1 > self.max_num_tokens(num_prompt_tokens, beam_width):
            what = (
                f"beam_width: got {beam_width}, but the KV cache holds {self.kv_capacity_tokens}"
                " tokens"
            )
            return AdmissionDecision(
                AllocStatus.NEVER,
                f"{what}: too few for these beams after a prompt of {num_prompt_tokens}",
                "raise kv_cache_memory_bytes",
            )
        return OK


def _never(
    limit: str, num: int, got: str, allowed: int, hint: str | None = None
) -> AdmissionDecision:
    reason = f"{limit}, the prompt has {got}; expected at most {allowed}"
    return AdmissionDecision(AllocStatus.NEVER, reason, hint, num, allowed)
