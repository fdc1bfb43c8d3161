"""The reference sampler: samples tokens from logits in NumPy, row by row, in float64.

The other backends follow this definition for a row of float32 logits z[0..V):

1. A row with a NaN logit fails. Logprobs, if requested, are computed from these raw logits: z -
   (max + ln sum exp(z - max)). A token's rank is its 1-based index in the order (logit descending,
   id ascending); the top list is the start of that order.
2. A row with `target_id` >= 0 scores a known token: nothing is sampled, and the target is the row's
   token. Otherwise the request's logits_processors are applied to z one after another.
3. z += bias of the token (-inf bans it); z = -inf for tokens that allowed_token_ids or the grammar
   do not allow. Then for each token of prompt and completion, which the completion has c times:
   z = z / r if z > 0, else z * r, with the repetition penalty r; z -= frequency * c; z -= presence
   if c > 0. If no finite maximum is left (everything is banned, or something is infinite), the row
   fails.
4. At temperature 0 the token is the one with the largest z, the lowest id among equals.
5. Otherwise tokens are filtered: `octavo/executor/filters.py`.
6. The token is the kept one with the largest score d + g, the lowest id among equals. With the
   noise g = -ln(-ln u), u = (k + 1/2) / 2^32, this samples from the softmax over the kept tokens
   (Gumbel-max). k is word `token % 4` of Philox4x32-10 with the key (low, high 32 bits of the seed)
   and the counter (position, sample_index, token // 4, purpose). For u > 1/2, -ln u is computed as
   -log1p(-(1 - u)), since a narrower type would round u to 1.

Noise depends on the token, not on its index among the kept tokens, so the allowed token with the
best score is the masked sample. g is between -3.13 and 22.88, so a token whose d is further below
the best score cannot win.

A failed row ends only its own request with an error; its token is 0.

Sources. Philox: Salmon et al. 2011; Gumbel-max: Maddison et al. 2014; DRY: P. E. Weidmann 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import (
    MAX_CANDIDATES,
    MAX_PROOF_TOKENS,
    Resample,
    SampleResult,
    SamplingBatch,
    unpacked_mask,
)
from octavo.executor.filters import kept_distances, order_tokens, surprise
from octavo.executor.noise import Floats, Record, gumbel, noise_words

SURE = 1 + 1e-4


def sample(
    logits: NDArray[np.float32],
    batch: SamplingBatch,
    processed: NDArray[np.float32] | None = None,
) -> SampleResult:
    """Samples a token from each row of `logits [S, V]`, or of `processed [S, V]` if given. Logprobs
    are of `logits`.
    """
    num_rows = len(logits)
    result = SampleResult(np.zeros(num_rows, np.int32), np.zeros(num_rows, np.bool_))
    if num_rows and batch.records["mirostat_mode"].any():
        result.surprises = np.zeros(num_rows, np.float32)
    processed = logits if processed is None else processed
    records, without_cutoffs = batch.records, batch.without_cutoffs
    if without_cutoffs is not None:
        result.proof_tokens = proofs = np.full((num_rows, MAX_PROOF_TOKENS), -1, np.int32)
        batch = disable_cutoffs(batch, without_cutoffs)
    for s in range(num_rows):
        if batch.deferred is not None and batch.deferred[s]:
            continue
        raw = processed[s].astype(np.float64)
        token = None if np.isnan(raw).any() else _choose(raw, s, batch, result)
        result.failed[s] = token is None
        result.token_ids[s] = 0 if token is None else token
        if token is not None and without_cutoffs is not None and without_cutoffs[s]:
            proof = find_cutoff_proof(changed_logits(raw, s, batch), records[s], token)
            proofs[s, : len(proof)] = proof
    if num_rows and (records["num_logprobs"].max() >= 0 or records["target_id"].max() >= 0):
        _add_logprobs(result, logits, batch)
    return result


def masked(batch: SamplingBatch, resample: Resample) -> SamplingBatch:
    """Returns a batch in which the rows to resample have the masks and bounds of `resample`; the
    other rows sample the same token again.
    """
    records = batch.records.copy()
    if resample.mirostat_mus is not None:
        has_bound = ~np.isnan(resample.mirostat_mus)
        records["mirostat_mu"][resample.samples[has_bound]] = resample.mirostat_mus[has_bound]
    records["allowed_mask"][resample.samples] = len(batch.allowed_masks) + np.arange(
        len(resample.samples)
    )
    masks = np.concatenate([batch.allowed_masks, resample.masks])
    return replace(batch, records=records, allowed_masks=masks, deferred=None, without_cutoffs=None)


def replaced(logits: NDArray[np.float32], resample: Resample) -> NDArray[np.float32]:
    """Returns the logits `[S, V]` to resample from."""
    if resample.logits is None or resample.logits_indices is None:
        return logits
    changed = logits.copy()
    for entry, row in zip(resample.samples, resample.logits_indices, strict=True):
        if row >= 0:
            changed[entry] = resample.logits[row]
    return changed


def candidates(z: Floats, record: Record) -> NDArray[np.intp]:
    """Returns the first MAX_CANDIDATES tokens in the order of their scores without filters, given
    the changed logits `z [V]`.
    """
    values = z
    if record["temperature"] > 0:
        words = noise_words(record, len(z))
        values = (z - z.max()) / float(record["temperature"]) + gumbel(words)
    order = order_tokens(values)[:MAX_CANDIDATES]
    return order[np.isfinite(values[order])]


def row_candidates(logits: NDArray[np.float32], batch: SamplingBatch, s: int) -> NDArray[np.int32]:
    """Returns the candidates of row s of a batch, given its `logits [V]`, padded with -1."""
    token_ids = candidates(changed_logits(logits.astype(np.float64), s, batch), batch.records[s])
    return np.pad(
        token_ids.astype(np.int32), (0, MAX_CANDIDATES - len(token_ids)), constant_values=-1
    )


def scores(z: Floats, record: Record) -> Floats:
    """Returns d + g of each token of the changed logits `z [V]`, -inf for tokens not kept."""
    distances = kept_distances(z, record)
    return distances + gumbel(noise_words(record, len(z)))


def _choose(raw: Floats, s: int, batch: SamplingBatch, result: SampleResult) -> int | None:
    """Returns the row's token, or None if the row fails; stores its surprise."""
    record = batch.records[s]
    if record["target_id"] >= 0:
        return int(record["target_id"])
    z = changed_logits(raw, s, batch)
    if not np.isfinite(z.max()):
        return None
    if record["temperature"] == 0.0:
        return int(z.argmax())
    token = int(scores(z, record).argmax())
    if result.surprises is not None and record["mirostat_mode"] > 0:
        result.surprises[s] = surprise(kept_distances(z, record), token)
    return token


def changed_logits(raw: Floats, s: int, batch: SamplingBatch) -> Floats:
    """Returns row s's logits after bias, mask and penalties."""
    z, record = raw.copy(), batch.records[s]
    entries = slice(batch.bias_starts[s], batch.bias_starts[s + 1])
    np.add.at(z, batch.bias_ids[entries], batch.bias_values[entries].astype(np.float64))
    if record["allowed_mask"] >= 0:
        z[~unpacked_mask(batch.allowed_masks[record["allowed_mask"]], len(z))] = -np.inf
    entries = slice(batch.history_starts[s], batch.history_starts[s + 1])
    ids, counts = batch.history_ids[entries], batch.history_counts[entries].astype(np.float64)
    repetition = float(record["repetition_penalty"])
    seen = z[ids]
    seen = np.where(seen > 0, seen / repetition, seen * repetition)
    frequency, presence = float(record["frequency_penalty"]), float(record["presence_penalty"])
    z[ids] = seen - frequency * counts - presence * (counts > 0)
    return z


def _add_logprobs(result: SampleResult, logits: NDArray[np.float32], batch: SamplingBatch) -> None:
    """Sets the logprobs of every row that has not failed."""
    num_rows, vocab_size = logits.shape
    count = min(max(int(batch.records["num_logprobs"].max()), 0), vocab_size)
    result.logprobs, result.ranks = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
    result.top_ids = np.zeros((num_rows, count), np.int32)
    result.top_logprobs = np.zeros((num_rows, count), np.float32)
    for s in np.flatnonzero(~result.failed):
        raw, token = logits[s].astype(np.float64), result.token_ids[s]
        top = raw.max()
        logprobs = raw - (top + np.log(np.cumsum(np.exp(raw - top))[-1]))
        order = order_tokens(raw)
        result.logprobs[s] = logprobs[token]
        result.ranks[s] = 1 + int(np.flatnonzero(order == token)[0])
        result.top_ids[s] = order[:count]
        result.top_logprobs[s] = logprobs[order[:count]]


def disable_cutoffs(batch: SamplingBatch, without_cutoffs: NDArray[np.bool_]) -> SamplingBatch:
    """Returns a batch whose rows `without_cutoffs [S]` have no cut-offs.

    A cut-off proof shows that a row's cut-offs (min_p, top_k, top_p) keep a token that was sampled
    without them, regardless of the tokens that a mask removes.

    The sample without cut-offs has the largest score of all tokens; if it is allowed and the
    cut-offs keep it among the allowed ones, it is the masked sample. A mask only improves a token's
    rank, so min_p and top_k keep it if they keep it unmasked. For top_p, let X be the unmasked
    weight of all tokens ordered before the token, and R the weight of the token and of later tokens
    known to be allowed. If a part x of X is allowed, all allowed tokens together weigh at least x +
    R, and the token is kept if x < top_p (x + R). This holds for every x up to X if X (1 - top_p) <
    top_p R. The proof consists of the first few tokens after the token. Bounds include a margin
    larger than any rounding error.
    """
    records = batch.records.copy()
    for name, neutral in (("min_p", 0.0), ("top_k", 0), ("top_p", 1.0)):
        records[name][without_cutoffs] = neutral
    return replace(batch, records=records)


def find_cutoff_proof(
    z: NDArray[np.float64], record: Mapping[str, Any] | np.void, token: int
) -> list[int]:
    """Returns `token` and further tokens of the changed logits `z [V]`. If all of them are allowed,
    the cut-offs keep `token`. Returns [] if more than MAX_PROOF_TOKENS would be needed.
    """
    weights = np.exp((z - z.max()) / float(record["temperature"]))
    min_weight = float(record["min_p"]) * SURE
    top_k = int(record["top_k"]) or len(z)
    top_p = float(record["top_p"])
    before = z >= z[token]
    rank = int(before.sum()) - 1
    if weights[token] < min_weight or rank >= top_k:
        return []
    required_weight = (weights[before].sum() - weights[token]) * (1 - top_p) * SURE
    behind = np.flatnonzero(z < z[token])
    behind = behind[np.argsort(-z[behind], kind="stable")]
    proof = [token]
    known = float(weights[token])
    for follower in behind[: min(MAX_PROOF_TOKENS, top_k - rank) - 1].tolist():
        if required_weight < top_p * known:
            break
        if weights[follower] == 0 or weights[follower] < min_weight:
            return []
        proof.append(follower)
        known += float(weights[follower])
    return proof if required_weight < top_p * known else []
