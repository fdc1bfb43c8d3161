"""Rounds of a benchmark on random token ids: the work, one round, its times.

Requests ignore end tokens, so that each round does the same work. Each round has new prompts, so
that there are no prefix cache hits.
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.api.errors import ConfigError, WorkerFailed
from octavo.tools.bench.percentiles import percentiles

if TYPE_CHECKING:
    from octavo.api.llm import LLM
    from octavo.api.outputs import Profile, RequestOutput

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Kind ("throughput" or "latency") and sizes of a benchmark."""

    bench: str
    num_prompts: int
    input_len: int
    output_len: int
    range_ratio: float
    rounds: int
    seed: int
    shared_prefix_len: int = 0

    def draw_len(self, draw: random.Random, mean: int) -> int:
        """Samples a length within `range_ratio` of the mean."""
        low = max(1, round(mean * (1 - self.range_ratio)))
        return draw.randint(low, round(mean * (1 + self.range_ratio)))


@dataclass(frozen=True, slots=True)
class Round:
    """Results of one round. Times (`_ms`) are percentiles ("p50") in milliseconds."""

    elapsed_s: float
    num_steps: int
    prompt_tokens: int
    output_tokens: int
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    request_latency_ms: dict[str, float]
    time_to_first_token_ms: dict[str, float]
    inter_token_ms: dict[str, float]


def warm_up(llm: LLM, work: Workload, draw: random.Random) -> None:
    _run(llm, work, [_prompt(draw, llm, 8)], [min(8, work.output_len)])


def run_profile(llm: LLM, work: Workload, draw: random.Random) -> Profile:
    """Profiles a separate round, since reading the clock after each op takes time."""
    llm.start_profile()
    run_round(llm, work, draw, work.rounds + 1)
    return llm.stop_profile()


def check_fits(work: Workload, llm: LLM) -> None:
    longest = (
        round(work.input_len * (1 + work.range_ratio)),
        round(work.output_len * (1 + work.range_ratio)),
    )
    needed, allowed = work.shared_prefix_len + sum(longest), llm.info.max_model_len
    if needed > allowed:
        what = (
            "shared_prefix_len + input_len + output_len"
            if work.shared_prefix_len
            else "input_len + output_len"
        )
        raise ConfigError(
            f"{what}: got {needed}, expected at most the context, {allowed}",
            hint="use shorter lengths, or raise max_model_len",
        )


def run_round(llm: LLM, work: Workload, draw: random.Random, number: int) -> Round:
    shared = _prompt(draw, llm, work.shared_prefix_len)
    prompts = [
        shared + _prompt(draw, llm, work.draw_len(draw, work.input_len))
        for _ in range(work.num_prompts)
    ]
    output_lens = [work.draw_len(draw, work.output_len) for _ in prompts]
    name = "profile" if number > work.rounds else f"round {number} of {work.rounds}"
    print(f"{name}: {work.num_prompts} prompts", file=sys.stderr)
    started, num_steps = time.monotonic(), llm.get_metrics().num_steps
    outputs = _run(llm, work, prompts, output_lens)
    return _measure(outputs, time.monotonic() - started, llm.get_metrics().num_steps - num_steps)


def _prompt(draw: random.Random, llm: LLM, num_tokens: int) -> list[int]:
    return [draw.randrange(llm.info.vocab_size) for _ in range(num_tokens)]


def _run(
    llm: LLM, work: Workload, prompts: Prompts, output_lens: Sequence[int]
) -> list[RequestOutput]:
    """Returns the outputs; raises WorkerFailed if an output does not have the requested length."""
    from octavo.api.sampling_params import SamplingParams

    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for num_tokens in output_lens
    ]
    if work.bench == "throughput":
        outputs = llm.generate(prompts, params, use_tqdm=False)
    else:
        outputs = [
            llm.generate(prompt, prompt_params, use_tqdm=False)[0]
            for prompt, prompt_params in zip(prompts, params, strict=True)
        ]
    for output, num_tokens in zip(outputs, output_lens, strict=True):
        output_len = len(output.outputs[0].token_ids)
        if output.error is not None or output_len != num_tokens:
            raise WorkerFailed(
                output.error or f"a request ended after {output_len} tokens, expected {num_tokens}"
            )
    return outputs


def _measure(outputs: Sequence[RequestOutput], elapsed_s: float, num_steps: int) -> Round:
    moments = [output.metrics for output in outputs if output.metrics is not None]
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Round(
        elapsed_s=elapsed_s,
        num_steps=num_steps,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prompt_tokens_per_s=prompt_tokens / elapsed_s,
        output_tokens_per_s=output_tokens / elapsed_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / elapsed_s,
        request_latency_ms=percentiles(one.token_times[-1] - one.arrival_time for one in moments),
        time_to_first_token_ms=percentiles(
            one.token_times[0] - one.arrival_time for one in moments
        ),
        inter_token_ms=percentiles(
            later - earlier
            for one in moments
            for earlier, later in itertools.pairwise(one.token_times)
        ),
    )


def median(
    rounds: Sequence[dict[str, Any]], pick: Callable[[list[float]], float] = statistics.median
) -> dict[str, Any]:
    """Returns the median of each field and each percentile over the rounds."""
    return {
        name: (
            median([one[name] for one in rounds])
            if isinstance(value, dict)
            else pick([one[name] for one in rounds])
        )
        for name, value in rounds[0].items()
    }
