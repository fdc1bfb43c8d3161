"""Heads that read hidden states guess what their formula says, find their features behind prefix
hits, and change no bit of an answer.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError, UnsupportedModel, WeightMismatch
from octavo.engine.speculation import throughput
from octavo.engine.speculation.step_cost_model import StepCostModel
from octavo.worker.draft_model import DraftModel
from tests.support.llm_tools import core_of, fingerprint, make_llm, prompts_of
from tests.support.proposers import draft_counts, verified_at_any_cost
from tests.support.tiers import examples
from tests.support.tiny_heads import eagle3, tiny_assistant, tiny_eagle3, tiny_mtp
from tests.support.tiny_models import tiny_model

BASE = {"max_tokens": 20, "ignore_eos": True, "logprobs": 1}
PARAMS = [
    SamplingParams(temperature=0, **BASE),
    SamplingParams(temperature=0.8, seed=3, frequency_penalty=0.5, **BASE),
    SamplingParams(temperature=1.0, seed=4, mirostat_mode=2, **BASE),
    SamplingParams(temperature=0.7, seed=5, n=2, **BASE),
]
PROMPTS = prompts_of(20, 33, 47, 18)
HEADS = {
    "eagle3": tiny_eagle3,
    "eagle3 with the model's table": lambda folder: tiny_eagle3(folder, own_table=False),
    "deepseek_v3": lambda folder: tiny_mtp(folder, "deepseek_v3"),
    "glm4_moe": lambda folder: tiny_mtp(folder, "glm4_moe", copies=False),
    "qwen3_next": lambda folder: tiny_mtp(folder, "qwen3_next"),
    "qwen3_5_text": lambda folder: tiny_mtp(folder, "qwen3_5_text", copies=False),
    "qwen3_5_moe_text": lambda folder: tiny_mtp(folder, "qwen3_5_moe_text", copies=False),
    "gemma4_assistant": lambda folder: tiny_assistant(),
    "gemma4_assistant with clusters": lambda folder: tiny_assistant(
        has_clusters=True, hidden_size_per_layer_input=0
    ),
}

ON_BACKENDS = [(name, backend) for name in HEADS for backend in ("native", "reference", "torch")]


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return {name: make(tmp_path_factory.mktemp("head")) for name, make in HEADS.items()}


@pytest.fixture
def proposals(monkeypatch):
    """Collects what was guessed for greedy rows, with the tokens that it follows."""
    found: list[tuple[list[int], list[int]]] = []
    follow = DraftModel.follow

    def collect(self, scheduled, results):
        follow(self, scheduled, results)
        for planned, result in zip(scheduled, results, strict=True):
            if planned.propose and result.draft_ids:
                rows = self._rows.indices([planned])
                row, records = rows[0], self._rows.sampling.plain_records(rows, np.zeros(1))
                if records["temperature"][0] > 0:
                    continue
                known = planned.start + planned.num_tokens - len(planned.draft_ids)
                known += len(result.token_ids)
                tokens = self._rows.token_ids[row, :known].tolist()
                found.append((tokens, list(result.draft_ids)))

    monkeypatch.setattr(DraftModel, "follow", collect)
    return found


def answers(prompts, params, **options):
    with make_llm(**options) as llm:
        found = llm.generate(prompts, params)
        assert core_of(llm).scheduler.stats().num_used_blocks == 0
        return list(map(fingerprint, found)), draft_counts(llm)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(("name", "backend"), ON_BACKENDS)
def test_guesses_are_those_of_the_formula(heads, proposals, name, backend):
    head = heads[name]
    with verified_at_any_cost():
        answers(
            PROMPTS[:2],
            PARAMS[0],
            model_path=head.path,
            backend=backend,
            spec_tokens=4,
            **head.options,
        )
    assert len(proposals) > 10 and max(len(guess) for _, guess in proposals) == 4
    for tokens, guess in random.Random(0).sample(proposals, 8):
        assert guess == head.guess(tokens, len(guess))


@pytest.mark.parametrize("name", HEADS)
def test_guesses_change_no_bit(heads, name):
    head = heads[name]
    options = {"model_path": head.path, "backend": "native"}
    plain, _ = answers(PROMPTS, PARAMS, **options)
    with verified_at_any_cost():
        found, (num_drafted, _) = answers(PROMPTS, PARAMS, **options, **head.options)
    assert found == plain
    assert num_drafted > 50


@pytest.mark.parametrize("name", ["eagle3", "deepseek_v3"])
def test_features_are_found_behind_a_prefix_hit(heads, proposals, name, monkeypatch):
    """The first answer is computed without guesses and several steps at a time; the second begins
    behind its blocks, and its guesses are those of the formula over the whole text.
    """
    head = heads[name]
    longer = SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)
    with make_llm(model_path=head.path, backend="native", **head.options) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(throughput, "LEAST_GAIN", 1e9)
            patch.setattr(throughput, "RETRY_AFTER", 1000)
            first = llm.generate(PROMPTS[0], longer)[0].outputs[0].token_ids
        assert draft_counts(llm) == (0, 0) and not proposals
        with verified_at_any_cost():
            again = llm.generate(PROMPTS[0] + first[:50], PARAMS[0])[0]
    assert again.num_cached_tokens >= 64
    assert len(proposals) > 5
    for tokens, guess in proposals[:4]:
        assert guess == head.guess(tokens, len(guess))


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["eagle3", "deepseek_v3", "gemma4_assistant"])
def test_under_pressure(heads, proposals, name):
    """Few blocks, chunks, preemption of both kinds, prefix hits and several samples."""
    head = heads[name]
    for seed in range(examples(2)):
        dice = random.Random(seed)
        prompts = prompts_of(*(dice.randint(3, 60) for _ in range(6)))
        prompts[3] = prompts[0] + prompts[3][:5]
        params = [PARAMS[0], *(dice.choice(PARAMS) for _ in prompts[1:])]
        options = {
            "model_path": head.path,
            "backend": "native",
            "max_num_seqs": dice.randint(2, 6),
            "max_num_batched_tokens": dice.randint(8, 64),
            "swap_space": dice.choice([0, 1 << 22]),
        }
        plain, _ = answers(prompts, params, **options)
        options["kv_cache_memory_bytes"] = dice.randint(24, 40) * 2 * 16 * 7 * 2 * 32 * 4
        with verified_at_any_cost():
            found, (num_drafted, _) = answers(prompts, params, **options, **head.options)
        assert found == plain and num_drafted > 0
        tokens, guess = proposals[-1]
        assert guess == head.guess(tokens, len(guess))


@pytest.mark.parametrize(
    "name", ["eagle3", "glm4_moe", "qwen3_5_text", "gemma4_assistant with clusters"]
)
def test_ranks_that_share_a_model_each_have_its_head(heads, proposals, name):
    head = heads[name]
    options = {"model_path": head.path, "backend": "native", "tensor_parallel_size": 2}
    plain, _ = answers(PROMPTS, PARAMS[:2] * 2, **options)
    with verified_at_any_cost():
        found, (num_drafted, _) = answers(PROMPTS, PARAMS[:2] * 2, **options, **head.options)
    assert found == plain and num_drafted > 30
    tokens, guess = proposals[-1]
    assert guess == head.guess(tokens, len(guess))


@pytest.mark.parametrize(("rate", "fewest"), [(0.64, 1.8), (0.82, 1.8), (0.0, 0.97)])
def test_a_planted_head_saves_steps(heads, monkeypatch, rate, fewest):
    """A head that is right with the given probability, also before a recurrence, whose state
    returns to where it was. All steps cost the same, as those of a large model do.
    """
    head = heads["qwen3_5_text"]
    longer = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    options = {"model_path": head.path, "backend": "native"}
    with make_llm(**options) as llm:
        truth = PROMPTS[0] + llm.generate(PROMPTS[0], longer)[0].outputs[0].token_ids
    dice = random.Random(0)
    follow = DraftModel.follow

    def plant(self, scheduled, results):
        follow(self, scheduled, results)
        for planned, result in zip(scheduled, results, strict=True):
            known = planned.start + planned.num_tokens - len(planned.draft_ids)
            known += len(result.token_ids)
            result.draft_ids = [
                token_id if dice.random() < rate else (token_id + 1) % 200
                for token_id in truth[known : known + len(result.draft_ids)]
            ]

    monkeypatch.setattr(DraftModel, "follow", plant)
    monkeypatch.setattr(StepCostModel, "seconds", lambda self, num_more: 1.0)
    with make_llm(**options, **head.options, spec_tokens=4) as llm:
        found = llm.generate(PROMPTS[0], longer)[0]
        steps = core_of(llm).scheduler.stats().num_steps
    assert found.outputs[0].token_ids == truth[len(PROMPTS[0]) :]
    assert 200 / steps >= fewest


def test_stored_blocks_of_another_head_are_not_loaded(tmp_path):
    """They would change no output, but its drafts would be made from another head's keys."""
    target = tiny_model("llama", num_hidden_layers=7)
    options = {"model_path": target.path, "backend": "native", "spec_method": "eagle3"}
    options["prefix_cache_dir"] = str(tmp_path / "blocks")
    cached = []
    for seed in (0, 0, 1):
        head = eagle3(tmp_path / f"head {seed}", seed=seed)
        with make_llm(**options, spec_model=str(head)) as llm:
            cached.append(llm.generate(PROMPTS[2], PARAMS[0])[0].num_cached_tokens)
    assert cached == [0, 32, 0]


def test_an_int8_head_changes_no_bit(heads):
    head = heads["eagle3"]
    options = {"model_path": head.path, "backend": "native", "quantization": "int8"}
    plain, _ = answers(PROMPTS, PARAMS, **options)
    with verified_at_any_cost():
        found, (num_drafted, _) = answers(PROMPTS, PARAMS, **options, **head.options)
    assert found == plain and num_drafted > 50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_method": "eagle3"}, "spec_model: got None"),
        ({"spec_method": "ngram", "spec_model": "x"}, "with spec_method ngram, expected none"),
        ({"spec_method": "mtp", "kv_cache": False}, "with kv_cache"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm(**options)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(UnsupportedModel, match="mtp requires a multi-token prediction layer"):
        make_llm(spec_method="mtp")


@pytest.mark.parametrize("method", [None, "mtp"])
def test_a_head_that_nothing_reads_is_told(heads, method):
    lines = []
    options = {"max_model_len": 64, "threads": 1, "skip_tokenizer_init": True}
    options |= {"spec_method": method} if method else {}
    LLM(str(heads["deepseek_v3"].path), report=lines.append, **options).close()
    told = [line for line in lines if "a layer that drafts is left out" in line]
    assert len(told) == (method is None)
    assert all("--spec-method mtp drafts with it" in line for line in told)


def test_a_model_that_is_no_head_is_refused():
    with pytest.raises(UnsupportedModel, match="expected an EAGLE-3 head"):
        make_llm(spec_method="eagle3", spec_model=str(tiny_model("llama").path))


def test_an_assistant_of_another_model_is_refused():
    """The tiny llama has another vocabulary, and the tiny gemma4_text is no assistant."""
    assistant = tiny_assistant()
    with pytest.raises(UnsupportedModel, match="hidden_size 40 for a model of 56, the model has"):
        make_llm(**assistant.options)
    with pytest.raises(UnsupportedModel, match="expected with spec_method mtp one of gemma4_assi"):
        make_llm(spec_method="mtp", spec_model=str(assistant.path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "the head has vocab_size 320 and hidden_size 32"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"draft_vocab_size": 190}, "lm_head.weight has shape"),
        ({"surprise": 3}, "surprise = 3 is unknown"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}},
            "requires the input of layer 9",
        ),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, "distinct numbers"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(tmp_path, changes, message):
    path = eagle3(tmp_path, **changes)
    target = tiny_model("llama", num_hidden_layers=7)
    with pytest.raises((UnsupportedModel, WeightMismatch), match=message):
        make_llm(model_path=target.path, spec_method="eagle3", spec_model=str(path))


def test_a_tensor_that_is_left_over_is_refused(tmp_path):
    file = eagle3(tmp_path) / "model.safetensors"
    save_file(load_file(file) | {"layers.1.mlp.weight": np.zeros((2, 2), np.float32)}, file)
    target = tiny_model("llama", num_hidden_layers=7)
    with pytest.raises(
        WeightMismatch, match=r"layers\.1\.mlp\.weight, which EAGLE-3 heads do not have"
    ):
        make_llm(model_path=target.path, spec_method="eagle3", spec_model=str(tmp_path))
