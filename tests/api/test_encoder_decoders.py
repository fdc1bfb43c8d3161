"""Decoders behind encoders through LLM.generate: the tokens are those of transformers, however the
requests are batched, preempted or shared; what such a model cannot do is refused.
"""

import json
import shutil
from functools import cache

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError, ContextTooLong, InvalidRequest
from octavo.engine.protocol.block_hashes import BlockHashing
from octavo.executor.native.extension import supported_levels
from octavo.worker.media.encoder_runner import EncoderRunner
from tests.support.llm_tools import make_llm
from tests.support.tiny_models import tiny_model
from tests.support.tiny_shapes import ENCODER_DECODERS

FORCED = {"bart": 1, "mbart": 7, "m2m_100": 11}
"""First tokens that generation_config.json forces."""

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
INPUTS = [
    np.random.default_rng(length).integers(3, 240, length).tolist() for length in (5, 40, 17, 90)
]
PROMPTS = [{"prompt_token_ids": ids} for ids in INPUTS]


@cache
def expected(family):
    """Returns what transformers' generate draws after each of INPUTS, behind the decoder's
    prompt.
    """
    torch.set_num_threads(1)
    model = tiny_model(family).model
    found = []
    for ids in INPUTS:
        with torch.no_grad():
            drawn = model.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                num_beams=1,
                max_new_tokens=NUM_TOKENS + (family in FORCED),
                use_cache=False,
                eos_token_id=None,
                forced_eos_token_id=None,
                forced_bos_token_id=FORCED.get(family),
            )
        found.append(drawn[0].tolist()[-NUM_TOKENS:])
    return found


def engine(family="bart", tmp_path=None, **options) -> LLM:
    """Makes a small engine on the native backend; with `tmp_path` the first token is forced."""
    path = tiny_model(family).path
    if tmp_path is not None:
        path = shutil.copytree(path, tmp_path / family)
        forced = {"forced_bos_token_id": FORCED[family]}
        given = json.loads((path / "generation_config.json").read_text())
        (path / "generation_config.json").write_text(json.dumps(given | forced))
    return make_llm(model_path=path, **{"backend": "native", "num_scheduler_steps": 4} | options)


def generated(llm, prompts=PROMPTS, params=GREEDY):
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("family", [name for name in ENCODER_DECODERS if name != "whisper"])
def test_tokens_are_those_of_transformers(family, tmp_path):
    with engine(family, tmp_path if family in FORCED else None) as llm:
        together = generated(llm)
        assert together == expected(family)
        assert [generated(llm, [prompt])[0] for prompt in PROMPTS] == together


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_other_backends_draw_the_same(backend):
    with engine("marian", backend=backend, num_scheduler_steps=None, batch_invariant=False) as llm:
        assert generated(llm) == expected("marian")


@pytest.mark.parametrize("level", supported_levels())
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_alone_is_batched_bitwise_at_every_level(level, quantization):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
    with engine("mbart", cpu_level=level, quantization=quantization) as llm:

        def logprobs(prompts):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [output.outputs[0].logprobs for output in outputs]

        assert logprobs(PROMPTS) == [logprobs([prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preempted_requests_draw_the_same(mode):
    """There are blocks for two whole requests and parts of others, so that requests give way."""
    options = {"max_model_len": 80, "max_encoder_len": 96, "kv_cache_memory_bytes": 700_000}
    with engine("t5", preemption_mode=mode, **options) as llm:
        assert generated(llm, PROMPTS[::2] * 4) == expected("t5")[::2] * 4
        stats = llm.get_metrics()
        assert stats.num_preemptions
        assert (stats.num_swaps > 0) == (mode == "swap")


def test_an_input_is_encoded_once(monkeypatch):
    encoded = []
    run = EncoderRunner.run
    monkeypatch.setattr(
        EncoderRunner,
        "run",
        lambda self, model_input: (
            encoded.extend(row.num_encoded for row in model_input.scheduled)
            or run(self, model_input)
        ),
    )
    with engine() as llm:
        generated(llm)
        assert sorted(encoded) == sorted(map(len, INPUTS))
        encoded.clear()
        params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
        (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
        assert encoded == [len(INPUTS[1])] and len(output.outputs) == 3


def test_samples_that_share_an_input_are_those_of_requests_alone():
    with engine() as llm:
        params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
        (shared,) = llm.generate(PROMPTS[3], params, use_tqdm=False)
        alone = llm.generate(PROMPTS[3], SamplingParams(seed=1, max_tokens=8, ignore_eos=True))
        assert shared.outputs[0].token_ids == alone[0].outputs[0].token_ids
        assert len({tuple(sample.token_ids) for sample in shared.outputs}) == 3
    with engine(max_num_seqs=1) as llm:  # where no two samples run at once
        (apart,) = llm.generate(PROMPTS[3], params, use_tqdm=False)
    assert [one.token_ids for one in apart.outputs] == [one.token_ids for one in shared.outputs]


def test_a_beam_search_is_that_of_transformers():
    with engine("marian") as llm:
        params = SamplingParams(beam_width=3, n=1, max_tokens=12, temperature=0, ignore_eos=True)
        (output,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    model = tiny_model("marian").model
    with torch.no_grad():
        wanted = model.generate(
            torch.tensor([INPUTS[1]]),
            attention_mask=torch.ones(1, len(INPUTS[1]), dtype=torch.long),
            num_beams=3,
            do_sample=False,
            max_new_tokens=12,
            eos_token_id=None,
            forced_eos_token_id=None,
        )
    assert output.outputs[0].token_ids == wanted[0].tolist()[1:]


def test_the_prompt_is_the_encoders_input():
    with engine() as llm:
        (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1), use_tqdm=False)
        assert output.prompt_token_ids == INPUTS[0]


def test_a_request_names_the_tokens_its_decoder_begins_with():
    with engine("m2m_100") as llm:
        own = generated(llm, [{**PROMPTS[0], "decoder_prompt_token_ids": [2, 11]}])
        assert own == expected("m2m_100")[:1]


def test_names_of_blocks_depend_on_the_input():
    roots = {BlockHashing(input_digest=digest).root() for digest in (b"", b"a", b"b")}
    assert len(roots) == 3
    with engine() as llm:
        generated(llm, PROMPTS[:1])
        generated(llm, PROMPTS[:1])
        assert llm.get_metrics().prefix_hit_tokens == 0


BAD_PROMPTS = {
    "empty": ({"prompt_token_ids": []}, {}, InvalidRequest, "got no token"),
    "too long": (
        {"prompt_token_ids": [5] * 301},
        {},
        ContextTooLong,
        "encoder accepts 300 tokens, the prompt has 301",
    ),
    "unknown id": ({"prompt_token_ids": [5, 999]}, {}, InvalidRequest, "got the token id 999"),
    "no decoder prompt": (
        {"prompt_token_ids": [5], "decoder_prompt_token_ids": []},
        {},
        InvalidRequest,
        "decoder_prompt_token_ids: got none",
    ),
    "decoder prompt of text": (
        {"prompt_token_ids": [5], "decoder_prompt_token_ids": "x"},
        {},
        InvalidRequest,
        "decoder_prompt_token_ids: got 'x', expected token ids",
    ),
    "both decoder prompts": (
        {"prompt_token_ids": [5], "decoder_prompt_token_ids": [2], "decoder_prompt": "x"},
        {},
        InvalidRequest,
        "expected one of them",
    ),
    "prompt logprobs": (PROMPTS[0], {"prompt_logprobs": 1}, InvalidRequest, "prompt_logprobs"),
}


def test_bad_prompts_are_refused():
    with engine() as llm:
        for prompt, params, kind, message in BAD_PROMPTS.values():
            with pytest.raises(kind) as error:
                llm.generate(prompt, SamplingParams(max_tokens=1, **params), use_tqdm=False)
            assert message in str(error.value)


BAD_OPTIONS = {
    "max_encoder_len": ({"max_encoder_len": 301}, "max_encoder_len: got 301, expected at most"),
    "max_num_batched_tokens": (
        {"max_num_batched_tokens": 300},
        "max_num_batched_tokens: got 300, but an input of 300 tokens is encoded in one step",
    ),
    "kv_layout": (
        {"kv_layout": "virtual", "enable_prefix_caching": False},
        "kv_layout: got virtual",
    ),
    "kv_cache": ({"kv_cache": False}, "kv_cache: got False"),
    "int4": ({"quantization": "int4"}, "quantization: got int4"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_options_that_such_a_model_cannot_have_are_refused(name):
    options, message = BAD_OPTIONS[name]
    with pytest.raises(ConfigError) as error:
        engine(**options)
    assert message in str(error.value) and "hint: " in str(error.value)


def test_an_encoders_option_is_refused_for_a_decoder():
    with pytest.raises(
        ConfigError, match="max_encoder_len: got 10, but the model is not an encoder-decoder"
    ):
        make_llm(max_encoder_len=10)
