"""A draft model never changes an answer: tokens and logprobs are bitwise those without it, whatever
it guesses, and one with other tokens is refused.
"""

from __future__ import annotations

import random
import shutil

import pytest
from tokenizers import Tokenizer

from octavo import SamplingParams
from octavo.api.errors import ConfigError
from octavo.engine.recording.recorder import read_log
from octavo.engine.recording.replay import Replay
from octavo.engine.speculation import throughput
from octavo.wiring.engine import build_executor
from tests.support.llm_tools import core_of, fingerprint, make_llm, prompts_of
from tests.support.proposers import draft_counts, verified_at_any_cost
from tests.support.tiers import examples
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import tiny_model_with_text

BASE = {"max_tokens": 30, "ignore_eos": True, "logprobs": 1}
PARAMS = [
    SamplingParams(temperature=0, **BASE),
    SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.5, **BASE),
    SamplingParams(temperature=1.0, seed=4, mirostat_mode=2, **BASE),
    SamplingParams(temperature=0.7, seed=5, n=2, **BASE),
]
PROMPTS = prompts_of(20, 33, 47, 18)


def drafting(model: str = "llama", **fields) -> dict:
    return {
        "spec_method": "draft_model",
        "spec_model": str(tiny_model(model, **fields).path),
    }


def outputs_of(prompts, params, family="llama", **options):
    """Returns the answers, and how many tokens were guessed and held."""
    with make_llm(family, **options) as llm:
        found = llm.generate(prompts, params)
        assert core_of(llm).scheduler.stats().num_used_blocks == 0
        return list(map(fingerprint, found)), draft_counts(llm)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("backend", ["native", "reference", "torch"])
def test_its_own_twin_guesses_what_is_greedy(backend):
    """The same model as its own draft guesses each greedy token, so its K and V are in place."""
    plain, _ = outputs_of(PROMPTS, PARAMS[0], backend=backend)
    with verified_at_any_cost():
        found, (num_drafted, num_accepted) = outputs_of(
            PROMPTS, PARAMS[0], backend=backend, spec_tokens=4, **drafting()
        )
    assert found == plain
    assert num_accepted > 0.9 * num_drafted > 40


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("backend", ["native", "reference", "torch"])
def test_its_own_twin_guesses_what_is_sampled(backend):
    """A guess is drawn with the noise and the filters of the draw that verifies it, of every sample
    and temperature; a greedy guess would hold about as often as the likeliest token is drawn.
    """
    params = [
        SamplingParams(temperature=0.9, seed=3, **BASE),
        SamplingParams(temperature=1.3, top_p=0.9, top_k=60, seed=4, **BASE),
        SamplingParams(temperature=0.7, min_p=0.02, seed=5, n=2, **BASE),
    ]
    plain, _ = outputs_of(PROMPTS[:3], params, backend=backend)
    with verified_at_any_cost():
        found, (num_drafted, num_accepted) = outputs_of(
            PROMPTS[:3], params, backend=backend, spec_tokens=4, **drafting()
        )
    assert found == plain
    assert num_accepted > 0.9 * num_drafted > 40


@pytest.mark.parametrize("model", ["llama", "gemma3_text"])
def test_guesses_of_another_model_change_no_bit(model):
    prompts, params = PROMPTS[:2], PARAMS[1:3]
    plain, _ = outputs_of(prompts, params, backend="native")
    options = drafting(model, **({"seed": 1} if model == "llama" else {"vocab_size": 320}))
    with verified_at_any_cost():
        found, (num_drafted, num_accepted) = outputs_of(
            prompts, params, backend="native", **options
        )
    assert found == plain
    assert 0 <= num_accepted < num_drafted


def test_blocks_made_without_guesses_are_the_draft_models_too(monkeypatch):
    """An answer is computed several steps at a time and without guesses; what its blocks hold of
    the draft model is right, since its twin's guesses hold behind a prefix hit on them.
    """
    longer = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    with make_llm(backend="native", **drafting()) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(throughput, "LEAST_GAIN", 1e9)
            patch.setattr(throughput, "RETRY_AFTER", 1000)
            first = llm.generate(PROMPTS[0], longer)[0].outputs[0].token_ids
        assert draft_counts(llm) == (0, 0)
        with verified_at_any_cost():
            again = llm.generate(PROMPTS[0] + first[:50], PARAMS[0])[0]
            num_drafted, num_accepted = draft_counts(llm)
    assert again.num_cached_tokens >= 64
    assert again.outputs[0].token_ids[:20] == first[50:]
    assert num_accepted > 0.9 * num_drafted > 10


def test_a_draft_model_reads_windows_that_the_model_has_gone_past(monkeypatch):
    """It computes a block only once it is full, and reads keys that no token of the model sees any
    more; the rows of a search that branch off have no other.
    """
    monkeypatch.setattr(throughput, "LEAST_GAIN", 1e9)
    monkeypatch.setattr(throughput, "RETRY_UNLIKELY_AFTER", 1000)
    params = SamplingParams(n=2, beam_width=3, max_tokens=24)
    options = {"backend": "native", "num_scheduler_steps": 1}
    plain, _ = outputs_of(PROMPTS[1:2], params, "gemma3_text", **options)
    found, (num_drafted, _) = outputs_of(
        PROMPTS[1:2], params, "gemma3_text", **options, **drafting("gemma3_text")
    )
    assert found == plain and num_drafted == 0


def test_under_pressure():
    """Few blocks, chunks, preemption of both kinds, prefix hits and several samples; a twin's
    greedy guesses hold afterwards as before.
    """
    for seed in range(examples(2)):
        dice = random.Random(seed)
        prompts = prompts_of(*(dice.randint(3, 60) for _ in range(6)))
        prompts[3] = prompts[0] + prompts[3][:5]
        params = [dice.choice(PARAMS) for _ in prompts]
        options = {
            "backend": "native",
            "max_num_seqs": dice.randint(2, 6),
            "max_num_batched_tokens": dice.randint(8, 64),
            "swap_space": dice.choice([0, 1 << 20]),
        }
        plain, _ = outputs_of(prompts, params, **options)
        options["kv_cache_memory_bytes"] = dice.randint(24, 60) * 2 * 2 * 2 * 2 * 16 * 16 * 4
        with verified_at_any_cost():
            found, _ = outputs_of(prompts, params, **options, **drafting())
            hits, (num_drafted, num_accepted) = outputs_of(
                [prompts[0]] * 3, PARAMS[0], **options, **drafting()
            )
        assert found == plain
        assert num_accepted > 0.8 * num_drafted > 0
        assert len(set(map(str, hits))) == 1


def test_a_recording_makes_the_same_guesses_again(tmp_path):
    """The plans of a replay are the recorded ones, and so are the guesses that come back."""
    path = tmp_path / "log"
    with verified_at_any_cost():
        _, (num_drafted, _) = outputs_of(
            PROMPTS, PARAMS, backend="native", record=str(path), **drafting()
        )
        header, events = read_log(path)
        executor = build_executor(header, model=None, report=lambda text: None)
        found = Replay(header, executor).run(events)
        executor.close()
    assert num_drafted > 0 and found.num_requests == 5
    assert found.differences == []


def test_a_model_with_other_tokens_is_refused(tmp_path):
    target = tiny_model_with_text()
    other = tmp_path / "other"
    shutil.copytree(target, other)
    file = str(other / "tokenizer.json")
    text = Tokenizer.from_file(file).to_str()
    (other / "tokenizer.json").write_text(text.replace('"z"', '"\\u0416"', 1))
    options = {"skip_tokenizer_init": False, "spec_method": "draft_model"}
    with pytest.raises(
        ConfigError, match=r"spec_model: .* has another vocabulary: token id \d+ is"
    ):
        make_llm(model_path=target, spec_model=str(other), **options)
    with make_llm(model_path=target, spec_model=str(target), **options) as llm:
        assert llm.generate("ab", SamplingParams(max_tokens=4, temperature=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_method": "draft_model"}, "spec_model: got None"),
        (
            {"spec_model": "x", "spec_method": "ngram"},
            "got x with spec_method ngram, expected none",
        ),
        ({"spec_model": "x", "spec_method": "draft_model", "kv_cache": False}, "with kv_cache"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(**options)


def test_a_draft_model_without_a_kv_cache_of_each_token_is_refused():
    with pytest.raises(ConfigError, match=r"spec_model .* has a state cache"):
        make_llm(**drafting("mamba2"))


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_recurrent_model_returns_to_where_drafts_are_rejected(backend):
    """The draft model is another one, so most of its guesses are rejected."""
    vocab_size = tiny_model("mamba2").config["vocab_size"]
    options = {"family": "mamba2", "backend": backend}
    plain, _ = outputs_of(PROMPTS, PARAMS[:2] * 2, **options)
    with verified_at_any_cost():
        found, (num_drafted, num_accepted) = outputs_of(
            PROMPTS, PARAMS[:2] * 2, **options, **drafting("llama", vocab_size=vocab_size)
        )
    assert found == plain
    assert num_accepted < num_drafted / 2 and num_drafted > 50
