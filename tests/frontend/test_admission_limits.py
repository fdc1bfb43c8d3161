"""The queue's limits: what may wait, and what a request that is turned away is told."""

import pytest

from octavo.api.errors import InvalidRequest, Overloaded
from octavo.config.scheduler_options import SchedulerOptions
from octavo.engine.protocol.stats import EngineStats
from octavo.frontend.admission_limits import MAX_S, QueueLimit, Size


def limit_of(**options):
    return QueueLimit(SchedulerOptions(max_num_seqs=2, **options))


def refused(limit, more, now=0.0, num_unfinished=1000):
    with pytest.raises(Overloaded) as error:
        limit.check(more, num_unfinished=num_unfinished, now=now)
    return error.value


def test_as_many_as_run_and_wait_are_taken_before_the_core_has_said_anything():
    limit = limit_of(max_num_queued_reqs=3)
    for _ in range(5):
        limit.check(Size(1, 10), num_unfinished=1000, now=0.0)
        limit.sent(Size(1, 10))
    error = refused(limit, Size(1, 10))
    assert str(error) == (
        "the queue is full: 3 requests are waiting, expected at most 3\n"
        "hint: try again later, or raise max_num_queued_reqs"
    )
    assert error.retry_after_s == 1.0
    limit.check(Size(1, 10), num_unfinished=4, now=0.0)


def test_what_waits_is_what_the_core_says_and_what_is_on_its_way():
    limit = limit_of(max_num_queued_reqs=3)
    limit.sent(Size(6, 60))
    limit.update(
        EngineStats(
            num_running=2, num_waiting=2, num_waiting_tokens=20, num_added=4, num_added_tokens=40
        ),
        0.0,
    )
    assert "4 requests" in str(refused(limit, Size(1)))
    limit.update(
        EngineStats(
            num_running=2, num_waiting=2, num_waiting_tokens=20, num_added=6, num_added_tokens=60
        ),
        0.0,
    )
    limit.check(Size(1), num_unfinished=1000, now=0.0)


def test_tokens_are_bounded_but_a_prompt_alone_is_never_too_long():
    limit = limit_of(max_num_queued_tokens=100)
    limit.check(Size(1, 500), num_unfinished=0, now=0.0)
    limit.sent(Size(3, 90))
    limit.check(Size(1, 10), num_unfinished=3, now=0.0)
    assert "90 tokens are waiting, expected at most 100" in str(refused(limit, Size(1, 11)))


def test_retry_after_follows_the_measured_rate():
    limit = limit_of(max_num_queued_reqs=10)
    before = Size()
    for second in range(30):
        added = 12 + 2 * second
        limit.sent(Size(added) - before)
        before = Size(added)
        limit.update(EngineStats(num_running=2, num_waiting=10, num_added=added), float(second))
    assert refused(limit, Size(1), now=29.0).retry_after_s == pytest.approx(0.5)
    assert refused(limit, Size(8), now=29.0).retry_after_s == pytest.approx(4.0)


def test_nobody_is_told_to_wait_for_longer_than_some_minutes():
    limit = limit_of(max_num_queued_reqs=10)
    limit.sent(Size(16))
    for moment, added in ((0.0, 12), (1000.0, 14), (2000.0, 16)):
        limit.update(EngineStats(num_running=2, num_waiting=10, num_added=added), moment)
    assert refused(limit, Size(1), now=2000.0).retry_after_s == MAX_S


def test_more_than_ever_has_room_is_refused_for_good():
    limit = limit_of(max_num_queued_reqs=3)
    limit.check(Size(5), num_unfinished=0, now=0.0)
    with pytest.raises(InvalidRequest, match="n: got 6, expected at most 5 \\(running and waiting"):
        limit.check(Size(6), num_unfinished=0, now=0.0)
