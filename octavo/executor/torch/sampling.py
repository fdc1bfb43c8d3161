"""Samples tokens on the device for all rows at once, following `executor/sampling.py`.

Arithmetic is in fp64 and noise is a function of integers, so results equal the reference's. The
summation order may differ, which shifts the top_p boundary by about 1e-15. Logits are read in their
own dtype, and only copied to fp64 if a row changes them or needs its complete distribution.
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
from octavo.executor.torch.kernels import Kernels
from octavo.executor.torch.sampler_ops import field, make_keep_mask, record_words, weigh


@dataclass(frozen=True, slots=True)
class SamplingStages:
    """Sampling stages that any row of a step needs; others are skipped."""

    draws: bool
    cuts: bool
    """Whether a sampled row has top_k or top_p."""
    biased: bool
    masked: bool
    penalised: bool
    num_top: int
    """Top logprobs per row; -1 without logprobs."""
    narrows: bool = False
    """Whether a sampled row has a filter on the full distribution."""
    steers: bool = False
    """Whether a sampled row has XTC or mirostat, which apply after the cut-offs."""
    surprises: bool = False
    """Whether to return the tokens' surprises."""
    counts_last: bool = False
    """Whether a row's history lacks its last token, which only the device knows."""
    biased_after: bool = False
    """Whether a logit bias depends on that token."""

    @property
    def adjusts(self) -> bool:
        """Whether a row changes its logits."""
        return self.biased or self.masked or self.penalised

    @property
    def last_ids(self) -> bool:
        """Whether the last tokens sampled on the device are read."""
        return self.counts_last or self.biased_after


GREEDY = SamplingStages(
    draws=False, cuts=False, biased=False, masked=False, penalised=False, num_top=-1
)
"""Only the largest logit of each row."""


def get_sampling_stages(batch: SamplingBatch, vocab_size: int) -> SamplingStages:
    """Returns the stages that the rows of a batch need."""
    records = batch.records
    sampled = records[records["temperature"] > 0]
    num_top = int(records["num_logprobs"].max(initial=-1))
    asked = num_top >= 0 or bool((records["target_id"] >= 0).any())
    return SamplingStages(
        draws=len(sampled) > 0,
        cuts=_any(sampled["top_k"] > 0, sampled["top_p"] < 1),
        biased=len(batch.bias_ids) > 0,
        masked=bool((records["allowed_mask"] >= 0).any()),
        penalised=len(batch.history_ids) > 0,
        num_top=min(max(num_top, 0), vocab_size) if asked else -1,
        narrows=_has_filter(sampled, "distribution"),
        steers=_has_filter(sampled, "after_cutoff"),
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


def make_sampling_arrays(batch: SamplingBatch, stages: SamplingStages) -> dict[str, NDArray]:
    """Returns the arrays that `sample` reads, copied with the step's other arrays."""
    arrays: dict[str, NDArray] = {"records": record_words(batch.records)}
    if stages.biased:
        arrays |= {
            "bias_rows": _rows(batch.bias_starts),
            "bias_ids": batch.bias_ids,
            "bias_values": batch.bias_values,
        }
    if stages.biased_after:
        assert batch.bias_after is not None
        arrays["bias_after"] = batch.bias_after
    if stages.masked:
        arrays["allowed_masks"] = batch.allowed_masks.view(np.int32)
    if stages.penalised:
        arrays |= {
            "history_rows": _rows(batch.history_starts),
            "history_ids": batch.history_ids,
            "history_counts": batch.history_counts,
        }
    if stages.counts_last:
        assert batch.counts_last is not None
        arrays["counts_last"] = batch.counts_last.astype(np.int32)
    return arrays


def _rows(starts: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


@dataclass(frozen=True, slots=True, eq=False)
class SamplerOutput:
    """A `SampleResult` on the device."""

    token_ids: Tensor
    failed: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Token logprobs, token ranks, top ids and top logprobs."""
    surprises: Tensor | None = None
    """Surprise in bits `[S]`, if requested."""


def sample(
    logits: Tensor, inputs: dict[str, Tensor], stages: SamplingStages, kernels: Kernels
) -> SamplerOutput:
    """Samples a token of each row of `logits [S, V]`; `inputs` are from `make_sampling_arrays`."""
    if stages == GREEDY:
        return _largest(logits)
    records = inputs["records"]
    # `max` treats NaN as the largest number.
    top, tokens = logits.max(dim=1)
    failed, z = top.isnan(), logits
    if stages.adjusts:
        z = _adjust_logits(logits.double(), inputs, stages)
        top, tokens = z.max(dim=1)
    bits = torch.zeros_like(top, dtype=torch.float64) if stages.surprises else None
    if stages.draws:
        sampled, weights = _sample_tokens(z, top, records, stages, kernels)
        tokens = torch.where(field(records, "temperature") > 0, sampled, tokens)
        if weights is not None and stages.surprises:
            bits = filters.surprises(weights, tokens)
    targets = field(records, "target_id").long()
    failed = failed | (~top.isfinite() & (targets < 0))
    tokens = torch.where(targets >= 0, targets, tokens).masked_fill(failed, 0)
    logprobs = None if stages.num_top < 0 else _logprobs(logits, tokens, stages.num_top, kernels)
    return SamplerOutput(tokens, failed, logprobs, bits)


def _largest(logits: Tensor) -> SamplerOutput:
    """Picks the largest logit of each row in one pass."""
    top, tokens = logits.max(dim=1)
    failed = ~top.isfinite()
    return SamplerOutput(tokens.masked_fill(failed, 0), failed, None)


def _adjust_logits(z: Tensor, inputs: dict[str, Tensor], stages: SamplingStages) -> Tensor:
    """Applies bias, mask and penalties; z is overwritten."""
    records = inputs["records"]
    if stages.biased:
        rows, values = inputs["bias_rows"], inputs["bias_values"].double()
        if stages.biased_after:
            after = inputs["bias_after"]
            values = values.masked_fill((after >= 0) & (after != inputs["last_ids"][rows]), 0.0)
        z.index_put_((rows, inputs["bias_ids"].long()), values, accumulate=True)
    if stages.masked:
        allowed = field(records, "allowed_mask").long()
        bits = _bits(inputs["allowed_masks"][allowed.clamp(min=0)], z.shape[1])
        z.masked_fill_(~bits & (allowed >= 0)[:, None], -torch.inf)
    if stages.penalised:
        _penalise(z, inputs, stages)
    return z


def _penalise(z: Tensor, inputs: dict[str, Tensor], stages: SamplingStages) -> None:
    """Applies history penalties to z in place.

    A last token known only to the device is added to its history count, or counted separately if it
    is not in the history.
    """
    rows, ids = inputs["history_rows"], inputs["history_ids"].long()
    counts = inputs["history_counts"]
    if not stages.counts_last:
        z[rows, ids] = _penalize(z[rows, ids], rows, counts, inputs["records"])
        return
    last, counts_last = inputs["last_ids"].long(), inputs["counts_last"]
    is_last = (ids == last[rows]).int() * counts_last[rows]
    z[rows, ids] = _penalize(z[rows, ids], rows, counts + is_last, inputs["records"])
    is_new = counts_last - torch.zeros_like(counts_last).index_add_(0, rows, is_last)
    every = torch.arange(len(z), device=z.device)
    own = z[every, last]
    alone = _penalize(own, every, is_new, inputs["records"])
    z[every, last] = torch.where(is_new > 0, alone, own)


def _penalize(seen: Tensor, rows: Tensor, counts: Tensor, records: Tensor) -> Tensor:
    """Returns penalized logits `[N]` of tokens in `rows [N]` that occurred `counts [N]` times."""
    repetition, presence, frequency = (
        field(records, f"{name}_penalty").double()[rows]
        for name in ("repetition", "presence", "frequency")
    )
    times = counts.double()
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    return seen - frequency * times - presence * (times > 0)


def _bits(words: Tensor, vocab_size: int) -> Tensor:
    """Unpacks `words [S, ceil(V / 32)] int32` to booleans `[S, V]`."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    bits = (words[:, :, None] >> shifts) & 1
    return bits.view(len(words), -1)[:, :vocab_size].bool()


def _sample_tokens(
    z: Tensor, top: Tensor, records: Tensor, stages: SamplingStages, kernels: Kernels
) -> tuple[Tensor, Tensor | None]:
    """Returns a sampled token per row `[S]`, undefined at temperature 0 and for failed rows, and
    the candidates' weights `[S, V]` if `stages.steers`. `top [S]` is the largest of `z [S, V]`.
    """
    temperature, top = field(records, "temperature").double(), top.double()
    temperature = torch.where(temperature > 0, temperature, 1.0)
    if stages.narrows:
        z, columns = filters.apply_distribution_filters(z.double(), temperature[:, None], records)
        temperature, top = columns[:, 0], z.amax(dim=1)
    if not stages.steers:
        return kernels.pick(z, top, temperature, records, cuts=stages.cuts), None
    d, weights = weigh(z, top, temperature, records)
    if stages.cuts:
        weights = torch.where(make_keep_mask(d, weights, records), weights, 0.0)
    weights = filters.apply_xtc_mirostat(d, weights, records)
    z = torch.where(weights > 0, z, -torch.inf)
    return kernels.pick(z, top, temperature, records, cuts=False), weights


def _logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the tuple of `Drawn.logprobs`."""
    top = logits.amax(dim=1, keepdim=True).double()
    log_total = top + kernels.sums(logits.double().sub_(top).exp_())[:, None].log()
    own = tokens[:, None]
    own_logits, ids = logits.gather(1, own), torch.arange(logits.shape[1], device=logits.device)
    before = (logits > own_logits) | ((logits == own_logits) & (ids < own))
    best = tokens.new_zeros(len(logits), 0)
    if num_top:
        best = logits.sort(dim=1, descending=True, stable=True).indices[:, :num_top]

    def logprobs(chosen: Tensor) -> Tensor:
        return (chosen.double() - log_total).float()

    ranks = 1 + before.sum(dim=1)
    return logprobs(own_logits)[:, 0], ranks, best, logprobs(logits.gather(1, best))


def join_results(parts: list[SamplerOutput]) -> SampleResult:
    """Joins the parts of a step into one result on the host."""
    result = SampleResult(
        torch.cat([part.token_ids for part in parts]).int().cpu().numpy(),
        torch.cat([part.failed for part in parts]).cpu().numpy(),
    )
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    if logprobs:
        result.logprobs = torch.cat([part[0] for part in logprobs]).cpu().numpy()
        result.ranks = torch.cat([part[1] for part in logprobs]).int().cpu().numpy()
        result.top_ids = torch.cat([part[2] for part in logprobs]).int().cpu().numpy()
        result.top_logprobs = torch.cat([part[3] for part in logprobs]).cpu().numpy()
    bits = [part.surprises for part in parts if part.surprises is not None]
    if bits:
        result.surprises = torch.cat(bits).float().cpu().numpy()
    return result
