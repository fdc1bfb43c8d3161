"""A request's tokens and logprobs do not depend on its company, chunks, threads, the prefix cache,
preemption or forks.

All of it bitwise, through LLM, on tiny models of each family in each precision, on every backend
(torch: batch-invariant), and on SmolLM2.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.checkpoint.catalogue import resolve
from tests.support.llm_tools import (
    GREEDY,
    PENALISED,
    SAMPLED,
    alone,
    core_of,
    fingerprint,
    make_llm,
    prompts_of,
)
from tests.support.tiny_models import tiny_model

torch.set_num_threads(1)

CONTEXT = 384
LENGTHS = (1, 5, 16, 17, 47, 2, 15, 31, 32, 33, 63, 64, 100, 130, 255, 270)
"""Prompt lengths on either side of blocks of 16 and of the attention's splits of 256."""

SCORED = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2, logprobs=0)
FORKED = SamplingParams(n=4, temperature=1.2, seed=7, max_tokens=20, ignore_eos=True, logprobs=2)
PARAMS = [GREEDY, SAMPLED, PENALISED, GREEDY, SAMPLED, SCORED]

PRECISIONS: dict[str, dict[str, str]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "as packed": {},
    "int8 KV": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4 KV": {"quantization": "int8", "kv_cache_dtype": "int4"},
    "k8v4 KV": {"dtype": "bfloat16", "kv_cache_dtype": "k8v4"},
}


UNTIED = {"gemma3_text": {"tie_word_embeddings": False}}
"""Options of the tiny models: with tied embeddings they would say their last token again and again,
however samples are drawn.
"""


@dataclass(frozen=True)
class Setup:
    """A model in a precision on a backend, and the number of requests it is given."""

    backend: str
    model: str
    precision: str
    num_requests: int = len(LENGTHS)

    def llm(self, **options: Any) -> LLM:
        path = (
            resolve("smollm2")
            if self.model == "smollm2"
            else tiny_model(self.model, **UNTIED.get(self.model, {})).path
        )
        options = {
            "max_model_len": CONTEXT,
            "max_num_seqs": 16,
            **PRECISIONS[self.precision],
            **options,
        }
        return make_llm(model_path=path, backend=self.backend, **options)

    def llm_of_blocks(self, num_blocks: int, **options: Any) -> LLM:
        """Makes an engine whose KV cache has this many blocks in every group; no window bounds them
        where that many requests may run.
        """
        with self.llm(kv_cache_memory_bytes=1 << 26, **options | {"max_num_seqs": 4096}) as llm:
            block_bytes = (1 << 26) // (llm.info.kv_capacity_tokens // 16)
        return self.llm(kv_cache_memory_bytes=block_bytes * num_blocks, **options)

    @property
    def has_threads(self) -> bool:
        """Whether the option `threads` says how the backend cuts its work."""
        return self.backend == "native"

    @property
    def requests(self) -> tuple[list[list[int]], list[SamplingParams]]:
        return prompts_of(*LENGTHS[: self.num_requests]), list(
            itertools.islice(itertools.cycle(PARAMS), self.num_requests)
        )

    def param(self, *marks: pytest.MarkDecorator) -> Any:
        return pytest.param(self, id=f"{self.backend}-{self.model}-{self.precision}", marks=marks)


SETUPS = [
    *(Setup("reference", family, "as packed", 5).param() for family in ("llama", "gemma3_text")),
    *(
        Setup("native", family, precision).param()
        for family in ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2")
        for precision in ("fp32", "bf16", "int8")
    ),
    Setup("torch", "llama", "fp32", 3).param(),
    *(
        Setup("torch", family, precision, 6).param(pytest.mark.slow)
        for family in ("llama", "gemma3_text", "gpt2", "qwen2_moe", "gpt_oss", "deepseek_v3")
        for precision in ("bf16", "int8")
    ),
    *(Setup("native", family, "int8 KV").param() for family in ("qwen3", "gemma3_text")),
    Setup("native", "gemma3_text", "int4 KV").param(),
    Setup("native", "qwen3", "k8v4 KV").param(),
    *(
        Setup("native", "smollm2", precision).param(pytest.mark.model, pytest.mark.slow)
        for precision in PRECISIONS
    ),
]

WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "two at once": {"max_num_seqs": 2},
    **{f"chunks of {size}": {"max_num_batched_tokens": size} for size in (1, 7, 16, 255, 257)},
    **{f"{threads} threads": {"threads": threads} for threads in (2, 3, 7)},
    "no prefix cache": {"enable_prefix_caching": False},
    "prompts in one piece": {"enable_chunked_prefill": False},
    "static batches": {"batching": "static", "max_num_seqs": 4},
    "one at a time": {"batching": "none"},
    "no KV cache": {"kv_cache": False},
    "chunks, threads, few at once": {"max_num_batched_tokens": 23, "threads": 3, "max_num_seqs": 3},
}


@pytest.fixture(scope="module", params=SETUPS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return request.param


@pytest.fixture(scope="module")
def whole(setup: Setup) -> list[Any]:
    """Computes each request by itself, on one thread, its prompt in one step, nothing shared."""
    with setup.llm() as llm:
        return [alone(llm, prompt, params) for prompt, params in zip(*setup.requests, strict=True)]


def fingerprints(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    return [fingerprint(output) for output in llm.generate(prompts, params)]


def found_again(output: RequestOutput) -> int:
    """Returns how many prompt tokens a second request would find in full blocks of the prompt and
    the answer; never the last one.
    """
    num_prompt_tokens, num_output_tokens = (
        len(output.prompt_token_ids),
        len(output.outputs[0].token_ids),
    )
    return min(num_prompt_tokens - 1, (num_prompt_tokens + num_output_tokens - 1) // 16 * 16)


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("way", WAYS)
def test_any_way_is_alone(setup: Setup, whole: list[Any], way: str) -> None:
    if way.endswith(" threads") and not setup.has_threads:
        return
    with setup.llm(**WAYS[way]) as llm:
        assert fingerprints(llm, *setup.requests) == whole


@pytest.mark.sampled(one_in=2)
def test_a_prefix_that_is_found_is_as_good_as_computed(setup: Setup, whole: list[Any]) -> None:
    prompts, params = setup.requests
    with setup.llm() as llm:
        first = llm.generate(prompts, params)
        second = llm.generate(prompts, params)
    assert [output.num_cached_tokens for output in first] == [0] * len(prompts)
    hits = [
        0 if given is SCORED else found_again(output)
        for output, given in zip(first, params, strict=True)
    ]
    assert [output.num_cached_tokens for output in second] == hits
    assert [fingerprint(output) for output in second] == whole


@pytest.mark.sampled(one_in=4)
def test_prompts_that_start_alike_share_blocks(setup: Setup) -> None:
    """Tails of several lengths share one long prefix, after its owner is done and while it runs."""
    prefix, *tails = prompts_of(100, 1, 12, 13, 30, 170)
    prompts = [prefix + tail for tail in tails]
    with setup.llm(enable_prefix_caching=False) as llm:
        expected = [alone(llm, prompt, SAMPLED) for prompt in prompts]
    with setup.llm() as llm:
        owner = llm.stream(prefix, msgspec.structs.replace(GREEDY, max_tokens=30))
        next(owner)
        assert fingerprints(llm, prompts, SAMPLED) == expected
        assert llm.get_metrics().prefix_hit_tokens == 5 * 96
        owner.close()
        outputs = llm.generate(prompts, SAMPLED)
    assert [fingerprint(output) for output in outputs] == expected
    assert [output.num_cached_tokens for output in outputs] == [
        max(len(prefix), found_again(output)) for output in outputs
    ]


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_prefix_read_together_is_as_good_as_read_alone(setup: Setup, threads: int) -> None:
    """A prefix of whole splits of 256 keys is shared by requests that are decoded beside each
    other, beside one that shares nothing, and in chunks.
    """
    if threads > 1 and not setup.has_threads:
        return
    prefix, other, *tails = prompts_of(290, 20, 1, 12, 13, 40)
    prompts = [other, *(prefix + tail for tail in tails)]
    with setup.llm(enable_prefix_caching=False, shared_prefix_attention=False) as llm:
        expected = [alone(llm, prompt, SAMPLED) for prompt in prompts]
    with setup.llm(max_num_batched_tokens=64, threads=threads) as llm:
        llm.generate(prefix, msgspec.structs.replace(GREEDY, max_tokens=1))
        assert fingerprints(llm, prompts, SAMPLED) == expected


@pytest.mark.sampled(one_in=4)
def test_prompts_that_part_inside_a_block_share_its_beginning(setup: Setup) -> None:
    prompt = prompts_of(90)[0]
    others = [[*prompt[:count], 238, *prompt[count + 1 :]] for count in (1, 15, 16, 17, 40, 79)]
    with setup.llm(enable_prefix_caching=False) as llm:
        expected = [alone(llm, other, SAMPLED) for other in others]
    for other, fingerprint_alone in zip(others, expected, strict=True):
        with setup.llm() as llm:
            llm.generate(prompt, GREEDY)
            output = llm.generate(other, SAMPLED)[0]
        assert output.num_cached_tokens == next(
            index for index, token in enumerate(other) if token == 238
        )
        assert fingerprint(output) == fingerprint_alone


@pytest.mark.sampled(one_in=2)
def test_prompt_logprobs_from_a_start_on_are_those_of_the_whole(setup: Setup) -> None:
    prompt = prompts_of(70)[0]
    with setup.llm() as llm:
        whole = llm.generate(prompt, SCORED)[0].prompt_logprobs
        for start in (0, 1, 16, 17, 60, 69):
            output = llm.generate(
                prompt, msgspec.structs.replace(SCORED, prompt_logprob_start=start)
            )[0]
            assert output.prompt_logprobs == [*[None] * max(1, start), *whole[max(1, start) :]]
            assert output.num_cached_tokens == min(64, max(0, start - 1))


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(
    ("mode", "caching", "budget"),
    [("swap", True, 2048), ("swap", False, 7), ("recompute", True, 7), ("recompute", False, 2048)],
)
def test_preempted_is_uninterrupted(setup: Setup, mode: str, caching: bool, budget: int) -> None:
    prompts = prompts_of(20, 25, 30, 33)
    long = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
    change = msgspec.structs.replace
    params = [
        long,
        change(long, prompt_logprobs=1),
        change(PENALISED, max_tokens=40),
        change(long, n=2),
    ]
    options = {"max_model_len": 80, "enable_prefix_caching": caching, "preemption_mode": mode}
    with setup.llm(**options) as llm:
        expected = [
            alone(llm, prompt, given) for prompt, given in zip(prompts, params, strict=True)
        ]
    with setup.llm_of_blocks(8, max_num_batched_tokens=budget, **options) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm.get_metrics()
    assert stats.num_preemptions > 0 and stats.num_used_blocks == stats.num_host_blocks == 0
    assert (stats.num_swaps > 0) == (mode == "swap")
    assert sum(output.metrics.num_preemptions for output in outputs) == stats.num_preemptions
    assert [fingerprint(output) for output in outputs] == expected


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_forks_are_separate_requests(setup: Setup, length: int) -> None:
    """The n samples of a request share its prompt's blocks; each equals the sample that is computed
    with no block shared.
    """
    prompt = prompts_of(length)[0]
    with setup.llm() as llm:
        together = alone(llm, prompt, FORKED)
        beside = fingerprints(llm, [*prompts_of(40, 50), prompt], [GREEDY, SAMPLED, FORKED])[-1]
    with setup.llm(max_num_seqs=1, enable_prefix_caching=False) as llm:
        apart = alone(llm, prompt, FORKED)
        assert llm.get_metrics().prefix_hit_tokens == 0
    assert together == apart == beside
    assert len({sample[1] for sample in together[:4]}) > 1


@pytest.mark.sampled(one_in=8)
def test_neighbours_that_are_aborted_change_nothing(setup: Setup) -> None:
    """Half of the requests are aborted at different moments, some while their prompt is still being
    computed; the others do not notice.
    """
    prompts = prompts_of(5, 90, 17, 120, 33, 250)
    params = msgspec.structs.replace(SAMPLED, max_tokens=25)
    with setup.llm() as llm:
        expected = [alone(llm, prompt, params) for prompt in prompts]
    with setup.llm(max_num_batched_tokens=32) as llm:
        streams = {index: llm.stream(prompt, params) for index, prompt in enumerate(prompts)}
        final, turns = {}, 0
        while streams:
            turns += 1
            for index, stream in list(streams.items()):
                output = next(stream, None)
                if output is None or turns == {1: 2, 3: 1, 5: 4}.get(index):
                    stream.close()
                    del streams[index]
                else:
                    final[index] = output
        assert [fingerprint(final[index]) for index in (0, 2, 4)] == [
            expected[index] for index in (0, 2, 4)
        ]
        assert llm.reset_prefix_cache(), "no block is held"


@pytest.mark.model
def test_the_real_model_in_short() -> None:
    """A few requests on SmolLM2 meet most of what can happen to one; the tests above take minutes
    on it (`-m slow`).
    """
    setup = Setup("native", "smollm2", "as packed")
    prompts = prompts_of(5, 33, 47, 20)
    params = [
        msgspec.structs.replace(given, max_tokens=12)
        for given in (SAMPLED, SCORED, PENALISED, FORKED)
    ]
    with setup.llm() as llm:
        expected = [
            alone(llm, prompt, given) for prompt, given in zip(prompts, params, strict=True)
        ]
    with setup.llm_of_blocks(7, max_model_len=96, max_num_batched_tokens=23, threads=3) as llm:
        for _ in range(2):
            assert fingerprints(llm, prompts, params) == expected
        stats = llm.get_metrics()
    assert stats.num_preemptions > 0 and stats.prefix_hit_tokens > 0


def test_prompt_logprobs_name_the_prompts_own_tokens(setup: Setup, whole: list[Any]) -> None:
    prompts, params = setup.requests
    for prompt, given, found in zip(prompts, params, whole, strict=True):
        assert (found[-1] is None) == (given is not SCORED)
        if given is SCORED:
            assert found[-1][0] is None
            assert [step[0][0] for step in found[-1][1:]] == prompt[1:]


@pytest.mark.parametrize(
    "backend", ["reference", "native", pytest.param("torch", marks=pytest.mark.slow)]
)
def test_a_window_of_few_blocks_is_as_good_as_one_of_many(backend: str) -> None:
    """Windows of 24 tokens stand beside full attention: contexts of 300, in a group that has blocks
    for a fraction of them.
    """
    setup = Setup(backend, "gemma3_text", "as packed")
    prompts = prompts_of(200, 150, 260)
    params = [
        msgspec.structs.replace(given, max_tokens=40) for given in (GREEDY, SAMPLED, PENALISED)
    ]
    with setup.llm() as llm:
        expected = [
            alone(llm, prompt, given) for prompt, given in zip(prompts, params, strict=True)
        ]
    with setup.llm(max_num_seqs=3, max_num_batched_tokens=32, swap_space=0) as llm:
        full, window = core_of(llm).scheduler.blocks.pools
        assert (
            window.num_blocks
            < 20
            < sum(len(prompt) + 40 for prompt in prompts) / 16
            < full.num_blocks
        )
        for _ in range(2):
            assert fingerprints(llm, prompts, params) == expected
