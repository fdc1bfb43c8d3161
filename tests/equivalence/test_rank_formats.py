"""1, 2, 3, 4 and 8 tensor-parallel ranks give the same bits in every weight format, alone, with
pipeline stages and with experts.

Bitwise: tokens and logprobs, those of prompts too, on native.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo import LLM, SamplingParams
from tests.executor.native.test_gguf_types import written
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.tiny_gguf import SHAPE, write_tiny_gguf
from tests.support.tiny_models import tiny_model

torch.set_num_threads(1)

WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
"""Whole blocks of 256 inputs, and heads for each number of ranks."""
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""Options that choose a format at load."""
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
"""Types of a GGUF file's blocks."""
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
PROMPTS = [[3 + token % 90 for token in prompt] for prompt in prompts_of(5, 33, 18)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


@pytest.fixture(scope="module")
def source(files: Path) -> Path:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(SHAPE | WIDTHS), tie_word_embeddings=False))
    return write_tiny_gguf(files / "floats.gguf", "llama", model)


@pytest.fixture(scope="module")
def single(files: Path, source: Path) -> Any:
    """Returns the file of a format, and the outputs of one process."""

    @cache
    def get(name: str) -> tuple[Path, list[list]]:
        path = source if name in FORMATS else written(source, files / f"{name}.gguf", name)
        return path, outputs_of(path, name)

    return get


def outputs_of(path: Path, name: str, **layout: int) -> list[list]:
    with make_llm(
        model_path=path,
        backend="native",
        max_model_len=64,
        max_num_batched_tokens=24,
        **FORMATS.get(name, {}) | layout,
    ) as llm:
        return list(map(fingerprint, llm.generate(PROMPTS, PARAMS)))


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", [*FORMATS, *BLOCKS])
def test_every_format_has_the_bits_of_one_process(single: Any, name: str, num_ranks: int) -> None:
    path, wanted = single(name)
    assert outputs_of(path, name, tensor_parallel_size=num_ranks) == wanted


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", ["bfloat16", "int8", "Q4_K", "Q8_0"])
def test_stages_of_several_ranks(single: Any, name: str) -> None:
    path, wanted = single(name)
    assert outputs_of(path, name, tensor_parallel_size=3, pipeline_parallel_size=2) == wanted


EXPERTS = {
    "hidden_size": 64,
    "moe_intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def experts(name: str, **layout: int) -> LLM:
    return make_llm(
        model_path=tiny_model("qwen3_moe", **EXPERTS).path,
        backend="native",
        **FORMATS[name] | {"max_num_batched_tokens": 24} | layout,
    )


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8", "int4"])
def test_experts_have_the_bits_of_one_process(name: str, num_ranks: int) -> None:
    """More ranks than KV heads have copies of them."""
    found = []
    for size in (1, num_ranks):
        with experts(name, tensor_parallel_size=size) as llm:
            found.append(list(map(fingerprint, llm.generate(PROMPTS, PARAMS))))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "bfloat16", "float32", "int8", "int4"])
def test_a_model_of_30_layers(name: str) -> None:
    """SmolLM2 as its file is packed, and converted: 9 heads, 3 of them for K and V."""
    found = []
    for size in (1, 2, 3):
        with LLM(
            "smollm2",
            backend="native",
            skip_tokenizer_init=True,
            kv_cache_memory_bytes="64MiB",
            max_model_len=256,
            threads=1,
            tensor_parallel_size=size,
            report=lambda text: None,
            **FORMATS.get(name, {}),
        ) as llm:
            prompts = [[id * 97 % 40000 + 3 for id in prompt] for prompt in prompts_of(5, 70, 33)]
            found.append(list(map(fingerprint, llm.generate(prompts, PARAMS))))
    assert found[1] == found[0] and found[2] == found[0]
