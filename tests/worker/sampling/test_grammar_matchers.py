"""The worker compiles grammars beside its steps, keeps a bounded number, and follows each row's own
tokens.
"""

import threading

import pytest

from octavo.api.sampling_params import SamplingParams
from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.protocol.step import NewRequest
from octavo.worker.sampling.grammar_matchers import CompiledGrammars, GrammarMatchers


class Countdown:
    """A matcher whose legal tokens are its next number alone."""

    def __init__(self, at=5):
        self.at = at

    def copy(self):
        return Countdown(self.at)

    def accept_tokens(self, token_ids):
        for token_id in token_ids:
            if token_id != self.at:
                raise ValueError(f"{token_id} is not {self.at}")
            self.at -= 1

    def allows(self, token_id):
        return token_id == self.at

    def try_accept(self, token_id):
        self.at -= token_id == self.at
        return token_id == self.at + 1

    def rollback(self):
        self.at += 1

    def mask(self):
        return (1 << self.at).to_bytes(4, "little")

    def only_token(self):
        return None

    def closing(self, most):
        return None

    @property
    def is_complete(self):
        return self.at == 0


class FakeGrammars:
    """Compiles once it may; counts."""

    def __init__(self, size=10):
        self.size, self.compiled, self.may = size, [], threading.Event()
        self.num_made = 0
        self.may.set()

    def compile(self, spec):
        assert self.may.wait(30)
        self.compiled.append(spec.text)
        if spec.text == "bad":
            raise ValueError("it is bad")
        return Countdown()

    def num_bytes(self, spec):
        return self.size

    def masks(self, matchers):
        self.num_made += len(matchers)
        return [matcher.mask() if matcher.at < 6 else None for matcher in matchers]


def spec(text="a", **fields):
    return GrammarSpec("regex", text, **fields)


def new_row(token_ids, num_prompt, grammar):
    return NewRequest("r", token_ids, num_prompt, SamplingParams(), seed=1, grammar=grammar)


def test_compiling_takes_no_time_of_the_caller():
    grammars = FakeGrammars()
    grammars.may.clear()
    kept = CompiledGrammars(grammars)
    kept.begin([spec(), spec("b")])
    assert kept.pop_compiled(wait_s=0.001) == []
    grammars.may.set()
    done = set()
    while len(done) < 2:
        done |= set(kept.pop_compiled(wait_s=10))
    assert done == {spec().digest, spec("b").digest}
    kept.matcher(spec())
    assert sorted(grammars.compiled) == ["a", "b"]
    kept.close()


def test_a_grammar_that_does_not_compile_is_reported_and_fails_its_row():
    rows = GrammarMatchers(FakeGrammars(), vocab_size=32)
    rows.begin([spec("bad")])
    assert rows.pop_compiled(wait_s=10) == [spec("bad").digest]
    with pytest.raises(ValueError, match="it is bad"):
        rows.add(3, new_row([9], 1, spec("bad")))
    rows.close()


def test_the_grammars_used_least_recently_are_dropped():
    grammars = FakeGrammars(size=10)
    kept = CompiledGrammars(grammars, max_bytes=25)
    for text in ("a", "b", "a", "c", "a", "b"):
        kept.matcher(spec(text))
    assert grammars.compiled == ["a", "b", "c", "b"]


def test_a_row_that_returns_goes_on_after_its_own_tokens():
    rows = GrammarMatchers(FakeGrammars(), vocab_size=32)
    rows.add(3, new_row([9, 9, 5, 4], 2, spec()))
    assert rows.allows(3, 3) and not rows.allows(3, 5)
    rows.accept_token(3, 3)
    assert rows.mask(3).tolist() == [1 << 2]
    rows.add(4, new_row([9, 5, 4, 3], 3, spec(num_given_tokens=2)))
    assert rows.allows(4, 2)


def test_a_token_that_is_not_legal_is_a_fault_of_the_next_draw():
    rows = GrammarMatchers(FakeGrammars(), vocab_size=32)
    rows.add(3, new_row([9], 1, spec()))
    rows.accept_token(3, 1)
    assert rows.fault(3) == "1 is not 5" and not rows.allows(3, 5)
    assert rows.mask_or_empty(3).tolist() == [0]
    rows.free(3)
    assert rows.fault(3) == "" and rows.mask(3) is None


def test_masks_made_together_are_those_made_alone():
    grammars = FakeGrammars()
    rows = GrammarMatchers(grammars, vocab_size=32)
    for row in (3, 4, 5):
        rows.add(row, new_row([9], 1, spec()))
    rows.accept_token(4, 5)
    rows.make_masks([3, 4, 7])
    assert [rows.mask(row).tolist() for row in (3, 4, 5)] == [[1 << 5], [1 << 4], [1 << 5]]
    rows.make_masks([3, 4])
    assert grammars.num_made == 2
    rows.accept_token(3, 5)
    rows.accept_token(5, 5)
    rows.make_masks([3, 4, 5])
    assert [rows.mask(row).tolist() for row in (3, 4, 5)] == [[1 << 4]] * 3
    assert grammars.num_made == 4
    rows.free(3)
    assert rows.mask(3) is None


def test_a_token_that_is_taken_in_early_is_taken_once():
    rows = GrammarMatchers(FakeGrammars(), vocab_size=32)
    rows.add(3, new_row([9], 1, spec()))
    assert not rows.try_accept(3, 4)
    assert rows.try_accept(3, 5)
    rows.accept_token(3, 5)
    assert rows.mask(3).tolist() == [1 << 4]


def test_a_step_that_does_not_end_gives_its_tokens_back():
    rows = GrammarMatchers(FakeGrammars(), vocab_size=32)
    for row in (3, 4):
        rows.add(row, new_row([9], 1, spec()))
    assert rows.try_accept(3, 5) and rows.try_accept(4, 5)
    rows.accept_token(4, 5)
    rows.rollback()
    assert [rows.mask(row).tolist() for row in (3, 4)] == [[1 << 5], [1 << 4]]


def test_another_token_than_the_one_taken_in_takes_its_place():
    rows = GrammarMatchers(FakeGrammars(), vocab_size=32)
    rows.add(3, new_row([9], 1, spec()))
    assert rows.try_accept(3, 5)
    rows.accept_token(3, 4)
    assert rows.fault(3) == "4 is not 5"
    rows.free(3)
    rows.rollback()
