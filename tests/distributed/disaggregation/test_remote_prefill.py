"""The shortest prompt that is worth sending, by what steps and the link are measured to cost."""

from __future__ import annotations

import math

import pytest

from octavo.distributed.disaggregation.remote_prefill import (
    RATE_LIFE_S,
    UNMEASURED_TOKENS,
    RemotePrefillThreshold,
)
from octavo.engine.protocol.kv_messages import StoredBytes
from octavo.engine.protocol.step_costs import CostPoint, StepCosts

COSTS = StepCosts((CostPoint(1, 0, 0.002), CostPoint(1024, 0, 1.024)))
"""A millisecond a token, and two of a step with one."""


def point(given: int | None = None) -> RemotePrefillThreshold:
    return RemotePrefillThreshold(given, token_bytes=1000, max_chunk=1024)


def measured(rate: float, round_trip_s: float) -> RemotePrefillThreshold:
    """Returns the point where both rates are known, that of the link in bytes a second."""
    found = point()
    found.note(COSTS, StoredBytes(link_bytes=round(rate), link_s=1.0), now=0.0)
    found.note_round_trip(round_trip_s)
    return found


def test_a_number_that_is_given_holds() -> None:
    found = point(given=7)
    found.note(COSTS, StoredBytes(link_bytes=10, link_s=1.0), now=0.0)
    assert found.num_tokens(0.0) == 7


def test_it_is_256_until_both_rates_are_known() -> None:
    found = point()
    assert found.num_tokens(0.0) == UNMEASURED_TOKENS
    found.note(COSTS, StoredBytes(), now=0.0)
    assert found.num_tokens(0.0) == UNMEASURED_TOKENS
    found.note(None, StoredBytes(link_bytes=10**8, link_s=0.1), now=1.0)
    assert found.num_tokens(1.0) != UNMEASURED_TOKENS


def test_it_is_where_computing_takes_longer_than_the_link() -> None:
    """A token takes 0.1 ms on a link of 10 MB/s, and two round trips of 45 ms are 90 ms."""
    found = measured(1e7, 0.045).num_tokens(1.0)
    assert isinstance(found, int)
    for num_tokens, is_more in ((found - 1, False), (found, True)):
        computed_s = COSTS.prefill_s(num_tokens, 1024)
        assert computed_s is not None
        assert (computed_s > 0.09 + num_tokens * 1e-4) is is_more
    assert 95 < found < 105


def test_a_slower_link_or_a_longer_way_takes_longer_prompts() -> None:
    fewest = [measured(rate, 0.01).num_tokens(1.0) for rate in (1e8, 1e7, 2e6)]
    assert fewest == sorted(set(fewest))
    ways = [measured(1e7, way_s).num_tokens(1.0) for way_s in (0.01, 0.02, 0.1)]
    assert ways == sorted(set(ways))


def test_no_prompt_is_sent_over_a_link_slower_than_computing_until_it_is_tried_again() -> None:
    found = measured(9e5, 0.0)
    assert found.num_tokens(1.0) == math.inf
    assert found.num_tokens(RATE_LIFE_S + 1.0) == UNMEASURED_TOKENS


def test_newer_transfers_outweigh_older_ones() -> None:
    found = measured(1e6, 0.01)
    stored = StoredBytes(link_bytes=10**6, link_s=1.0)
    for _ in range(20):
        stored = StoredBytes(link_bytes=stored.link_bytes + 10**7, link_s=stored.link_s + 1.0)
        found.note(None, stored, now=1.0)
    assert found.num_tokens(1.0) == pytest.approx(measured(1e7, 0.01).num_tokens(1.0), rel=0.05)


def test_a_replaced_engine_begins_its_sums_again() -> None:
    found = measured(1e7, 0.01)
    before = found.num_tokens(1.0)
    found.note(None, StoredBytes(), now=1.0)
    assert found.num_tokens(1.0) == before
