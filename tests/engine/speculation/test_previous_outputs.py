"""Answers that have ended: who finds them, which of them, and for how long."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.api.sampling_params import SamplingParams
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.protocol.step import AdapterRef
from octavo.engine.speculation.previous_outputs import GRAM, LONGEST, TOKEN_BYTES, PreviousOutputs
from octavo.engine.speculation.proposer import NO_DRAFT, Draft


def request(prompt=(1, 2, 3, 4, 5), *, tenant="", salt="", adapter=None) -> EngineRequest:
    ref = None if adapter is None else AdapterRef(adapter, "path")
    params = SamplingParams(max_tokens=9)
    return EngineRequest("r", list(prompt), params, 0, tenant=tenant, cache_salt=salt, adapter=ref)


ANSWER = [*range(10, 40)]
TEXT = [1, 2, 3, 4, 5, *ANSWER]


def test_an_answer_is_found_by_its_own_tenant_salt_and_adapter_alone() -> None:
    kept = PreviousOutputs(1 << 20)
    kept.add(request(tenant="a", salt="s", adapter=b"x"), TEXT)
    same = request(tenant="a", salt="s", adapter=b"x")
    assert kept.propose(same, [7, 7, *ANSWER[:6]], 5) == Draft(ANSWER[6:11], 6)
    for other in (
        request(tenant="b", salt="s", adapter=b"x"),
        request(tenant="a", salt="t", adapter=b"x"),
        request(tenant="a", salt="s", adapter=b"y"),
        request(tenant="a", salt="s"),
    ):
        assert kept.propose(other, [7, 7, *ANSWER[:6]], 5) == NO_DRAFT


def test_an_answer_begins_behind_its_prompt() -> None:
    kept = PreviousOutputs(1 << 20)
    kept.add(request(), TEXT)
    assert kept.propose(request(), [9, *TEXT[1:5]], 3) == Draft(ANSWER[:3], GRAM)
    assert kept.propose(request(), TEXT[:4], 3) == NO_DRAFT


def test_the_latest_answer_wins_and_the_oldest_goes() -> None:
    kept = PreviousOutputs(100 * TOKEN_BYTES)
    for last in range(6):
        kept.add(request(), [1, 2, 3, 4, 5, *ANSWER, 100 + last])
        assert kept.propose(request(), ANSWER[-5:], 4) == Draft([100 + last], 5)
    assert len(kept.outputs) == 2 and sum(map(len, kept.outputs)) <= 100
    assert kept.num_runs <= 100


def test_a_short_or_huge_answer_does_no_harm() -> None:
    kept = PreviousOutputs(20 * TOKEN_BYTES)
    kept.add(request((1,)), [1, 5])
    kept.add(request(), TEXT)
    assert kept.propose(request(), TEXT[1:5], 2) == Draft(ANSWER[:2], GRAM)
    assert list(map(len, kept.outputs)) == [20]


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(5, 60))
def test_what_is_found_is_what_followed(seed: int, max_tokens: int) -> None:
    """A guess is a run of some kept answer behind as many equal tokens as it says, and nothing is
    left of answers that are gone.
    """
    dice = random.Random(seed)
    kept = PreviousOutputs(max_tokens * TOKEN_BYTES)
    for _ in range(12):
        prompt = [dice.randrange(3) for _ in range(dice.randint(1, 6))]
        kept.add(request(prompt), prompt + [dice.randrange(3) for _ in range(dice.randint(0, 20))])
        assert kept.num_runs <= sum(map(len, kept.outputs)) <= max_tokens
        text = [dice.randrange(3) for _ in range(dice.randint(4, 20))]
        draft = kept.propose(request(), text, 4)
        if draft == NO_DRAFT:
            continue
        assert GRAM <= draft.num_matched <= LONGEST and draft.token_ids
        run = [*text[-draft.num_matched :], *draft.token_ids]
        assert any(
            answer[at : at + len(run)] == run
            for answer in kept.outputs
            for at in range(len(answer))
        )
