"""Guessed tokens never change an answer: tokens and logprobs are bitwise those without guesses,
whatever is guessed and however tokens are drawn.
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
from octavo.engine.scheduler import step_builder
from octavo.engine.speculation.speculation import Speculation
from octavo.worker.input_batch import InputBatch
from octavo.worker.worker import Worker
from tests.support.llm_tools import core_of, fingerprint, make_llm, prompts_of
from tests.support.proposers import (
    all_verified,
    draft_counts,
    right,
    seldom_right,
    sequences,
    verified_at_any_cost,
    wrong,
)
from tests.support.tiers import examples

LENGTH = 24
BASE = {"max_tokens": LENGTH, "ignore_eos": True, "logprobs": 2}
PARAMS = {
    "greedy": SamplingParams(temperature=0, **BASE),
    "sampled": SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=11, **BASE),
    "hot": SamplingParams(temperature=2.0, min_p=0.01, seed=5, **BASE),
    "penalised": SamplingParams(
        temperature=0.7,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        presence_penalty=0.2,
        seed=5,
        **BASE,
    ),
    "banned": SamplingParams(
        temperature=0.8,
        seed=3,
        logit_bias={7: 2.0},
        bad_words_token_ids=[[5, 6], [9]],
        allowed_token_ids=list(range(120)),
        **BASE,
    ),
    "ends": SamplingParams(
        temperature=1.5, seed=9, max_tokens=LENGTH, min_tokens=6, stop_token_ids=list(range(60))
    ),
    "xtc": SamplingParams(
        temperature=1.0, seed=2, xtc_probability=0.5, xtc_threshold=0.05, typical_p=0.9, **BASE
    ),
    "three samples": SamplingParams(temperature=1.0, seed=8, n=3, **BASE),
    "mirostat": SamplingParams(temperature=1.0, seed=4, mirostat_mode=2, **BASE),
    "mirostat of the first kind": SamplingParams(
        temperature=1.2,
        seed=4,
        mirostat_mode=1,
        mirostat_tau=2.0,
        allowed_token_ids=list(range(90)),
        **BASE,
    ),
    "dry": SamplingParams(
        temperature=0.6, seed=6, dry_multiplier=0.8, dry_allowed_length=1, **BASE
    ),
    "listed": SamplingParams(
        temperature=0.8, seed=7, logprob_token_ids=[5, 200, 9], max_tokens=LENGTH, ignore_eos=True
    ),
    "beams": SamplingParams(n=2, beam_width=3, max_tokens=12),
}
PROMPTS = prompts_of(20, 33, 47)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("kind", ["right", "wrong", "seldom right"])
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_guesses_change_no_bit(backend, name, kind):
    params = PARAMS[name]
    with make_llm(backend=backend) as llm:
        plain = llm.generate(PROMPTS, params)
    answers = sequences(plain, PROMPTS)
    guesses = {"right": right(answers), "wrong": wrong, "seldom right": seldom_right(answers, 3)}
    with all_verified(guesses[kind]), make_llm(backend=backend, spec_method="ngram") as llm:
        found = llm.generate(PROMPTS, params)
        num_drafted, num_accepted = draft_counts(llm)
        assert core_of(llm).scheduler.stats().num_used_blocks == 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    if name == "beams":
        assert num_drafted == 0
    else:
        assert num_drafted > 0
        # The wrong guess is always the same token, which may be drawn by chance.
        assert num_accepted <= num_drafted / 20 if kind == "wrong" else num_accepted > 0


@pytest.mark.parametrize(
    ("model", "kv_cache_dtype"),
    [
        *((model, "auto") for model in ("gemma3_text", "gpt2", "qwen3_moe", "deepseek_v3")),
        ("qwen3", "k8v4"),
        ("gemma3_text", "int4"),
    ],
)
def test_in_other_families(model, kv_cache_dtype):
    params = [PARAMS["sampled"], PARAMS["penalised"], PARAMS["greedy"]]
    options = {"backend": "native", "kv_cache_dtype": kv_cache_dtype}
    with make_llm(model, **options) as llm:
        plain = llm.generate(PROMPTS, params)
    guess = seldom_right(sequences(plain, PROMPTS), 5)
    with all_verified(guess), make_llm(model, **options, spec_method="ngram") as llm:
        found = llm.generate(PROMPTS, params)
        assert draft_counts(llm)[1] > 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@pytest.mark.parametrize("names", [("sampled", "penalised", "greedy"), ("dry", "listed", "hot")])
def test_on_torch_with_batch_invariance(names):
    params = [PARAMS[name] for name in names]
    with make_llm(backend="torch") as llm:
        plain = llm.generate(PROMPTS, params)
    guess = seldom_right(sequences(plain, PROMPTS), 5)
    with all_verified(guess), make_llm(backend="torch", spec_method="ngram") as llm:
        found = llm.generate(PROMPTS, params)
        assert draft_counts(llm)[1] > 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


def test_mirostat_gets_no_guesses_where_rows_cannot_be_drawn_again():
    """Its next draw depends on how surprising the last one was; torch draws each row once."""
    params = PARAMS["mirostat"]
    with make_llm(backend="torch") as llm:
        plain = llm.generate(PROMPTS, params)
    guess = right(sequences(plain, PROMPTS))
    with all_verified(guess), make_llm(backend="torch", spec_method="ngram") as llm:
        found = llm.generate(PROMPTS, params)
        assert draft_counts(llm) == (0, 0)
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@settings(max_examples=examples(8), deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_blocks=st.integers(24, 60),
    max_num_seqs=st.integers(1, 6),
    max_num_batched_tokens=st.integers(8, 64),
    swap_space=st.sampled_from([0, 1 << 20]),
    spec_tokens=st.integers(1, 20),
)
def test_under_pressure(
    seed, num_blocks, max_num_seqs, max_num_batched_tokens, swap_space, spec_tokens
):
    """Few blocks, few tokens a step, preemption of both kinds, prefix hits and aborts."""
    dice = random.Random(seed)
    prompts = prompts_of(*(dice.randint(3, 60) for _ in range(6)))
    prompts[3] = prompts[0] + prompts[3][:5]
    names = [name for name in PARAMS if name != "beams"]
    params = [PARAMS[dice.choice(names)] for _ in prompts]
    with make_llm(backend="native") as llm:
        plain = llm.generate(prompts, params)
    options = {
        "backend": "native",
        "kv_cache_memory_bytes": num_blocks * 2 * 2 * 2 * 16 * 16 * 4,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "swap_space": swap_space,
        "spec_method": "ngram",
        "spec_tokens": spec_tokens,
    }
    guess = seldom_right(sequences(plain, prompts), seed)
    with all_verified(guess), make_llm(**options) as llm:
        found = llm.generate(prompts, params)
        assert core_of(llm).scheduler.stats().num_used_blocks == 0
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))


@pytest.mark.parametrize("layout", ["paged", "virtual"])
def test_blocks_behind_a_guess_that_failed_go_back_with_its_result(layout):
    """No row holds a block between two steps for a token that did not come, and others take the
    blocks at once.
    """
    params = [PARAMS["sampled"], PARAMS["greedy"], PARAMS["penalised"]]
    options = {"backend": "native", "kv_layout": layout, "enable_prefix_caching": False}
    with make_llm(**options) as llm:
        plain = llm.generate(PROMPTS, params)
    guess = seldom_right(sequences(plain, PROMPTS), 5)
    options |= {"spec_method": "ngram", "spec_tokens": 40}
    most_reserved, found = 0, {}
    with all_verified(guess), make_llm(**options) as llm:
        core = core_of(llm)
        streams = dict(enumerate(map(llm.stream, PROMPTS, params)))
        while streams:
            for index, stream in list(streams.items()):
                output = next(stream, None)
                if output is None:
                    del streams[index]
                    continue
                found[index] = output
                scheduler = core.scheduler
                for row in (row for request in scheduler.queues.running for row in request.rows):
                    (table,) = scheduler.blocks.tables[row.request_id]
                    assert len(table) <= -(-row.num_tokens // 16)
                most_reserved = max(most_reserved, len(scheduler.kv_allocator.table_lengths))
        assert core.scheduler.stats().num_used_blocks == 0
    assert [fingerprint(found[index]) for index in range(3)] == list(map(fingerprint, plain))
    assert most_reserved > 0


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("llama", {"swap_space": 1 << 20, "kv_cache_memory_bytes": 30 << 13}),
        ("llama", {"swap_space": 0, "kv_cache_memory_bytes": 30 << 13}),
        ("gemma3_text", {}),
        ("gemma3_text", {"kv_layout": "virtual", "enable_prefix_caching": False}),
        ("nemotron_h", {}),
    ],
)
def test_the_worker_knows_tables_as_they_are(model, options, monkeypatch):
    """Each block that a plan's rows have is at its place in the worker's tables, and nothing is
    behind them, whatever was granted for guesses and given back before.
    """
    prompts = [*PROMPTS, *prompts_of(5, 60), PROMPTS[0] + [7, 8]]
    params = [PARAMS[name] for name in ("greedy", "three samples", "ends", "hot", "dry", "sampled")]
    with make_llm(model, backend="native") as llm:
        plain = llm.generate(prompts, params)
    num_cut, known = 0, []

    def update_tables(rows, scheduled, block_map):
        known[:] = [rows]
        updated(rows, scheduled, block_map)

    def execute(worker, plan):
        nonlocal num_cut
        num_cut += len(plan.table_lengths)
        result = computed(worker, plan)
        (rows,), block_map, blocks = known, worker.cache_engine.block_map, core.scheduler.blocks
        for planned, row in zip(plan.rows, rows.indices(plan.rows).tolist(), strict=True):
            tables = blocks.tables[planned.request_id]
            growing = [
                len(table)
                for table, pool in zip(tables, blocks.pools, strict=True)
                if not pool.spec.is_rewritten
            ]
            assert rows.num_placed_tokens(row) == 16 * min(growing)
            for group, wanted in enumerate(tables):
                table = rows.block_tables[group, row]
                for at, block_id in enumerate(wanted):
                    slot = block_id if block_map is None else block_map.find(group, block_id)
                    assert block_id < 0 or table[at] == slot
                is_state = blocks.pools[group].spec.is_rewritten
                assert is_state or (table[len(wanted) :] == -1).all()
        return result

    guess = seldom_right(sequences(plain, prompts), 5)
    options = {"spec_method": "ngram", "spec_tokens": 40, "max_num_seqs": 6} | options
    with all_verified(guess), make_llm(model, backend="native", **options) as llm:
        core, computed, updated = core_of(llm), Worker.execute, InputBatch.update_tables
        monkeypatch.setattr(InputBatch, "update_tables", update_tables)
        monkeypatch.setattr(Worker, "execute", execute)
        found = llm.generate(prompts, params)
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    assert num_cut > 0


def test_guesses_behind_an_end_are_not_counted():
    """A guess goes on behind the token that ends its request; what is accepted is handed out."""
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=LENGTH, ignore_eos=True)
    with make_llm(backend="native") as llm:
        (plain,) = llm.generate(PROMPTS[:1], params)
    answers, drawn = sequences([plain], PROMPTS[:1]), plain.outputs[0].token_ids
    num_drawn = next(
        count for count in range(16, LENGTH) if drawn.index(drawn[count - 1]) == count - 1
    )
    params = SamplingParams(
        temperature=0.9,
        seed=11,
        max_tokens=LENGTH,
        ignore_eos=True,
        stop_token_ids=[drawn[num_drawn - 1]],
    )
    with all_verified(right(answers)), make_llm(backend="native", spec_method="ngram") as llm:
        (found,) = llm.generate(PROMPTS[:1], params)
        num_drafted, num_accepted = draft_counts(llm)
    assert found.outputs[0].token_ids == drawn[:num_drawn]
    assert (
        found.timings.accepted_tokens == num_accepted and found.timings.draft_tokens == num_drafted
    )
    assert 0 < num_accepted < num_drawn and num_drafted > num_accepted


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_a_text_that_repeats_is_guessed(method):
    """With two tokens to choose from, what came before comes again."""
    greedy = SamplingParams(
        temperature=0.3, seed=1, max_tokens=150, ignore_eos=True, allowed_token_ids=[5, 6]
    )
    with make_llm(backend="native") as llm:
        plain = llm.generate(PROMPTS, greedy)
    with verified_at_any_cost(), make_llm(backend="native", spec_method=method) as llm:
        found = llm.generate(PROMPTS, greedy)
        num_drafted, num_accepted = draft_counts(llm)
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    assert 0 < num_accepted <= num_drafted
    assert sum(output.timings.draft_tokens for output in found) == num_drafted
    assert sum(output.timings.accepted_tokens for output in found) == num_accepted


def test_a_recording_makes_the_same_guesses_again(tmp_path):
    """Calls of several decode steps end for guesses in between; a replay, which makes no call,
    plans the same guesses.
    """
    path = tmp_path / "log"
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=100, ignore_eos=True)
    with make_llm(backend="native") as llm:
        plain = llm.generate(PROMPTS, params)
    knows = right(sequences(plain, PROMPTS))

    def guess(token_ids, most):
        return knows(token_ids, most) if len(token_ids) % 11 == 0 else []

    ended: list[bool] = []
    tempted = Speculation.should_end_decode

    def noting(self, owners):
        ended.append(tempted(self, owners))
        return ended[-1]

    with all_verified(guess), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Speculation, "should_end_decode", noting)
        patch.setattr(step_builder, "MAX_CALL_S", 100.0)
        with make_llm(backend="native", spec_method="ngram", record=str(path)) as llm:
            found = llm.generate(PROMPTS, params)
            num_drafted, _ = draft_counts(llm)
        header, events = read_log(path)
        replayed = Replay(header).run(events)
    assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
    assert any(ended) and num_drafted > 0
    assert replayed.differences == []


def test_an_earlier_answer_is_guessed_in_a_later_one():
    """A question asked again is answered by its first answer's tokens; another tenant's is not."""
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True)
    counts = []
    options = {"backend": "native", "spec_method": "suffix", "spec_history": "1MiB"}
    with verified_at_any_cost(), make_llm(**options) as llm:
        for salt in ("", "", "other"):
            prompt = {"prompt_token_ids": PROMPTS[0], "cache_salt": salt}
            found = llm.generate(prompt, params)[0].outputs[0].token_ids
            counts.append(draft_counts(llm)[1])
    with make_llm(backend="native") as llm:
        assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids == found
    first, again, others = counts[0], counts[1] - counts[0], counts[2] - counts[1]
    assert again > first + 40 and others == first


def test_a_history_is_for_suffixes():
    with pytest.raises(
        ConfigError, match="spec_history: requires spec_method suffix or auto, got ngram"
    ):
        make_llm(spec_method="ngram", spec_history=1024)


def test_async_scheduling_beside_guesses_is_refused():
    with pytest.raises(ConfigError, match="spec_method"):
        make_llm(backend="torch", spec_method="ngram", async_scheduling="on")
