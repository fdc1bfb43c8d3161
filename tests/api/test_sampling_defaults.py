"""Sampling values of requests that set none: where they come from, and what goes over them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError
from octavo.checkpoint.catalogue import CATALOGUE, recommended_sampling
from octavo.frontend.sampling_defaults import SamplingDefaults, params_over
from octavo.wiring.sampling_defaults import BASE, CHAT, ENCODER_DECODER
from tests.support.llm_tools import make_llm
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import tiny_model_with_text

NEUTRAL = SamplingParams()


def defaults_of(path: Path, **options: object) -> SamplingDefaults:
    with make_llm(model_path=path, **{"generation_config": "auto"} | options) as llm:
        return llm.frontend.sampling


def with_config(tmp_path: Path, content: object) -> Path:
    shutil.copytree(tiny_model("llama").path, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(content))
    return tmp_path / "model"


def test_a_generation_config_goes_over_everything(tmp_path):
    path = with_config(tmp_path, {"temperature": 0.6, "top_p": 0.9, "do_sample": True})
    found = defaults_of(path)
    assert found.values == {"temperature": 0.6, "top_p": 0.9}
    assert found.source == "generation_config.json" and found.chat_params.max_tokens is None


def test_a_generation_config_without_sampling_values_recommends_none(tmp_path):
    path = with_config(tmp_path, {"eos_token_id": 2, "max_new_tokens": 99})
    found = defaults_of(path)
    assert found.values == {
        "temperature": BASE["temperature"],
        "top_p": BASE["top_p"],
        "repetition_penalty": BASE["repetition_penalty"],
        "max_tokens": 99,
    }


def test_a_model_without_one_has_the_values_of_its_kind():
    chat = defaults_of(tiny_model_with_text(), skip_tokenizer_init=False)
    assert chat.values == CHAT and chat.source.endswith(": chat")
    assert chat.params.max_tokens == NEUTRAL.max_tokens and chat.chat_params.max_tokens is None
    base = defaults_of(tiny_model("llama").path)
    assert base.source.endswith(": base")
    assert base.chat_params.max_tokens == BASE["max_new_tokens"]


def test_a_recommended_limit_is_for_chats_and_a_given_one_for_completions_too(tmp_path):
    base = tiny_model("llama").path
    assert defaults_of(base).params.max_tokens == NEUTRAL.max_tokens
    override = '{"max_new_tokens": 7}'
    assert defaults_of(base, override_generation_config=override).params.max_tokens == 7
    path = with_config(tmp_path, {"max_new_tokens": 99})
    assert defaults_of(path).params.max_tokens == 99


def test_an_encoder_decoder_is_greedy():
    assert defaults_of(tiny_model("t5").path).values == ENCODER_DECODER


def test_vllm_ignores_what_the_model_recommends(tmp_path):
    found = defaults_of(with_config(tmp_path, {"temperature": 0.6}), generation_config="vllm")
    assert found.params == NEUTRAL


@pytest.mark.parametrize("inside", [False, True])
def test_a_path_names_another_one(tmp_path, inside):
    own = tmp_path / "generation_config.json"
    own.write_text(json.dumps({"temperature": 0.3}))
    given = str(tmp_path if inside else own)
    assert defaults_of(tiny_model("llama").path, generation_config=given).values == {
        "temperature": 0.3
    }


def test_single_values_are_overridden():
    override = '{"temperature": 0.1, "max_new_tokens": 7}'
    found = defaults_of(tiny_model("llama").path, override_generation_config=override)
    assert found.values == {
        **{name: value for name, value in BASE.items() if name != "max_new_tokens"},
        "temperature": 0.1,
        "max_tokens": 7,
    }
    assert found.source.endswith("--override-generation-config")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_config": "none"}, "generation_config: got 'none', expected auto, vllm"),
        ({"override_generation_config": "{"}, "override_generation_config: got '{', expected"),
        ({"override_generation_config": "[]"}, "override_generation_config: got"),
        ({"override_generation_config": '{"temp": 1}'}, "override_generation_config: got"),
        (
            {"override_generation_config": '{"top_p": 7}'},
            "override-generation-config: top_p: got 7",
        ),
    ],
)
def test_what_is_no_source_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        defaults_of(tiny_model("llama").path, **options)


def test_bad_values_of_the_model_are_refused_with_a_way_out(tmp_path):
    path = with_config(tmp_path, {"temperature": -1})
    with pytest.raises(ConfigError, match=r"generation_config\.json: temperature") as caught:
        defaults_of(path)
    assert "--generation-config vllm" in str(caught.value)


def test_they_are_told_at_start_up():
    lines: list[str] = []
    with make_llm(report=lines.append, generation_config="auto"):
        pass
    assert (
        "default sampling params: temperature 0.7, top_p 0.95, repetition_penalty 1.1, max_tokens"
        " 256 (the model recommends no values: base)" in lines
    )


def test_a_catalogue_model_is_known_by_its_file(tmp_path, monkeypatch):
    file = CATALOGUE["smollm2"].files[0]
    copied = tmp_path / file.name
    with copied.open("wb") as out:
        out.truncate(file.num_bytes)
    found = recommended_sampling(copied)
    assert found is not None and found[0] == "smollm2" and found[1]["temperature"] == 0
    with copied.open("wb") as out:
        out.truncate(file.num_bytes - 1)
    assert recommended_sampling(copied) is None
    assert recommended_sampling(tmp_path) is None


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_a_generating_catalogue_model_has_values(name):
    values = CATALOGUE[name].sampling
    assert values is not None
    found = SamplingDefaults.from_generation_config(values, name)
    assert {"temperature", "repetition_penalty", "max_tokens"} <= found.values.keys()


GREEDY = SamplingParams(temperature=0, repetition_penalty=1.1, max_tokens=100)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 0, "repetition_penalty": 1.1, "max_tokens": 100}),
        ({"temperature": 0.5}, {"temperature": 0.5, "repetition_penalty": 1.1}),
        ({"repetition_penalty": 1.0}, {"temperature": 0, "repetition_penalty": 1.0}),
        ({"temperature": 0.5}, {"top_p": 1.0}),
        ({"n": 3}, {"temperature": 0.7, "top_p": 0.95, "repetition_penalty": 1.1, "n": 3}),
        ({"n": 3, "top_p": 0.5}, {"temperature": 0.7, "top_p": 0.5}),
        ({"best_of": 3}, {"temperature": 0.7, "top_p": 0.95}),
        ({"n": 1}, {"temperature": 0}),
        ({"top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
        ({"top_k": -1}, {"temperature": 0}),
        ({"mirostat_mode": 2}, {"temperature": 0.7, "mirostat_mode": 2}),
        ({"min_tokens": 200}, {"max_tokens": None}),
        ({"min_tokens": 200, "max_tokens": 300}, {"max_tokens": 300}),
        ({"max_tokens": None}, {"max_tokens": None}),
    ],
)
def test_what_a_request_sets_goes_over_the_defaults(given, expected):
    made = params_over(GREEDY, given)
    assert {name: getattr(made, name) for name in expected} == expected


def test_a_conversation_without_params_is_not_cut_at_sixteen_tokens():
    options = {"generation_config": "vllm", "skip_tokenizer_init": False}
    with make_llm(model_path=tiny_model_with_text(), **options) as llm:
        messages = [{"role": "user", "content": "hello"}]
        (output,) = llm.chat(messages, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop" or len(output.outputs[0].token_ids) > 16
        assert isinstance(llm, LLM) and llm.get_default_sampling_params().max_tokens == 16
