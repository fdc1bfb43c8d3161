"""How much attention the last tokens of a prompt pay to stored blocks of its beginning, by the keys
of one layer, before the blocks themselves are read.

The queries are those that the prompt's first block and its last tokens make as a text of their own,
at their positions in the prompt, by the part of the Program up to that layer, over KV memory that
no request has. They are made while the keys are still being read. Which blocks are asked about is
the scheduler half's business (`sparsity/important_blocks.py`). Source: IMPRESS (Chen et al. 2025,
FAST).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.kv_messages import BlockQuery
from octavo.executor.base import ProbingBackend, Runnable
from octavo.executor.batch import StepBatch
from octavo.executor.kv import BLOCK_SIZE, KvCache, KvLayout
from octavo.sparsity.passes.probe_prefixes import Probe

MAX_TOKENS = 128
"""Most tokens of the text that makes queries."""

NUM_BLOCKS = MAX_TOKENS // BLOCK_SIZE
"""Blocks of each cache group in which that text is computed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefixWeigher:
    """Answers probes with a prepared part of a Program, which makes the queries of one layer."""

    backend: ProbingBackend
    part: Runnable
    kv: KvCache
    """The part's own memory: NUM_BLOCKS blocks of each of its cache groups."""
    layout: KvLayout
    """Layout of the blocks of keys, which the whole Program keeps."""
    probe: Probe

    def prepare(self, query: BlockQuery) -> NDArray[np.float32] | None:
        """Returns the last queries of the probe's text, `[Q, H, D]`; None where that fails, which
        is logged. Computes with all threads.
        """
        try:
            output = self.part.run(self._batch(query), self.kv)
            rows = output.arrays["hidden"][-query.num_queries :]
            return rows.reshape(len(rows), self.probe.num_heads, -1).astype(np.float32)
        except Exception:
            logger.exception("the prefix of %s could not be weighed", query.request_id)
            return None

    def rate(
        self, query: BlockQuery, prepared: NDArray[np.float32], blocks: NDArray[np.uint8]
    ) -> list[float]:
        """Returns the share of the attention of the prepared queries that falls on each block of
        `blocks [B, block_bytes]`, in the order of the prompt; [] where that fails, which is logged.
        Any thread may ask.
        """
        try:
            known = self.backend.rows_of(self.layout, blocks).k
            masses: list[float] = attention_masses(prepared, known, self.probe.scale).tolist()
            return masses
        except Exception:
            logger.exception("the prefix of %s could not be weighed", query.request_id)
            return []

    def _batch(self, query: BlockQuery) -> StepBatch:
        """Returns the text as a step that draws nothing."""
        num_tokens, num_groups = len(query.token_ids), len(self.part.kv_layouts)
        places = np.arange(num_tokens, dtype=np.int32)
        blocks = np.arange(-(-num_tokens // BLOCK_SIZE), dtype=np.int32)
        return StepBatch(
            token_ids=np.array(query.token_ids, np.int32),
            places=places,
            positions=np.array(query.positions, np.int32)[None],
            query_starts=np.array([0, num_tokens], np.int32),
            context_lens=np.full((num_groups, 1), num_tokens, np.int32),
            slots=np.tile(places, (num_groups, 1)),
            block_tables=np.tile(blocks, (num_groups, 1, 1)),
            sample_rows=np.zeros(0, np.int32),
        )


def attention_masses(
    queries: NDArray[np.float32], keys: NDArray[np.float32], scale: float
) -> NDArray[np.float64]:
    """Returns the share of the attention of `queries [Q, H, D]`, over all heads, that falls on each
    block of `keys [B, S, K, D]`, `[B]`.
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
