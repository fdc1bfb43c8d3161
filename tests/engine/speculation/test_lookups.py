"""The lookup proposers against plain searches of the same tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.protocol.draft_tree import DraftTree
from octavo.engine.speculation.ngram import NgramProposer
from octavo.engine.speculation.proposer import DIVIDED, NO_DRAFT, Draft, Proposer, continuation
from octavo.engine.speculation.suffix import (
    EDIT_LEAD,
    LEAST_COPIED,
    SuffixAutomaton,
    SuffixProposer,
)

TOKENS = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.integers(0, size - 1), min_size=0, max_size=60)
)


def earlier_ends(token_ids: list[int], length: int) -> list[int]:
    """Returns one past the end of each earlier occurrence of the last `length` tokens."""
    suffix = token_ids[len(token_ids) - length :]
    return [end for end in range(length, len(token_ids)) if token_ids[end - length : end] == suffix]


def following(token_ids: list[int], length: int) -> set[int]:
    """Returns the tokens that followed earlier occurrences of the last `length` tokens."""
    return {token_ids[end] for end in earlier_ends(token_ids, length)}


def longest_match(token_ids: list[int]) -> int:
    """Returns the length of the longest end of the tokens that occurs earlier in them."""
    lengths = range(len(token_ids) - 1, 0, -1)
    return next((length for length in lengths if earlier_ends(token_ids, length)), 0)


@settings(max_examples=300, deadline=None)
@given(TOKENS)
def test_the_automaton_finds_the_longest_match(token_ids: list[int]) -> None:
    """The match is an earlier occurrence of the longest end that has one."""
    automaton = SuffixAutomaton()
    for token_id in token_ids:
        automaton.extend(token_id)
    length, end = automaton.match
    assert length == longest_match(token_ids)
    assert not length or end in earlier_ends(token_ids, length)


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.integers(1, 9))
def test_a_suffix_draft_follows_a_match_or_a_copied_text(
    token_ids: list[int], max_tokens: int
) -> None:
    """A draft is what followed the longest match, or some place in a text that was copied."""
    proposer = SuffixProposer(min_match=1)
    proposer.extend(token_ids)
    draft = proposer.propose(max_tokens)
    length = longest_match(token_ids)
    ends = earlier_ends(token_ids, length) if length else []
    follow = [continuation(token_ids, end, max_tokens) for end in ends]
    if draft == NO_DRAFT:
        assert length == 0
        return
    is_divided, num_matched = divmod(draft.num_matched, DIVIDED)
    assert is_divided == (len(following(token_ids, length)) > 1)
    if num_matched == length and draft.token_ids in follow:
        return
    everywhere = range(LEAST_COPIED, len(token_ids))
    assert draft.token_ids in [continuation(token_ids, at, max_tokens) for at in everywhere]
    assert length < num_matched + EDIT_LEAD


def continued(token_ids: list[int], max_tokens: int = 6, num_paths: int = 1) -> Draft:
    """Returns how the tokens go on by a suffix lookup."""
    proposer = SuffixProposer(num_paths=num_paths)
    proposer.extend(token_ids)
    return proposer.propose(max_tokens)


TEXT = list(range(100, 130))


@pytest.mark.parametrize(
    ("copied", "expected"),
    [
        ([*TEXT[:8], 1], TEXT[9:15]),  # one token for one
        ([*TEXT[:8], 1, 2, TEXT[9]], TEXT[10:16]),  # two for one
        ([*TEXT[:8], 1, TEXT[10]], TEXT[11:17]),  # one for two
        ([*TEXT[:8], TEXT[11]], TEXT[12:18]),  # some left out
        ([*TEXT[:8], 1, *TEXT[9:11], 2], TEXT[12:18]),  # a second edit near the first
    ],
)
def test_a_copy_goes_on_behind_an_edit(copied: list[int], expected: list[int]) -> None:
    """No lookup matches the tokens around the edit."""
    assert continued([*TEXT, 0, *copied]).token_ids == expected


def test_a_copy_that_was_left_is_not_followed() -> None:
    """Where nothing agrees any more, nothing is guessed, until a lookup finds a text again."""
    left = [*TEXT, 0, *TEXT[:8], *range(20)]
    assert continued(left) == NO_DRAFT
    assert continued([*left, *TEXT[:2]]).token_ids == TEXT[2:8]


def test_other_ways_on_are_guessed_beside_the_latest() -> None:
    """The latest occurrence is the first path; alternatives near the start come first."""
    tokens = [1, 2, 3, 4, 0, 1, 2, 3, 5, 6, 0, 1, 2, 7, 8, 9, 0, 1, 2]
    assert continued(tokens).token_ids == [7, 8, 9, 0, 1, 2]
    draft = continued(tokens, num_paths=2)
    assert draft.token_ids == [7, 8, 9, 0, 1, 2, 3, 5, 6, 0, 1, 2]
    assert list(draft.parents) == [-1, 0, 1, 2, 3, 4, -1, 6, 7, 8, 9, 10]
    later = continued([*tokens, 3], max_tokens=2, num_paths=8)
    assert (later.token_ids, list(later.parents)) == ([5, 6, 4, 0], [-1, 0, -1, 2])


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.integers(1, 9), st.integers(2, 8))
def test_trees_of_lookups(token_ids: list[int], max_tokens: int, num_paths: int) -> None:
    """The first path is the guess that does not branch; each path goes on as the text did, and no
    token stands beside an equal one.
    """
    chain = continued(token_ids, max_tokens)
    draft = continued(token_ids, max_tokens, num_paths)
    tree = DraftTree.of(len(draft.token_ids), draft.parents)
    assert draft.num_matched == chain.num_matched
    assert [draft.token_ids[at] for at in tree.paths[0]] == chain.token_ids
    assert len(tree.paths) <= num_paths and max(map(len, tree.paths)) <= max_tokens
    for beside in tree.children.values():
        ids = [draft.token_ids[at] for at in beside]
        assert len(set(ids)) == len(ids)
    for path, own in list(zip(tree.paths, tree.own, strict=True))[1:]:
        behind = [draft.token_ids[at] for at in own]
        starts = [at for at, token_id in enumerate(token_ids) if token_id == behind[0]]
        assert behind in [continuation(token_ids, at, len(behind)) for at in starts]
        assert len(path) == max_tokens


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.integers(1, 9))
def test_an_ngram_draft_follows_the_latest_occurrence(
    token_ids: list[int], max_tokens: int
) -> None:
    """The longest n-gram within the bounds is found where it occurred last."""
    proposer = NgramProposer(min_ngram=2, max_ngram=4)
    proposer.extend(token_ids)
    draft = proposer.propose(max_tokens)
    length = min(4, longest_match(token_ids))
    if length < 2:
        assert draft == NO_DRAFT
        return
    is_divided = len(following(token_ids, length)) > 1
    assert draft.num_matched == length + DIVIDED * is_divided
    assert draft.token_ids == continuation(
        token_ids, earlier_ends(token_ids, length)[-1], max_tokens
    )


@settings(max_examples=100, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 60), max_size=5), st.sampled_from(["ngram", "suffix"]))
def test_drafts_do_not_depend_on_how_tokens_arrive(
    token_ids: list[int], cuts: list[int], method: str
) -> None:
    """Tokens taken in one list or in several yield the same draft, also past the bound."""
    whole: Proposer = NgramProposer() if method == "ngram" else SuffixProposer(max_tokens=16)
    parts: Proposer = NgramProposer() if method == "ngram" else SuffixProposer(max_tokens=16)
    whole.extend(token_ids)
    edges = [0, *sorted(cuts), len(token_ids)]
    for start, end in pairwise(edges):
        parts.extend(token_ids[start:end])
    assert whole.propose(8) == parts.propose(8)


def test_a_full_suffix_proposer_forgets_the_oldest_tokens() -> None:
    """Tokens before the kept half are no longer found, and later ones still are."""
    proposer = SuffixProposer(min_match=2, max_tokens=16)
    proposer.extend([1, 2, 3, *range(100, 120)])
    proposer.extend([1, 2])
    assert proposer.propose(1) == NO_DRAFT
    proposer.extend([118, 119])
    assert proposer.propose(1).token_ids == [1]


def test_a_repeated_token_is_drafted_to_any_length() -> None:
    """A copy that reaches the end of the tokens goes on in itself."""
    for proposer in (NgramProposer(), SuffixProposer()):
        proposer.extend([7] * 5)
        assert proposer.propose(20).token_ids == [7] * 20
