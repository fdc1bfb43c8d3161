"""Scores stored prefix blocks by the attention that a prompt's last tokens pay to them, from the
keys of one layer, before the blocks are read.

For the queries, the prompt's first block and last tokens are computed as a separate sequence, at
their original positions, by the part of the Program up to that layer. This uses a separate KV
memory and runs while the keys are still being read. `important_blocks.py` chooses blocks by the
scores. Source: IMPRESS (Chen et al. 2025, FAST).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.kv_messages import BlockQuery
from octavo.executor.base import Backend, Runnable
from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE, KvCache, KvLayout
from octavo.sparsity.passes.probe_prefixes import Probe

MAX_TOKENS = 128
"""Maximum number of tokens of the sequence that computes queries."""

NUM_BLOCKS = MAX_TOKENS // BLOCK_SIZE
"""Number of blocks of each cache group for this sequence."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefixWeigher:
    """Scores blocks with the part of a Program that computes one layer's queries."""

    backend: Backend
    part: Runnable
    kv: KvCache
    """Separate KV memory: NUM_BLOCKS blocks of each cache group of the part."""
    layout: KvLayout
    """Layout of the key blocks, from the complete Program."""
    probe: Probe

    def prepare_query(self, query: BlockQuery) -> NDArray[np.float32] | None:
        """Computes the last queries, `[Q, H, D]`, using all threads.

        Returns None and logs the error if that fails.
        """
        try:
            output = self.part.run(self._batch(query), self.kv)
            rows = output.arrays["hidden"][-query.num_queries :]
            return rows.reshape(len(rows), self.probe.num_heads, -1).astype(np.float32)
        except Exception:
            logger.exception(
                "the importance of the prefix blocks of %s could not be computed", query.request_id
            )
            return None

    def rate(
        self, query: BlockQuery, prepared: NDArray[np.float32], blocks: NDArray[np.uint8]
    ) -> list[float]:
        """Returns the fraction of attention on each block of `blocks [B, block_bytes]`, in prompt
        order.

        Returns [] and logs the error if that fails. Thread-safe.
        """
        try:
            known = self.backend.get_block_rows(self.layout, blocks).k
            masses: list[float] = attention_masses(prepared, known, self.probe.scale).tolist()
            return masses
        except Exception:
            logger.exception(
                "the importance of the prefix blocks of %s could not be computed", query.request_id
            )
            return []

    def _batch(self, query: BlockQuery) -> StepBatch:
        """Builds a step without sampling."""
        num_tokens, num_groups = len(query.token_ids), len(self.part.kv_layouts)
        key_indices = np.arange(num_tokens, dtype=np.int32)
        blocks = np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32)
        return StepBatch(
            token_ids=np.array(query.token_ids, np.int32),
            key_indices=key_indices,
            positions=np.array(query.positions, np.int32)[None],
            query_starts=np.array([0, num_tokens], np.int32),
            context_lens=np.full((num_groups, 1), num_tokens, np.int32),
            slots=np.tile(key_indices, (num_groups, 1)),
            block_tables=np.tile(blocks, (num_groups, 1, 1)),
            sample_rows=np.zeros(0, np.int32),
        )


def attention_masses(
    queries: NDArray[np.float32], keys: NDArray[np.float32], scale: float
) -> NDArray[np.float64]:
    """Returns the fraction of attention, over all heads of `queries [Q, H, D]`, on each block of
    `keys [B, S, K, D]`: `[B]`.
    """
    num_blocks, block_size, num_kv_heads, width = keys.shape
    by_head = queries.reshape(len(queries), num_kv_heads, -1, width).transpose(1, 0, 2, 3)
    rows = by_head.reshape(num_kv_heads, -1, width) * np.float32(scale)
    columns = keys.reshape(-1, num_kv_heads, width).transpose(1, 2, 0)
    scores = rows @ columns
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    blocks = weights.reshape(*weights.shape[:2], num_blocks, block_size).sum(axis=-1)
    shares = blocks / blocks.sum(axis=-1, keepdims=True)
    masses: NDArray[np.float64] = shares.mean(axis=(0, 1), dtype=np.float64)
    return masses
