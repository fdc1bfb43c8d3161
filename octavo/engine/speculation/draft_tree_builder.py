"""Merges the drafts of a row's proposers: the likeliest draft, and if the row may branch, the
tokens of the other drafts as siblings.

At most one of several sibling tokens is accepted; their probabilities account for this.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.engine.protocol.draft_tree import ROOT, DraftTree
from octavo.engine.speculation.acceptance import Acceptance
from octavo.engine.speculation.policy import RowDraft
from octavo.engine.speculation.proposer import RUNNER_UP, Draft


class DraftTreeBuilder:
    """Builds one row's draft tree; the first draft added is its spine."""

    def __init__(self, acceptance: Acceptance, request_id: str, *, max_leaves: int) -> None:
        self._acceptance = acceptance
        self._request_id = request_id
        self._max_leaves = max_leaves
        self._num_leaves = 0
        self._token_ids: list[int] = []
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._reached: list[float] = []
        self._children: dict[int, list[int]] = {}
        self._beside: dict[int, float] = {}
        """Probability that any of a token's children is accepted if the token is."""
        self._num_matched = 0

    def add(self, draft: Draft, max_tokens: int) -> None:
        """Adds a draft with paths of up to `max_tokens` tokens, within the limit on leaves."""
        if not self._token_ids:
            self._num_matched = draft.num_matched
        indices = {ROOT: ROOT}
        parents = DraftTree.of(len(draft.token_ids), draft.parents).parents
        for token, (token_id, draft_parent) in enumerate(
            zip(draft.token_ids, parents, strict=True)
        ):
            parent = indices.get(draft_parent)
            if parent is None or (parent != ROOT and self._depths[parent] + 1 >= max_tokens):
                continue
            new_index = self._get_child(parent, token_id, draft.num_matched)
            if new_index is not None:
                indices[token] = new_index

    def row_draft(self, index: int) -> RowDraft:
        """Returns the draft of the row with an index in the step, likeliest tokens first. A parent
        is at least as likely as its children and precedes them.
        """
        order = sorted(range(len(self._token_ids)), key=lambda position: -self._reached[position])
        new_index = {ROOT: ROOT} | {old: position for position, old in enumerate(order)}
        return RowDraft(
            index,
            [self._token_ids[old] for old in order],
            [new_index[self._parents[old]] for old in order],
            self._num_matched,
            [self._reached[old] for old in order],
        )

    def _get_child(self, parent: int, token_id: int, num_matched: int) -> int | None:
        """Returns the index of a parent's child with this token id, adding it if missing. Returns
        None if that would exceed the limit on leaves.
        """
        siblings = self._children.setdefault(parent, [])
        for sibling in siblings:
            if self._token_ids[sibling] == token_id:
                return sibling
        if siblings or parent == ROOT:
            if self._num_leaves == self._max_leaves:
                return None
            self._num_leaves += 1
        child = len(self._token_ids)
        depth = 0 if parent == ROOT else self._depths[parent] + 1
        chance = self._chance(parent, siblings, num_matched, depth)
        siblings.append(child)
        self._token_ids.append(token_id)
        self._parents.append(parent)
        self._depths.append(depth)
        self._reached.append(chance if parent == ROOT else chance * self._reached[parent])
        return child

    def _chance(self, parent: int, siblings: Sequence[int], num_matched: int, depth: int) -> float:
        """Returns the probability that a new child is accepted if its parent is: by match and
        depth, or as a runner-up if all its siblings are rejected.
        """
        kind, at = (RUNNER_UP, len(siblings) - 1) if siblings else (num_matched, depth)
        left = 1 - self._beside.get(parent, 0.0)
        chance = left * self._acceptance.chance(self._request_id, kind, at)
        self._beside[parent] = self._beside.get(parent, 0.0) + chance
        return chance


def build_row_draft(
    acceptance: Acceptance,
    request_id: str,
    index: int,
    drafts: Sequence[Draft],
    *,
    max_tokens: int,
    max_leaves: int,
) -> RowDraft:
    """Returns the draft of the row with an index in the step, merged from `drafts` (likeliest
    first), with at most `max_tokens` tokens on each path.
    """
    if max_leaves == 1 or (len(drafts) == 1 and not drafts[0].parents):
        return _chain(acceptance, request_id, index, drafts[0], max_tokens)
    builder = DraftTreeBuilder(acceptance, request_id, max_leaves=max_leaves)
    for draft in drafts:
        builder.add(draft, max_tokens)
    return builder.row_draft(index)


def _chain(
    acceptance: Acceptance, request_id: str, index: int, draft: Draft, max_tokens: int
) -> RowDraft:
    """Returns the first path of a draft as a chain."""
    token_ids = draft.token_ids
    if draft.parents:
        path = DraftTree.of(len(token_ids), draft.parents).paths[0]
        token_ids = [token_ids[at] for at in path]
    token_ids = token_ids[:max_tokens]
    reached = acceptance.reached(request_id, draft.num_matched, len(token_ids))
    return RowDraft(index, token_ids, [], draft.num_matched, reached)
