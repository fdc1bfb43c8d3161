"""Whether a request may start: OK, LATER (with what it waits for), or NEVER (with the limit that it
breaks).

Knows the sizes of requests and how many blocks have to stay free; gives no block away itself. The
same limits stand at the front, where a user's prompt is checked before anything is queued.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.engine.protocol.prompt_limits import OK, AdmissionDecision, AllocStatus, PromptLimits


@dataclass(frozen=True, slots=True)
class Admission:
    """Decides whether a waiting request may start in a step."""

    limits: PromptLimits
    watermark_blocks: int
    """Blocks that stay free when a request starts beside others, so that its start does not cause
    the next preemption.
    """

    def limits_of(self, kv_capacity_tokens: int) -> PromptLimits:
        """Returns the limits of a request whose rows find room for `kv_capacity_tokens`."""
        return replace(self.limits, kv_capacity_tokens=kv_capacity_tokens)

    def may_start(
        self, num_tokens: int, *, budget: int, room: int, num_seqs: int = 1, num_whole: int = 0
    ) -> AdmissionDecision:
        """Returns OK or LATER for a request of `num_tokens` and `num_seqs` rows, by what is left of
        the step: a `budget` of tokens and `room` for rows. Before its own tokens `num_whole` others
        are computed, in one step.
        """
        if room < num_seqs:
            return AdmissionDecision(AllocStatus.LATER, "batch full")
        whole = self.limits.max_whole_prompt
        least = num_tokens if whole is not None and num_tokens <= whole else 1
        return OK if budget >= num_whole + least else STEP_FULL

    def reserve(self, num_running: int) -> int:
        """Returns the blocks to be left free: one for each running row, or the watermark where that
        is more; none where nothing runs.
        """
        return max(num_running, self.watermark_blocks) if num_running else 0


STEP_FULL = AdmissionDecision(AllocStatus.LATER, "step full")
NO_BLOCKS = AdmissionDecision(AllocStatus.LATER, "KV full")
READING = AdmissionDecision(AllocStatus.LATER, "reading the prefix cache")
COMPILING = AdmissionDecision(AllocStatus.LATER, "compiling its grammar")
LOADING = AdmissionDecision(AllocStatus.LATER, "loading its adapter")
NO_PROMPT = AdmissionDecision(AllocStatus.LATER, "the prompt that it shares is not computed")

HELD_BACK = "held back by the policy"
"""Reason of requests that the policy leaves out: their tenant runs as many as it may."""
