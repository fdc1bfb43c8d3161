"""Logprobs of listed tokens are those that the whole vocabulary's list has: bitwise on native and
reference, to rounding on torch.
"""

import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import InvalidRequest
from tests.support.llm_tools import make_llm

PROMPTS = [[5, 6, 7], [9] * 20, [3, 1, 4, 1, 5]]
OPTIONS = {"max_tokens": 9, "ignore_eos": True, "seed": 2}


@pytest.fixture(scope="module")
def llm(backend):
    with make_llm(max_logprobs=1 << 20, backend=backend) as llm:
        yield llm


def generate(llm: LLM, *params: SamplingParams):
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS[: len(params)]]
    return [output.outputs[0] for output in llm.generate(prompts, list(params))]


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bias", [None, {7: -100.0, 8: 50.0}])
def test_listed_tokens_have_what_the_whole_list_says(llm, backend, temperature, bias):
    fields = OPTIONS | {"temperature": temperature, "logit_bias": bias}
    listed = [[7], [200, 3, 8], list(range(100, 228))]
    found = generate(llm, *(SamplingParams(**fields, logprob_token_ids=ids) for ids in listed))
    whole = generate(llm, *[SamplingParams(**fields, logprobs=-1)] * 3)
    for told, every, ids in zip(found, whole, listed, strict=True):
        assert told.token_ids == every.token_ids
        for token, some, best in zip(told.token_ids, told.logprobs, every.logprobs, strict=True):
            assert set(some) == {token, *ids} and next(iter(some)) == token
            for token_id, entry in some.items():
                if backend == "torch":
                    assert entry.logprob == pytest.approx(best[token_id].logprob, abs=1e-5)
                else:
                    assert entry == best[token_id]


def test_a_request_beside_others_says_what_it_says_alone(llm, backend):
    listed = SamplingParams(**OPTIONS, logprob_token_ids=[4, 2], prompt_logprobs=2)
    others = [SamplingParams(**OPTIONS), SamplingParams(**OPTIONS, logprobs=3, prompt_logprobs=1)]
    (alone,) = generate(llm, listed)
    together = generate(llm, listed, *others)
    assert together[0].token_ids == alone.token_ids
    if backend != "torch":
        assert together[0].logprobs == alone.logprobs
    assert together[1].logprobs is None
    assert all(len(place) in (3, 4) for place in together[2].logprobs)


def test_an_id_beyond_the_vocabulary_is_refused(llm):
    with pytest.raises(InvalidRequest, match="logprob_token_ids: got the token id 1000000"):
        generate(llm, SamplingParams(logprob_token_ids=[1_000_000]))
