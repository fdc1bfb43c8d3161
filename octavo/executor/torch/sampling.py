"""Draws tokens on the device, for all rows at once, after the text of `executor/sampling.py`.

All arithmetic is in fp64, as there, and a token's noise is a function of integers, so draws are the
reference's. Sums may be added in another order, which moves the border of top_p by some 1e-15 of
the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.api.sampling_options import FilterKind
from octavo.api.sampling_params import OPTIONS
from octavo.executor.batch import SampleResult, SamplingBatch
from octavo.executor.torch import filters
from octavo.executor.torch.draws import field, kept, record_words
from octavo.executor.torch.kernels import Kernels


@dataclass(frozen=True, slots=True)
class Wants:
    """The steps of a draw that any row needs; the others are not computed."""

    draws: bool
    cuts: bool
    """Whether a row that draws has top_k or top_p."""
    biased: bool
    masked: bool
    penalised: bool
    num_top: int
    """Top alternatives of each row; -1 without logprobs."""
    narrows: bool = False
    """Whether a row that draws has a filter that looks at the whole distribution."""
    steers: bool = False
    """Whether one has XTC or mirostat, which look at what the cuts leave."""
    surprises: bool = False
    """Whether the tokens' surprises go back."""
    counts_last: bool = False
    """Whether a row's history lacks the last token that the device has drawn for it."""
    biased_after: bool = False
    """Whether what is added to logits depends on that token."""

    @property
    def last_ids(self) -> bool:
        """Whether the tokens are read that the device has drawn last."""
        return self.counts_last or self.biased_after


GREEDY = Wants(draws=False, cuts=False, biased=False, masked=False, penalised=False, num_top=-1)
"""Only the largest logit of each row."""


def wants_of(batch: SamplingBatch, vocab_size: int) -> Wants:
    """Returns what the rows of a batch need."""
    records = batch.records
    drawn = records[records["temperature"] > 0]
    most = int(records["num_logprobs"].max(initial=-1))
    asked = most >= 0 or bool((records["target_id"] >= 0).any())
    return Wants(
        draws=len(drawn) > 0,
        cuts=_any(drawn["top_k"] > 0, drawn["top_p"] < 1),
        biased=len(batch.bias_ids) > 0,
        masked=bool((records["allowed_mask"] >= 0).any()),
        penalised=len(batch.history_ids) > 0,
        num_top=min(max(most, 0), vocab_size) if asked else -1,
        narrows=_has_filter(drawn, "distribution"),
        steers=_has_filter(drawn, "after_cutoff"),
        surprises=_any(records["mirostat_mode"] > 0),
        counts_last=batch.counts_last is not None and _any(batch.counts_last),
        biased_after=batch.bias_after is not None and _any(batch.bias_after >= 0),
    )


def _has_filter(records: NDArray[np.void], kind: FilterKind) -> bool:
    return _any(
        *(
            records[name] != option.default
            for name, option in OPTIONS.record.items()
            if option.filter == kind
        )
    )


def _any(*asked: NDArray[np.bool_]) -> bool:
    return any(bool(rows.any()) for rows in asked)


def draw_arrays(batch: SamplingBatch, wants: Wants) -> dict[str, NDArray]:
    """Returns what `draw` reads, to be copied to the device with the step's other arrays."""
    arrays: dict[str, NDArray] = {"records": record_words(batch.records)}
    if wants.biased:
        arrays |= {
            "bias_rows": _rows(batch.bias_starts),
            "bias_ids": batch.bias_ids,
            "bias_values": batch.bias_values,
        }
    if wants.biased_after:
        assert batch.bias_after is not None
        arrays["bias_after"] = batch.bias_after
    if wants.masked:
        arrays["allowed_masks"] = batch.allowed_masks.view(np.int32)
    if wants.penalised:
        arrays |= {
            "history_rows": _rows(batch.history_starts),
            "history_ids": batch.history_ids,
            "history_counts": batch.history_counts,
        }
    if wants.counts_last:
        assert batch.counts_last is not None
        arrays["counts_last"] = batch.counts_last.astype(np.int32)
    return arrays


def _rows(starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns the row that each entry belongs to."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """A `SampleResult` on the device."""

    token_ids: Tensor
    failed: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Logprobs of the tokens, their ranks, the ids of the top list and its logprobs."""
    surprises: Tensor | None = None
    """Bits of surprise `[S]`, where the step wants them."""


def draw(logits: Tensor, inputs: dict[str, Tensor], wants: Wants, kernels: Kernels) -> Drawn:
    """Draws a token of each row of `logits [S, V]`; `inputs` are `draw_arrays` on the device."""
    if wants == GREEDY:
        return _largest(logits)
    records = inputs["records"]
    logits = logits.float()
    failed = logits.isnan().any(dim=1)
    z = _changed(logits.double(), inputs, wants)
    top, tokens = z.amax(dim=1), z.argmax(dim=1)
    bits: Tensor | None = torch.zeros_like(top) if wants.surprises else None
    if wants.draws:
        drawn, weights = _drawn(z, records, wants, kernels)
        tokens = torch.where(field(records, "temperature") > 0, drawn, tokens)
        bits = filters.surprises(weights, tokens) if wants.surprises else None
    targets = field(records, "target_id").long()
    failed = failed | (~top.isfinite() & (targets < 0))
    tokens = torch.where(targets >= 0, targets, tokens).masked_fill(failed, 0)
    found = None if wants.num_top < 0 else _logprobs(logits, tokens, wants.num_top, kernels)
    return Drawn(tokens, failed, found, bits)


def _largest(logits: Tensor) -> Drawn:
    """Draws the largest logit of each row in one pass over the logits as they are.

    It is what fp64 gives, too, and `max` takes a NaN for larger than any number.
    """
    top, tokens = logits.max(dim=1)
    failed = ~top.isfinite()
    return Drawn(tokens.masked_fill(failed, 0), failed, None)


def _changed(z: Tensor, inputs: dict[str, Tensor], wants: Wants) -> Tensor:
    """Returns the logits after bias, mask and penalties; z is overwritten."""
    records = inputs["records"]
    if wants.biased:
        rows, values = inputs["bias_rows"], inputs["bias_values"].double()
        if wants.biased_after:
            after = inputs["bias_after"]
            values = values.masked_fill((after >= 0) & (after != inputs["last_ids"][rows]), 0.0)
        z.index_put_((rows, inputs["bias_ids"].long()), values, accumulate=True)
    if wants.masked:
        allowed = field(records, "allowed_mask").long()
        bits = _bits(inputs["allowed_masks"][allowed.clamp(min=0)], z.shape[1])
        z.masked_fill_(~bits & (allowed >= 0)[:, None], -torch.inf)
    if wants.penalised:
        _penalise(z, inputs, wants)
    return z


def _penalise(z: Tensor, inputs: dict[str, Tensor], wants: Wants) -> None:
    """Penalises tokens of the rows' histories in z. A last token that the device alone knows counts
    with those of its history, or by itself where this does not have it.
    """
    rows, ids = inputs["history_rows"], inputs["history_ids"].long()
    counts = inputs["history_counts"]
    if not wants.counts_last:
        z[rows, ids] = _penalised(z[rows, ids], rows, counts, inputs["records"])
        return
    last, counts_last = inputs["last_ids"].long(), inputs["counts_last"]
    is_last = (ids == last[rows]).int() * counts_last[rows]
    z[rows, ids] = _penalised(z[rows, ids], rows, counts + is_last, inputs["records"])
    is_new = counts_last - torch.zeros_like(counts_last).index_add_(0, rows, is_last)
    every = torch.arange(len(z), device=z.device)
    own = z[every, last]
    alone = _penalised(own, every, is_new, inputs["records"])
    z[every, last] = torch.where(is_new > 0, alone, own)


def _penalised(seen: Tensor, rows: Tensor, counts: Tensor, records: Tensor) -> Tensor:
    """Returns logits `[N]` of tokens of `rows [N]` that were generated `counts [N]` times."""
    repetition, presence, frequency = (
        field(records, f"{name}_penalty").double()[rows]
        for name in ("repetition", "presence", "frequency")
    )
    times = counts.double()
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    return seen - frequency * times - presence * (times > 0)


def _bits(words: Tensor, vocab_size: int) -> Tensor:
    """Returns the bits of `words [S, ceil(V / 32)] int32` as booleans `[S, V]`."""
    places = torch.arange(32, device=words.device, dtype=torch.int32)
    bits = (words[:, :, None] >> places) & 1
    return bits.view(len(words), -1)[:, :vocab_size].bool()


def _drawn(z: Tensor, records: Tensor, wants: Wants, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Returns a token of each row `[S]` and the weights of those that could be drawn `[S, V]`,
    without meaning at temperature 0 and where the row fails.
    """
    temperature = field(records, "temperature").double()[:, None]
    temperature = torch.where(temperature > 0, temperature, 1.0)
    if wants.narrows:
        z, temperature = filters.narrowed(z, temperature, records)
    d = (z - z.amax(dim=1, keepdim=True)) / temperature
    weights = torch.exp(d)
    least = field(records, "min_p").double()[:, None]
    weights = torch.where(weights >= least, weights, 0.0)
    if not wants.steers:
        return kernels.pick(d, weights, records, cuts=wants.cuts), weights
    if wants.cuts:
        weights = torch.where(kept(d, weights, records), weights, 0.0)
    weights = filters.steered(d, weights, records)
    return kernels.pick(d, weights, records, cuts=False), weights


def _logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns what `Drawn.logprobs` holds."""
    raw = logits.double()
    top = raw.amax(dim=1, keepdim=True)
    logprobs = raw - (top + kernels.sums(torch.exp(raw - top))[:, None].log())
    own = tokens[:, None]
    own_logits, ids = raw.gather(1, own), torch.arange(raw.shape[1], device=raw.device)
    before = (raw > own_logits) | ((raw == own_logits) & (ids < own))
    best = raw.new_zeros(len(raw), 0).long()
    if num_top:
        best = raw.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
    ranks = 1 + before.sum(dim=1)
    return logprobs.gather(1, own)[:, 0].float(), ranks, best, logprobs.gather(1, best).float()


def result_of(parts: list[Drawn]) -> SampleResult:
    """Returns the parts of a step as one result on the host."""
    result = SampleResult(
        torch.cat([part.token_ids for part in parts]).int().cpu().numpy(),
        torch.cat([part.failed for part in parts]).cpu().numpy(),
    )
    found = [part.logprobs for part in parts if part.logprobs is not None]
    if found:
        result.logprobs = torch.cat([part[0] for part in found]).cpu().numpy()
        result.ranks = torch.cat([part[1] for part in found]).int().cpu().numpy()
        result.top_ids = torch.cat([part[2] for part in found]).int().cpu().numpy()
        result.top_logprobs = torch.cat([part[3] for part in found]).cpu().numpy()
    bits = [part.surprises for part in parts if part.surprises is not None]
    if bits:
        result.surprises = torch.cat(bits).float().cpu().numpy()
    return result
