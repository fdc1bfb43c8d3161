"""What is asked of a model that pools, as one job: the prompts of a call, the params of all, and
what is read from their pooled rows.

LLM, AsyncLLM and the server's routes run jobs each in their own way. Knows no engine and no wire
format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import msgspec

from octavo.engine.front.arguments import PoolingPrompt, Prompt, pooling_params_of, prompt_list
from octavo.engine.front.pooling_inputs import PoolingInputs, Pools
from octavo.errors import InvalidRequest, shown
from octavo.outputs import RequestOutput
from octavo.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
)
from octavo.pooling_params import PoolingParams, TextPair

OutputT = TypeVar("OutputT")

Texts: TypeAlias = Prompt | Iterable[Prompt]
"""One text or several; token ids where an embedding is made of each."""

PoolingPrompts: TypeAlias = PoolingPrompt | Iterable[PoolingPrompt]
"""One prompt or several, pairs of texts among them."""


@dataclass(frozen=True, slots=True)
class PoolingJob(Generic[OutputT]):
    """The prompts of one call, and what is made of their outputs."""

    prompts: Sequence[PoolingPrompt]
    params: PoolingParams
    read: Callable[[Sequence[RequestOutput]], list[OutputT]]
    """Returns the call's outputs from those of the prompts, in the prompts' order."""


@dataclass(frozen=True, slots=True)
class PoolingJobs:
    """Maker of jobs from what users pass in; InvalidRequest where the model lacks the task."""

    pools: Callable[..., PoolingInputs]
    """Returns the checks of a model that does one of the named tasks, or refuses it."""

    def embedding(
        self, prompts: Texts, params: PoolingParams | None = None
    ) -> PoolingJob[EmbeddingRequestOutput]:
        """Returns the job that makes an embedding of each prompt."""
        self.pools("embed")
        return PoolingJob(
            prompt_list(prompts),
            pooling_params_of(params),
            lambda outputs: [EmbeddingRequestOutput.of(output) for output in outputs],
        )

    def classification(
        self, prompts: PoolingPrompts, params: PoolingParams | None = None
    ) -> PoolingJob[ClassificationRequestOutput]:
        """Returns the job that classifies each prompt."""
        labels = self.pools("classify").pools.labels
        return PoolingJob(
            [prompts] if isinstance(prompts, TextPair) else prompt_list(prompts),  # type: ignore[arg-type]
            pooling_params_of(params),
            lambda outputs: [ClassificationRequestOutput.of(each, labels) for each in outputs],
        )

    def scoring(
        self,
        data_1: Texts,
        data_2: Texts,
        params: PoolingParams | None = None,
        *,
        max_second_tokens: int | None = None,
    ) -> PoolingJob[ScoringRequestOutput]:
        """Returns the job that scores each text of `data_2` with the one of `data_1`, or with the
        one at the same place. A classifier with one label reads the pairs, in which the second text
        is cut to `max_second_tokens`; embeddings are compared by their cosine.
        """
        pools = self.pools("classify", "embed").pools
        params = pooling_params_of(params)
        _check_scores(pools)
        first, second = prompt_list(data_1, "data_1"), prompt_list(data_2, "data_2")
        _check_counts(len(first), len(second))
        if pools.task == "embed":
            if max_second_tokens is not None:
                raise InvalidRequest(
                    f"max_second_tokens: got {max_second_tokens}, allowed only for a model that"
                    " reads pairs of texts: this one makes an embedding of each",
                    param="max_second_tokens",
                )
            return _cosines(first, second, params)
        firsts = [_text(prompt, "data_1") for prompt in first] * (len(second) // len(first))
        seconds = [_text(prompt, "data_2") for prompt in second]
        return PoolingJob(
            [TextPair(*pair, max_second_tokens) for pair in zip(firsts, seconds, strict=True)],
            params,
            lambda outputs: [ScoringRequestOutput.of(output) for output in outputs],
        )


def _check_scores(pools: Pools) -> None:
    """Raises InvalidRequest where the model gives a pair of texts more than one score."""
    if pools.task == "classify" and pools.width != 1:
        raise InvalidRequest(
            f"model: got one with {pools.width} labels, needed for scoring is one label, or"
            " embeddings",
            hint="classify takes pairs of texts too, as TextPair",
            param="model",
        )


def _cosines(
    first: list[Prompt], second: list[Prompt], params: PoolingParams
) -> PoolingJob[ScoringRequestOutput]:
    """Returns the job that makes each text's embedding once and compares them."""

    def read(outputs: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        firsts = list(outputs[: len(first)]) * (len(second) // len(first))
        return list(map(ScoringRequestOutput.of_units, firsts, outputs[len(first) :]))

    units = msgspec.structs.replace(params, normalize=True)
    return PoolingJob([*first, *second], units, read)


def _check_counts(num_first: int, num_second: int) -> None:
    if not num_second:
        raise InvalidRequest("data_2: got no text, needed is at least one", param="data_2")
    if num_first not in (1, num_second):
        raise InvalidRequest(
            f"data_1: got {num_first} texts, allowed are one, or {num_second}, one for each text"
            " that it is scored with",
            param="data_1",
        )


def _text(prompt: Prompt, name: str) -> str:
    """Returns a prompt's text; InvalidRequest where it has token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) and len(prompt) == 1 else prompt
    if not isinstance(text, str):
        raise InvalidRequest(
            f"{name}: got {shown(prompt)}, allowed are texts: the model reads them in pairs",
            param=name,
        )
    return text
