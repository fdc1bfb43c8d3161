"""How much attention the last tokens of a prompt pay to stored blocks of its beginning, by the keys
of one layer, before the blocks themselves are read.

The queries are those that the prompt's first block and its last tokens make as a text of their own,
at their positions in the prompt; the text is computed in blocks that no request has. Knows one
Program and its KV memory; which blocks are asked about is the scheduler half's business
(`engine/kv/important_blocks.py`). Source: IMPRESS (Chen et al. 2025, FAST).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.backends.base import ReadingBackend, Runnable
from octavo.backends.batch import StepBatch
from octavo.backends.kv import BLOCK_SIZE, BlockRows, KvCache, KvLayout
from octavo.kv_messages import PrefixProbe
from octavo.program.passes.probe_prefixes import Probe

MAX_TOKENS = 128
"""Most tokens of the text that makes queries."""

NUM_BLOCKS = MAX_TOKENS // BLOCK_SIZE
"""Blocks of each cache group in which that text is computed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrefixWeigher:
    """Answers probes with a prepared Program that keeps the keys and queries of one layer."""

    backend: ReadingBackend
    runnable: Runnable
    kv: KvCache
    probe: Probe
    first_blocks: Sequence[int]
    """First of the NUM_BLOCKS blocks of each cache group that no request has."""
    step_tokens: int
    """Most tokens of a step."""

    def masses(self, asked: PrefixProbe, keys: NDArray[np.uint8]) -> list[float]:
        """Returns the share of the attention that falls on each block of `keys [B, block_bytes]`,
        in the order of the prompt; [] where that fails, which is logged.
        """
        try:
            queries = self._queries(asked)
            known = self.backend.rows_of(self._layout, keys).k
            masses: list[float] = attention_masses(queries, known, self.probe.scale).tolist()
            return masses
        except Exception:
            logger.exception("the prefix of %s could not be weighed", asked.request_id)
            return []

    @property
    def _layout(self) -> KvLayout:
        return self.runnable.kv_layouts[self.probe.group]

    def _queries(self, asked: PrefixProbe) -> NDArray[np.float32]:
        """Returns the last queries of the text, `[Q, H, D]`."""
        num_tokens = len(asked.token_ids)
        for start in range(0, num_tokens, self.step_tokens):
            end = min(num_tokens, start + self.step_tokens)
            self.runnable.run(self._batch(asked, start, end), self.kv)
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        blocks = np.empty((num_blocks, self._layout.block_bytes), np.uint8)
        for index, block in enumerate(blocks):
            self.kv.read_block(self.probe.group, self.first_blocks[self.probe.group] + index, block)
        rows: BlockRows = self.backend.rows_of(self._layout, blocks)
        found = rows.v.reshape(num_blocks * BLOCK_SIZE, self.probe.num_heads, -1)
        return found[num_tokens - asked.num_queries : num_tokens]

    def _batch(self, asked: PrefixProbe, start: int, end: int) -> StepBatch:
        """Returns a part of the text as a step that draws nothing."""
        places = np.arange(start, end, dtype=np.int32)
        blocks = np.arange(-(-end // BLOCK_SIZE), dtype=np.int32)
        firsts = np.array(self.first_blocks, np.int32)
        return StepBatch(
            token_ids=np.array(asked.token_ids[start:end], np.int32),
            places=places,
            positions=np.array(asked.positions[start:end], np.int32)[None],
            query_starts=np.array([0, end - start], np.int32),
            context_lens=np.full((len(firsts), 1), end, np.int32),
            slots=firsts[:, None] * BLOCK_SIZE + places,
            block_tables=(firsts[:, None] + blocks)[:, None],
            sample_rows=np.zeros(0, np.int32),
        )


def attention_masses(
    queries: NDArray[np.float32], keys: NDArray[np.float32], scale: float
) -> NDArray[np.float64]:
    """Returns the share of the attention of `queries [Q, H, D]`, over all heads, that falls on each
    block of `keys [B, S, K, D]`, `[B]`.
    """
    _, _, num_kv_heads, width = keys.shape
    by_head = queries.reshape(len(queries), num_kv_heads, -1, width).astype(np.float64)
    scores = scale * np.einsum("qkld,bskd->klqbs", by_head, keys.astype(np.float64))
    weights = np.exp(scores - scores.max(axis=(3, 4), keepdims=True))
    weights /= weights.sum(axis=(3, 4), keepdims=True)
    masses: NDArray[np.float64] = weights.sum(axis=4).mean(axis=(0, 1, 2))
    return masses
