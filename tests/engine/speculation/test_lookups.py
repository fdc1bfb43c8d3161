"""The lookup drafters against plain searches of the same tokens."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.speculation.drafter import NO_DRAFT, Drafter, continuation
from octavo.engine.speculation.ngram import NgramDrafter
from octavo.engine.speculation.suffix import SuffixDrafter

TOKENS = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.integers(0, size - 1), min_size=0, max_size=60)
)


def earlier_ends(token_ids: list[int], length: int) -> list[int]:
    """Returns one past the end of each earlier occurrence of the last `length` tokens."""
    suffix = token_ids[len(token_ids) - length :]
    return [end for end in range(length, len(token_ids)) if token_ids[end - length : end] == suffix]


def longest_match(token_ids: list[int]) -> int:
    """Returns the length of the longest end of the tokens that occurs earlier in them."""
    lengths = range(len(token_ids) - 1, 0, -1)
    return next((length for length in lengths if earlier_ends(token_ids, length)), 0)


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.integers(1, 9))
def test_a_suffix_draft_follows_the_longest_match(token_ids: list[int], max_tokens: int) -> None:
    """A draft is what followed an earlier occurrence of the longest end that has one."""
    drafter = SuffixDrafter(min_match=1)
    drafter.took(token_ids)
    draft = drafter.propose(max_tokens)
    length = longest_match(token_ids)
    assert draft.num_matched == length
    follow = [continuation(token_ids, end, max_tokens) for end in earlier_ends(token_ids, length)]
    assert draft.token_ids in follow if length else draft == NO_DRAFT


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.integers(1, 9))
def test_an_ngram_draft_follows_the_latest_occurrence(
    token_ids: list[int], max_tokens: int
) -> None:
    """The longest n-gram within the bounds is found where it occurred last."""
    drafter = NgramDrafter(min_ngram=2, max_ngram=4)
    drafter.took(token_ids)
    draft = drafter.propose(max_tokens)
    length = min(4, longest_match(token_ids))
    if length < 2:
        assert draft == NO_DRAFT
        return
    assert draft.num_matched == length
    assert draft.token_ids == continuation(
        token_ids, earlier_ends(token_ids, length)[-1], max_tokens
    )


@settings(max_examples=100, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 60), max_size=5), st.sampled_from(["ngram", "suffix"]))
def test_drafts_do_not_depend_on_how_tokens_arrive(
    token_ids: list[int], cuts: list[int], method: str
) -> None:
    """Tokens taken in one list or in several yield the same draft, also past the bound."""
    whole: Drafter = NgramDrafter() if method == "ngram" else SuffixDrafter(max_tokens=16)
    parts: Drafter = NgramDrafter() if method == "ngram" else SuffixDrafter(max_tokens=16)
    whole.took(token_ids)
    edges = [0, *sorted(cuts), len(token_ids)]
    for start, end in pairwise(edges):
        parts.took(token_ids[start:end])
    assert whole.propose(8) == parts.propose(8)


def test_a_full_suffix_drafter_forgets_the_oldest_tokens() -> None:
    """Tokens before the kept half are no longer found, and later ones still are."""
    drafter = SuffixDrafter(min_match=2, max_tokens=16)
    drafter.took([1, 2, 3, *range(100, 120)])
    drafter.took([1, 2])
    assert drafter.propose(1) == NO_DRAFT
    drafter.took([118, 119])
    assert drafter.propose(1).token_ids == [1]


def test_a_repeated_token_is_drafted_to_any_length() -> None:
    """A copy that reaches the end of the tokens goes on in itself."""
    for drafter in (NgramDrafter(), SuffixDrafter()):
        drafter.took([7] * 5)
        assert drafter.propose(20).token_ids == [7] * 20
