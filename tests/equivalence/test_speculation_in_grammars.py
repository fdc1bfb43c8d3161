"""Guessed tokens never change an answer that keeps to a grammar: legal and illegal guesses, those
beyond the text's end, and with each way of drawing.
"""

from __future__ import annotations

import json
import random
import shutil

import jsonschema
import pytest

from octavo import SamplingParams, StructuredOutputs
from octavo.engine.recording.recorder import read_log
from octavo.engine.recording.replay import Replay
from octavo.wiring.engine import build_executor
from tests.support.llm_tools import fingerprint, make_llm, prompts_of
from tests.support.proposers import (
    DraftTreeBuilder,
    all_verified,
    draft_counts,
    right,
    sequences,
    verified_at_any_cost,
)
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import SPECIALS, tiny_model_with_text
from tests.support.tiny_vocabularies import bpe_with_specials, save_tokenizer_json

END = SPECIALS.index("<eos>")
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["circle", "square"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}
MODES = {
    "greedy": {"temperature": 0, "logprobs": 2},
    "sampled": {"logprobs": 2},
    "top_p": {"top_p": 0.4},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "mirostat": {"mirostat_mode": 2, "mirostat_tau": 3.0},
    "repetition": {"dry_multiplier": 1.0},
    "listed logprobs": {"logprob_token_ids": [5, 94]},
    "at least 40 tokens": {"min_tokens": 40},
    "two samples of few ids": {"n": 2, "allowed_token_ids": list(range(280))},
}
PROMPTS = prompts_of(9, 14)


def of_mode(mode: str) -> SamplingParams:
    form = StructuredOutputs(json=SCHEMA)
    return SamplingParams(max_tokens=180, seed=7, structured_outputs=form, **MODES[mode])


def careless(answers: list[list[int]]) -> DraftTreeBuilder:
    """Guesses what comes and more behind its end, now and then with a token that may be illegal."""
    dice, knows = random.Random(4), right(answers)

    def guess(token_ids: list[int], most: int) -> list[int]:
        found = [*knows(token_ids, most), END, 5, END, 94][:most]
        return [dice.randrange(280) if dice.random() < 0.1 else one for one in found]

    return guess


@pytest.fixture(scope="module")
def wordy_model(tmp_path_factory):
    """A tiny model whose tokens are parts of words, so that a text may be spelled in many ways."""
    folder = tmp_path_factory.mktemp("wordy") / "model"
    shutil.copytree(tiny_model("llama", vocab_size=720).path, folder)
    return save_tokenizer_json(folder, bpe_with_specials())


@pytest.mark.parametrize("method", ["grammar", "ngram", None])
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_a_text_without_choice_is_guessed_as_a_tokenizer_spells_it(wordy_model, mode, method):
    """Only its bytes are sure; a model may spell them in other tokens, and then does."""
    names = ["the story name", "it is a number"]
    properties = {name: {"enum": ["we will", "and there"]} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    form = StructuredOutputs(json=schema | {"additionalProperties": False})
    params = SamplingParams(max_tokens=90, seed=7, structured_outputs=form, **MODES[mode])
    options = {"backend": "native", "skip_tokenizer_init": False, "model_path": wordy_model}
    with make_llm(**options, spec_method="none") as llm:
        plain = llm.generate(PROMPTS, params)
        assert draft_counts(llm) == (0, 0)
    with verified_at_any_cost(), make_llm(**options, spec_method=method) as llm:
        found = llm.generate(PROMPTS, params)
        num_drafted, num_accepted = draft_counts(llm)
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    assert 0 < num_accepted <= num_drafted
    jsonschema.validate(json.loads(found[0].outputs[0].text), schema)


def test_a_recording_of_forms_is_made_again(wordy_model, tmp_path):
    """The plans of an engine that guesses what forms force follow from their results; a worker
    rebuilds its matchers and draws the same.
    """
    names = ["the story name", "it is a number"]
    properties = {name: {"enum": ["we will", "and there"]} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    form = StructuredOutputs(json=schema | {"additionalProperties": False})
    params = SamplingParams(max_tokens=60, seed=7, structured_outputs=form)
    path = tmp_path / "log"
    options = {"backend": "native", "skip_tokenizer_init": False, "model_path": wordy_model}
    with verified_at_any_cost():
        with make_llm(**options, record=str(path)) as llm:
            llm.generate(PROMPTS, params)
            assert draft_counts(llm)[0] > 0
        header, events = read_log(path)
        recorded = list(events)
        assert Replay(header).run(recorded).differences == []
        executor = build_executor(header, model=None, report=lambda text: None)
        assert Replay(header, executor).run(recorded).differences == []
        executor.close()


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backend", ["native", "reference", "torch"])
def test_guesses_change_no_bit_of_a_grammars_text(backend, mode):
    options = {"backend": backend, "skip_tokenizer_init": False, "spec_method": "none"}
    params = of_mode(mode)
    with make_llm(model_path=tiny_model_with_text(), **options) as llm:
        plain = llm.generate(PROMPTS, params)
    guess = careless(sequences(plain, PROMPTS))
    options["spec_method"] = "ngram"
    with all_verified(guess), make_llm(model_path=tiny_model_with_text(), **options) as llm:
        found = llm.generate(PROMPTS, params)
        num_drafted, num_accepted = draft_counts(llm)
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    is_drafted = mode != "mirostat" or backend != "torch"
    assert (0 < num_accepted <= num_drafted) is is_drafted
    for output in found:
        for sample in output.outputs:
            assert sample.finish_reason == "stop"
            jsonschema.validate(json.loads(sample.text), SCHEMA)
