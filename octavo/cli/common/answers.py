"""Sampling params, statistics and reasons for early ends of responses, for `octavo run` and `octavo
chat`.
"""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.common.style import paint

if TYPE_CHECKING:
    from octavo.api.llm import LLM
    from octavo.api.outputs import RequestOutput
    from octavo.api.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 1024
"""Limit of a response without --max-tokens: small models may never stop."""

SHOWN_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling parameters printed to stderr unless they are neutral."""

SystemFlag = Annotated[str | None, typer.Option(help="Set the system message")]
TemperatureFlag = Annotated[
    float | None, typer.Option(help="Set the temperature (0: greedy)", show_default="the model's")
]
TopPFlag = Annotated[
    float | None, typer.Option(help="Sample from the top tokens with this total probability")
]
MaxTokensFlag = Annotated[
    int | None,
    typer.Option(
        help="Generate at most N tokens", show_default=f"the model's, or {DEFAULT_MAX_TOKENS}"
    ),
]
SeedFlag = Annotated[int | None, typer.Option(help="Set the sampling seed", show_default="random")]
RepetitionFlag = Annotated[
    bool,
    typer.Option(
        "--repetition-detection/--no-repetition-detection",
        help="Stop if the output repeats itself",
    ),
]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Token counts and times of a response."""

    model: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    time_to_first_token_s: float | None
    tokens_per_second: float | None
    """Excludes the first token."""
    total_s: float

    @staticmethod
    def of(output: RequestOutput, model: str) -> Statistics:
        (sample,), metrics = output.outputs, output.metrics
        assert metrics is not None, "the frontend always measures"
        times = metrics.token_times
        num_more, spent_s = len(times) - 1, times[-1] - times[0] if times else 0.0
        return Statistics(
            model=model,
            finish_reason=sample.finish_reason,
            prompt_tokens=len(output.prompt_token_ids),
            completion_tokens=len(sample.token_ids),
            time_to_first_token_s=metrics.first_token_latency,
            tokens_per_second=num_more / spent_s if spent_s > 0 else None,
            total_s=time.monotonic() - metrics.arrival_time,
        )

    def describe(self) -> str:
        """Formats the statistics as one line, dimmed if standard error is a terminal."""
        parts = [
            f"{self.prompt_tokens} prompt + {self.completion_tokens} completion tokens",
            f"{self.total_s:.2f} s",
        ]
        if self.time_to_first_token_s is not None:
            parts.append(f"first token {self.time_to_first_token_s:.2f} s")
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tok/s")
        if self.finish_reason == "length":
            parts.append("truncated at max_tokens")
        return paint(", ".join(parts), sys.stderr, dim=True)


def check_sampling(sampling: dict[str, Any]) -> None:
    """Rejects invalid values before a model is loaded."""
    from octavo.api.sampling_params import SamplingParams

    SamplingParams(
        **{
            "max_tokens": None,
            **{name: value for name, value in sampling.items() if value is not None},
        }
    )


def check_answers(llm: LLM) -> None:
    """Raises InvalidRequest for embedding and speech models."""
    from octavo.api.errors import InvalidRequest

    llm.frontend.check_generates()
    if "speech" in llm.frontend.media:
        name = llm.config.model.served_model_name
        raise InvalidRequest(
            f"model: {name} transcribes speech and does not generate text",
            hint=f"run `octavo serve {name}` and send an audio file to POST"
            f" /v1/audio/transcriptions",
        )


def new_seed() -> int:
    """Returns a random seed, so that repeated commands differ."""
    return secrets.randbits(31)


def describe_sampling(params: SamplingParams) -> str:
    """Formats the sampling params of a response as one line."""
    shown = [f"temperature {params.temperature:g}"]
    for name, neutral in SHOWN_SAMPLING.items():
        value = getattr(params, name)
        if value != neutral:
            shown.append(f"{name} {value:g}")
    seed = [] if params.is_greedy or params.seed is None else [f"seed {params.seed}"]
    return f"sampling params: {', '.join([*shown, f'max_tokens {params.max_tokens}', *seed])}"


def sampling_for(llm: LLM, sampling: dict[str, Any]) -> SamplingParams:
    """Returns the model's recommended params, overridden by the given ones; max_tokens defaults to
    DEFAULT_MAX_TOKENS.
    """
    from octavo.frontend.sampling_defaults import params_over

    defaults = llm.get_default_chat_params()
    if defaults.max_tokens is None:
        defaults.max_tokens = DEFAULT_MAX_TOKENS
    return params_over(defaults, {name: v for name, v in sampling.items() if v is not None})


def explain_end(statistics: Statistics, default_limit: int | None, change: str) -> str | None:
    """Returns why a response ended early although the user set no limit; None if it did not.

    `default_limit` is max_tokens if the user did not set it; `change` is the way to set it.
    """
    if statistics.finish_reason == "repetition":
        return "the response was stopped because it repeats itself; rephrase the prompt"
    is_cut = statistics.finish_reason == "length" and default_limit is not None
    if is_cut and statistics.completion_tokens == default_limit:
        return f"the response was truncated after {default_limit} tokens, the default of {change}"
    return None
