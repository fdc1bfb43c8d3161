"""Draws tokens on the device, for all rows at once, after the text of `backends/sampling.py`.

All arithmetic is in fp64, as there; Philox's numbers come from the host, where seeds and positions
are known: they are the same on every backend. Sums may be added in another order than the
reference's, which moves a draw's borders by some 1e-15.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.backends.batch import SampleResult, SamplingBatch
from octavo.backends.sampling import MASK32, PHILOX_MULTIPLIERS, PHILOX_WEYL
from octavo.backends.torch.kernels import Kernels
from octavo.backends.torch.plain import Cuts

ROW_COLUMNS = (
    "temperatures",
    "top_ks",
    "top_ps",
    "min_ps",
    "seeds",
    "sample_indices",
    "positions",
    "target_ids",
    "num_logprobs",
    "repetition_penalties",
    "presence_penalties",
    "frequency_penalties",
    "allowed",
)


@dataclass(frozen=True, slots=True)
class Wants:
    """Which steps of the text the rows ask for at all: what none asks for is not computed."""

    draws: bool
    cuts: bool
    """Of top_k or top_p."""
    biased: bool
    masked: bool
    penalised: bool
    num_top: int
    """-1: no logprobs."""


GREEDY = Wants(draws=False, cuts=False, biased=False, masked=False, penalised=False, num_top=-1)
"""The largest logit of each row, and nothing else."""


def part_of(batch: SamplingBatch, rows: slice) -> SamplingBatch:
    """Neighbouring rows of a batch."""
    columns: dict[str, NDArray] = {name: getattr(batch, name)[rows] for name in ROW_COLUMNS}
    for kind, names in {
        "bias": ("bias_ids", "bias_values"),
        "history": ("history_ids", "history_counts"),
    }.items():
        starts = getattr(batch, f"{kind}_starts")[rows.start : rows.stop + 1]
        columns |= {name: getattr(batch, name)[starts[0] : starts[-1]] for name in names}
        columns[f"{kind}_starts"] = starts - starts[0]
    return SamplingBatch(**columns, allowed_masks=batch.allowed_masks)


def wants_of(batch: SamplingBatch, vocab_size: int) -> Wants:
    wanted = batch.temperatures > 0
    asked = len(batch.seeds) > 0 and (
        int(batch.num_logprobs.max()) >= 0 or int(batch.target_ids.max()) >= 0
    )
    return Wants(
        draws=bool(wanted.any()),
        cuts=bool((wanted & ((batch.top_ks > 0) | (batch.top_ps < 1))).any()),
        biased=len(batch.bias_ids) > 0,
        masked=bool((batch.allowed >= 0).any()),
        penalised=len(batch.history_ids) > 0,
        num_top=min(max(int(batch.num_logprobs.max()), 0), vocab_size) if asked else -1,
    )


def draw_arrays(batch: SamplingBatch, wants: Wants) -> dict[str, NDArray]:
    """What `draw` reads, to be copied to the device with the step's other arrays."""
    arrays: dict[str, NDArray] = {"target_ids": batch.target_ids}
    if wants.draws:
        arrays |= {
            "temperatures": batch.temperatures,
            "min_ps": batch.min_ps,
            "uniforms": uniforms(batch),
        }
    if wants.cuts:
        arrays |= {"top_ks": batch.top_ks, "top_ps": batch.top_ps}
    if wants.biased:
        arrays |= {
            "bias_rows": _rows(batch.bias_starts),
            "bias_ids": batch.bias_ids,
            "bias_values": batch.bias_values,
        }
    if wants.masked:
        arrays |= {"allowed": batch.allowed, "allowed_masks": batch.allowed_masks}
    if wants.penalised:
        arrays |= {
            "history_rows": _rows(batch.history_starts),
            "history_ids": batch.history_ids,
            "history_counts": batch.history_counts,
        }
        arrays |= {
            name: getattr(batch, f"{name}_penalties")
            for name in ("repetition", "presence", "frequency")
        }
    return arrays


def _rows(starts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Which row each entry belongs to."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def uniforms(batch: SamplingBatch) -> NDArray[np.float64]:
    """`[S]`: each row's number in [0, 1), `sampling.uniform` for all rows at once."""
    c0, c1 = batch.positions.astype(np.uint64), batch.sample_indices.astype(np.uint64)
    c2 = c3 = np.zeros_like(c0)
    mask, half = np.uint64(MASK32), np.uint64(32)
    k0, k1 = batch.seeds & mask, batch.seeds >> half
    for _ in range(10):
        p0, p1 = np.uint64(PHILOX_MULTIPLIERS[0]) * c0, np.uint64(PHILOX_MULTIPLIERS[1]) * c2
        c0, c1, c2, c3 = (p1 >> half) ^ c1 ^ k0, p1 & mask, (p0 >> half) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + np.uint64(PHILOX_WEYL[0])) & mask, (k1 + np.uint64(PHILOX_WEYL[1])) & mask
    bits: NDArray[np.uint64] = (c0 << np.uint64(21)) | (c1 >> np.uint64(11))
    return bits.astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """`SampleResult` on the device."""

    token_ids: Tensor
    failed: Tensor
    logprobs: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """The tokens' own, their ranks, the best ids and theirs."""


def draw(logits: Tensor, inputs: dict[str, Tensor], wants: Wants, kernels: Kernels) -> Drawn:
    """`logits [S, V]`, `inputs`: `draw_arrays` on the device."""
    if wants == GREEDY:
        return _largest(logits)
    logits = logits.float()
    failed = logits.isnan().any(dim=1)
    z = _adjusted(logits.double(), inputs, wants)
    unbounded = ~z.amax(dim=1).isfinite()
    tokens = z.argmax(dim=1)
    if wants.draws:
        tokens = torch.where(inputs["temperatures"] > 0, _drawn(z, inputs, wants, kernels), tokens)
    targets = inputs["target_ids"].long()
    failed = failed | (unbounded & (targets < 0))
    tokens = torch.where(targets >= 0, targets, tokens).masked_fill(failed, 0)
    return Drawn(
        tokens,
        failed,
        None if wants.num_top < 0 else _logprobs(logits, tokens, wants.num_top, kernels),
    )


def _largest(logits: Tensor) -> Drawn:
    """One pass over the logits as they are: to fp64 and back they stay the same, and a NaN is
    larger than any number.
    """
    top, tokens = logits.max(dim=1)
    failed = ~top.isfinite()
    return Drawn(tokens.masked_fill(failed, 0), failed, None)


def _adjusted(z: Tensor, inputs: dict[str, Tensor], wants: Wants) -> Tensor:
    """The logits after bias, mask and penalties; z is written over."""
    if wants.biased:
        z.index_put_(
            (inputs["bias_rows"], inputs["bias_ids"].long()),
            inputs["bias_values"].double(),
            accumulate=True,
        )
    if wants.masked:
        allowed = inputs["allowed"].long()
        banned = ~inputs["allowed_masks"][allowed.clamp(min=0)] & (allowed >= 0)[:, None]
        z.masked_fill_(banned, -torch.inf)
    if wants.penalised:
        rows, ids = inputs["history_rows"], inputs["history_ids"].long()
        repetition, presence, frequency = (
            inputs[name].double()[rows] for name in ("repetition", "presence", "frequency")
        )
        seen, counts = z[rows, ids], inputs["history_counts"].double()
        seen = torch.where(seen > 0, seen / repetition, seen * repetition)
        z[rows, ids] = seen - frequency * counts - presence * (counts > 0)
    return z


def _drawn(z: Tensor, inputs: dict[str, Tensor], wants: Wants, kernels: Kernels) -> Tensor:
    """`[S]`; means nothing in rows of temperature 0 and in failed ones."""
    temperatures = inputs["temperatures"].double()
    z = z / torch.where(temperatures > 0, temperatures, 1.0)[:, None]
    weights = torch.exp(z - z.amax(dim=1, keepdim=True))
    weights = torch.where(weights >= inputs["min_ps"].double()[:, None], weights, 0.0)
    cuts = Cuts(inputs["top_ks"], inputs["top_ps"]) if wants.cuts else Cuts(None, None)
    return kernels.pick(z, weights, inputs["uniforms"], cuts)


def _logprobs(
    logits: Tensor, tokens: Tensor, num_top: int, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    raw = logits.double()
    top = raw.amax(dim=1, keepdim=True)
    logprobs = raw - (top + kernels.sums(torch.exp(raw - top))[:, None].log())
    own = tokens[:, None]
    ranks = 1 + (raw > raw.gather(1, own)).sum(dim=1)
    best = (
        raw.sort(dim=1, descending=True, stable=True).indices[:, :num_top]
        if num_top
        else raw.new_zeros(len(raw), 0).long()
    )
    return logprobs.gather(1, own)[:, 0].float(), ranks, best, logprobs.gather(1, best).float()


def result_of(parts: list[Drawn]) -> SampleResult:
    """On the host."""
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
    return result
