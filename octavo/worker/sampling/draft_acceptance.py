"""Which rows a step computes of a row with guesses, which draws it makes of them, and which of
these are kept.

A draw is made after a row's last known token and after each guess. Verifying is drawing: a guess
holds where it is what was drawn before it. Where guesses branch, each path but the first is one
more request of the step, which computes what no path before it has. Knows neither blocks nor
devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.draft_tree import ROOT, DraftTree
from octavo.engine.protocol.step import ScheduledRequest


@dataclass(frozen=True, slots=True)
class LeafSpan:
    """The tokens that one path of a guess, not its first, computes in a step."""

    index: int
    """Index of its row among the scheduled ones."""
    path: int
    """Index of the path."""
    tokens: list[int]
    """Guessed tokens that it computes, the end of the path."""
    end: int
    """Number of tokens of the row up to the path's end."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step: those of its `R` requests end to end, then those of `L` leaf spans."""

    trees: list[DraftTree | None]
    """Shape of each request's guess where it branches, `[R]`."""
    leaves: list[LeafSpan]
    ends: NDArray[np.int32]
    """Number of tokens of each request, and of each leaf span's, up to its last row's, `[R+L]`."""
    query_starts: NDArray[np.int32]
    """First row of each of them, `[R+L+1]`."""

    @staticmethod
    def of(scheduled: Sequence[ScheduledRequest]) -> StepRows:
        trees = [DraftTree(row.draft_parents) if row.leaf_blocks else None for row in scheduled]
        counts = [row.num_tokens for row in scheduled]
        leaves: list[LeafSpan] = []
        for index, tree in enumerate(trees):
            if tree is None:
                continue
            row = scheduled[index]
            num_known = row.num_tokens - len(row.draft_ids)
            counts[index] = num_known + len(tree.paths[0])
            first = row.start + num_known
            leaves += [
                LeafSpan(index, path, own, first + len(tree.paths[path]))
                for path, own in enumerate(tree.own)
                if path
            ]
        ends = [row.start + count for row, count in zip(scheduled, counts, strict=True)]
        counts += [len(leaf.tokens) for leaf in leaves]
        return StepRows(
            trees,
            leaves,
            np.array(ends + [leaf.end for leaf in leaves], np.int32),
            np.array([0, *accumulate(counts)], np.int32),
        )

    def places_of(self, index: int) -> list[int]:
        """Returns the row of the step that computes each token of a request's branching guess."""
        tree = self.trees[index]
        assert tree is not None, "the guess branches"
        places = [0] * len(tree.parents)
        spans = [(index, tree.paths[0])]
        spans += [
            (len(self.trees) + at, leaf.tokens)
            for at, leaf in enumerate(self.leaves)
            if leaf.index == index
        ]
        for span, tokens in spans:
            end = int(self.query_starts[span + 1])
            for behind, token in enumerate(reversed(tokens), start=1):
                places[token] = end - behind
        return places


class Draws(NamedTuple):
    """The draws that a step makes of its requests, those of one request side by side."""

    owners: list[int]
    """Index of the request of each draw."""
    ends: NDArray[np.int32]
    """Number of tokens before each draw."""
    places: NDArray[np.int32]
    """Row of the step after which each draw is made."""


def draws_of(
    scheduled: Sequence[ScheduledRequest], rows: StepRows, draws_once: Sequence[bool]
) -> Draws:
    """Returns the draws of a step: of each request that draws one after its last known token, then
    one after each guess. A request that `draws_once` is drawn before its guesses alone.
    """
    owners: list[int] = []
    ends: list[int] = []
    places: list[int] = []
    for index, row in enumerate(scheduled):
        if row.wants != "draw":
            continue
        num_drafts = 0 if draws_once[index] else len(row.draft_ids)
        num_known = row.num_tokens - len(row.draft_ids)
        end, place = row.start + num_known, int(rows.query_starts[index]) + num_known - 1
        owners += [index] * (num_drafts + 1)
        tree = rows.trees[index]
        if tree is None or not num_drafts:
            ends += range(end, end + num_drafts + 1)
            places += range(place, place + num_drafts + 1)
        else:
            ends += [end, *(end + depth + 1 for depth in tree.depths)]
            places += [place, *rows.places_of(index)]
    return Draws(owners, np.array(ends, np.int32), np.array(places, np.int32))


class AcceptedSamples(NamedTuple):
    """The draws that a step keeps."""

    entries: list[int]
    """Indices of the draws, those of one request in the order of its tokens."""
    paths: dict[int, int]
    """Path of the guess that is kept, by the index of a request whose guess branches."""


def accept_drafts(
    scheduled: Sequence[ScheduledRequest],
    owners: Sequence[int],
    token_ids: Sequence[int],
    failed: Sequence[bool],
) -> AcceptedSamples:
    """Returns the draws that were made after nothing but what was drawn: of each row the first, and
    those after guesses that held.

    A draw after a guess that failed is left out: the next step makes it again, and the fault is
    told of that step.
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
        row = scheduled[index]
        tree = DraftTree.of(len(row.draft_ids), row.draft_parents)
        held = _held(row.draft_ids, tree, token_ids[first:entry], failed[first:entry])
        kept += [first + 1 + token for token in held]
        if row.leaf_blocks:
            paths[index] = tree.path_of(held[-1] if held else ROOT)
    return AcceptedSamples(kept, paths)


def _held(
    draft_ids: Sequence[int], tree: DraftTree, drawn: Sequence[int], failed: Sequence[bool]
) -> list[int]:
    """Returns the guessed tokens that hold, in order: `drawn` and `failed` are of the draw after
    the last known token, then of those after each guessed one.
    """
    held: list[int] = []
    at = ROOT
    while not failed[at + 1]:
        behind = tree.children.get(at, ())
        found = next((token for token in behind if draft_ids[token] == drawn[at + 1]), None)
        if found is None or failed[found + 1]:
            break
        at = found
        held.append(at)
    return held
