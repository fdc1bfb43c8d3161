"""Random attention calls, with which tests compare sets of kernels. Everything that no row may see
is NaN: unused slots, the block that tables name where they have none, the queries of padded rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.torch.attention.call import AttentionCall, Bias
from octavo.executor.torch.attention.query_rows import make_query_rows
from octavo.executor.torch.attention.sdpa import Sdpa
from octavo.executor.torch.kv_cache import CODES, KvTensor
from octavo.executor.torch.step import step_arrays
from octavo.executor.torch.triton.attention import TritonAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FAR = 8
"""Distance from which the bias by distance is constant."""


@dataclass(frozen=True)
class Case:
    """An attention call's shape and attributes."""

    requests: tuple[tuple[int, int], ...] = ((1, 300), (5, 270), (40, 40), (1, 17), (7, 520))
    """Rows and context of each request; its rows are the last of its context."""
    heads: int = 4
    kv_heads: int = 2
    k_width: int = 24
    v_width: int = 24
    window: int | None = None
    chunks: bool = False
    """Whether `window` is the length of a chunk."""
    full: bool = False
    softcap: float | None = None
    sinks: bool = False
    bias: str | None = None
    kv: torch.dtype = torch.float32
    dtype: torch.dtype = torch.float32
    pad: int = 3
    latent: bool = False
    """Whether values are the first columns of the keys."""

    @cached_property
    def batch(self) -> StepBatch:
        starts = np.cumsum([0, *(rows for rows, _ in self.requests)]).astype(np.int32)
        at = [np.arange(context - rows, context) for rows, context in self.requests]
        blocks = [-(-context // BLOCK_SIZE) for _, context in self.requests]
        tables = np.full((1, len(blocks), max(blocks, default=0)), -1, np.int32)
        free = iter(np.random.default_rng(1).permutation(sum(blocks)) + 1)
        for request, count in enumerate(blocks):
            tables[0, request, :count] = [next(free) for _ in range(count)]
        num_rows = int(starts[-1])
        key_indices = np.concatenate([*at, np.zeros(self.pad, np.int64)]).astype(np.int32)
        return StepBatch(
            token_ids=np.zeros(num_rows + self.pad, np.int32),
            key_indices=key_indices,
            positions=key_indices[None],
            query_starts=starts,
            context_lens=np.array([[context for _, context in self.requests]], np.int32).reshape(
                1, -1
            ),
            slots=np.concatenate([np.zeros(num_rows), np.full(self.pad, -1)])[None].astype(
                np.int32
            ),
            block_tables=tables,
            sample_rows=np.arange(num_rows, dtype=np.int32),
        )

    @property
    def num_blocks(self) -> int:
        return sum(-(-context // BLOCK_SIZE) for _, context in self.requests) + 1

    def stored(self, width: int, generator: torch.Generator) -> KvTensor:
        """Returns keys or values `[blocks + 1, 16, K, width]`, NaN where no request has a key."""
        shape = (self.num_blocks + 1, BLOCK_SIZE, self.kv_heads)
        rows = torch.randn((*shape, width), generator=generator)
        written = torch.zeros(shape[:2], dtype=torch.bool)
        for request, (_, context) in enumerate(self.requests):
            at = np.arange(context)
            written[self.batch.block_tables[0, request][at // BLOCK_SIZE], at % BLOCK_SIZE] = True
        rows[~written] = torch.nan
        if self.kv not in CODES:
            return KvTensor(rows.to(self.kv).to(DEVICE))
        made = KvTensor(
            torch.zeros(rows.shape, dtype=self.kv), torch.zeros(shape, dtype=torch.bfloat16)
        )
        made.write(torch.arange(shape[0] * BLOCK_SIZE), rows.flatten(0, 1))
        assert made.scales is not None
        return KvTensor(made.numbers.to(DEVICE), made.scales.to(DEVICE))

    @cached_property
    def call(self) -> AttentionCall:
        generator = torch.Generator().manual_seed(0)
        k = self.stored(self.k_width, generator)
        q = torch.randn((len(self.batch.token_ids), self.heads, self.k_width), generator=generator)
        q[len(self.batch.sample_rows) :] = torch.nan
        inputs = {
            name: torch.from_numpy(array).to(DEVICE)
            for name, array in step_arrays(self.batch, [self.num_blocks]).items()
        }
        return AttentionCall(
            op=None,  # type: ignore[arg-type]  # kernels read the call
            q=q.to(self.dtype).to(DEVICE),
            k=k,
            v=k if self.latent else self.stored(self.v_width, generator),
            block_tables=inputs["block_tables"][0],
            context_lens=inputs["context_lens"][0],
            key_indices=inputs["key_indices"],
            inputs=inputs,
            group=0,
            batch=self.batch,
            once=lambda key, make: make(),
            rows=make_query_rows(
                self.batch,
                0,
                full=self.full,
                window=self.window,
                chunks=self.chunks,
                device=DEVICE,
            ),
            scale=self.k_width**-0.5,
            v_width=self.v_width,
            window=self.window,
            chunks=self.chunks,
            full=self.full,
            softcap=self.softcap,
            sinks=torch.randn(self.heads, generator=generator).to(DEVICE) if self.sinks else None,
            bias=self.made_bias(generator),
            expand=(lambda k, _: (k, k[..., : self.v_width])) if self.latent else None,
        )

    def made_bias(self, generator: torch.Generator) -> Bias | None:
        numbers = torch.randn((self.heads, 2 * FAR + 1), generator=generator).to(DEVICE)
        if self.bias == "slopes":
            slopes = numbers[:, 0].abs().contiguous() / 8
            return Bias(
                lambda keys, queries: (
                    slopes[:, None, None] * _distance(keys, queries)[..., None, :, :]
                ),
                slopes=slopes,
            )
        if self.bias == "by distance":
            return Bias(
                lambda keys, queries: numbers[
                    :, _distance(keys, queries).clamp(-FAR, FAR).long() + FAR
                ].movedim(0, -3),
                by_distance=lambda: numbers,
            )
        return None

    def live(self, out: Tensor) -> Tensor:
        """Returns a result without its padded rows."""
        return out[: len(self.batch.sample_rows)].float().cpu()

    def wanted(self) -> Tensor:
        return self.live(Sdpa().attend(self.call))

    def found(self, *, fixed_tiles: bool = False) -> Tensor:
        return self.live(TritonAttention(DEVICE, fixed_tiles=fixed_tiles).attend(self.call))


def _distance(keys: Tensor, queries: Tensor) -> Tensor:
    return keys[..., None, :] - queries[..., :, None]
