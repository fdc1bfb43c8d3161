"""Outputs of pooling requests. Names are vLLM's."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from operator import mul
from sys import byteorder
from typing import TypeAlias

from octavo.api.outputs import RequestOutput

TokenSimilarity: TypeAlias = Callable[[RequestOutput, RequestOutput, Set[int]], float]
"""Similarity of a query and a document with an embedding of each token; takes the ids of the
document's tokens to ignore."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """Embedding of a text; empty if the request failed (`error`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    error: str | None = None

    @staticmethod
    def of(output: RequestOutput) -> EmbeddingRequestOutput:
        return EmbeddingRequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            EmbeddingOutput(pooled_row(output)),
            output.error,
        )


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """Classification of a text or a pair of texts."""

    probs: list[float]
    """Probability of each label; raw scores with activation "none"."""
    label: str
    """Most probable label; "" if the request failed."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """Classification of a text; without probabilities if the request failed (`error`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    error: str | None = None

    @staticmethod
    def of(output: RequestOutput, labels: Sequence[str]) -> ClassificationRequestOutput:
        row = pooled_row(output)
        label = labels[row.index(max(row))] if row else ""
        return ClassificationRequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            ClassificationOutput(row, label),
            output.error,
        )


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """Relevance or similarity of two texts."""

    score: float
    """Classifier score, or cosine similarity of embeddings; NaN if a request failed."""


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """Score of two texts. `error` is set if one of their requests failed."""

    request_id: str
    prompt_token_ids: list[int]
    """Tokens of the pair; for embeddings, the tokens of both texts concatenated."""
    outputs: ScoringOutput
    error: str | None = None

    @staticmethod
    def of(output: RequestOutput) -> ScoringRequestOutput:
        (score,) = pooled_row(output) or (math.nan,)
        return ScoringRequestOutput(
            output.request_id, output.prompt_token_ids, ScoringOutput(score), output.error
        )

    @staticmethod
    def of_tokens(
        first: RequestOutput, second: RequestOutput, compare: TokenSimilarity, skipped: Set[int]
    ) -> ScoringRequestOutput:
        """Compares the token embeddings of a query and a document."""
        failed = first.pooled is None or second.pooled is None
        return ScoringRequestOutput(
            f"{first.request_id}_{second.request_id}",
            first.prompt_token_ids + second.prompt_token_ids,
            ScoringOutput(math.nan if failed else compare(first, second, skipped)),
            first.error or second.error,
        )

    @staticmethod
    def of_units(first: RequestOutput, second: RequestOutput) -> ScoringRequestOutput:
        """Compares two embeddings of unit length."""
        return ScoringRequestOutput(
            f"{first.request_id}_{second.request_id}",
            first.prompt_token_ids + second.prompt_token_ids,
            ScoringOutput(dot(pooled_row(first), pooled_row(second))),
            first.error or second.error,
        )


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    data: list[float] | list[list[float]]
    """The pooled row: an embedding or probabilities, or an embedding of each token."""


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput:
    """Pooled row of a text, or a row for each token; empty if the request failed (`error`)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    error: str | None = None

    @staticmethod
    def of(output: RequestOutput, *, keeps_tokens: bool) -> PoolingRequestOutput:
        data: list[float] | list[list[float]] = pooled_row(output)
        return PoolingRequestOutput(
            output.request_id,
            output.prompt,
            output.prompt_token_ids,
            PoolingOutput(token_rows(output) if keeps_tokens else data),
            output.error,
        )


def dot(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the dot product (cosine similarity) of two unit vectors; NaN if one is empty."""
    if not first or not second:
        return math.nan
    product: float = sum(map(mul, first, second))
    return min(1.0, max(-1.0, product))


def pooled_row(output: RequestOutput) -> list[float]:
    """Returns the pooled output of a request as floats; [] if it failed."""
    row = array("f", output.pooled or b"")
    if byteorder == "big":
        row.byteswap()
    return row.tolist()


def token_rows(output: RequestOutput) -> list[list[float]]:
    """Returns the pooled rows of a request's tokens; [] if it failed."""
    flat = pooled_row(output)
    width = len(flat) // max(len(output.prompt_token_ids), 1)
    return [flat[start : start + width] for start in range(0, len(flat), width)] if width else []
