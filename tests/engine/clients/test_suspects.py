"""Suspects find the request that makes an engine fail, and come to an end if there is none."""

from octavo.engine.clients.suspects import Suspects


def test_suspects_are_tried_one_after_the_other():
    suspects = Suspects()
    assert suspects.accuse(["a", "b", "c"]) == [] and suspects.any
    assert suspects.next_on_trial() == "a" and suspects.next_on_trial() is None
    suspects.cleared("a")
    assert suspects.next_on_trial() == "b"
    assert suspects.accuse(["b"]) == ["b"]
    assert suspects.next_on_trial() == "c" and suspects.any
    suspects.ended("c")
    assert not suspects.any
    assert suspects.accuse(["only"], certain=True) == ["only"]
    assert suspects.accuse(["sent"]) == [] and suspects.next_on_trial() == "sent"
    assert suspects.accuse(["sent", "later"]) == ["sent"] and not suspects.any


def test_requests_that_are_sound_alone_but_not_together_fail_the_third_time():
    """A failure that was explained does not count against the others."""
    suspects = Suspects()

    def try_all(guilty=()):
        while (name := suspects.next_on_trial()) is not None:
            if name in guilty:
                assert suspects.accuse([name]) == [name]
            else:
                suspects.cleared(name)

    for _ in range(5):
        assert suspects.accuse(["x", "y", "bad"]) == []
        try_all(guilty=["bad"])
    for _ in range(2):
        assert suspects.accuse(["x", "y"]) == []
        try_all()
    assert suspects.accuse(["x", "y", "new"]) == ["x", "y"] and suspects.next_on_trial() == "new"


def test_a_trial_that_never_began_is_held_again():
    suspects = Suspects()
    assert suspects.accuse(["a", "b"]) == []
    assert suspects.next_on_trial() == "a"
    suspects.postpone()
    assert suspects.on_trial is None and suspects.any
    assert [suspects.next_on_trial(), suspects.next_on_trial()] == ["a", None]


def test_a_request_that_was_computed_alone_is_tried_before_it_is_blamed_for_a_death():
    """It may be killed from outside twice; the third time it fails."""
    suspects = Suspects()
    for _ in range(2):
        assert suspects.accuse(["a"]) == []
        assert suspects.next_on_trial() == "a"
        suspects.cleared("a")
    assert suspects.accuse(["a"]) == ["a"] and not suspects.any
