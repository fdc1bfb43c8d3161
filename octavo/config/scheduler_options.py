"""Options of the scheduler, speculation, recording and stall detection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import option

PROGRAM_METHODS = ("draft_model", "eagle3", "mtp")
"""Speculation methods that run a Program of their own."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Options of the scheduler and of speculative decoding."""

    max_num_batched_tokens: int = option(
        2048, "Scheduling", "Compute at most N tokens in one step", unit="count", low=1
    )
    itl_target_ms: float | None = option(
        None,
        "Scheduling",
        "Target inter-token latency in ms",
        details="Prompt chunks are sized by the predicted step time. The target cannot be met if"
        " decoding alone takes longer.",
        low=1,
    )
    max_num_seqs: int = option(
        128, "Scheduling", "Run at most N requests at once", common=True, low=1
    )
    max_num_queued_reqs: int = option(
        1024, "Scheduling", "Reject requests (429) if more than N wait", low=1
    )
    max_num_queued_tokens: int | None = option(
        None,
        "Scheduling",
        "Reject requests (429) if more than N prompt tokens wait",
        unit="count",
        low=1,
    )
    max_predicted_ttft_s: float | None = option(
        None,
        "Scheduling",
        "Reject requests (429) with a predicted TTFT above N s",
        details="Predicted from the queue and measured step times.",
        low=0,
    )
    max_predicted_tpot_s: float | None = option(
        None,
        "Scheduling",
        "Reject requests (429) with a predicted TPOT above N s",
        low=0,
    )
    max_prompt_len: int | None = option(
        None,
        "Scheduling",
        "Reject prompts longer than N tokens",
        derived="context length",
        unit="count",
        low=1,
    )
    scheduling_policy: Literal["fcfs", "priority", "fair"] = option(
        "fcfs",
        "Scheduling",
        "Choose the order of waiting requests",
        details="fcfs: by arrival; priority: by the request's priority, lower first; fair: the"
        " tenant with the least service relative to its weight.",
    )
    priority_function: str | None = option(
        None,
        "Scheduling",
        "Compute priorities with this Python function",
        details="Given as MODULE:FUNCTION. It is called with each new request under the policy"
        " priority and returns an integer; lower values start first.",
        metavar="FUNCTION",
    )
    tenant_weight: tuple[str, ...] = option(
        (),
        "Scheduling",
        "Set the weight of a tenant (fair policy)",
        details="The default weight is 1.",
        metavar="NAME=WEIGHT",
    )
    max_num_seqs_per_tenant: int | None = option(
        None, "Scheduling", "Run at most N requests per tenant (fair policy)", low=1
    )
    watermark: float = option(
        0.01,
        "Scheduling",
        "Reserve this fraction of KV blocks at admission",
        details="Does not apply if no other request is running.",
        low=0,
    )
    enable_chunked_prefill: bool = option(True, "Scheduling", "Split long prompts into chunks")
    long_prefill_token_threshold: int = option(
        0,
        "Scheduling",
        "Compute at most N tokens of one prompt per step",
        details="Allows other requests to start during a long prefill. 0: no limit.",
        unit="count",
        low=0,
    )
    scheduler_delay_factor: float = option(
        0.0,
        "Scheduling",
        "Delay prompts by N times the last prefill step",
        details="Without chunked prefill only; decoding continues during the delay.",
        low=0,
    )
    batching: Literal["continuous", "static", "dynamic", "none"] = option(
        "continuous",
        "Experimental",
        "Choose the batching mode",
        metavar="MODE",
        details="For comparison. static: batch the waiting requests; dynamic: wait until a batch"
        " is full; none: one request at a time. Each batch runs to completion.",
    )
    batch_window_ms: int = option(
        50, "Experimental", "Wait N ms for a dynamic batch to fill", low=0
    )
    num_scheduler_steps: int | None = option(
        None,
        "Scheduling",
        "Run up to N decode steps per scheduler step",
        details="The arrays are gathered once for all of them; applies only if no request waits."
        " The default is 8 for native on one rank, else 1.",
        derived="8 or 1",
        low=1,
    )
    preemption_mode: Literal["auto", "swap", "recompute"] = option(
        "auto",
        "Scheduling",
        "Swap or recompute preempted requests",
        details="auto: the cheaper of the two, by measurement.",
    )
    spec_method: (
        Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar", "auto", "none"] | None
    ) = option(
        None,
        "Speculative decoding",
        "Choose the speculative decoding method",
        details="Draft tokens are verified in one step if measurements show a gain; the output"
        " does not change. ngram: continue the last match of the last few tokens; suffix: continue"
        " the longest match; draft_model: use the model of spec_model; eagle3: use the EAGLE-3"
        " head of spec_model; mtp: use the multi-token prediction head of the checkpoint, or the"
        " Gemma 4 assistant of spec_model; grammar: draft only tokens that structured output"
        " determines (included in all methods); auto:"
        " suffix, and mtp if the checkpoint has a supported head; none: off. The default is"
        " grammar for native and reference, and for torch with batch_invariant and without"
        " async_scheduling; else none.",
        derived="grammar or none",
    )
    spec_model: str | None = option(
        None,
        "Speculative decoding",
        "Draft with this model or head",
        details="A smaller model with the same vocabulary (spec_method draft_model), an EAGLE-3"
        " head (eagle3), or the model's assistant (mtp, Gemma 4): a name or path as for model.",
    )
    spec_tokens: int = option(8, "Speculative decoding", "Draft at most N tokens per step", low=1)
    spec_tree_width: int = option(
        1,
        "Speculative decoding",
        "Verify draft trees with up to N branches, at most 8",
        details="With 2 or more, alternative tokens or matches are verified together with the most"
        " likely draft. Each branch has its own KV blocks.",
        low=1,
    )
    spec_history: int = option(
        0,
        "Speculative decoding",
        "Keep finished outputs for drafting, in this much memory",
        details="For example 64MiB. Used by spec_method suffix and auto, for the same tenant,"
        " cache salt and adapter.",
        unit="bytes",
        low=0,
    )
    async_scheduling: Literal["auto", "on", "off"] = option(
        "auto",
        "Scheduling",
        "Schedule the next step during the current one",
        details="Torch only. auto: on for CUDA unless another option prevents it.",
    )

    @property
    def uses_speculation(self) -> bool:
        """Whether these options enable speculative decoding."""
        return self.spec_method not in (None, "none")


@dataclass(frozen=True, slots=True)
class ObserveOptions:
    """Options of recording and stall detection."""

    record: str | None = option(
        None,
        "Logging",
        "Record requests, plans and results for octavo replay",
        details="An existing file is overwritten.",
        metavar="FILE",
    )
    stall_timeout: float = option(
        60.0,
        "Server",
        "Restart an engine if a step hangs for N seconds",
        details="The request that caused it fails; other requests continue. 0: never.",
        low=0,
    )
