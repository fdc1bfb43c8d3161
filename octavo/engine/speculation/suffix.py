"""Suffix lookup: the longest end of a row's tokens that occurs earlier in them, of any length, and
what followed it there; behind an edit in a text that the row copies, what follows in that text.

Owns a suffix automaton of one row's tokens, at most two states a token, built token by token in
linear time. Sources: the automaton is Blumer et al. 1985; drafting from suffixes, and trees of what
followed them, are SuffixDecoding (Oliaro et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from octavo.engine.speculation.copied_text import CopiedText
from octavo.engine.speculation.drafter import DIVIDED, NO_DRAFT, Draft, continuation

MAX_REFRESHED = 32
"""Most states whose latest occurrence is renewed for a token; without a bound a row of one
repeated token would take quadratic time.
"""
EDIT_LEAD = 4
"""Tokens by which a lookup must match more than agree since an edit of a copied text, before it is
trusted more: the text agreed before the edit too.
"""
MOST_FOLLOWING = 64
"""Most tokens that may have followed a match where the latest of them are guessed beside each
other: where more have, none of them is likely.
"""


class GuessFork(NamedTuple):
    """A token that followed an earlier occurrence of a match, beside the one that is guessed."""

    depth: int
    """Number of guessed tokens before it."""
    place: int
    """Index of the token in the text, about the latest."""


class SuffixDrafter:
    """Guesses from the last `max_tokens` tokens at most, and from matches of at least
    `min_match`; up to `num_paths` ways in which the text went on.
    """

    def __init__(self, *, min_match: int = 2, max_tokens: int = 32768, num_paths: int = 1) -> None:
        assert min_match >= 1 and max_tokens >= 2, "the options are checked where they are read"
        self._min_match = min_match
        self._max_tokens = max_tokens
        self._num_paths = num_paths
        self._forget()

    def _forget(self) -> None:
        self._token_ids: list[int] = []
        self._automaton = SuffixAutomaton()
        self._copied = CopiedText()

    def took(self, token_ids: Sequence[int]) -> None:
        """Takes in the row's next tokens. A full automaton is built again from the later half."""
        for token_id in token_ids:
            if len(self._token_ids) == self._max_tokens:
                self._keep_later_half()
            self._take(token_id)

    def _take(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self._automaton.extend(token_id)
        self._copied.took(self._token_ids, *self._automaton.match)

    def propose(self, max_tokens: int) -> Draft:
        """Returns what followed an earlier occurrence of the longest end that has one, or what
        follows in a copied text behind an edit.
        """
        num_matched, end = self._automaton.match
        is_found = num_matched >= self._min_match
        copied = self._copied
        lead = EDIT_LEAD if copied.num_agreed else self._min_match
        if copied.goes_on and num_matched < copied.num_agreed + lead:
            forks = [GuessFork(0, end)] if is_found else []
            return self._draft(copied.place, copied.num_agreed + 1, max_tokens, forks)
        if not is_found:
            return NO_DRAFT
        return self._draft(end, num_matched, max_tokens, None)

    def _draft(
        self, start: int, num_matched: int, most: int, forks: Sequence[GuessFork] | None
    ) -> Draft:
        """Returns a guess of the text from `start` on, and with it, where guesses may branch, of
        that from forks on; None: those of the longest match.
        """
        spine = continuation(self._token_ids, start, most)
        num_matched += DIVIDED * self._automaton.is_divided
        if self._num_paths == 1:
            return Draft(spine, num_matched)
        found: Iterable[GuessFork] = (
            self._automaton.forks(spine, self._min_match) if forks is None else forks
        )
        token_ids = list(spine)
        parents = list(range(-1, most - 1))
        others = (fork for fork in found if self._token_ids[fork.place] != spine[fork.depth])
        for fork in islice(others, self._num_paths - 1):
            behind = continuation(self._token_ids, fork.place, most - fork.depth)
            parents += [fork.depth - 1, *range(len(token_ids), len(token_ids) + len(behind) - 1)]
            token_ids += behind
        return Draft(token_ids, num_matched, parents)

    def _keep_later_half(self) -> None:
        kept = self._token_ids[-(self._max_tokens // 2) :]
        self._forget()
        for token_id in kept:
            self._take(token_id)


class SuffixAutomaton:
    """States of a growing text: each stands for its substrings that end at the same places."""

    def __init__(self) -> None:
        self.match = (0, 0)
        """Length of the longest end of the text that occurs earlier, and one past its end there."""
        self._next: list[dict[int, int]] = [{}]
        self._links = [-1]
        """State of the longest suffix that ends at further places."""
        self._lengths = [0]
        """Length of a state's longest substring."""
        self._ends = [0]
        """One past the end of an occurrence, about the latest."""
        self._last = 0

    def extend(self, token_id: int) -> None:
        """Appends a token, and finds the longest end of the text that occurs earlier."""
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
        """Whether different tokens have followed the longest end that occurs earlier."""
        return len(self._next[self._links[self._last]]) > 1

    def forks(self, guess: Sequence[int], min_match: int) -> Iterator[GuessFork]:
        """Yields the tokens that followed the longest match beside those of a guess, and then
        shorter ones down to `min_match`, those near the guess's start first.
        """
        state = self._links[self._last]
        for depth, token_id in enumerate(guess):
            seen = {token_id}
            for shorter in self._ending_alike(state, min_match):
                following = self._next[shorter]
                if len(following) > MOST_FOLLOWING:
                    break
                places = {
                    other: self._ends[target] - 1
                    for other, target in following.items()
                    if other not in seen
                }
                seen.update(places)
                for other in sorted(places, key=places.__getitem__, reverse=True):
                    yield GuessFork(depth, places[other])
            following_state = self._next[state].get(token_id)
            if following_state is None:
                return
            state = following_state

    def _ending_alike(self, state: int, min_match: int) -> Iterator[int]:
        """Yields a state and those of its ends of at least `min_match` tokens."""
        while state > 0 and self._lengths[state] >= min_match:
            yield state
            state = self._links[state]

    def _target(self, state: int, token_id: int) -> int:
        """Returns the state of exactly `state`'s longest substring and the token, which is split
        off where a state stands for longer ones too.
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
