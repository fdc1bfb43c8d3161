"""Shapes of guesses that branch: every token lies on a path, and each is computed once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.engine.protocol.draft_tree import ROOT, DraftTree

PARENTS = st.lists(st.integers(0, 1 << 20), max_size=12).map(
    lambda numbers: [number % (at + 1) - 1 for at, number in enumerate(numbers)]
)
"""Parents of up to 12 tokens, each before its children."""


@settings(deadline=None)
@given(PARENTS)
def test_paths_lead_to_the_leaves_and_share_their_beginnings(parents: list[int]) -> None:
    tree = DraftTree(parents)
    leaves = [token for token in range(len(parents)) if token not in parents]
    assert sorted(path[-1] for path in tree.paths if path) == leaves
    for path in tree.paths:
        assert [parents[token] for token in path] == [ROOT, *path[:-1]][: len(path)]
        assert [tree.depths[token] for token in path] == list(range(len(path)))
    assert sorted(token for own in tree.own for token in own) == list(range(len(parents)))
    for own, path in zip(tree.own, tree.paths, strict=True):
        assert own == path[len(path) - len(own) :]
    assert tree.is_chain == (len(tree.paths) == 1) == (tree.paths == [list(range(len(parents)))])
    assert tree.longest == max(map(len, tree.paths))


@settings(deadline=None)
@given(PARENTS, st.data())
def test_what_held_is_the_longest_path_of_drawn_tokens(parents: list[int], data) -> None:
    """Tokens beside each other are different, so at most one of them is drawn."""
    tree = DraftTree(parents)
    ids = [tree.children[parent].index(token) for token, parent in enumerate(parents)]
    path = data.draw(st.sampled_from(tree.paths))
    num_right = data.draw(st.integers(0, len(path)))
    drawn = [ids[token] for token in path[:num_right]] + [99]
    held = tree.held(ids, drawn)
    assert held == path[:num_right]
    last = held[-1] if held else ROOT
    assert tree.paths[tree.get_path_index(last)][:num_right] == held
    assert not held or all(last not in path for path in tree.paths[: tree.get_path_index(last)])


def test_a_guess_without_parents_is_a_chain() -> None:
    assert DraftTree.of(3, []).paths == [[0, 1, 2]]
    assert DraftTree.of(0, []).paths == [[]] and DraftTree.of(0, []).longest == 0
