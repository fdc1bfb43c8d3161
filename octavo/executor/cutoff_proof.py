"""Cut-off proofs: whether the cut-offs of a row (min_p, top_k, top_p) keep a token that was sampled
without them, whatever a mask removes.

The sample without cut-offs has the largest score of all tokens; if it is allowed and the cut-offs
keep it among the allowed ones, it is the masked sample. A mask only improves a token's rank, so
min_p and top_k keep it if they keep it unmasked. For top_p let X be the weight before the token
unmasked, and R the weight of the token and of those after it that are known to be allowed. Whatever
part x of X is allowed, all allowed tokens weigh at least x + R, and the token is kept if
x < top_p (x + R): for every x up to X if X (1 - top_p) < top_p R. The first few tokens after it
make the proof. Bounds are widened by more than rounding could move them.
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
    """Returns a batch whose rows `uncut [S]` have no cut-offs."""
    records = batch.records.copy()
    for name, neutral in (("min_p", 0.0), ("top_k", 0), ("top_p", 1.0)):
        records[name][uncut] = neutral
    return replace(batch, records=records)


def find_cutoff_proof(
    z: NDArray[np.float64], record: Mapping[str, Any] | np.void, token: int
) -> list[int]:
    """Returns `token`, then tokens of the changed logits `z [V]` that prove, if all are allowed,
    that the cut-offs keep it; [] if MAX_PROOF_TOKENS do not suffice.
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
