"""Guesses that branch never change an answer: tokens and logprobs are those without, bit for bit,
whichever path holds, and no block is lost.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import SamplingParams
from octavo.api.errors import ConfigError
from octavo.engine.recording.recorder import read_log
from octavo.engine.recording.replay import Replay
from octavo.engine.speculation.acceptance import Acceptance
from octavo.worker.input_batch import InputBatch
from tests.equivalence.test_speculation import PARAMS, PROMPTS
from tests.support.llm_tools import core_of, fingerprint, make_llm, prompts_of
from tests.support.proposers import (
    draft_counts,
    right,
    seldom_right,
    sequences,
    trees_verified,
    verified_at_any_cost,
)
from tests.support.tiers import examples
from tests.support.tiny_heads import tiny_eagle3, tiny_mtp
from tests.support.tiny_models import tiny_model

TREES = {"spec_method": "ngram", "spec_tree_width": 4}


@pytest.fixture
def kept_paths(monkeypatch):
    """Lists which path of each guess that branches held."""
    kept: list[int] = []
    keep_path = InputBatch.keep_path

    def noting(self, scheduled, path):
        kept.append(path)
        keep_path(self, scheduled, path)

    monkeypatch.setattr(InputBatch, "keep_path", noting)
    return kept


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_trees_change_no_bit(backend, name, kept_paths):
    params = PARAMS[name]
    with make_llm(backend=backend) as llm:
        plain = llm.generate(PROMPTS, params)
    guess = right(sequences(plain, PROMPTS))
    with trees_verified(guess, 3), make_llm(backend=backend, **TREES) as llm:
        found = llm.generate(PROMPTS, params)
        num_drafted, num_accepted = draft_counts(llm)
        assert core_of(llm).scheduler.stats().num_used_blocks == 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    # How these are drawn follows from the tokens before, so their guesses do not branch.
    follows = ("penalised", "banned", "dry", "mirostat", "mirostat of the first kind")
    if name == "beams":
        assert num_drafted == 0
    else:
        assert num_accepted > 0 and (name in follows or max(kept_paths) > 0)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("model", "names", "options"),
    [
        ("llama", ("sampled", "penalised", "greedy"), {}),
        ("llama", ("hot", "listed", "sampled"), {"kv_cache_dtype": "int8"}),
        ("gemma3_text", ("sampled", "greedy", "hot"), {}),
        ("deepseek_v3", ("sampled", "hot", "greedy"), {}),
    ],
)
def test_on_torch_with_batch_invariance(model, names, options, kept_paths):
    """Tokens that paths share are written to the blocks of each, codes and latents too."""
    params = [PARAMS[name] for name in names]
    with make_llm(model, backend="torch", **options) as llm:
        plain = llm.generate(PROMPTS, params)
    guess = right(sequences(plain, PROMPTS))
    with trees_verified(guess, 3), make_llm(model, backend="torch", **options, **TREES) as llm:
        found = llm.generate(PROMPTS, params)
        assert draft_counts(llm)[1] > 0 and max(kept_paths) > 0
        assert core_of(llm).scheduler.stats().num_used_blocks == 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("model", ["gemma3_text", "gpt2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_in_other_families(model, backend, kept_paths):
    """Windows, learned positions, experts and latents."""
    params = [PARAMS["sampled"], PARAMS["hot"], PARAMS["greedy"]]
    with make_llm(model, backend=backend) as llm:
        plain = llm.generate(PROMPTS, params)
    guess = right(sequences(plain, PROMPTS))
    with trees_verified(guess, 5), make_llm(model, backend=backend, **TREES) as llm:
        found = llm.generate(PROMPTS, params)
        assert draft_counts(llm)[1] > 0 and max(kept_paths) > 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@pytest.mark.parametrize(
    ("backend", "kv_cache_dtype"),
    [("native", "bf16"), ("native", "int8"), ("reference", "int8"), ("reference", "fp8")],
)
def test_with_keys_that_are_stored_as_codes(backend, kv_cache_dtype, kept_paths):
    options = {"backend": backend, "kv_cache_dtype": kv_cache_dtype}
    with make_llm(**options) as llm:
        plain = llm.generate(PROMPTS, PARAMS["sampled"])
    guess = right(sequences(plain, PROMPTS))
    with trees_verified(guess, 7), make_llm(**options, **TREES) as llm:
        found = llm.generate(PROMPTS, PARAMS["sampled"])
        assert max(kept_paths) > 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@settings(max_examples=examples(8), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_blocks=st.integers(24, 60),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(8, 64),
    swap_space=st.sampled_from([0, 1 << 20]),
    spec_tokens=st.integers(1, 12),
    spec_tree_width=st.integers(2, 8),
)
def test_under_pressure(seed, num_blocks, swap_space, **options):
    """Few blocks, few tokens a step, preemption of both kinds, prefix hits and several samples."""
    dice = random.Random(seed)
    prompts = prompts_of(*(dice.randint(3, 60) for _ in range(6)))
    prompts[3] = prompts[0] + prompts[3][:5]
    names = [name for name in PARAMS if name != "beams"]
    params = [PARAMS[dice.choice(names)] for _ in prompts]
    with make_llm(backend="native") as llm:
        plain = llm.generate(prompts, params)
    options |= {
        "backend": "native",
        "kv_cache_memory_bytes": num_blocks * 2 * 2 * 2 * 16 * 16 * 4,
        "swap_space": swap_space,
        "spec_method": "ngram",
    }
    guess = seldom_right(sequences(plain, prompts), seed)
    with trees_verified(guess, seed), make_llm(**options) as llm:
        found = llm.generate(prompts, params)
        assert core_of(llm).scheduler.stats().num_used_blocks == 0
        again = llm.generate(prompts, params)
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    assert [fingerprint(one)[-1] for one in again] == [fingerprint(one)[-1] for one in plain]


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_draft_model_guesses_what_it_would_draw_next(backend, kept_paths):
    """Guesses of another model change no bit, second choices among them."""
    base = {"max_tokens": 40, "ignore_eos": True, "logprobs": 1}
    params = [SamplingParams(temperature=0, **base)]
    params += [SamplingParams(temperature=0.3, seed=seed, n=2, **base) for seed in (3, 4)]
    prompts = PROMPTS[: len(params)]
    plain_options = {"backend": backend}
    with make_llm(**plain_options) as llm:
        plain = llm.generate(prompts, params)
    options = {
        "spec_method": "draft_model",
        "spec_model": str(tiny_model("llama", seed=1).path),
        "spec_tree_width": 4,
        "spec_tokens": 6,
    }
    with verified_at_any_cost(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Acceptance, "chance", lambda self, name, num_matched, depth=0: 0.6)
        with make_llm(**plain_options, **options) as llm:
            found = llm.generate(prompts, params)
            num_drafted, _ = draft_counts(llm)
            assert core_of(llm).scheduler.stats().num_used_blocks == 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    assert num_drafted > 0 and kept_paths


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_lookups_guess_what_else_followed(backend, kept_paths):
    """Texts of three tokens, where each match was followed in several ways."""
    base = {"max_tokens": 24, "ignore_eos": True, "logprobs": 1, "allowed_token_ids": [5, 6, 7]}
    params = [SamplingParams(seed=seed, **base) for seed in (3, 4)]
    prompts = [[5, 6, 7, 5, 6, 5], [5, 5, 6, 7, 7, 5, 6]]
    with make_llm(backend=backend) as llm:
        plain = llm.generate(prompts, params)
    with verified_at_any_cost(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Acceptance, "chance", lambda self, name, num_matched, depth=0: 0.6)
        with make_llm(backend=backend, spec_method="suffix", spec_tree_width=4) as llm:
            found = llm.generate(prompts, params)
            assert draft_counts(llm)[1] > 0 and max(kept_paths) > 0
            assert core_of(llm).scheduler.stats().num_used_blocks == 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@pytest.mark.parametrize("name", ["eagle3", "deepseek_v3"])
def test_heads_guess_trees(name, tmp_path, kept_paths):
    """Features of the path that holds are where the head reads them."""
    head = tiny_eagle3(tmp_path) if name == "eagle3" else tiny_mtp(tmp_path, name)
    base = {"max_tokens": 30, "ignore_eos": True, "logprobs": 1}
    params = [
        SamplingParams(temperature=0, **base),
        SamplingParams(temperature=0.7, seed=5, **base),
    ]
    options = {"model_path": head.path, "backend": "native"}
    with make_llm(**options) as llm:
        plain = llm.generate(PROMPTS[:2], params)
    with verified_at_any_cost(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Acceptance, "chance", lambda self, name, num_matched, depth=0: 0.6)
        with make_llm(**options, **head.options, spec_tree_width=8) as llm:
            found = llm.generate(PROMPTS[:2], params)
            assert core_of(llm).scheduler.stats().num_used_blocks == 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    assert kept_paths


def test_a_recording_makes_the_same_trees_again(tmp_path):
    path = tmp_path / "log"
    with make_llm(backend="native") as llm:
        plain = llm.generate(PROMPTS, PARAMS["sampled"])
    guess = right(sequences(plain, PROMPTS))
    with trees_verified(guess, 3):
        with make_llm(backend="native", record=str(path), **TREES) as llm:
            llm.generate(PROMPTS, PARAMS["sampled"])
            assert draft_counts(llm)[1] > 0
        header, events = read_log(path)
        assert Replay(header).run(events).differences == []


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, "without spec_method"),
        (
            {"spec_method": "suffix", "kv_layout": "virtual", "enable_prefix_caching": False},
            "with kv_layout virtual",
        ),
        ({"spec_method": "suffix", "tensor_parallel_size": 2}, "with tensor_parallel_size"),
    ],
)
def test_trees_are_refused_where_guesses_cannot_branch(options, where):
    with pytest.raises(ConfigError, match=f"spec_tree_width: got 2, expected 1 {where}"):
        make_llm(spec_tree_width=2, **({"backend": "native"} | options))
