"""Suffix lookup: the longest end of a row's tokens that occurs earlier in them, of any length, and
what followed it there.

Owns a suffix automaton of one row's tokens, at most two states a token, built token by token in
linear time. Sources: the automaton is Blumer et al. 1985; drafting from suffixes is SuffixDecoding
(Oliaro et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.speculation.drafter import NO_DRAFT, Draft, continuation

MAX_REFRESHED = 32
"""Most states whose latest occurrence is renewed for a token; without a bound a row of one
repeated token would take quadratic time.
"""


class SuffixDrafter:
    """Guesses from the last `max_tokens` tokens at most, and from matches of at least
    `min_match`.
    """

    def __init__(self, *, min_match: int = 2, max_tokens: int = 32768) -> None:
        assert min_match >= 1 and max_tokens >= 2, "the options are checked where they are read"
        self._min_match = min_match
        self._max_tokens = max_tokens
        self._token_ids: list[int] = []
        self._automaton = SuffixAutomaton()

    def took(self, token_ids: Sequence[int]) -> None:
        """Takes in the row's next tokens. A full automaton is built again from the later half."""
        for token_id in token_ids:
            if len(self._token_ids) == self._max_tokens:
                self._keep_later_half()
            self._token_ids.append(token_id)
            self._automaton.extend(token_id)

    def propose(self, max_tokens: int) -> Draft:
        """Returns what followed an earlier occurrence of the longest end that has one."""
        num_matched, end = self._automaton.match
        if num_matched < self._min_match:
            return NO_DRAFT
        return Draft(continuation(self._token_ids, end, max_tokens), num_matched)

    def _keep_later_half(self) -> None:
        self._token_ids = self._token_ids[-(self._max_tokens // 2) :]
        self._automaton = SuffixAutomaton()
        for token_id in self._token_ids:
            self._automaton.extend(token_id)


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
