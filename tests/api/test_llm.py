"""LLM as a user meets it: forms of prompts, order, messages, and what happens to a request that
fails.
"""

import itertools
import json
import shutil
import threading
import time

import numpy as np
import pytest
import torch
from transformers import SuppressTokensLogitsProcessor

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError, ContextTooLong, InvalidRequest, OctavoError
from octavo.config.engine_config import EngineConfig
from octavo.engine.protocol.requests import EngineRequest
from octavo.utils.progress import quiet
from octavo.wiring.engine import build_core, core_texts
from octavo.wiring.model import open_model
from tests.support.llm_tools import GREEDY, alone, fingerprint, make_llm, prompts_of, small_options
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def llm(backend):
    with make_llm(backend=backend) as llm:
        yield llm


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = prompts_of(40, 3, 20)
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 9, 4)]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 9, 4]
    assert all(
        output.finished and output.outputs[0].finish_reason == "length" for output in outputs
    )


def test_a_step_shows_that_it_gets_ahead(backend):
    """A step reports progress many times, so that a long one is told from one that hangs."""
    options = EngineConfig.from_options(**small_options() | {"backend": backend})
    model = open_model(options)
    built = build_core(model, quiet, core_texts(model, lambda: None))
    one_token = SamplingParams(temperature=0, max_tokens=1)
    built.core.add(EngineRequest("a", [5, 6, 7], one_token, seed=0))
    before = built.worker.progress
    while built.core.has_work:
        built.core.step()
    assert built.worker.progress >= before + 10
    built.core.close()


def test_forms_of_a_prompt(llm):
    ids = prompts_of(7)[0]
    one = fingerprint(llm.generate(ids, GREEDY)[0])
    assert fingerprint(llm.generate([ids], GREEDY)[0]) == one
    assert fingerprint(llm.generate({"prompt_token_ids": ids}, GREEDY)[0]) == one
    assert (
        fingerprint(
            llm.generate([{"prompt_token_ids": tuple(ids), "cache_salt": "mine"}], GREEDY)[0]
        )
        == one
    )
    assert llm.generate([], GREEDY) == []


def test_metrics_and_times(llm):
    output = llm.generate(prompts_of(9), GREEDY)[0]
    metrics = output.metrics
    assert metrics.num_generation_tokens == 8
    assert (
        metrics.arrival_time
        <= metrics.scheduled_ts
        <= metrics.first_token_ts
        <= metrics.last_token_ts
    )
    stats = llm.get_metrics()
    assert stats.num_running == stats.num_waiting == stats.num_used_blocks == 0
    assert stats.generation_tokens >= 8 and stats.busy_s > 0


def test_without_params_the_models_defaults_hold(tmp_path):
    shutil.copytree(tiny_model("llama").path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.25, "top_k": 7, "max_new_tokens": 3, "eos_token_id": 2})
    )
    with make_llm(model_path=tmp_path, generation_config="auto") as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 3)
        assert len(llm.generate(prompts_of(4))[0].outputs[0].token_ids) <= 3


def test_suppressed_tokens_are_never_sampled(tmp_path):
    """As in transformers: `suppress_tokens`, and `bad_words_ids` of one token."""
    model, (ids,) = tiny_model("llama"), prompts_of(9)
    prompt = {"prompt_token_ids": ids}
    shutil.copytree(model.path, tmp_path, dirs_exist_ok=True)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with make_llm() as llm:
        first, second, *_ = dict.fromkeys(llm.generate(prompt, params)[0].outputs[0].token_ids)
    given = {"suppress_tokens": [first], "bad_words_ids": [[second], [5, 6]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    ban = SuppressTokensLogitsProcessor([first, second], device="cpu")
    wanted = torch.tensor([ids])
    for _ in range(6):
        with torch.no_grad():
            logits = ban(wanted, model.model(wanted).logits[:, -1])
        wanted = torch.cat((wanted, logits.argmax(-1, keepdim=True)), 1)
    with make_llm(model_path=tmp_path, generation_config="auto") as llm:
        sampled = llm.generate(prompt, params)[0].outputs[0].token_ids
    assert list(sampled) == wanted[0, len(ids) :].tolist()
    with make_llm(model_path=tmp_path, generation_config="vllm") as llm:
        assert first in llm.generate(prompt, params)[0].outputs[0].token_ids


def test_unseeded_requests_draw_seeds_from_the_engines(llm):
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    first, second = (llm.generate(prompts_of(5), params)[0].outputs[0].token_ids for _ in range(2))
    assert first != second
    with make_llm(seed=4) as one, make_llm(seed=4) as two:
        assert [fingerprint(e.generate(prompts_of(5), params)[0]) for e in (one, one)] == [
            fingerprint(e.generate(prompts_of(5), params)[0]) for e in (two, two)
        ]


def test_logprobs_name_the_sampled_token_and_the_best(llm):
    step = llm.generate(
        prompts_of(6), SamplingParams(temperature=1.5, seed=1, max_tokens=1, logprobs=2)
    )[0].outputs[0]
    entries = step.logprobs[0]
    assert next(iter(entries)) == step.token_ids[0] and len(entries) in (2, 3)
    assert sorted(entry.rank for entry in entries.values())[:2] == [1, 2]
    assert step.cumulative_logprob == pytest.approx(entries[step.token_ids[0]].logprob)


def test_bans_are_kept(llm):
    prompt = prompts_of(6)[0]
    free = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    allowed = llm.generate(
        prompt,
        SamplingParams(
            temperature=1, seed=2, max_tokens=8, allowed_token_ids=[5, 9], ignore_eos=True
        ),
    )[0]
    assert set(allowed.outputs[0].token_ids) <= {5, 9}
    biased = llm.generate(
        prompt, SamplingParams(temperature=0, max_tokens=3, logit_bias={7: 100}, ignore_eos=True)
    )[0]
    assert biased.outputs[0].token_ids == [7, 7, 7]
    stopped = llm.generate(
        prompt,
        SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[free[3]], ignore_eos=True),
    )[0].outputs[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free[3])
    first = free.index(free[3])
    late = llm.generate(
        prompt,
        SamplingParams(
            temperature=0, max_tokens=8, min_tokens=6, stop_token_ids=[free[3]], ignore_eos=True
        ),
    )[0]
    assert (
        len(late.outputs[0].token_ids) > 6 > first and free[3] not in late.outputs[0].token_ids[:6]
    )


BAD_PROMPTS = {
    "none": ([], "got no token"),
    "negative": ([3, -1], r"prompt: got the token id -1, expected 0 to 319"),
    "outside": ([3, 320], r"prompt: got the token id 320, expected 0 to 319"),
    "float": ([3, 1.5], r"got 1.5 among token ids"),
    "number": (7, "prompt: got int"),
    "ids as text": (
        {"prompt_token_ids": "abc"},
        "prompt_token_ids: got a string, expected token ids",
    ),
    "key": (
        {"prompt_ids": [1]},
        "got the key 'prompt_ids', expected prompt, prompt_token_ids, cache_salt",
    ),
    "empty dict": ({}, "a dict without a prompt"),
    "salt": ({"prompt_token_ids": [1], "cache_salt": 5}, "cache_salt: got 5"),
    "text": ("hello", "a text prompt requires a tokenizer, and this engine has none"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_bad_prompts_are_named(llm, name):
    prompt, message = BAD_PROMPTS[name]
    with pytest.raises(InvalidRequest, match=message) as error:
        llm.generate([prompts_of(3)[0], prompt], GREEDY)
    assert error.value.param in ("prompt", "cache_salt")
    assert fingerprint(llm.generate(prompts_of(3), GREEDY)[0]), "the engine goes on"


BAD_PARAMS = {
    "stop_token_ids": (
        {"stop_token_ids": [320]},
        "stop_token_ids: got the token id 320, expected 0 to 319",
    ),
    "allowed_token_ids": (
        {"allowed_token_ids": [5000]},
        "allowed_token_ids: got the token id 5000",
    ),
    "logit_bias": ({"logit_bias": {"999": 1}}, "logit_bias: got the token id 999"),
    "logprobs": ({"logprobs": 21}, "logprobs: got 21, expected at most 20"),
    "whole vocabulary": (
        {"prompt_logprobs": -1},
        r"prompt_logprobs: got -1 \(the whole vocabulary, 320\), expected at most 20",
    ),
    "prompt_logprob_start": (
        {"prompt_logprobs": 1, "prompt_logprob_start": 3},
        "prompt_logprob_start: got 3, expected 0 to 2 for a prompt of 3 tokens",
    ),
    "stop": ({"stop": "x"}, "stop: stop strings require a tokenizer"),
    "bad_words": ({"bad_words": ["x"]}, "bad_words: strings require a tokenizer"),
}


@pytest.mark.parametrize("name", BAD_PARAMS)
def test_params_are_checked_against_the_model(llm, name):
    options, message = BAD_PARAMS[name]
    with pytest.raises(InvalidRequest, match=message):
        llm.generate(prompts_of(3), SamplingParams(**options))


def test_whole_vocabulary_where_it_is_allowed():
    with make_llm(max_logprobs=-1) as llm:
        output = llm.generate(
            prompts_of(3), SamplingParams(max_tokens=1, logprobs=-1, temperature=0)
        )[0].outputs[0]
    assert len(output.logprobs[0]) == 320
    assert sum(np.exp(entry.logprob) for entry in output.logprobs[0].values()) == pytest.approx(1)


def test_a_prompt_longer_than_the_context(llm):
    with pytest.raises(
        ContextTooLong,
        match="maximum context length is 256 tokens, the prompt has 256; expected at most 255",
    ):
        llm.generate(prompts_of(256), GREEDY)
    output = llm.generate(
        prompts_of(250), SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    )[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (6, "length")


def test_params_for_each_prompt_must_match_in_number(llm):
    with pytest.raises(
        InvalidRequest, match="got 2, expected one, or one for each of the 3 prompts"
    ):
        llm.generate(prompts_of(1, 2, 3), [GREEDY, GREEDY])


SETUPS = {
    "unknown option": (
        {"thread": 2},
        ConfigError,
        "unknown option 'thread'\nhint: did you mean threads?",
    ),
    "context": (
        {"max_model_len": 4096},
        ConfigError,
        "max_model_len: got 4096, expected at most the model's context, 2048",
    ),
    "short": ({"max_model_len": 1}, ConfigError, "max_model_len: got 1, expected at least 2"),
    "memory": (
        {"kv_cache_memory_bytes": "100KiB"},
        ConfigError,
        "kv_cache_memory_bytes: got 100.0 KiB, expected",
    ),
    "backend": (
        {"backend": "cuda"},
        ConfigError,
        "backend: got 'cuda', expected 'native' or 'torch' or 'reference'",
    ),
}


@pytest.mark.parametrize("name", SETUPS)
def test_what_keeps_an_engine_from_starting(name):
    options, kind, message = SETUPS[name]
    with pytest.raises(kind) as error:
        make_llm(**options)
    assert message in str(error.value)


def test_the_start_says_what_fits():
    lines = []
    with make_llm(report=lines.append):
        pass
    assert (
        lines[-1].startswith("KV cache ")
        and " tokens, " in lines[-1]
        and lines[-1].endswith("requests of 256")
    )


def test_leaving_a_stream_aborts_it(llm):
    seen = []
    for output in llm.stream(
        prompts_of(5)[0], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    ):
        seen.append(len(output.outputs[0].token_ids))
        if len(seen) == 3:
            break
    assert seen == [1, 2, 3]
    assert llm.reset_prefix_cache(), "no request holds a block"
    assert len(llm.generate(prompts_of(5), GREEDY)) == 1


def test_a_stream_ends_in_one_final_output(llm):
    outputs = list(llm.stream(prompts_of(5)[0], GREEDY))
    assert [output.finished for output in outputs] == [False] * 7 + [True]


def test_streams_may_be_read_in_turns(llm):
    """Each stream gives its own request's outputs, though any of them may step the engine;
    `generate` may run beside them.
    """
    prompts = prompts_of(5, 20, 33)
    expected = [alone(llm, prompt, GREEDY) for prompt in prompts]
    final = {}
    for outputs in itertools.zip_longest(*(llm.stream(prompt, GREEDY) for prompt in prompts)):
        final |= {index: output for index, output in enumerate(outputs) if output is not None}
    assert [fingerprint(final[index]) for index in range(3)] == expected
    stream = llm.stream(prompts[0], GREEDY)
    next(stream)
    assert fingerprint(llm.generate(prompts[1], GREEDY)[0]) == expected[1]
    assert fingerprint(list(stream)[-1]) == expected[0]


def test_threads_may_generate_at_the_same_time(llm):
    """Each call gets its own outputs, bitwise those it gets alone; streams go on beside them."""
    prompts = prompts_of(5, 20, 33, 12)
    expected = [alone(llm, prompt, GREEDY) for prompt in prompts]
    found = [[] for _ in prompts]
    failed = []

    def call(index):
        try:
            for turn in range(6):
                if (index + turn) % 2:
                    found[index].append(llm.generate(prompts[index], GREEDY)[0])
                else:
                    found[index].append(list(llm.stream(prompts[index], GREEDY))[-1])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failed == []
    assert [[fingerprint(output) for output in outputs] for outputs in found] == [
        [one] * 6 for one in expected
    ]


def test_closing_from_another_thread_ends_every_call():
    llm = make_llm()
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    failed = []

    def call():
        try:
            while True:
                llm.generate(prompts_of(5, 6), long)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    llm.close()
    for thread in threads:
        thread.join(30)
    assert [str(error).splitlines()[0] for error in failed] == ["the engine was closed"] * 3


def test_numpy_and_generators_are_taken(llm):
    prompts = prompts_of(7, 9)
    expected = [fingerprint(output) for output in llm.generate(prompts, GREEDY)]
    for form in (
        [np.array(prompt) for prompt in prompts],
        (prompt for prompt in prompts),
        [[np.int64(token) for token in prompt] for prompt in prompts],
        [{"prompt_token_ids": np.array(prompt, np.uint16)} for prompt in prompts],
    ):
        outputs = llm.generate(form, (params for params in (GREEDY, GREEDY)))
        assert [fingerprint(output) for output in outputs] == expected
        assert all(type(token) is int for output in outputs for token in output.prompt_token_ids)


def test_a_text_may_stand_beside_its_token_ids(llm):
    ids = prompts_of(7)[0]
    output = llm.generate({"prompt": "seven", "prompt_token_ids": ids}, GREEDY)[0]
    assert (output.prompt, output.prompt_token_ids) == ("seven", ids)


MISTAKES = {
    "a dict of params": (
        lambda llm: llm.generate([5], {"max_tokens": 2}),
        "sampling_params: got the dict {'max_tokens': 2}, expected SamplingParams",
    ),
    "a number": (lambda llm: llm.generate(5), "prompts: got int, expected a string, token ids"),
    "a text for a chat": (lambda llm: llm.chat("hi"), "messages: got 'hi', expected a list"),
    "no content": (
        lambda llm: llm.chat([{"role": "user"}]),
        "messages[0]: got {'role': 'user'}, which has no 'content'",
    ),
    "params of a search": (
        lambda llm: llm.beam_search([5], SamplingParams()),
        "expected BeamSearchParams",
    ),
    "priorities": (
        lambda llm: llm.generate([5], GREEDY, priority=1.5),
        "priority: got 1.5, expected a 32-bit integer",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_our_errors(llm, name):
    call, message = MISTAKES[name]
    with pytest.raises(InvalidRequest) as error:
        call(llm)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"), [("max_tokens", 10**30), ("top_k", 2**31), ("logit_bias", {3: 1000.0})]
)
def test_params_changed_after_they_were_made_are_checked_too(llm, field, value):
    params = SamplingParams(max_tokens=4)
    setattr(params, field, value)
    with pytest.raises(InvalidRequest, match=f"^{field}: got "):
        llm.generate(prompts_of(3), params)
    assert fingerprint(llm.generate(prompts_of(3), GREEDY)[0]), "the engine goes on"


def test_a_large_limit_is_cut_to_the_context(llm):
    params = SamplingParams(temperature=0, max_tokens=2**31 - 1, ignore_eos=True)
    output = llm.generate(prompts_of(250), params)[0].outputs[0]
    assert (len(output.token_ids), output.finish_reason) == (6, "length")


def test_samples_are_indexed_and_counted(llm):
    output = llm.generate(
        prompts_of(20), SamplingParams(n=4, temperature=1.2, seed=9, max_tokens=5, ignore_eos=True)
    )[0]
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert output.metrics.num_generation_tokens == 20


def test_a_closed_engine_says_so():
    llm = make_llm()
    llm.close()
    llm.close()
    with pytest.raises(OctavoError, match="the engine was closed"):
        llm.generate(prompts_of(3), GREEDY)


def test_chat_and_tokenizer_need_a_tokenizer(llm):
    with pytest.raises(InvalidRequest, match="this engine has no tokenizer"):
        llm.get_tokenizer()
    with pytest.raises(InvalidRequest, match="a conversation requires the model's tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])


def test_model_may_be_the_first_argument():
    with LLM(
        str(tiny_model("llama").path),
        backend="reference",
        skip_tokenizer_init=True,
        max_model_len=64,
        report=str,
    ) as llm:
        assert llm.config.model.max_model_len == 64
        assert llm.config.model.served_model_name == tiny_model("llama").path.name
        assert llm.config.backend.threads >= 1
