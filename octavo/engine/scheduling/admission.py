"""Whether a request may start: OK, LATER (and what it waits for), or NEVER (and which limit it
breaks).

Knows requests' sizes and the blocks that have to stay free; gives no block away itself. The same
limits stand at the front, where a user's prompt is checked before anything is queued.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    OK = "ok"
    LATER = "later"
    NEVER = "never"


class Answer(NamedTuple):
    verdict: Verdict
    reason: str = ""
    """What the request waits for, or the limit that it breaks with what was got and what is
    allowed.
    """
    hint: str | None = None


OK = Answer(Verdict.OK)


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt is checked against, once; the context and the KV cache must have room for one
    new token besides.
    """

    max_prompt_len: int | None
    max_model_len: int
    kv_capacity_tokens: int
    max_whole_prompt: int | None = None
    """Tokens of a step, where a prompt has to fit into one."""
    max_num_seqs: int = 1 << 30
    block_size: int = 16
    shares_blocks: bool = True

    def max_num_tokens(self, num_prompt_tokens: int, num_seqs: int = 1) -> int:
        """Of each of a request's rows, which have all but the full blocks of its prompt for
        themselves.
        """
        num_blocks, num_shared = (
            self.kv_capacity_tokens // self.block_size,
            num_prompt_tokens // self.block_size,
        )
        return min(
            self.max_model_len,
            (num_shared + (num_blocks - num_shared) // num_seqs) * self.block_size,
        )

    def judge(
        self, num_prompt_tokens: int, beam_width: int | None = None, *, at_least: bool = False
    ) -> Answer:
        """Answers OK or NEVER; with `at_least` the prompt may have more tokens than that."""
        answer = self._judge_prompt(num_prompt_tokens, "at least " if at_least else "")
        return (
            answer
            if answer is not OK or beam_width is None
            else self._judge_beams(num_prompt_tokens, beam_width)
        )

    def _judge_beams(self, num_prompt_tokens: int, beam_width: int) -> Answer:
        if not self.shares_blocks:
            hint = "leave kv_layout at paged, and the KV cache on"
            return Answer(
                Verdict.NEVER,
                f"beam_width: got {beam_width}, but beams share KV blocks, and here nobody does",
                hint,
            )
        if beam_width > self.max_num_seqs:
            what = (
                f"beam_width: got {beam_width}, allowed are at most {self.max_num_seqs} sequences"
                " at once (max_num_seqs)"
            )
            return Answer(Verdict.NEVER, what, "raise max_num_seqs")
        if num_prompt_tokens + 1 > self.max_num_tokens(num_prompt_tokens, beam_width):
            what = (
                f"beam_width: got {beam_width}, but the KV cache holds {self.kv_capacity_tokens}"
                " tokens"
            )
            return Answer(
                Verdict.NEVER,
                f"{what}: too few for so many beams after a prompt of {num_prompt_tokens}",
                "raise kv_cache_memory_bytes",
            )
        return OK

    def _judge_prompt(self, num: int, qualifier: str) -> Answer:
        """Compares a prompt with every limit; `qualifier` goes before its number of tokens."""
        got = f"{qualifier}{num}"
        if self.max_prompt_len is not None and num > self.max_prompt_len:
            return _never(
                f"The prompt limit is {self.max_prompt_len} tokens",
                got,
                self.max_prompt_len,
                "raise max_prompt_len",
            )
        if num + 1 > self.max_model_len:
            return _never(
                f"This model's maximum context length is {self.max_model_len} tokens",
                got,
                self.max_model_len - 1,
            )
        if num + 1 > self.kv_capacity_tokens:
            limit = f"The KV cache holds {self.kv_capacity_tokens} tokens"
            return _never(limit, got, self.kv_capacity_tokens - 1, "raise kv_cache_memory_bytes")
        if self.max_whole_prompt is not None and num > self.max_whole_prompt:
            limit = (
                f"The batch limit is {self.max_whole_prompt} tokens a step, and prompts are not"
                " chunked"
            )
            return _never(
                limit,
                got,
                self.max_whole_prompt,
                "raise max_num_batched_tokens, or allow chunked prefill",
            )
        return OK


def _never(limit: str, got: str, allowed: int, hint: str | None = None) -> Answer:
    return Answer(
        Verdict.NEVER, f"{limit}, the prompt has {got}; allowed are at most {allowed}", hint
    )


@dataclass(frozen=True, slots=True)
class Admission:
    """`watermark_blocks` stay free when a request starts beside others, so that its start does not
    cause the next preemption.
    """

    limits: PromptLimits
    watermark_blocks: int

    def limits_of(self, kv_capacity_tokens: int) -> PromptLimits:
        """Of a request for whose rows the KV cache holds so much."""
        return replace(self.limits, kv_capacity_tokens=kv_capacity_tokens)

    def may_start(self, num_tokens: int, *, budget: int, room: int, num_seqs: int = 1) -> Answer:
        """OK or LATER, as far as the step's budgets go; `num_tokens` are the request's, `room`
        counts rows: it wants `num_seqs`.
        """
        if room < num_seqs:
            return Answer(Verdict.LATER, "batch full")
        whole = self.limits.max_whole_prompt
        least = num_tokens if whole is not None and num_tokens <= whole else 1
        return OK if budget >= least else Answer(Verdict.LATER, "step full")

    def reserve(self, num_running: int) -> int:
        """Blocks to be left free: one for each running request, or the watermark where that is
        more; none where nothing runs.
        """
        return max(num_running, self.watermark_blocks) if num_running else 0


NO_BLOCKS = Answer(Verdict.LATER, "KV full")
READING = Answer(Verdict.LATER, "reading the prefix cache")
NO_PROMPT = Answer(Verdict.LATER, "the prompt that it shares is not computed")

HELD_BACK = "held back by the policy"
"""What those wait for whom the policy leaves out, such as a tenant's that runs as many as it may.
"""
