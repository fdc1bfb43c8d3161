"""What a request for a pooled row gives back. Names are vLLM's."""

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
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Number of its components."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A text's embedding. `error` is set where the engine failed the request, whose embedding is
    then empty.
    """

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
    """The classes of one text, or of one pair."""

    probs: list[float]
    """Probability of each label, or its score where the activation is "none"."""
    label: str
    """Name of the most probable label; "" where the engine failed the request."""

    @property
    def num_classes(self) -> int:
        """Number of the labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """A text's classes. `error` is set where the engine failed the request, whose probabilities are
    then empty.
    """

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
    """The score of two texts: how well they belong together."""

    score: float
    """Score by the classifier, or the cosine of the embeddings; NaN where a request failed."""


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of two texts. `error` is set where the engine failed one of its requests."""

    request_id: str
    prompt_token_ids: list[int]
    """Tokens of the pair, or of both texts one after the other where each has an embedding."""
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
        """Compares two embeddings of length 1."""
        return ScoringRequestOutput(
            f"{first.request_id}_{second.request_id}",
            first.prompt_token_ids + second.prompt_token_ids,
            ScoringOutput(dot(pooled_row(first), pooled_row(second))),
            first.error or second.error,
        )


def dot(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns the dot product of two rows of length 1, which is their cosine; NaN where a row is
    empty.
    """
    if not first or not second:
        return math.nan
    product: float = sum(map(mul, first, second))
    return min(1.0, max(-1.0, product))


def pooled_row(output: RequestOutput) -> list[float]:
    """Returns a request's pooled row; [] where it failed."""
    row = array("f", output.pooled or b"")
    if byteorder == "big":
        row.byteswap()
    return row.tolist()
