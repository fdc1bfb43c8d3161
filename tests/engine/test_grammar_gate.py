"""Requests wait for their grammars, and hold up no other."""

from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.scheduler.request_resources import GrammarGate

ONE, OTHER = GrammarSpec("regex", "one"), GrammarSpec("regex", "other")


def test_a_grammar_is_asked_for_once_and_is_ready_when_it_is_compiled():
    gate = GrammarGate()
    for spec in (ONE, ONE, OTHER):
        gate.want(spec)
    assert gate.pop_wanted() == [ONE, OTHER] and gate.pop_wanted() == []
    assert not gate.is_ready(ONE) and not gate.is_ready(OTHER)
    gate.compiled([ONE.digest])
    assert gate.is_ready(ONE) and not gate.is_ready(OTHER)
    gate.want(ONE)
    assert gate.pop_wanted() == [] and gate.is_ready(ONE)
