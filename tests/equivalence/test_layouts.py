"""Layouts of one model over several processes give the bits of one, alone and in pairs.

Bitwise: tokens and logprobs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo import LLM
from octavo.api.errors import ConfigError
from tests.support.llm_tools import SAMPLED, fingerprint, make_llm, prompts_of
from tests.support.tiny_models import tiny_model

TENSOR, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
EXPERTS, ENGINES = {"expert_parallel_size": 2}, {"data_parallel_size": 2}
SHARED = ENGINES | {"enable_expert_parallel": True, "routing_policy": "round_robin"}
"""Engines with tokens of their own, each with half of the experts."""
LENGTHS = (5, 40, 33, 16, 70)
LAYERS = {"num_hidden_layers": 4}


@cache
def path_of(family: str) -> Path:
    return tiny_model(family, **LAYERS).path


def laid_out(layout: dict[str, Any], family: str = "qwen3_moe", **options: Any) -> LLM:
    usual = {"backend": "native", "dtype": "float32", "max_num_batched_tokens": 24}
    if "data_parallel_size" in layout:
        usual["kv_cache_memory_bytes"] = 8 << 20
    return make_llm(model_path=path_of(family), **usual | layout | options)


def outputs_of(llm: LLM) -> list[list]:
    """Returns what comes of prompts in chunks beside others that generate, then of prefixes that
    are found.
    """
    params = msgspec.structs.replace(SAMPLED, max_tokens=8)
    return [
        fingerprint(output)
        for _ in range(2)
        for output in llm.generate(prompts_of(*LENGTHS), params)
    ]


@cache
def of_one_process(family: str = "qwen3_moe") -> list[list]:
    with laid_out({}, family) as llm:
        return outputs_of(llm)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    "layout",
    [
        EXPERTS,
        {"expert_parallel_size": 3},
        TENSOR | EXPERTS,
        SHARED,
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in (
                STAGES | EXPERTS,
                TENSOR | STAGES,
                ENGINES | EXPERTS,
                ENGINES | TENSOR,
                ENGINES | STAGES,
                TENSOR | STAGES | EXPERTS,
                SHARED | {"data_parallel_size": 3},
                SHARED | TENSOR,
                SHARED | STAGES,
                SHARED | EXPERTS,
            )
        ),
    ],
    ids=lambda layout: "-".join(f"{name.split('_')[0]}{size}" for name, size in layout.items()),
)
def test_a_layout_gives_the_bits_of_one_process(layout: dict[str, Any]) -> None:
    with laid_out(layout) as llm:
        found = outputs_of(llm)
    assert found == of_one_process()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "llama4_text", "qwen2_moe"])
def test_experts_of_other_families(family: str) -> None:
    with laid_out(EXPERTS, family) as llm:
        found = outputs_of(llm)
    assert found == of_one_process(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "llama4_text"])
def test_shared_experts_of_other_families(family: str) -> None:
    with laid_out(SHARED, family) as llm:
        found = outputs_of(llm)
    assert found == of_one_process(family)


def test_an_engine_without_work_takes_empty_steps() -> None:
    """A request alone: every step is the other engine's too, which has no rows."""
    params = msgspec.structs.replace(SAMPLED, max_tokens=8)
    with laid_out({}) as llm:
        wanted = fingerprint(llm.generate(prompts_of(40), params)[0])
    with laid_out(SHARED) as llm:
        found = [fingerprint(llm.generate(prompts_of(40), params)[0]) for _ in range(3)]
        steps = [engine.num_steps for engine in llm.frontend.stats.engines]
    assert found == [wanted] * 3
    assert all(steps)


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "int8", "dtype": "auto"},
        pytest.param({"backend": "torch", "device": "cpu"}, marks=pytest.mark.slow),
        pytest.param({"preemption_mode": "swap", "max_model_len": 112}, marks=pytest.mark.slow),
        pytest.param({"spec_method": "ngram"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_experts_beside_other_options(options: dict[str, Any]) -> None:
    if "preemption_mode" in options:
        options = options | {"kv_cache_memory_bytes": 128 << 10}
    with laid_out({}, **options) as llm:
        wanted = outputs_of(llm)
    with laid_out(EXPERTS, **options) as llm:
        assert outputs_of(llm) == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "llama"}, "expert_parallel_size: got 2, but decoder has no experts"),
        ({"expert_parallel_size": 99}, "expert_parallel_size: got 99, but decoder has 7 experts"),
        ({"backend": "reference"}, "expert_parallel_size: got 2, requires the native or torch"),
        ({"num_scheduler_steps": 4}, "got 4, expected 1 with expert_parallel_size 2"),
        ({"enable_lora": True}, "enable_lora: not supported with expert_parallel_size 2"),
    ],
)
def test_what_experts_cannot_do_is_refused_before_anything_starts(
    options: dict[str, Any], message: str
) -> None:
    family = options.pop("family", "qwen3_moe")
    with pytest.raises(ConfigError, match=message):
        laid_out(EXPERTS | options, family)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "llama"}, "enable_expert_parallel: got 2, but decoder has no experts"),
        ({"data_parallel_size": 1}, "enable_expert_parallel: requires several engines"),
        ({"data_parallel_size": 4} | EXPERTS, "enable_expert_parallel: got 8, but decoder has 7"),
        ({"backend": "torch"}, "enable_expert_parallel: requires the native backend"),
        ({"num_scheduler_steps": 4}, "got 4, expected 1 with enable_expert_parallel"),
        ({"enable_lora": True}, "enable_expert_parallel: not supported with enable_lora"),
    ],
)
def test_what_engines_that_share_experts_cannot_do_is_refused(
    options: dict[str, Any], message: str
) -> None:
    family = options.pop("family", "qwen3_moe")
    layout = SHARED | options
    if layout["data_parallel_size"] == 1:
        layout["routing_policy"] = "kv"
    with pytest.raises(ConfigError, match=message):
        laid_out(layout, family)
