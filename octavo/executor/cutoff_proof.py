"""Whether the cuts of a row (min_p, top_k, top_p) keep a token that was drawn without them,
whatever a mask takes from the others.

The draw without cuts is the largest score of all tokens; where it is legal and the cuts keep it
among the legal ones, it is the masked draw. A mask can only make a token better placed: min_p and
top_k keep it where they keep it unmasked. For top_p let X weigh what stands before the token
unmasked, and R the token and what stands behind it and is known to be legal. Whatever part x of X
is legal, all legal tokens weigh x + R at least, and the token is kept where x < top_p (x + R): for
every x up to X where X (1 - top_p) < top_p R. The first few tokens behind it are its witnesses.
Bounds are widened by more than what rounding could move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import MAX_PROOF_TOKENS, SamplingBatch

SURE = 1 + 1e-4


def disable_cutoffs(batch: SamplingBatch, uncut: NDArray[np.bool_]) -> SamplingBatch:
    """Returns a batch whose rows `uncut [S]` keep all tokens."""
    records = batch.records.copy()
    for name, neutral in (("min_p", 0.0), ("top_k", 0), ("top_p", 1.0)):
        records[name][uncut] = neutral
    return replace(batch, records=records)


def witnesses(z: NDArray[np.float64], record: Mapping[str, Any] | np.void, token: int) -> list[int]:
    """Returns the tokens that, if they are all legal, show that the cuts keep `token`, of `z [V]`,
    the changed logits: itself first; none where fewer than MAX_PROOF_TOKENS do not show it.
    """
    weights = np.exp((z - z.max()) / float(record["temperature"]))
    least = float(record["min_p"]) * SURE
    top_k = int(record["top_k"]) or len(z)
    top_p = float(record["top_p"])
    before = z >= z[token]
    place = int(before.sum()) - 1
    if weights[token] < least or place >= top_k:
        return []
    wanted = (weights[before].sum() - weights[token]) * (1 - top_p) * SURE
    behind = np.flatnonzero(z < z[token])
    behind = behind[np.argsort(-z[behind], kind="stable")]
    found = [token]
    known = float(weights[token])
    for follower in behind[: min(MAX_PROOF_TOKENS, top_k - place) - 1].tolist():
        if wanted < top_p * known:
            break
        if weights[follower] == 0 or weights[follower] < least:
            return []
        found.append(follower)
        known += float(weights[follower])
    return found if wanted < top_p * known else []
