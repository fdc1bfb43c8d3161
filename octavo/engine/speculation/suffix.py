"""Suffix decoding: proposes the tokens that followed the longest suffix of a row's tokens that
occurs earlier. After an edit in a copied text, proposes the rest of that text.

The suffix automaton has at most two states per token and is built incrementally in linear time.
Sources: suffix automata are from Blumer et al. 1985; drafting from suffixes, and trees of
continuations, from SuffixDecoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from octavo.engine.speculation.proposer import DIVIDED, NO_DRAFT, Draft, continuation

LEAST_COPIED = 4
"""Minimum match length, in tokens, that is followed across an edit."""
MOST_REPLACED = 2
"""Number of differing tokens after which the copied text is proposed again only once some tokens
agree.
"""
MOST_EDITED = 8
"""Maximum length of an edit, in tokens; after a longer one, the row no longer counts as copying."""
WINDOW = 8
"""Number of tokens of the copied text in which the end of an edit is searched."""
MAX_REFRESHED = 32
"""Maximum number of states whose latest occurrence is updated per token. Without a limit, a row of
one repeated token would take quadratic time.
"""
EDIT_LEAD = 4
"""A match is preferred to a copied text if it is this many tokens longer than the text's agreement
since its edit: the copy also agreed before the edit.
"""
MOST_FOLLOWING = 64
"""Maximum number of different continuations of a match to propose as siblings; with more, none of
them is likely.
"""


class SuffixAlternative(NamedTuple):
    """An alternative continuation of a match, proposed as a sibling of a draft token."""

    depth: int
    """Number of draft tokens before it."""
    start: int
    """Index of its first token in the row's tokens."""


class SuffixProposer:
    """Proposes from matches of at least `min_match` tokens among the last `max_tokens`, with up to
    `num_paths` continuations.
    """

    def __init__(self, *, min_match: int = 2, max_tokens: int = 32768, num_paths: int = 1) -> None:
        assert min_match >= 1 and max_tokens >= 2, "the options are checked where they are read"
        self._min_match = min_match
        self._max_tokens = max_tokens
        self._num_paths = num_paths
        self._reset()

    def _reset(self) -> None:
        self._token_ids: list[int] = []
        self._automaton = SuffixAutomaton()
        self._copied = CopiedText()

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends the row's next tokens. A full automaton is rebuilt from its second half."""
        for token_id in token_ids:
            if len(self._token_ids) == self._max_tokens:
                self._keep_later_half()
            self._append(token_id)

    def _append(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._automaton.extend(token_id)
        self._copied.extend(self._token_ids, *self._automaton.match)

    def propose(self, max_tokens: int) -> Draft:
        """Proposes the tokens that followed the longest suffix that occurs earlier, or the rest of
        a copied text after an edit.
        """
        num_matched, end = self._automaton.match
        is_found = num_matched >= self._min_match
        copied = self._copied
        lead = EDIT_LEAD if copied.num_agreed else self._min_match
        if copied.continues and num_matched < copied.num_agreed + lead:
            alternatives = [SuffixAlternative(0, end)] if is_found else []
            return self._draft(copied.next_index, copied.num_agreed + 1, max_tokens, alternatives)
        if not is_found:
            return NO_DRAFT
        return self._draft(end, num_matched, max_tokens, None)

    def _draft(
        self,
        start: int,
        num_matched: int,
        max_tokens: int,
        alternatives: Sequence[SuffixAlternative] | None,
    ) -> Draft:
        """Returns a draft copied from `start` on, with `alternatives` if drafts may branch; None:
        the alternatives of the longest match.
        """
        spine = continuation(self._token_ids, start, max_tokens)
        num_matched += DIVIDED * self._automaton.is_divided
        if self._num_paths == 1:
            return Draft(spine, num_matched)
        candidates: Iterable[SuffixAlternative] = (
            self._automaton.alternatives(spine, self._min_match)
            if alternatives is None
            else alternatives
        )
        token_ids = list(spine)
        parents = list(range(-1, max_tokens - 1))
        others = (
            other for other in candidates if self._token_ids[other.start] != spine[other.depth]
        )
        for other in islice(others, self._num_paths - 1):
            added = continuation(self._token_ids, other.start, max_tokens - other.depth)
            parents += [other.depth - 1, *range(len(token_ids), len(token_ids) + len(added) - 1)]
            token_ids += added
        return Draft(token_ids, num_matched, parents)

    def _keep_later_half(self) -> None:
        kept = self._token_ids[-(self._max_tokens // 2) :]
        self._reset()
        for token_id in kept:
            self._append(token_id)


class SuffixAutomaton:
    """Suffix automaton of a growing text; a state is a set of substrings with the same end
    positions.
    """

    def __init__(self) -> None:
        self.match = (0, 0)
        """Length of the longest suffix that occurs earlier, and the index after that occurrence."""
        self._next: list[dict[int, int]] = [{}]
        self._links = [-1]
        """Suffix link of each state."""
        self._lengths = [0]
        """Length of each state's longest substring."""
        self._ends = [0]
        """Index after a recent occurrence of each state."""
        self._last = 0

    def extend(self, token_id: int) -> None:
        """Appends a token and updates `match`."""
        end = self._lengths[self._last] + 1
        new = self._add({}, -1, end, end)
        state = self._last
        while state >= 0 and token_id not in self._next[state]:
            self._next[state][token_id] = new
            state = self._links[state]
        self._links[new] = 0 if state < 0 else self._target(state, token_id)
        self._last = new
        link = self._links[new]
        self.match = (self._lengths[link], self._ends[link])
        self._refresh(link, end)

    @property
    def is_divided(self) -> bool:
        """Whether different tokens have followed the longest suffix that occurs earlier."""
        return len(self._next[self._links[self._last]]) > 1

    def alternatives(self, spine: Sequence[int], min_match: int) -> Iterator[SuffixAlternative]:
        """Yields tokens other than the spine's that followed the longest match, then shorter ones
        down to `min_match`; positions near the start of the spine first.
        """
        state = self._links[self._last]
        for depth, token_id in enumerate(spine):
            seen = {token_id}
            for shorter in self._ending_alike(state, min_match):
                following = self._next[shorter]
                if len(following) > MOST_FOLLOWING:
                    break
                starts = {
                    other: self._ends[target] - 1
                    for other, target in following.items()
                    if other not in seen
                }
                seen.update(starts)
                for other in sorted(starts, key=starts.__getitem__, reverse=True):
                    yield SuffixAlternative(depth, starts[other])
            following_state = self._next[state].get(token_id)
            if following_state is None:
                return
            state = following_state

    def _ending_alike(self, state: int, min_match: int) -> Iterator[int]:
        """Yields a state, then its suffixes with at least `min_match` tokens."""
        while state > 0 and self._lengths[state] >= min_match:
            yield state
            state = self._links[state]

    def _target(self, state: int, token_id: int) -> int:
        """Returns the state for the longest substring of `state` followed by the token. Splits this
        state off if the existing one also contains longer substrings.
        """
        target = self._next[state][token_id]
        length = self._lengths[state] + 1
        if self._lengths[target] == length:
            return target
        split = self._add(dict(self._next[target]), self._links[target], length, self._ends[target])
        while state >= 0 and self._next[state].get(token_id) == target:
            self._next[state][token_id] = split
            state = self._links[state]
        self._links[target] = split
        return split

    def _refresh(self, state: int, end: int) -> None:
        for _ in range(MAX_REFRESHED):
            if state <= 0:
                return
            self._ends[state] = end
            state = self._links[state]

    def _add(self, following: dict[int, int], link: int, length: int, end: int) -> int:
        self._next.append(following)
        self._links.append(link)
        self._lengths.append(length)
        self._ends.append(end)
        return len(self._lengths) - 1


class CopiedText:
    """Position of the text that a row is expected to copy next.

    When an output repeats the prompt with a name replaced, an n-gram lookup right after the
    name finds nothing, although the copied text continues there. This class keeps the position
    in the copied text and the number of tokens that agreed since the last edit.
    """

    def __init__(self) -> None:
        self.next_index = -1
        """Index of the expected next token; -1 if the row copies nothing."""
        self.num_agreed = 0
        """Number of tokens that agreed since the last edit."""
        self._num_edited = 0
        """Number of tokens of the current edit."""

    @property
    def continues(self) -> bool:
        """Whether the copy is expected to continue after an edit, where no lookup finds it: some
        tokens agree again, or the edit has just begun.
        """
        is_edited = self.next_index >= 0 and self._num_edited > 0
        return is_edited and (self.num_agreed > 0 or self._num_edited <= MOST_REPLACED)

    def extend(self, token_ids: Sequence[int], num_matched: int, end: int) -> None:
        """Updates the position by the row's last tokens. A lookup found that the last `num_matched`
        tokens also precede index `end`.
        """
        if self.next_index >= 0:
            self._follow(token_ids)
        if num_matched > max(self.num_agreed, LEAST_COPIED - 1):
            self.next_index = end
            self.num_agreed = num_matched
            self._num_edited = 0

    def _follow(self, token_ids: Sequence[int]) -> None:
        last = len(token_ids) - 1
        token_id = token_ids[last]
        if self.next_index < last and token_ids[self.next_index] == token_id:
            self.next_index += 1
            self.num_agreed += 1
            if self.num_agreed >= LEAST_COPIED:
                self._num_edited = 0
            return
        self._num_edited = 1 if self.num_agreed else self._num_edited + 1
        self.num_agreed = 0
        behind = token_ids[self.next_index + 1 : min(self.next_index + WINDOW, last)]
        if token_id in behind:
            # Tokens were omitted, or the previous token replaces several.
            self.next_index += behind.index(token_id) + 2
            self.num_agreed = 1
        elif self._num_edited == 1:
            self.next_index += 1
        elif self._num_edited > MOST_EDITED:
            self.next_index = -1
