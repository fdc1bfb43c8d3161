"""Options of the queue, of what runs together in a step, and of watching both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import option

PROGRAM_METHODS = ("draft_model", "eagle3", "mtp")
"""Ways to guess that run a Program of their own."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Options of the queue and of what runs together in a step."""

    max_num_batched_tokens: int = option(
        2048, "most tokens computed in one step", unit="count", low=1
    )
    itl_target_ms: float | None = option(
        None,
        "bound on what a running request waits between two tokens, in milliseconds, where decoding"
        " alone allows it: prompts are cut by the predicted time of a step",
        low=1,
    )
    max_num_seqs: int = option(128, "most requests running at once", low=1)
    max_num_queued_reqs: int = option(
        1024, "most requests waiting; beyond it a server answers 429", low=1
    )
    max_num_queued_tokens: int | None = option(
        None, "most prompt tokens waiting; beyond it a server answers 429", unit="count", low=1
    )
    max_predicted_ttft_s: float | None = option(
        None,
        "predicted seconds to a request's first token, by the queue and by measured costs, beyond"
        " which a server answers 429",
        low=0,
    )
    max_predicted_tpot_s: float | None = option(
        None,
        "predicted seconds between a request's tokens beyond which a server answers 429",
        low=0,
    )
    max_prompt_len: int | None = option(
        None, "longest prompt taken; default what the context has room for", unit="count", low=1
    )
    scheduling_policy: Literal["fcfs", "priority", "fair"] = option(
        "fcfs",
        "who starts first: by arrival; by priority, lower first; or the tenant served least for its"
        " weight",
    )
    tenant_weight: tuple[str, ...] = option(
        (), "NAME=WEIGHT of a tenant under the fair policy, else 1; may be given several times"
    )
    max_num_seqs_per_tenant: int | None = option(
        None, "most requests of one tenant running under the fair policy", low=1
    )
    watermark: float = option(
        0.01, "share of the KV blocks that stay free when a request starts beside others", low=0
    )
    enable_chunked_prefill: bool = option(
        True, "compute long prompts in pieces, beside the requests that generate"
    )
    long_prefill_token_threshold: int = option(
        0,
        "most tokens of one prompt in a step, so that others start beside it; default 0, as many as"
        " the step has",
        unit="count",
        low=0,
    )
    scheduler_delay_factor: float = option(
        0.0,
        "without chunked prefill: after a step with a prompt, this many times its duration without"
        " another one, for the requests that generate",
        low=0,
    )
    batching: Literal["continuous", "static", "dynamic", "none"] = option(
        "continuous",
        "start requests at any step, or (to compare) in batches that run to their end: as they"
        " wait, when full, singly",
    )
    batch_window_ms: int = option(50, "how long dynamic batching waits for a batch to fill", low=0)
    num_scheduler_steps: int | None = option(
        None,
        "most decode steps computed for one plan, in one native call, while no request waits;"
        " default 8 with native on one rank, else 1",
        low=1,
    )
    preemption_mode: Literal["auto", "swap", "recompute"] = option(
        "auto",
        "what happens to a request that gives up its KV blocks: to host memory, computed again, or"
        " the cheaper as measured",
    )
    spec_method: (
        Literal["ngram", "suffix", "draft_model", "eagle3", "mtp", "grammar", "auto", "none"] | None
    ) = option(
        None,
        "guess tokens and verify several in one step, where that is measured to pay: ngram, what"
        " followed the last few tokens before; suffix, the same of the longest match; draft_model,"
        " what the model of spec_model would write; eagle3, what the head of spec_model makes of"
        " the model's hidden states; mtp, the same of the head in the model's own checkpoint;"
        " grammar, only text that a form leaves no choice of, which the others guess too; auto,"
        " suffix, and mtp where the checkpoint has a head that can be used; none, nothing; no token"
        " changes; default grammar with native and reference, and with torch where batch_invariant"
        " is on and async_scheduling off; else none",
    )
    spec_model: str | None = option(
        None,
        "a smaller model with the same tokens that guesses them (spec_method draft_model), or an"
        " EAGLE-3 head (eagle3); a name or a path, as for model",
    )
    spec_tokens: int = option(8, "most tokens of one guess", low=1)
    spec_tree_width: int = option(
        1,
        "most paths of one guess, at most 8: with 2 or more, the next likeliest tokens, or what"
        " else followed a lookup's match, are verified beside the likeliest, and each path has KV"
        " blocks of its own",
        low=1,
    )
    spec_history: int = option(
        0,
        "memory for answers that have ended, e.g. 64MiB, in which spec_method suffix or auto looks"
        " up those of the same tenant, cache salt and adapter; default none",
        unit="bytes",
        low=0,
    )
    async_scheduling: Literal["auto", "on", "off"] = option(
        "auto",
        "plan a step while the device computes the one before (torch); auto: on CUDA, where nothing"
        " speaks against it",
    )

    @property
    def guesses(self) -> bool:
        """Whether tokens are guessed, as far as these options say by name."""
        return self.spec_method not in (None, "none")


@dataclass(frozen=True, slots=True)
class ObserveOptions:
    """Options of recording and watching an engine."""

    record: str | None = option(
        None,
        "file that every request, plan and result is written to, for `octavo replay`; overwritten",
    )
    stall_timeout: float = option(
        60.0,
        "seconds in which a step must get ahead: a server's engine that hangs is replaced, and what"
        " hung it fails; 0 waits forever",
        low=0,
    )
