"""Requests that outgrow the context up to which their model's angles are the original ones
(LongRoPE): the tokens are those of transformers' generate, which computes such a request once more
with the long factors, and no way of computing them changes a bit.
"""

from functools import cache

import msgspec
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError
from octavo.executor.native.extension import supported_levels
from tests.support.llm_tools import (
    GREEDY,
    SAMPLED,
    alone,
    fingerprint,
    make_llm,
    prompts_of,
)
from tests.support.tiny_models import tiny_model

ORIGINAL = 48
FACTORS = [1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 8.0]
PHI3 = {
    "original_max_position_embeddings": ORIGINAL,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": FACTORS,
        "long_factor": [8.0, 1.0, 4.0, 1.0, 9.0, 6.0, 2.0, 1.0],
        "original_max_position_embeddings": ORIGINAL,
    },
}
LENGTHS = (30, 47, 48, 49, 46, 10, 70)
"""Prompts that outgrow the context later, at once, from the first token on, and never."""
NUM_TOKENS = 30
LONG = msgspec.structs.replace(GREEDY, max_tokens=NUM_TOKENS)
DRAWN = msgspec.structs.replace(SAMPLED, max_tokens=NUM_TOKENS)


def engine(**options) -> LLM:
    path = tiny_model("phi3", **PHI3).path
    return make_llm(model_path=path, **{"backend": "native", "dtype": "float32"} | options)


KINDS = {"greedy": LONG, "sampled": DRAWN}


@cache
def one_by_one(kind, level=None):
    """Returns the answers of requests alone, in whole prompts, with nothing shared."""
    with engine(enable_prefix_caching=False, cpu_level=level or "auto") as llm:
        return [alone(llm, prompt, KINDS[kind]) for prompt in prompts_of(*LENGTHS)]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
def test_tokens_are_those_of_transformers(backend):
    model = tiny_model("phi3", **PHI3).model
    wanted = []
    for ids in prompts_of(*LENGTHS):
        with torch.no_grad():
            drawn = model.generate(
                torch.tensor([ids]), do_sample=False, max_new_tokens=NUM_TOKENS, eos_token_id=None
            )
        wanted.append(drawn[0].tolist()[len(ids) :])
    with engine(backend=backend) as llm:
        found = llm.generate(prompts_of(*LENGTHS), LONG)
    assert [output.outputs[0].token_ids for output in found] == wanted


WAYS = {
    "batched": {},
    "two at once": {"max_num_seqs": 2},
    "a token at a time": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    "chunks of 7": {"max_num_batched_tokens": 7},
    "three threads": {"threads": 3},
    "several steps at once": {"num_scheduler_steps": 8},
    "no prefix cache": {"enable_prefix_caching": False},
    "no KV cache": {"kv_cache": False},
    "a small context": {"max_model_len": 110},
    "guesses": {"spec_method": "ngram", "num_scheduler_steps": 1},
    **{f"at {level}": {"cpu_level": level} for level in supported_levels()[:-1]},
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_any_way_is_alone(way, kind):
    level = WAYS[way].get("cpu_level")
    with engine(**WAYS[way]) as llm:
        outputs = llm.generate(prompts_of(*LENGTHS), KINDS[kind])
    assert [fingerprint(output) for output in outputs] == one_by_one(kind, level)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_is_uninterrupted(mode):
    with engine(kv_cache_memory_bytes=1 << 26) as llm:
        block_bytes = (1 << 26) // (llm.info.kv_capacity_tokens // 16)
    prompts, params = prompts_of(30, 45, 40, 47), msgspec.structs.replace(DRAWN, max_tokens=50)
    options = {"max_model_len": 112, "preemption_mode": mode}
    with engine(**options) as llm:
        expected = [alone(llm, prompt, params) for prompt in prompts]
    with engine(kv_cache_memory_bytes=9 * block_bytes, **options) as llm:
        outputs = llm.generate(prompts, params)
        stats = llm.get_metrics()
    assert stats.num_preemptions > 0 and stats.num_used_blocks == stats.num_host_blocks == 0
    assert [fingerprint(output) for output in outputs] == expected


def test_keys_of_short_and_long_angles_are_never_mixed():
    """A prompt that outgrows the context finds nothing of one that does not, and the other way
    round; each finds its own kind.
    """
    short, tail = prompts_of(30, 60)
    long = short + tail
    with engine(enable_prefix_caching=False) as llm:
        expected = [alone(llm, short, GREEDY), alone(llm, long, GREEDY)]
    for prompts in ((short, long), (long, short)):
        with engine() as llm:
            found = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
            again = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
        assert [output.num_cached_tokens for output in found] == [0, 0]
        assert all(output.num_cached_tokens >= 16 for output in again)
        wanted = expected if prompts[0] is short else expected[::-1]
        assert [fingerprint(output) for output in found] == wanted
        assert [fingerprint(output) for output in again] == wanted


def test_an_answer_that_outgrows_is_found_again_as_a_prompt():
    prompt = prompts_of(40)[0]
    with engine() as llm:
        first = llm.generate(prompt, LONG)[0]
        longer = [*prompt, *first.outputs[0].token_ids]
        second = llm.generate(longer, GREEDY)[0]
    assert second.num_cached_tokens == (len(longer) - 1) // 16 * 16
    with engine() as llm:
        assert alone(llm, longer, GREEDY) == fingerprint(second)


@pytest.mark.parametrize("length", [40, 48])
def test_samples_are_separate_requests(length):
    """Samples that start after the first one has outgrown the context share nothing with it."""
    prompt = prompts_of(length)[0]
    params = msgspec.structs.replace(DRAWN, n=4, max_tokens=20, temperature=1.3)
    found = []
    for options in ({}, {"max_num_seqs": 2}, {"max_num_seqs": 1, "enable_prefix_caching": False}):
        with engine(**options) as llm:
            found.append(alone(llm, prompt, params))
    assert found[0] == found[1] == found[2]
    assert len({sample[1] for sample in found[0][:4]}) > 1


def test_beams_outgrow_together():
    """A search goes on with its beams' tokens computed again, however they are cut."""
    prompt = prompts_of(44)[0]
    params = SamplingParams(n=3, beam_width=4, max_tokens=20, ignore_eos=True, logprobs=1)
    found = []
    for options in ({}, {"max_num_batched_tokens": 16}, {"enable_prefix_caching": False}):
        with engine(**options) as llm:
            found.append(alone(llm, prompt, params))
    assert found[0] == found[1] == found[2]
    with engine(backend="reference") as llm:
        wanted = alone(llm, prompt, params)
    assert [beam[1] for beam in found[0][:3]] == [beam[1] for beam in wanted[:3]]


def test_a_draft_model_whose_angles_change_elsewhere_is_refused():
    target = tiny_model("phi3", **PHI3)
    later = {"original_max_position_embeddings": 64}
    other = tiny_model(
        "phi3", **PHI3 | later | {"rope_parameters": PHI3["rope_parameters"] | later}
    )
    options = {"spec_method": "draft_model", "num_scheduler_steps": 1}
    with pytest.raises(ConfigError, match=r"changes its rope factors after 64 tokens"):
        make_llm(model_path=target.path, spec_model=str(other.path), **options)
    with engine(spec_model=str(target.path), **options) as llm:
        outputs = llm.generate(prompts_of(*LENGTHS), DRAWN)
    assert [fingerprint(output) for output in outputs] == one_by_one("sampled")
