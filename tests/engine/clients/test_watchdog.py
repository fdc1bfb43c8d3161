"""When a core counts as hung, and how long the start of the next one is put off."""

from octavo.engine.clients.watchdog import HEALTHY_S, MAX_DELAY_S, RestartBackoff, Watchdog


def test_time_in_which_the_heartbeat_was_not_checked_does_not_count():
    watchdog = Watchdog(8.0)
    assert watchdog.interval_s == 1.0
    assert not any(watchdog.has_stalled(1, now) for now in (100, 101, 102, 5000, 5001, 5002))
    assert [watchdog.has_stalled(1, 5003 + second) for second in range(3)] == [False, True, True]
    assert not watchdog.has_stalled(2, 5010)
    watchdog.reset()
    assert not watchdog.has_stalled(2, 6000) and not watchdog.has_stalled(2, 6001)


def test_a_timeout_of_zero_turns_the_watchdog_off():
    watchdog = Watchdog(0)
    assert watchdog.interval_s > 0
    assert not any(watchdog.has_stalled(1, now) for now in range(0, 10_000, 2))


def test_the_first_restart_is_immediate_and_later_ones_wait_longer_and_longer():
    backoff = RestartBackoff()
    delays = []
    for now in range(12):
        backoff.note_ready(now)
        delays.append(backoff.delay_s(now))
    assert delays[:4] == [0.0, 0.5, 1.0, 2.0]
    assert delays == sorted(delays) and delays[-1] == MAX_DELAY_S
    assert backoff.num_failed_starts == 0


def test_a_core_that_was_healthy_for_long_restarts_at_once():
    backoff = RestartBackoff()
    backoff.note_ready(0)
    backoff.delay_s(1)
    backoff.note_ready(2)
    assert backoff.delay_s(2 + HEALTHY_S - 1) > 0
    backoff.note_ready(100)
    assert backoff.delay_s(100 + HEALTHY_S) == 0


def test_starts_that_fail_are_counted_until_one_is_ready():
    backoff = RestartBackoff()
    backoff.note_ready(0)
    backoff.delay_s(1)
    backoff.delay_s(2)
    backoff.delay_s(3)
    assert backoff.num_failed_starts == 2
    backoff.note_ready(4)
    assert backoff.num_failed_starts == 0
