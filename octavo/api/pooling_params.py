"""PoolingParams: options of pooling requests. Names are vLLM's.

Ranges are checked when the params are made; limits that depend on the model are checked when a
request is admitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from octavo.api.checked_call import CheckedCall
from octavo.api.errors import InvalidRequest, shown
from octavo.api.sampling_options import whole_number
from octavo.api.sampling_params import SamplingParams

MODEL_LIMIT = -1
"""Value of `truncate_prompt_tokens`: truncate to the model's context length."""

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""Task of a pooling model, with vLLM's names; "token_..." returns a row for each token."""

PoolingActivation = Literal["none", "sigmoid", "softmax"]
"""Function from classifier scores to probabilities; "none" keeps the scores."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts for a cross-encoder, such as a question and a passage. Special tokens spelled out
    in them are treated as text.
    """

    first: str
    second: str
    max_second_tokens: int | None = None
    """Truncate the second text to this many tokens; None: no limit."""


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text for a late-interaction model, which marks queries and documents by a token."""

    text: str
    is_query: bool


class PairIds(NamedTuple):
    """Token ids of a text pair."""

    token_ids: list[int]
    type_ids: list[int]
    """Segment of each token: 1 for the second text if the tokenizer distinguishes them, else 0."""
    num_fixed: int
    """Number of special or template tokens, which truncation keeps."""


class PoolingParams(msgspec.Struct, kw_only=True, tag="pooling", metaclass=CheckedCall):
    """Options of one pooling request."""

    dimensions: int | None = None
    """Truncate embeddings to this many components, before normalization; None: keep all."""
    normalize: bool | None = None
    """Whether to normalize embeddings to unit length; None: as the checkpoint configures."""
    truncate_prompt_tokens: int | None = None
    """Truncate texts to this many tokens, including special ones; -1: the model's context length;
    None: reject longer texts.
    """
    activation: PoolingActivation | None = None
    """Function from classifier scores to probabilities; None: as the checkpoint configures."""

    # What general code asks of any request's params: it has one sample and draws no token.
    n: ClassVar[int] = 1
    num_samples: ClassVar[int] = 1
    is_ranked: ClassVar[bool] = False
    beam_width: ClassVar[int | None] = None
    max_tokens: ClassVar[int | None] = 0
    num_needed_tokens: ClassVar[int] = 0
    min_tokens: ClassVar[int] = 0
    stop_token_ids: ClassVar[list[int] | None] = None
    stop_strings: ClassVar[list[str]] = []
    ends_by_text: ClassVar[bool] = False
    include_stop_str_in_output: ClassVar[bool] = False
    logprobs: ClassVar[int | None] = None
    prompt_logprobs: ClassVar[int | None] = None
    first_prompt_logprob: ClassVar[int] = 1
    detokenize: ClassVar[bool] = False
    bad_words: ClassVar[list[str] | None] = None

    def __post_init__(self) -> None:
        _check_number("dimensions", self.dimensions)
        if self.truncate_prompt_tokens != MODEL_LIMIT:
            _check_number("truncate_prompt_tokens", self.truncate_prompt_tokens, " or -1")
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise _make_error("normalize", self.normalize, "True or False")
        if self.activation not in (None, *get_args(PoolingActivation)):
            raise _make_error("activation", self.activation, ", ".join(get_args(PoolingActivation)))


RequestParams: TypeAlias = SamplingParams | PoolingParams


def _check_number(name: str, value: object, others: str = "") -> None:
    if value is None:
        return
    number = whole_number(value)
    if number is None or not 1 <= number < 1 << 31:
        raise _make_error(name, value, f"an integer from 1 to {(1 << 31) - 1}{others}")


def _make_error(name: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: got {shown(value)}, expected {allowed}", param=name)
