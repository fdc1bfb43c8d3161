"""Outputs of pooling requests. Names are vLLM's."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from sys import byteorder

from octavo.api.outputs import RequestOutput


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
    def of_units(first: RequestOutput, second: RequestOutput) -> ScoringRequestOutput:
        """Compares two embeddings of unit length."""
        return ScoringRequestOutput(
            f"{first.request_id}_{second.request_id}",
            first.prompt_token_ids + second.prompt_token_ids,
            ScoringOutput(dot(pooled_row(first), pooled_row(second))),
            first.error or second.error,
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
