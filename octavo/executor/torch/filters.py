"""The distribution and after_cutoff filters of `executor/filters.py` for all rows at once, in fp64.

Functions take z or weights `[S, V]` and records `[S, WORDS]`, and leave rows without the option
unchanged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.executor.filters import MIN_TEMPERATURE, MIROSTAT_TOKENS
from octavo.executor.noise import XTC_PURPOSE
from octavo.executor.torch.sampler_ops import field, noise_words


def apply_distribution_filters(
    z: Tensor, temperature: Tensor, records: Tensor
) -> tuple[Tensor, Tensor]:
    """Applies top_n_sigma, typical_p and dynamic temperature; returns z and temperatures
    `[S, 1]`.
    """
    z = _above_sigmas(z, _column(records, "top_n_sigma"))
    temperature = _dynamic_temperature(z, temperature, records)
    return _typical(z, temperature, _column(records, "typical_p")), temperature


def apply_xtc_mirostat(d: Tensor, weights: Tensor, records: Tensor) -> Tensor:
    """Applies XTC and mirostat; returns the remaining weights."""
    order = torch.where(weights > 0, d, -torch.inf).sort(dim=1, descending=True, stable=True)
    sorted_weights = weights.gather(1, order.indices)
    remaining = _without_top_choices(sorted_weights, records)
    remaining = _unsurprising(order.values, remaining, records)
    return torch.zeros_like(weights).scatter_(1, order.indices, remaining)


def surprises(weights: Tensor, tokens: Tensor) -> Tensor:
    """Returns the surprise in bits of `tokens [S]` under the given weights."""
    own = weights.gather(1, tokens[:, None])[:, 0]
    return (weights.sum(dim=1) / own).log2()


def _column(records: Tensor, name: str) -> Tensor:
    return field(records, name).double()[:, None]


def _above_sigmas(z: Tensor, num_sigmas: Tensor) -> Tensor:
    finite = z.isfinite()
    count = finite.sum(dim=1, keepdim=True)
    mean = torch.where(finite, z, 0.0).sum(dim=1, keepdim=True) / count
    squares = torch.where(finite, (z - mean) ** 2, 0.0).sum(dim=1, keepdim=True)
    lower_bound = z.amax(dim=1, keepdim=True) - num_sigmas * (squares / count).sqrt()
    return torch.where((num_sigmas <= 0) | (z >= lower_bound), z, -torch.inf)


def _entropy(d: Tensor, weights: Tensor) -> Tensor:
    """Returns the entropy in nats `[S, 1]` of each row's softmax."""
    total = weights.sum(dim=1, keepdim=True)
    sums = torch.where(weights > 0, weights * d, 0.0).sum(dim=1, keepdim=True)
    return total.log() - sums / total


def _dynamic_temperature(z: Tensor, temperature: Tensor, records: Tensor) -> Tensor:
    reach = _column(records, "dynatemp_range")
    d = z - z.amax(dim=1, keepdim=True)
    count = z.isfinite().sum(dim=1, keepdim=True)
    share = (_entropy(d, d.exp()) / count.double().log()).clamp(0.0, 1.0)
    low, high = (temperature - reach).clamp(min=MIN_TEMPERATURE), temperature + reach
    dynamic = low + (high - low) * share ** _column(records, "dynatemp_exponent")
    return torch.where((reach > 0) & (count > 1), dynamic, temperature)


def _typical(z: Tensor, temperature: Tensor, typical_p: Tensor) -> Tensor:
    d = (z - z.amax(dim=1, keepdim=True)) / temperature
    weights = d.exp()
    distances = (weights.sum(dim=1, keepdim=True).log() - d - _entropy(d, weights)).abs()
    distances = torch.where(weights > 0, distances, torch.inf)
    order = distances.sort(dim=1, stable=True).indices
    sums = weights.gather(1, order).cumsum(dim=1)
    before = torch.cat([torch.full_like(sums[:, :1], -1.0), sums[:, :-1]], dim=1)
    sorted_kept = before < typical_p * sums[:, -1:]
    is_kept = torch.zeros_like(sorted_kept).scatter_(1, order, sorted_kept) & (weights > 0)
    return torch.where((typical_p >= 1) | is_kept, z, -torch.inf)


def _without_top_choices(weights: Tensor, records: Tensor) -> Tensor:
    """Zeroes the sorted `weights` that XTC removes."""
    words = noise_words(records, 1, purpose=XTC_PURPOSE).double()
    throws = (words + 0.5) * 2.0**-32 < _column(records, "xtc_probability")
    p = weights / weights.sum(dim=1, keepdim=True)
    num_viable = (p >= _column(records, "xtc_threshold")).logical_and(weights > 0).sum(1, True)
    ranks = torch.arange(weights.shape[1], device=weights.device)
    return torch.where(throws & (ranks < num_viable - 1), 0.0, weights)


def _unsurprising(d: Tensor, weights: Tensor, records: Tensor) -> Tensor:
    """Zeroes the sorted `weights` that mirostat removes; d is sorted too."""
    modes, mu = field(records, "mirostat_mode")[:, None], _column(records, "mirostat_mu")
    first = (weights > 0).int().argmax(dim=1, keepdim=True)
    p = weights / weights.sum(dim=1, keepdim=True)
    bounded = (-p.log2() <= mu).logical_and(weights > 0).sum(dim=1, keepdim=True)
    num_tokens = torch.where(modes == 2, bounded, _zipf_counts(d, weights, first, mu)).clamp(min=1)
    ranks = torch.arange(weights.shape[1], device=weights.device)
    return torch.where((modes > 0) & (ranks >= first + num_tokens), 0.0, weights)


def _zipf_counts(d: Tensor, weights: Tensor, first: Tensor, mu: Tensor) -> Tensor:
    """Returns how many tokens yield a surprise of mu bits under Zipf's law, `[S, 1]`; see
    `executor/filters.py`.
    """
    vocab_size = d.shape[1]
    steps = torch.arange(min(MIROSTAT_TOKENS, vocab_size), device=d.device)
    indices = (first + steps).clamp(max=vocab_size - 1)
    present = (weights.gather(1, indices) > 0) & (first + steps < vocab_size)
    best = torch.where(present, d.gather(1, indices), 0.0)
    t = ((steps[1:] + 1) / steps[1:].double()).log()
    pairs = present[:, 1:] & present[:, :-1]
    products = torch.where(pairs, t * (best[:, :-1] - best[:, 1:]), 0.0).sum(1, True)
    exponent = products / torch.where(pairs, t * t, 0.0).sum(1, True)
    epsilon, log_vocab = exponent - 1, math.log(vocab_size)
    quotient = (epsilon / -torch.expm1(-epsilon * log_vocab)).log()
    quotient = torch.where(epsilon.abs() > 1e-9, quotient, -math.log(max(log_vocab, 1e-300)))
    log_count = (quotient + mu * math.log(2.0)) / exponent
    count = log_count.clamp(max=40.0).exp().clamp(max=float(vocab_size))
    count = torch.where(exponent > 0, count, float(vocab_size))
    return torch.where(pairs.any(dim=1, keepdim=True), count, 1.0).nan_to_num(1.0).long()
