"""A request's tokens and logprobs do not depend on its company, on chunks, the prefix cache, preemption or forks: bitwise, all of them."""

import pytest

from octavo import SamplingParams
from tests.llm_tools import GREEDY, PENALISED, SAMPLED, alone, fingerprint, make_llm, prompts_of

LENGTHS = (1, 5, 16, 17, 47)
PARAMS = [GREEDY, SAMPLED, PENALISED, GREEDY, SAMPLED]
FAMILIES = ["llama", "gemma3_text"]


@pytest.fixture(scope="module")
def whole():
    """Each family's outputs one by one, computed once: (family, backend) -> fingerprints."""
    found = {}

    def get(family, backend):
        if (family, backend) not in found:
            with make_llm(family, backend=backend) as llm:
                prompts = prompts_of(*LENGTHS)
                found[family, backend] = [alone(llm, prompt, params) for prompt, params in zip(prompts, PARAMS, strict=True)]
        return found[family, backend]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_batched_is_alone(family, backend, whole):
    with make_llm(family, backend=backend) as llm:
        outputs = llm.generate(prompts_of(*LENGTHS), PARAMS)
    assert [fingerprint(output) for output in outputs] == whole(family, backend)


@pytest.mark.parametrize("budget", [1, 7, 16, 255])
def test_chunked_is_whole(budget, backend, whole):
    with make_llm("gemma3_text", backend=backend, max_num_batched_tokens=budget) as llm:
        outputs = llm.generate(prompts_of(*LENGTHS), PARAMS)
    assert [fingerprint(output) for output in outputs] == whole("gemma3_text", backend)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_cache_hit_is_computed(family, backend, whole):
    with make_llm(family, backend=backend) as llm:
        first = llm.generate(prompts_of(*LENGTHS), PARAMS)
        second = llm.generate(prompts_of(*LENGTHS), PARAMS)
    assert [output.num_cached_tokens for output in first] == [0] * 5
    assert [output.num_cached_tokens for output in second] == [0, 0, 0, 16, 32]
    assert [fingerprint(output) for output in second] == whole(family, backend)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_is_uninterrupted(caching, backend):
    long = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
    prompts = prompts_of(20, 25, 30)
    options = {"backend": backend, "max_model_len": 80, "enable_prefix_caching": caching}
    with make_llm(**options) as llm:
        expected = [alone(llm, prompt, long) for prompt in prompts]
    with make_llm(**options, kv_cache_memory_bytes=kv_bytes(backend, num_blocks=8)) as llm:
        outputs = llm.generate(prompts, long)
        assert llm.get_metrics().num_preemptions > 0
    assert [fingerprint(output) for output in outputs] == expected


def kv_bytes(backend, *, num_blocks):
    """Bytes of so many blocks of the tiny llama."""
    with make_llm(backend=backend, kv_cache_memory_bytes=1 << 24) as llm:
        capacity = llm._front.client.info.kv_capacity_tokens // 16
    return (1 << 24) // capacity * num_blocks


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_forks_are_separate_requests(length, backend):
    """n samples share their prompt's blocks; each equals the sample that is computed with no block shared."""
    params = SamplingParams(n=3, temperature=0.9, seed=7, max_tokens=6, ignore_eos=True, logprobs=2)
    prompt = prompts_of(length)[0]
    with make_llm(backend=backend) as llm:
        together = fingerprint(llm.generate(prompt, params)[0])
    with make_llm(backend=backend, max_num_seqs=1, enable_prefix_caching=False) as llm:
        apart = fingerprint(llm.generate(prompt, params)[0])
        assert llm.get_metrics().prefix_hit_tokens == 0
    assert together == apart
    assert len({sample[1] for sample in together[:3]}) > 1


def test_prompt_logprobs_do_not_depend_on_chunks(backend):
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2, logprobs=0)
    prompts = prompts_of(1, 17, 40)
    with make_llm(backend=backend) as llm:
        expected = [alone(llm, prompt, params) for prompt in prompts]
    with make_llm(backend=backend, max_num_batched_tokens=7) as llm:
        outputs = llm.generate(prompts, params)
    assert [fingerprint(output) for output in outputs] == expected
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs[0] is None
        assert [next(iter(step)) for step in output.prompt_logprobs[1:]] == prompt[1:]
