"""Answers to windows are cut at their timestamps as transformers cuts them."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.frontend.transcription import split_at_timestamps
from tests.support.whisper_oracle import oracle_cut

FIRST, NUM_STEPS = 50, 100


def drawn(seed: int) -> list[int]:
    """Returns words among timestamps that never go back, pairs of them and single ones."""
    generator = np.random.default_rng(seed)
    tokens, time = [FIRST + int(generator.integers(0, 3))], 0
    for _ in range(int(generator.integers(1, 6))):
        tokens += generator.integers(0, FIRST, int(generator.integers(0, 4))).tolist()
        time = min(time + int(generator.integers(1, 30)), NUM_STEPS)
        tokens += [FIRST + time] * int(generator.integers(1, 3))
    return tokens + generator.integers(0, FIRST, int(generator.integers(0, 3))).tolist()


@pytest.mark.parametrize("seed", range(60))
def test_cuts_are_those_of_transformers(seed: int) -> None:
    tokens = drawn(seed)
    wanted = oracle_cut(tokens, first=FIRST, frames=2 * NUM_STEPS, step_s=1.0)
    cut = split_at_timestamps(tokens, FIRST, NUM_STEPS)
    assert cut.num_steps == wanted.num_frames / 2
    assert cut.spans == [(round(start), round(end), words) for start, end, words in wanted.segments]


@pytest.mark.parametrize(
    ("tokens", "spans", "num_steps"),
    [
        ([50, 1, 2], [(0, 100, [1, 2])], 100),
        ([50, 1, 80], [(0, 30, [1])], 100),
        ([50, 1, 80, 80, 2], [(0, 30, [1])], 30),
        ([50, 1, 80, 80], [(0, 30, [1])], 30),
        ([50, 1, 80, 81, 2, 90], [(0, 30, [1]), (31, 40, [2])], 100),
    ],
)
def test_what_no_timestamp_ends_is_heard_again(
    tokens: list[int], spans: list[tuple[int, int, list[int]]], num_steps: int
) -> None:
    assert split_at_timestamps(tokens, FIRST, NUM_STEPS) == (spans, num_steps)
