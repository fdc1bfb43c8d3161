"""Which draws a step makes of rows with guesses, and which of them are kept.

A draw is made after a row's last known token and after each guess. Verifying is drawing: a guess
holds where it is what was drawn before it. Knows neither arrays nor devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.step import ScheduledRow


def draws_of(
    scheduled: Sequence[ScheduledRow], draws_once: Sequence[bool]
) -> tuple[list[int], NDArray[np.int32]]:
    """Returns the row of each draw, and how many of the row's guesses come after it. A row that
    `draws_once` is drawn before its guesses alone.
    """
    draws: list[int] = []
    num_left: list[int] = []
    for index, row in enumerate(scheduled):
        if row.wants == "draw":
            num_draws = 1 if draws_once[index] else len(row.draft_ids) + 1
            draws += [index] * num_draws
            num_left += [len(row.draft_ids) - at for at in range(num_draws)]
    return draws, np.array(num_left, np.int32)


def kept_draws(
    scheduled: Sequence[ScheduledRow],
    draws: Sequence[int],
    token_ids: Sequence[int],
    failed: Sequence[bool],
) -> list[int]:
    """Returns the draws that were made after nothing but what was drawn: of each row the first, and
    those after guesses that held.

    A draw after a guess that failed is left out: the next step makes it again, and the fault is
    told of that step.
    """
    kept: list[int] = []
    row, num_held = -1, 0
    for entry, index in enumerate(draws):
        if index != row:
            row, num_held = index, 0
        elif num_held < 0 or failed[entry]:
            num_held = -1
            continue
        kept.append(entry)
        guesses = scheduled[index].draft_ids
        holds = num_held < len(guesses) and guesses[num_held] == token_ids[entry]
        num_held = num_held + 1 if holds and not failed[entry] else -1
    return kept
