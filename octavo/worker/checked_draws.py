"""Draws first, then checks the grammar: a drawn token that is legal is the one that a masked draw
would give, since the draw takes the largest of scores that belong to tokens.

Only the rows whose token is not legal are drawn again, under a mask. Rows with a filter that
depends on which tokens there are (`SamplingParams.depends_on_mask`) get their masks beforehand.
"""

from __future__ import annotations

import numpy as np

from octavo.backends.batch import Bits, Redraw, SampleResult
from octavo.worker.grammar_rows import GrammarRows


class CheckedDraws:
    """The draws of one step that are checked. A `backends.batch.Check`."""

    def __init__(
        self, grammars: GrammarRows, rows: dict[int, int], allowed: dict[int, Bits]
    ) -> None:
        """Takes the permanent row of each sampled row that is checked, and the ids that it may draw
        besides, where they are given.
        """
        self._grammars = grammars
        self._rows = rows
        self._allowed = allowed

    def __contains__(self, entry: int) -> bool:
        return entry in self._rows

    def __call__(self, samples: SampleResult) -> Redraw | None:
        """Returns the rows whose tokens are not legal, with their masks."""
        found: dict[int, Bits] = {}
        for entry, row in self._rows.items():
            token_id = int(samples.token_ids[entry])
            if samples.failed[entry] or not self._grammars.allows(row, token_id):
                found[entry] = self._mask(entry, row)
        if not found:
            return None
        return Redraw(np.array(list(found), np.int32), np.stack(list(found.values())))

    def _mask(self, entry: int, row: int) -> Bits:
        legal, allowed = self._grammars.mask_or_none(row), self._allowed.get(entry)
        return legal if allowed is None else legal & allowed
