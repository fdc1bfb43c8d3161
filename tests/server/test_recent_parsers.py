"""Output parsers of the latest chats: bounded in number and bytes, the oldest go first."""

from octavo.server.output_parser import PLAIN, OutputParser
from octavo.server.state import recent_parsers
from octavo.server.state.recent_parsers import RecentParsers
from octavo.text.parsers.reader import MessageForm

READ = OutputParser(MessageForm())


def test_the_oldest_go_first(monkeypatch):
    monkeypatch.setattr(recent_parsers, "MAX_KEPT", 2)
    kept = RecentParsers()
    for name in ("a", "b", "a", "c"):
        kept.keep(name, READ, 1)
    assert [kept.find(name) for name in "abc"] == [READ, PLAIN, READ]


def test_their_requests_are_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr(recent_parsers, "MAX_KEPT_BYTES", 10)
    kept = RecentParsers()
    kept.keep("a", READ, 6)
    kept.keep_fork("a", "fork", READ)
    assert [kept.find(name) for name in ("a", "fork")] == [PLAIN, READ]
    kept.keep("large", READ, 11)
    assert [kept.find(name) for name in ("large", "fork")] == [PLAIN, READ]


def test_plain_texts_are_not_kept():
    kept = RecentParsers()
    kept.keep("a", OutputParser(id_length=9), 1)
    kept.keep_fork("gone", "fork", READ)
    assert kept.find("a") is PLAIN and kept.find("fork") is PLAIN
