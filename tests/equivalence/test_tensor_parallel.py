"""Tensor-parallel ranks (native in shared memory, torch by gloo) give the bits of one process,
whatever the scheduler does.

Bitwise: tokens and logprobs. On torch with batch invariance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams, StructuredOutputs
from octavo.api.errors import BackendUnavailable, ConfigError
from octavo.checkpoint.open import open_checkpoint
from octavo.executor.torch.kv_cache import make_kv_layout
from octavo.models.registry import build_programs
from octavo.program.passes.shard import shard
from tests.support.llm_tools import SAMPLED, fingerprint, make_llm, prompts_of
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import tiny_model_with_text

torch.set_num_threads(1)

LENGTHS = (5, 40, 33, 16, 90)


GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
GROWING = (20, 25, 30, 33)
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "qwen2_moe", "gpt_oss", "deepseek_v3"]

BACKENDS = {
    "native": {"backend": "native"},
    "torch": {"backend": "torch", "device": "cpu", "batch_invariant": True},
}
every_backend = pytest.mark.parametrize("backend", BACKENDS)
REFUSED = {("deepseek_v3", "native")}
"""Families whose ranks a backend refuses: native absorbs projections of whole latents alone."""
every_family = pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param(family, backend, marks=() if family == FAMILIES[0] else pytest.mark.slow)
        for family in FAMILIES
        for backend in BACKENDS
        if (family, backend) not in REFUSED
    ],
)

UNTIED = {"gemma3_text": {"tie_word_embeddings": False}}
"""Options of families whose tiny model repeats one token forever if its embeddings are tied."""


def path_of(family: str) -> Path:
    return tiny_model(family, **UNTIED.get(family, {})).path


def ranked(family: str, backend: str = "torch", **options: Any) -> LLM:
    return make_llm(
        model_path=path_of(family),
        **{"dtype": "float32", "tensor_parallel_size": 2}
        | BACKENDS.get(backend, {"backend": backend})
        | options,
    )


@cache
def wanted(
    family: str, backend: str, lengths: tuple[int, ...] = LENGTHS, max_tokens: int = 16
) -> list[list]:
    """Returns the outputs of one process."""
    params = msgspec.structs.replace(GREEDY, max_tokens=max_tokens)
    with ranked(family, backend, tensor_parallel_size=1) as llm:
        return fingerprints(llm.generate(prompts_of(*lengths), params))


def fingerprints(outputs: list[RequestOutput]) -> list[list]:
    return list(map(fingerprint, outputs))


def block_bytes(family: str) -> int:
    """Returns the bytes on the first rank, in fp32, of one block in every group."""
    program = build_programs(open_checkpoint(path_of(family)).config)["decoder"]
    return sum(
        make_kv_layout(group, torch.float32).block_bytes for group in shard(program, 0, 2).groups
    )


@every_family
def test_outputs_prefix_hits_and_forks(family: str, backend: str) -> None:
    prompts = prompts_of(*LENGTHS)
    forked = msgspec.structs.replace(SAMPLED, n=3, temperature=1.5, max_tokens=30)
    with ranked(family, backend) as llm:
        assert fingerprints(llm.generate(prompts, GREEDY)) == wanted(family, backend)
        again = llm.generate(prompts, GREEDY)
        assert sum(output.num_cached_tokens for output in again) > 100
        assert fingerprints(again) == wanted(family, backend)
        together = llm.generate(prompts[1], forked)[0]
        assert llm.reset_prefix_cache()
    with ranked(family, backend, tensor_parallel_size=1) as llm:
        one = llm.generate(prompts[1], forked)[0]
    assert fingerprint(together) == fingerprint(one)
    assert len({tuple(sample.token_ids) for sample in one.outputs}) == 3


@pytest.mark.parametrize(("family", "backend"), sorted(REFUSED))
def test_ranks_that_a_backend_refuses(family: str, backend: str) -> None:
    with pytest.raises(BackendUnavailable, match="MlaAttention"):
        ranked(family, backend)


@every_family
@pytest.mark.parametrize("mode", ["swap", pytest.param("recompute", marks=pytest.mark.slow)])
def test_chunks_and_preemption(family: str, backend: str, mode: str) -> None:
    """There is room for two of four requests as they grow, at 13 tokens a step, so blocks are
    swapped on both ranks.
    """
    options = {"max_model_len": 80, "preemption_mode": mode, "max_num_batched_tokens": 13}
    room = 8 * block_bytes(family)
    with ranked(family, backend, kv_cache_memory_bytes=room, **options) as llm:
        params = msgspec.structs.replace(GREEDY, max_tokens=40)
        found = llm.generate(prompts_of(*GROWING), params)
        stats = llm.get_metrics()
    assert stats.num_preemptions > 0 and stats.num_used_blocks == stats.num_host_blocks == 0
    assert (stats.num_swaps > 0) == (mode == "swap")
    assert fingerprints(found) == wanted(family, backend, GROWING, 40)


@pytest.fixture(scope="module")
def llama() -> Iterator[LLM]:
    with ranked("llama") as llm:
        yield llm


def test_with_batch_invariant_company_changes_no_bit(llama: LLM) -> None:
    prompts = prompts_of(5, 20)
    short = msgspec.structs.replace(SAMPLED, max_tokens=4)
    alone = [fingerprint(llama.generate(prompt, short)[0]) for prompt in prompts]
    assert [fingerprint(output) for output in llama.generate(prompts, short)] == alone


def test_the_first_rank_draws_for_all(llama: LLM) -> None:
    """Penalties, biases and logprobs of the prompt are applied by the first rank alone."""
    prompt = prompts_of(20)[0]
    params = SamplingParams(
        temperature=0.8,
        seed=3,
        max_tokens=12,
        repetition_penalty=1.2,
        logit_bias={7: 2.0},
        prompt_logprobs=1,
        logprobs=1,
    )
    with ranked("llama", tensor_parallel_size=1) as one:
        expected = one.generate(prompt, params)[0]
    assert fingerprint(llama.generate(prompt, params)[0]) == fingerprint(expected)


OPTIONS: dict[str, list[dict[str, Any]]] = {
    "native": [
        {"quantization": "int8", "dtype": "auto"},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "k8v4"},
        {"spec_method": "ngram"},
        {"kv_layout": "virtual", "enable_prefix_caching": False},
        {"threads": 4},
    ],
    "torch": [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}],
}


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        pytest.param(backend, options, marks=() if index == 0 else pytest.mark.slow)
        for backend in BACKENDS
        for index, options in enumerate(OPTIONS[backend])
    ],
    ids=str,
)
def test_ranks_beside_other_options(backend: str, options: dict[str, Any]) -> None:
    prompts = prompts_of(*LENGTHS)
    with ranked("llama", backend, tensor_parallel_size=1, **options) as llm:
        expected = fingerprints(llm.generate(prompts, GREEDY))
    with ranked("llama", backend, **options) as llm:
        assert fingerprints(llm.generate(prompts, GREEDY)) == expected


def test_native_ranks_have_the_same_bits_in_any_company() -> None:
    """The 70 prompts' tokens go by ranges of rows, their samples in two chunks; alone each is one
    row.
    """
    prompts = prompts_of(5, 20, *[3] * 68)
    short = msgspec.structs.replace(SAMPLED, max_tokens=4)
    with ranked("llama", "native", max_num_seqs=70) as llm:
        together = [fingerprint(output) for output in llm.generate(prompts, short)]
        alone = [fingerprint(llm.generate(prompt, short)[0]) for prompt in prompts[:4]]
    assert together[:4] == alone
    with ranked("llama", "native", max_num_batched_tokens=7) as llm:
        chunked = [fingerprint(output) for output in llm.generate(prompts[:3], short)]
    assert chunked == together[:3]


def test_native_ranks_keep_to_a_form() -> None:
    """The first rank's grammar decides: all ranks go on from the tokens that it allowed."""
    params = SamplingParams(
        temperature=1,
        seed=5,
        max_tokens=30,
        structured_outputs=StructuredOutputs(regex="(ab|cd){4}"),
    )
    texts = []
    for num_ranks in (1, 2):
        with make_llm(
            model_path=tiny_model_with_text(),
            backend="native",
            dtype="float32",
            tensor_parallel_size=num_ranks,
            skip_tokenizer_init=False,
        ) as llm:
            texts.append(llm.generate("say", params)[0].outputs[0].text)
    assert texts[0] == texts[1] and re.fullmatch("(ab|cd){4}", texts[0])


@pytest.mark.slow
@every_backend
def test_more_ranks_than_kv_heads(backend: str) -> None:
    """With four ranks each of llama's two KV heads is on two of them."""
    with ranked("llama", backend, tensor_parallel_size=4) as llm:
        found = fingerprints(llm.generate(prompts_of(*LENGTHS), GREEDY))
    assert found == wanted("llama", backend)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "reference", "device": None},
            "tensor_parallel_size: got 2, requires the native or torch backend, got 'reference'",
        ),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size: got 3, but the model has 2 KV heads"),
        (
            {"kv_offloading_size": 1 << 20},
            "kv_offloading_size: requires tensor_parallel_size 1, got 2",
        ),
        (
            {"backend": "native", "weights_memory_bytes": 1 << 20, "weights_dir": "/nowhere"},
            "weights_memory_bytes: requires tensor_parallel_size 1, got 2",
        ),
        (
            {"backend": "native", "num_scheduler_steps": 4},
            "num_scheduler_steps: got 4, expected 1 with tensor_parallel_size 2",
        ),
        (
            {"prefix_cache_dir": "/nowhere"},
            "prefix_cache_dir: requires tensor_parallel_size 1, got 2",
        ),
        (
            {"tensor_parallel_size": 0},
            "tensor_parallel_size: got 0, expected an integer of at least 1",
        ),
    ],
)
def test_options_that_do_not_fit_together_are_refused_before_anything_starts(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ranked("llama", **options)


def test_an_error_that_keeps_a_rank_from_loading_is_raised() -> None:
    """There is too little memory for one request, on every rank."""
    with pytest.raises(ConfigError, match=r"kv_cache_memory_bytes: got 1\.0 KiB, expected"):
        ranked("llama", kv_cache_memory_bytes=1024)
