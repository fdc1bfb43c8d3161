"""Experts read from a file when a router chooses them: the resident engine's bits, the experts used
most often stay in memory, and what is refused before anything is loaded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError
from tests.support.llm_tools import GREEDY, SAMPLED, fingerprint, make_llm, prompts_of
from tests.support.native_harness import require_native
from tests.support.tiny_models import tiny_model

PROMPTS = prompts_of(5, 40, 90)
PARAMS = [GREEDY, SAMPLED, GREEDY]
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def native():
    require_native()


def streamed(directory: Path, memory: int, family: str, **options: Any) -> LLM:
    return make_llm(
        model_path=tiny_model(family).path,
        backend="native",
        weights_dir=str(directory),
        weights_memory_bytes=memory,
        weights_schedule="experts",
        **options,
    )


def least_bytes(directory: Path, family: str, **options: Any) -> int:
    """Returns the least memory with which a family runs, as its refusal says."""
    with pytest.raises(ConfigError, match="the experts of one layer") as caught:
        streamed(directory, 1, family, **options)
    found = re.search(r"set weights_memory_bytes to (\d+) or more", str(caught.value))
    assert found is not None
    return int(found[1])


def results(llm: LLM) -> list[Any]:
    alone = [
        llm.generate([prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    return [fingerprint(output) for output in (*alone, *llm.generate(PROMPTS, PARAMS))]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("deepseek_v3", {}),
        ("qwen3_moe", {"quantization": "int8", "threads": 2}),
    ],
)
def test_experts_in_a_file_give_the_resident_engines_bits(family, options, tmp_path):
    with make_llm(model_path=tiny_model(family).path, backend="native", **options) as llm:
        expected = results(llm)
    least = least_bytes(tmp_path, family, **options)
    for memory in (least, least + 40_000, 1 << 40):
        with streamed(tmp_path, memory, family, **options) as llm:
            assert results(llm) == expected
            weights = llm.get_metrics().weights
            assert weights.experts_found + weights.experts_read > 0
    assert len(list(tmp_path.glob("*.weights"))) == 1, "the memory is not part of the file"


def test_experts_are_read_once_if_there_is_room(tmp_path):
    with streamed(tmp_path, 1 << 40, "qwen3_moe") as llm:
        llm.generate(PROMPTS, GREEDY)
        before = llm.get_metrics().weights
        llm.generate(PROMPTS, GREEDY)
        after = llm.get_metrics().weights
        assert after.experts_read == before.experts_read
        assert after.num_bytes == before.num_bytes and after.experts_found > before.experts_found


def test_a_dense_model_has_no_experts(tmp_path):
    with pytest.raises(ConfigError, match="experts requires a mixture of experts"):
        streamed(tmp_path, 1 << 30, "llama")
