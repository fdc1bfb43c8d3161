"""Stages that share out a model's layers give the bits of one process, whatever the scheduler does.

Bitwise: tokens and logprobs. Each stage is a process; as many steps are in flight as there are
stages.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM, SamplingParams, StructuredOutputs
from octavo.api.errors import ConfigError, UnsupportedModel
from tests.support.llm_tools import GREEDY, PENALISED, SAMPLED, fingerprint, make_llm, prompts_of
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import tiny_model_with_text

LENGTHS = (5, 40, 33, 16, 90)
FAMILIES = ("llama", "gemma2", "qwen3_moe", "deepseek_v3")
LAYERS = {"num_hidden_layers": 4}
every_family = pytest.mark.parametrize(
    "family", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])]
)


@cache
def path_of(family: str) -> Path:
    return tiny_model(family, **LAYERS).path


def staged(num_stages: int, family: str = "llama", **options: Any) -> LLM:
    return make_llm(
        model_path=path_of(family),
        **{"backend": "native", "pipeline_parallel_size": num_stages} | options,
    )


def outputs_of(llm: LLM, params: SamplingParams = SAMPLED) -> list[list]:
    return [fingerprint(output) for output in llm.generate(prompts_of(*LENGTHS), params)]


@every_family
def test_stages_give_the_bits_of_one_process(family: str) -> None:
    """Prompts in chunks beside others that generate, then prefixes that are found, then forks."""
    forked = msgspec.structs.replace(SAMPLED, n=3, temperature=1.5)
    found = []
    for num_stages in (1, 2):
        with staged(num_stages, family, max_num_batched_tokens=24) as llm:
            found.append([outputs_of(llm), outputs_of(llm), outputs_of(llm, forked)])
            stats = llm.get_metrics()
        assert stats.prefix_hit_tokens > 100
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "options",
    [
        {"preemption_mode": "swap"},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"preemption_mode": "recompute"},
                {"backend": "reference"},
                {"quantization": "int8"},
                {"kv_layout": "virtual", "enable_prefix_caching": False},
            )
        ),
    ],
    ids=str,
)
def test_stages_beside_other_options(options: dict[str, Any]) -> None:
    """There is room for two of four requests as they grow."""
    room = "192KiB" if options.get("backend") == "reference" else "96KiB"
    few = {"max_model_len": 96, "kv_cache_memory_bytes": room}
    long = msgspec.structs.replace(SAMPLED, max_tokens=60)
    prompts = prompts_of(20, 25, 30, 33)
    with staged(1, **options) as llm:
        wanted = [fingerprint(output) for output in llm.generate(prompts, long)]
    with staged(3, **few | options) as llm:
        found = [fingerprint(output) for output in llm.generate(prompts, long)]
        stats = llm.get_metrics()
    assert found == wanted
    assert stats.num_used_blocks == stats.num_host_blocks == 0
    if "preemption_mode" in options:
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("params", [PENALISED, GREEDY], ids=["penalties", "logprobs"])
@pytest.mark.slow
def test_the_last_stage_draws_for_all(params: SamplingParams) -> None:
    asked = msgspec.structs.replace(params, prompt_logprobs=1)
    with staged(1) as one, staged(4) as four:
        assert outputs_of(four, asked) == outputs_of(one, asked)


def test_stages_keep_to_a_form() -> None:
    """Tokens that a grammar leaves no choice of reach the stages that drew nothing."""
    params = SamplingParams(
        seed=5, max_tokens=30, structured_outputs=StructuredOutputs(regex="(ab|cd){4} end")
    )
    texts = []
    for num_stages in (1, 2):
        with make_llm(
            model_path=tiny_model_with_text(),
            backend="native",
            pipeline_parallel_size=num_stages,
            skip_tokenizer_init=False,
        ) as llm:
            texts.append(llm.generate("say", params)[0].outputs[0].text)
    assert texts[0] == texts[1] and texts[0].endswith(" end")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 9}, r"got 9, but decoder can be split at only 3 points"),
        ({"backend": "torch", "device": "cpu"}, "requires the native or reference backend"),
        ({"spec_method": "ngram"}, "not supported with spec_method ngram"),
        ({"kv_offloading_size": 1 << 20}, "not supported with kv_offloading_size 1048576"),
        ({"num_scheduler_steps": 4}, "got 4, expected 1 with pipeline_parallel_size 2"),
    ],
)
def test_what_stages_cannot_do_is_refused_before_anything_starts(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        staged(options.pop("pipeline_parallel_size", 2), **options)
