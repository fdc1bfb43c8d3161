"""The prefix cache off the device while there is too little of everything: requests preempted and
forked, contexts exactly full.
"""

from __future__ import annotations

from typing import Any

import pytest

from octavo import SamplingParams
from tests.equivalence.test_prefix_store import SETUPS, answers, kv_bytes, make, plain, stats_of
from tests.support.llm_tools import GREEDY, SAMPLED, prompts_of

LONG = SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
FORKED = SamplingParams(n=2, temperature=0.8, seed=7, max_tokens=40, ignore_eos=True, logprobs=1)


HELD = [setup for setup in SETUPS if setup[0] != "torch"]
"""Backends whose results depend on no option, bitwise, whatever is chunked, batched or preempted.
"""


@pytest.fixture(
    params=HELD, ids=lambda setup: f"{setup[0]}-{setup[1]}-{'-'.join(setup[2].values())}"
)
def setup(request):
    return request.param


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_hits_from_disk_then_preempted(setup: Any, tmp_path: Any, mode: str) -> None:
    """It holds for gemma's windows and for full attention; the forks' parents are swapped too."""
    system, *users = prompts_of(48, 9, 30, 33, 52)
    prompts = [system + user for user in users]
    params = [LONG, FORKED, LONG, FORKED]
    expected = plain(setup, prompts, params)
    small = {
        "kv_cache_memory_bytes": kv_bytes(setup, 11),
        "max_model_len": 160,
        "preemption_mode": mode,
        "max_num_batched_tokens": 40,
    }
    for round in range(3):
        with make(
            setup, prefix_cache_dir=str(tmp_path), kv_offloading_size="256KiB", **small
        ) as llm:
            found, hits = answers(llm, prompts, params)
            stats = llm.get_metrics()
        assert found == expected and (min(hits) >= 48) == (round > 0)
        assert stats.num_preemptions > 0 and (stats.num_swaps > 0) == (mode == "swap")
        assert stats.connector.num_fetched > 0 or round == 0
        assert stats.num_used_blocks == stats.num_host_blocks == 0


@pytest.mark.sampled(one_in=3)
def test_a_context_exactly_full(setup: Any, tmp_path: Any) -> None:
    """A context of eight blocks fills a device of eight: with the prompt's last block full, nearly
    full or just begun, stored or not.
    """
    change = {"max_model_len": 128, "kv_cache_memory_bytes": kv_bytes(setup, 8)}
    rest = SamplingParams(temperature=0.9, seed=11, max_tokens=None, ignore_eos=True, logprobs=2)
    two = SamplingParams(n=2, temperature=0.9, seed=11, max_tokens=None, ignore_eos=True)
    prompts, params = prompts_of(127, 113, 112, 111, 16), [rest, two, rest, rest, two]
    with make(setup, enable_prefix_caching=False, max_model_len=128) as llm:
        expected = answers(llm, prompts, params)[0]
    assert [
        len(tokens) for _, tokens, reason, _ in (one[0] for one in expected) if reason == "length"
    ] == [1, 15, 16, 17, 112]
    for hits in ([0] * 5, [112, 112, 96, 96, 0]):
        with make(setup, prefix_cache_dir=str(tmp_path), **change) as llm:
            assert answers(llm, prompts, params) == (expected, hits)


def test_what_was_generated_is_found_too(setup: Any, tmp_path: Any) -> None:
    """The next turn of a conversation begins with the whole of the last."""
    prompt, more = prompts_of(70, 21)
    with make(setup, prefix_cache_dir=str(tmp_path)) as llm:
        (output,) = llm.generate(prompt, LONG)
    turn = prompt + output.outputs[0].token_ids + more
    expected = plain(setup, [turn], SAMPLED)
    with make(setup, prefix_cache_dir=str(tmp_path)) as llm:
        assert answers(llm, [turn], SAMPLED) == (expected, [96])
        assert stats_of(llm).num_not_fetched == 0
        assert answers(llm, [turn], GREEDY)[1] == [128]
