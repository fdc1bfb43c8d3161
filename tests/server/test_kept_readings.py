"""Readings of the latest chats: bounded in number and bytes, the oldest go first."""

from octavo.server.reading import PLAIN, AnswerReading
from octavo.server.state import kept_readings
from octavo.server.state.kept_readings import KeptReadings
from octavo.text.parsers.reader import MessageForm

READ = AnswerReading(MessageForm())


def test_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(kept_readings, "MAX_KEPT", 2)
    kept = KeptReadings()
    for name in ("a", "b", "a", "c"):
        kept.keep(name, READ, 1)
    assert [kept.find(name) for name in "abc"] == [READ, PLAIN, READ]


def test_their_requests_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(kept_readings, "MAX_KEPT_BYTES", 10)
    kept = KeptReadings()
    kept.keep("a", READ, 6)
    kept.keep_fork("a", "fork", READ)
    assert [kept.find(name) for name in ("a", "fork")] == [PLAIN, READ]
    kept.keep("large", READ, 11)
    assert [kept.find(name) for name in ("large", "fork")] == [PLAIN, READ]


def test_plain_texts_are_not_kept():
    kept = KeptReadings()
    kept.keep("a", AnswerReading(id_length=9), 1)
    kept.keep_fork("gone", "fork", READ)
    assert kept.find("a") is PLAIN and kept.find("fork") is PLAIN
