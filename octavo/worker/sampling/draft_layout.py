"""Draft tokens in a step: the rows that compute draft trees, and which samples accept them.

A request is sampled after its last known token and after each draft token. A draft token is
accepted if it equals the token sampled before it, so verification is plain sampling. Each path of a
draft tree except the first is an additional request of the step, which computes the tokens that no
earlier path has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.engine.protocol.draft_tree import ROOT, DraftTree
from octavo.engine.protocol.step import ScheduledRequest


@dataclass(frozen=True, slots=True)
class DraftLeaf:
    """Tokens that a step computes for a path of a draft tree other than the first."""

    index: int
    """Index of its request in the scheduled requests."""
    path: int
    tokens: list[int]
    """Draft tokens to compute, at the end of the path."""
    end: int
    """Number of tokens of the request up to the end of the path."""


class DraftLayout:
    """Rows of a step's draft trees. First paths are part of their requests; `leaves` follow all
    requests.
    """

    def __init__(self) -> None:
        self.trees: dict[int, DraftTree] = {}
        """Draft trees by index of the request."""
        self.leaves: list[DraftLeaf] = []
        self._starts: list[int] = []
        self._num_requests = 0

    def add(self, index: int, request: ScheduledRequest) -> int:
        """Adds a request's tree; returns how many tokens the request's first path has."""
        tree = self.trees[index] = DraftTree(request.draft_parents)
        num_known = request.num_tokens - len(request.draft_ids)
        first = request.start + num_known
        self.leaves += [
            DraftLeaf(index, path, own, first + len(tree.paths[path]))
            for path, own in enumerate(tree.own)
            if path
        ]
        return num_known + len(tree.paths[0])

    def append_leaves(self, rows: list[int], ends: list[int], starts: list[int]) -> None:
        """Appends each leaf's permanent row and end to `rows` and `ends`, `[R]`, and the index of
        its first token in the step to `starts`, `[R+1]`.
        """
        self._num_requests, self._starts = len(rows), starts
        for leaf in self.leaves:
            rows.append(rows[leaf.index])
            ends.append(leaf.end)
            starts.append(starts[-1] + len(leaf.tokens))

    def set_samples(self, owners: list[int], ends: list[int], rows: list[int]) -> None:
        """Sets where requests with trees are sampled: after the last known token, then after each
        draft token. Sets the request of each sample, its number of tokens before the sample, and
        its row in the step.
        """
        for index, tree in self.trees.items():
            if owners.count(index) < 2:
                continue
            first = owners.index(index)
            ends[first + 1 : first + 1 + len(tree.depths)] = [
                ends[first] + depth + 1 for depth in tree.depths
            ]
            rows[first + 1 : first + 1 + len(tree.depths)] = self.get_token_rows(index)

    def get_token_rows(self, index: int) -> list[int]:
        """Returns the row of the step that computes each token of a request's tree."""
        tree = self.trees[index]
        rows = [0] * len(tree.parents)
        spans = [(index, tree.paths[0])]
        spans += [
            (self._num_requests + index_of_leaf, leaf.tokens)
            for index_of_leaf, leaf in enumerate(self.leaves)
            if leaf.index == index
        ]
        for span, tokens in spans:
            end = self._starts[span + 1]
            for distance, token in enumerate(reversed(tokens), start=1):
                rows[token] = end - distance
        return rows

    def get_shared_rows(self, leaf: DraftLeaf, request: ScheduledRequest) -> list[int]:
        """Returns the rows of the step whose tokens a leaf's path shares with earlier paths: the
        request's known tokens, then draft tokens.
        """
        path = self.trees[leaf.index].paths[leaf.path]
        start = self._starts[leaf.index]
        rows = self.get_token_rows(leaf.index)
        return [
            *range(start, start + request.num_tokens - len(request.draft_ids)),
            *(rows[token] for token in path[: len(path) - len(leaf.tokens)]),
        ]


class AcceptedSamples(NamedTuple):
    """Samples of a step that are kept."""

    entries: list[int]
    """Indices of the samples; samples of one request are in token order."""
    paths: dict[int, int]
    """Index of the accepted path of each draft tree, by index of the request."""


def accept_drafts(
    scheduled: Sequence[ScheduledRequest],
    owners: Sequence[int],
    token_ids: Sequence[int],
    failed: Sequence[bool],
) -> AcceptedSamples:
    """Returns the samples to keep: the first one of each request, and samples after accepted draft
    tokens.

    A failed sample after a draft token is omitted: the next step samples it again and reports the
    failure.
    """
    kept: list[int] = []
    paths: dict[int, int] = {}
    entry = 0
    while entry < len(owners):
        index, first = owners[entry], entry
        while entry < len(owners) and owners[entry] == index:
            entry += 1
        kept.append(first)
        if entry - first == 1:
            continue
        request = scheduled[index]
        tree = DraftTree.of(len(request.draft_ids), request.draft_parents)
        accepted = _accept(request.draft_ids, tree, token_ids[first:entry], failed[first:entry])
        kept += [first + 1 + token for token in accepted]
        if request.leaf_blocks:
            paths[index] = tree.get_path_index(accepted[-1] if accepted else ROOT)
    return AcceptedSamples(kept, paths)


def _accept(
    draft_ids: Sequence[int], tree: DraftTree, sampled: Sequence[int], failed: Sequence[bool]
) -> list[int]:
    """Returns the accepted draft tokens, in order. `sampled` and `failed` belong first to the
    sample after the last known token, then to the samples after each draft token.
    """
    accepted: list[int] = []
    last = ROOT
    while not failed[last + 1]:
        children = tree.children.get(last, ())
        child = next((token for token in children if draft_ids[token] == sampled[last + 1]), None)
        if child is None or failed[child + 1]:
            break
        last = child
        accepted.append(last)
    return accepted
