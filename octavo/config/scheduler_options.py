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
        "Bound the time between two tokens of a request, in ms",
        details="Prompts are cut by the predicted time of a step. The bound holds where decoding"
        " alone allows it.",
        low=1,
    )
    max_num_seqs: int = option(
        128, "Scheduling", "Run at most N requests at once", common=True, low=1
    )
    max_num_queued_reqs: int = option(
        1024, "Scheduling", "Answer 429 if more than N requests wait", low=1
    )
    max_num_queued_tokens: int | None = option(
        None, "Scheduling", "Answer 429 if more than N prompt tokens wait", unit="count", low=1
    )
    max_predicted_ttft_s: float | None = option(
        None,
        "Scheduling",
        "Answer 429 if the first token is predicted later (s)",
        details="Predicted by the queue and by measured costs.",
        low=0,
    )
    max_predicted_tpot_s: float | None = option(
        None,
        "Scheduling",
        "Answer 429 if tokens are predicted further apart (s)",
        low=0,
    )
    max_prompt_len: int | None = option(
        None,
        "Scheduling",
        "Refuse prompts longer than N tokens",
        derived="by the context",
        unit="count",
        low=1,
    )
    scheduling_policy: Literal["fcfs", "priority", "fair"] = option(
        "fcfs",
        "Scheduling",
        "Choose the order of waiting requests",
        details="fcfs: by arrival; priority: by the request's priority, lower first; fair: the"
        " tenant that has been served least for its weight.",
    )
    tenant_weight: tuple[str, ...] = option(
        (),
        "Scheduling",
        "Weight a tenant under the fair policy",
        details="A tenant without an entry weighs 1.",
        metavar="NAME=WEIGHT",
    )
    max_num_seqs_per_tenant: int | None = option(
        None, "Scheduling", "Run at most N requests per tenant (fair policy)", low=1
    )
    watermark: float = option(
        0.01,
        "Scheduling",
        "Keep this fraction of KV blocks free at a start",
        details="Applies when a request starts beside others.",
        low=0,
    )
    enable_chunked_prefill: bool = option(
        True, "Scheduling", "Split long prompts so that decoding goes on"
    )
    long_prefill_token_threshold: int = option(
        0,
        "Scheduling",
        "Compute at most N tokens of one prompt per step",
        details="Others can then start beside a long prompt. 0: as many as the step has.",
        unit="count",
        low=0,
    )
    scheduler_delay_factor: float = option(
        0.0,
        "Scheduling",
        "Delay prompts by N times the last one's step",
        details="Without chunked prefill; requests that generate run in between.",
        low=0,
    )
    batching: Literal["continuous", "static", "dynamic", "none"] = option(
        "continuous",
        "Experimental",
        "Batch requests continuously or not",
        metavar="MODE",
        details="For comparison. static batches what waits, dynamic waits until a batch is full,"
        " none runs one request at a time; each batch runs to its end.",
    )
    batch_window_ms: int = option(
        50, "Experimental", "Wait N ms for a dynamic batch to fill", low=0
    )
    num_scheduler_steps: int | None = option(
        None,
        "Scheduling",
        "Compute up to N decode steps per plan",
        details="In one native call, while no request waits. The default is 8 with native on one"
        " rank, else 1.",
        derived="8 or 1",
        low=1,
    )
    preemption_mode: Literal["auto", "swap", "recompute"] = option(
        "auto",
        "Scheduling",
        "Swap out or recompute preempted requests",
        details="auto: whichever is measured to be cheaper.",
    )
    spec_method: (
        Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar", "auto", "none"] | None
    ) = option(
        None,
        "Speculative decoding",
        "Draft tokens by ngram, suffix or another method",
        details="Draft tokens are verified in one step, where that is measured to pay; the output"
        " does not change. ngram: what followed the last few tokens before; suffix: what followed"
        " the longest match; draft_model: the model of spec_model; eagle3: the head of spec_model,"
        " from the model's hidden states; mtp: the same with the head of the model's own"
        " checkpoint; grammar: only text that structured output leaves no choice of, which the"
        " others draft too; auto: suffix, and mtp if the checkpoint has a usable head; none:"
        " nothing. The default is grammar with native and reference, and with torch if"
        " batch_invariant is on and async_scheduling off; else none.",
        derived="grammar or none",
    )
    spec_model: str | None = option(
        None,
        "Speculative decoding",
        "Draft with this model or EAGLE-3 head",
        details="A smaller model with the same tokens (spec_method draft_model), or an EAGLE-3 head"
        " (eagle3): a name or a path, as for model.",
    )
    spec_tokens: int = option(8, "Speculative decoding", "Draft at most N tokens at a time", low=1)
    spec_tree_width: int = option(
        1,
        "Speculative decoding",
        "Verify up to N branches of a draft, at most 8",
        details="With 2 or more, the next likeliest tokens, or other continuations of a lookup's"
        " match, are verified beside the likeliest. Each branch has KV blocks of its own.",
        low=1,
    )
    spec_history: int = option(
        0,
        "Speculative decoding",
        "Draft from finished answers kept in this memory",
        details="e.g. 64MiB. spec_method suffix or auto looks up those of the same tenant, cache"
        " salt and adapter.",
        unit="bytes",
        low=0,
    )
    async_scheduling: Literal["auto", "on", "off"] = option(
        "auto",
        "Scheduling",
        "Plan a step while the device computes the last",
        details="torch. auto: on CUDA, if no other option prevents it.",
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
        "Replace an engine whose step hangs for N seconds",
        details="What hung it fails, the other requests go on. 0 waits forever.",
        low=0,
    )
