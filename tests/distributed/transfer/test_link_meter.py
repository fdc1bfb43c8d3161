"""The link's rate: parts behind which another one waited tell it, others do not."""

from octavo.distributed.transfer.block_fetcher import LinkMeter


def test_the_time_between_parts_that_waited_is_the_link_s() -> None:
    meter = LinkMeter()
    for now in (1.0, 1.5, 2.0):
        meter.note("a", 100, now, has_more=True)
    assert (meter.num_bytes, meter.seconds) == (200, 1.0)


def test_the_time_before_a_part_that_was_made_meanwhile_is_not() -> None:
    meter = LinkMeter()
    meter.note("a", 100, 1.0, has_more=False)
    meter.note("a", 100, 9.0, has_more=True)
    meter.note("b", 100, 9.5, has_more=True)
    assert (meter.num_bytes, meter.seconds) == (0, 0.0)
    meter.note("a", 100, 10.0, has_more=False)
    meter.note("a", 100, 20.0, has_more=False)
    assert (meter.num_bytes, meter.seconds) == (100, 1.0)
