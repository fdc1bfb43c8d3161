"""Scheduler and worker together over a pseudo-model, then a step's arrays one by one."""

import itertools

import numpy as np
import pytest

from octavo.executor.batch import unpacked_mask
from tests.support.engine_fakes import expected_tokens, make_core, make_request, run_all, tokens_of
from tests.support.worker_fakes import FakeRunnable, make_worker

PROMPTS = [
    [(7 * i + j) % 900 for j in range(length)] for i, length in enumerate((1, 5, 16, 17, 40, 100))
]


def make(runnable=None, *, num_blocks=64, num_groups=1, **options):
    runnable = runnable or FakeRunnable()
    worker = make_worker(runnable, num_groups=num_groups, num_blocks=num_blocks)
    return runnable, make_core(
        num_blocks=num_blocks, num_groups=num_groups, executor=worker, **options
    )


@pytest.mark.parametrize(
    ("budget", "num_blocks", "num_groups"), [(1, 64, 1), (7, 64, 2), (64, 9, 2), (255, 64, 1)]
)
def test_tokens_through_the_worker(budget, num_blocks, num_groups):
    _, core = make(budget=budget, num_blocks=num_blocks, num_groups=num_groups)
    for index, prompt in enumerate(PROMPTS):
        core.add(make_request(str(index), prompt, max_tokens=30))
    found = run_all(core)
    for index, prompt in enumerate(PROMPTS):
        assert tokens_of(found[str(index)]) == expected_tokens(prompt, 30)


@pytest.mark.parametrize("length", [1, 16, 17, 30])
def test_forks_through_the_worker(length):
    _, core = make(num_groups=2)
    prompt = list(range(50, 50 + length))
    core.add(make_request("p", prompt, max_tokens=20))
    for index in (1, 2):
        core.add(make_request(f"p_{index}", prompt, max_tokens=20, sample_index=index, fork_of="p"))
    found = run_all(core)
    for index, request_id in enumerate(("p", "p_1", "p_2")):
        assert tokens_of(found[request_id]) == expected_tokens(prompt, 20, index)


@pytest.mark.parametrize("budget", [7, 64])
def test_prompt_logprobs_name_the_prompts_own_tokens(budget):
    _, core = make(budget=budget)
    prompt = list(range(300, 340))
    core.add(make_request("plain", [1, 2, 3]))
    core.add(make_request("scored", prompt, prompt_logprobs=2, logprobs=1, max_tokens=3))
    core.add(make_request("single", [5], prompt_logprobs=0))
    found = run_all(core)
    entries = found["scored"][0].prompt_logprobs
    assert [entry.token_ids for entry in entries] == [[token, 0, 1] for token in prompt[1:]]
    assert [entry.ranks for entry in entries] == [[token + 1, 1, 2] for token in prompt[1:]]
    assert found["single"][0].prompt_logprobs == []
    tokens = expected_tokens(prompt, 3)
    assert [output.logprobs[0].token_ids for output in found["scored"]] == [
        [token, 0] for token in tokens
    ]
    assert all(output.logprobs is None for output in found["plain"])


def test_a_fault_in_a_step_is_narrowed_to_its_request():
    runnable, core = make()
    runnable.raise_on = 999
    core.add(make_request("before", [1, 2, 3]))
    core.add(make_request("bad", [4, 999, 5]))
    core.add(make_request("after", [1, 2, 4]))
    found = run_all(core)
    assert found["bad"][-1].error == "the step failed: RuntimeError: kernel fault"
    assert tokens_of(found["before"]) == expected_tokens([1, 2, 3], 8)
    assert tokens_of(found["after"]) == expected_tokens([1, 2, 4], 8)
    assert core.scheduler.blocks.num_free_blocks == 64


def test_out_of_memory_in_a_step_says_so():
    runnable, core = make()
    runnable.raise_on, runnable.error = 999, MemoryError()
    core.add(make_request("bad", [999]))
    assert run_all(core)["bad"][-1].error == "the step ran out of memory"


def test_nan_logits_fail_their_own_request():
    runnable, core = make()
    runnable.nan_on = 999
    core.add(make_request("good", [1, 2, 3]))
    core.add(make_request("bad", [4, 5, 999]))
    core.add(make_request("scored", [4, 999, 5], prompt_logprobs=0))
    found = run_all(core)
    assert (
        found["bad"][-1].finish_reason == "error"
        and "after 3 tokens are NaN" in found["bad"][-1].error
    )
    assert "within the prompt are NaN" in found["scored"][-1].error
    assert tokens_of(found["good"]) == expected_tokens([1, 2, 3], 8)


def test_rows_are_reused_and_bounded():
    _, core = make()
    for index in range(40):
        core.add(make_request(str(index), [index], max_tokens=3))
    found = run_all(core)
    assert all(tokens_of(found[str(index)]) == expected_tokens([index], 3) for index in range(40))


def sampling_of(core, runnable, *requests):
    for request in requests:
        core.add(request)
    core.step()
    return runnable.batches[-1].sampling


def csr(starts, *columns):
    return [
        tuple(column[a:b].tolist() for column in columns) for a, b in itertools.pairwise(starts)
    ]


def test_columns_of_a_sampling_batch():
    runnable, core = make()
    plain = make_request(
        "a", [1, 2, 3], temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, logprobs=-1
    )
    batch = sampling_of(core, runnable, plain, make_request("b", [4], sample_index=2))
    records = batch.records
    assert records["temperature"].tolist() == pytest.approx([0.7, 1.0])
    assert records["top_p"].tolist() == pytest.approx([0.9, 1.0])
    assert records[["top_k", "num_logprobs"]].tolist() == [(5, 1000), (0, -1)]
    assert records[["position", "sample_index"]].tolist() == [(3, 0), (1, 2)]
    assert records["target_id"].tolist() == records["allowed_mask"].tolist() == [-1, -1]
    assert batch.bias_starts.tolist() == batch.history_starts.tolist() == [0, 0, 0]


def test_bias_and_allowed_ids():
    runnable, core = make()
    batch = sampling_of(
        core,
        runnable,
        make_request("a", [1], logit_bias={5: 2.0, 7: -1.0}),
        make_request("b", [1]),
        make_request("c", [1], allowed_token_ids=[3, 4]),
        make_request("d", [1], allowed_token_ids=[4, 3]),
        make_request("e", [1], allowed_token_ids=[9]),
    )
    assert csr(batch.bias_starts, batch.bias_ids, batch.bias_values) == [
        ([5, 7], [2.0, -1.0]),
        *[([], [])] * 4,
    ]
    assert batch.records["allowed_mask"].tolist() == [-1, -1, 0, 0, 1]
    allowed = [unpacked_mask(mask, 1000) for mask in batch.allowed_masks]
    assert [np.flatnonzero(mask).tolist() for mask in allowed] == [[3, 4], [9]]


def test_end_tokens_are_banned_until_min_tokens():
    runnable, core = make()
    core.add(make_request("a", [1, 2], min_tokens=2, eos=(11,), stop_token_ids=[12], max_tokens=4))
    run_all(core)
    seen = [
        csr(b.sampling.bias_starts, b.sampling.bias_ids, b.sampling.bias_values)[0]
        for b in runnable.batches
    ]
    banned = ([11, 12], [-np.inf, -np.inf])
    assert seen == [banned, banned, ([], []), ([], [])]


def test_bad_words_are_banned_after_their_beginning():
    runnable, core = make()
    prompt = [1, 2]
    tokens = expected_tokens(prompt, 4)
    request = make_request(
        "a", prompt, max_tokens=4, bad_words_token_ids=[[33], [tokens[1], 44], [2, 55]]
    )
    core.add(request)
    run_all(core)
    seen = [csr(b.sampling.bias_starts, b.sampling.bias_ids)[0][0] for b in runnable.batches]
    assert seen == [[33], [33], [33, 44], [33]]


@pytest.mark.parametrize("num_blocks", [64, 4])
def test_penalties_see_the_distinct_tokens_and_their_counts(num_blocks):
    runnable, core = make(num_blocks=num_blocks)
    prompt = [1, 2, 2, 900]
    core.add(make_request("a", prompt, max_tokens=40))
    core.add(make_request("b", prompt, max_tokens=40, frequency_penalty=0.5))
    run_all(core)
    tokens = expected_tokens(prompt, 39)
    batch = runnable.batches[-1].sampling
    ids, counts = csr(batch.history_starts, batch.history_ids, batch.history_counts)[-1]
    assert dict(zip(ids, counts, strict=True)) == {
        token: tokens.count(token) for token in {*prompt, *tokens}
    }
