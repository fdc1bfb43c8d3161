"""What a request for a pooled row gives back. Names are vLLM's."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from sys import byteorder

from octavo.outputs import RequestOutput


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


def pooled_row(output: RequestOutput) -> list[float]:
    """Returns a request's pooled row; [] where it failed."""
    row = array("f", output.pooled or b"")
    if byteorder == "big":
        row.byteswap()
    return row.tolist()
