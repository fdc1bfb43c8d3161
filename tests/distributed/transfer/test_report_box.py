"""What several ranks report of the same blocks, as one worker's report."""

from __future__ import annotations

import threading
import time

import pytest

from octavo.distributed.transfer.report_box import ReportBox, SentReports
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    BlockKey,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
)
from octavo.engine.protocol.kv_messages import StoredBytes as Stored

BLOCK = SlotBlock(0, 0, BlockKey(b"a", b"", (1,)), "tcp://127.0.0.1:1")
NAME = BLOCK.name
FETCHED, LOST = ConnectorReport(fetched=[NAME]), ConnectorReport(not_fetched=[NAME])
KEPT, REFUSED = ConnectorReport(kept=[NAME]), ConnectorReport(not_kept=[NAME])


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([FETCHED, FETCHED], FETCHED),
        ([FETCHED, LOST], LOST),
        ([LOST, FETCHED], LOST),
        ([LOST, LOST], LOST),
        ([KEPT, KEPT], KEPT),
        ([KEPT, REFUSED], REFUSED),
        ([REFUSED, KEPT], REFUSED),
    ],
)
def test_a_block_is_there_when_it_is_so_on_all_ranks(told, expected) -> None:
    box = ReportBox(2)
    for _ in range(2):  # the second time as the first
        box.add_rank(1, told[0])
        assert box.take(wait_s=0.0) is None
        box.add_rank(0, told[1])
        assert box.take(wait_s=0.0) == expected


def test_a_block_that_one_rank_let_go_before_another_kept_it_is_not_kept() -> None:
    box = ReportBox(2)
    box.add_rank(1, KEPT)
    box.add_rank(1, ConnectorReport(gone=[NAME]))
    box.add_rank(0, KEPT)
    report = box.take(wait_s=0.0)
    assert report is not None and report.not_kept == [NAME] and report.kept == []
    assert report.gone == [NAME]


def test_a_rank_may_tell_before_the_first_one_has_begun() -> None:
    """Nothing is waited for while nothing is under way, and all outcomes end the wait."""
    box = ReportBox(2)
    began = time.monotonic()
    assert box.take(wait_s=5.0) is None
    box.add_rank(1, FETCHED)
    box.begin(ConnectorPlan(fetch=[BLOCK]))
    threading.Timer(0.05, box.add_rank, (0, FETCHED)).start()
    assert box.take(wait_s=20.0) == FETCHED
    assert box.take(wait_s=5.0) is None
    assert time.monotonic() - began < 5.0


def test_sums_of_ranks_that_work_at_the_same_time() -> None:
    """Bytes add up; the seconds of a link are those of one rank."""
    box = ReportBox(2)
    box.add_rank(0, ConnectorReport(stored=Stored(10, link_bytes=100, link_s=1.0)))
    box.add_rank(1, ConnectorReport(stored=Stored(20, num_expired_leases=1, link_bytes=80)))
    box.add_rank(1, ConnectorReport(stored=Stored(30, num_expired_leases=1, link_bytes=90)))
    report = box.take(wait_s=0.0)
    assert report is not None
    assert report.stored == Stored(40, num_expired_leases=1, link_bytes=190, link_s=0.5)


def test_other_ranks_tell_the_first_at_once() -> None:
    told: list[ConnectorReport] = []
    reports = SentReports(told.append)
    reports.begin(ConnectorPlan(fetch=[BLOCK]))
    reports.add(FETCHED)
    assert told == [FETCHED] and reports.take(wait_s=5.0) is None
    assert isinstance(told[0].fetched[0], BlockHashWithGroupId)
