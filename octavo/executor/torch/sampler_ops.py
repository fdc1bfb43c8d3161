"""Last sampling stages in plain PyTorch: weights, top_k/top_p selection and noise.

Follows `executor/filters.py` and `executor/noise.py` in fp64. PyTorch has no multiplication of
unsigned 32-bit integers, so words are int64.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.executor.batch import SAMPLING_RECORD
from octavo.executor.noise import (
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
    SAMPLE_PURPOSE,
)

MASK32 = 0xFFFFFFFF


WORDS = SAMPLING_RECORD.itemsize // 4
"""32-bit words in a sampling record."""


def record_words(records: NDArray[np.void]) -> NDArray[np.int32]:
    """Views records `[S]` as `[S, WORDS]`, because PyTorch has no structured dtypes."""
    return records.view(np.int32).reshape(len(records), WORDS)


def get_word_index(name: str) -> int:
    """Returns the word index of a field in a sampling record."""
    fields = SAMPLING_RECORD.fields
    assert fields is not None
    return fields[name][1] // 4


def field(records: Tensor, name: str) -> Tensor:
    """Returns a 32-bit field `[S]` of `records [S, WORDS] int32`."""
    column = records[:, get_word_index(name)]
    return column.view(torch.float32) if SAMPLING_RECORD[name].kind == "f" else column


def weigh(z: Tensor, top: Tensor, temperature: Tensor, records: Tensor) -> tuple[Tensor, Tensor]:
    """Returns d = (z - top) / temperature and the weights exp(d) of the tokens that min_p keeps, 0
    for others, both `[S, V] fp64`, from `z [S, V]`, `top` and `temperature [S] fp64`.
    """
    d = (z.double() - top[:, None]) / temperature[:, None]
    weights = torch.exp(d)
    min_p = field(records, "min_p").double()[:, None]
    return d, torch.where(weights >= min_p, weights, 0.0)


def make_keep_mask(d: Tensor, weights: Tensor, records: Tensor) -> Tensor:
    """Returns which weighted tokens `[S, V]` top_k and top_p keep."""
    top_ks = field(records, "top_k").long()[:, None]
    top_ps = field(records, "top_p").double()[:, None]
    weighed = weights > 0
    order = torch.where(weighed, d, -torch.inf).sort(dim=1, descending=True, stable=True).indices
    best = weighed.gather(1, order)
    best &= (top_ks <= 0) | (torch.arange(d.shape[1], device=d.device) < top_ks)
    sums = torch.where(best, weights.gather(1, order), 0.0).cumsum(dim=1)
    before = torch.cat([torch.full_like(sums[:, :1], -1.0), sums[:, :-1]], dim=1)
    best &= (top_ps >= 1) | (before < top_ps * sums[:, -1:])
    return torch.zeros_like(weighed).scatter_(1, order, best)


def noise_words(records: Tensor, vocab_size: int, *, purpose: int = SAMPLE_PURPOSE) -> Tensor:
    """Returns the random word of each token, `[S, V] int64`."""
    seed, position, sample = (get_word_index(name) for name in ("seed", "position", "sample_index"))
    quads = torch.arange(-(-vocab_size // 4), device=records.device)
    words = _philox(
        key=(_word(records, seed), _word(records, seed + 1)),
        counter=(
            _word(records, position),
            _word(records, sample),
            quads,
            torch.full_like(quads, purpose),
        ),
    )
    return torch.stack(words, dim=2).view(len(records), -1)[:, :vocab_size]


def gumbel(words: Tensor) -> Tensor:
    """Returns Gumbel noise -ln(-ln u) with u = (word + 1/2) / 2^32, in fp64."""
    u, rest = (words.double() + 0.5) * 2.0**-32, ((MASK32 - words).double() + 0.5) * 2.0**-32
    return -torch.where(u > 0.5, -torch.log1p(-rest), -torch.log(u)).log()


def _word(records: Tensor, word_index: int) -> Tensor:
    """Returns a word of each record as a column `[S, 1] int64`."""
    return records[:, word_index, None].long() & MASK32


def _philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, ...]) -> list[Tensor]:
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(PHILOX_ROUNDS):
        p0, p1 = int(PHILOX_MULTIPLIERS[0]) * c0, int(PHILOX_MULTIPLIERS[1]) * c2
        c0, c1 = ((p1 >> 32) & MASK32) ^ c1 ^ k0, p1 & MASK32
        c2, c3 = ((p0 >> 32) & MASK32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + int(PHILOX_WEYL[0])) & MASK32, (k1 + int(PHILOX_WEYL[1])) & MASK32
    return [c0, c1, c2, c3]
