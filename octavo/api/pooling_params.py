"""PoolingParams: what is made of the one row that a model pools of a text. Names are vLLM's.

What no model decides is checked when the params are made; widths and what a model can do are
checked when a request is admitted.
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
"""Value of `truncate_prompt_tokens` that stands for as many tokens as the model takes."""

PoolingTask = Literal["embed", "classify"]

PoolingActivation = Literal["none", "sigmoid", "softmax"]
"""Function that turns a classifier's scores into probabilities; "none" leaves them."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that a classifier reads together, as a question and a passage. Text in them that
    spells a special token stays text.
    """

    first: str
    second: str
    max_second_tokens: int | None = None
    """Most tokens of the second text, beyond which its end is cut off; None: all."""


class PairIds(NamedTuple):
    """The tokens of two texts."""

    token_ids: list[int]
    type_ids: list[int]
    """Segment of each token: 0, or 1 for those of the second text where the tokenizer marks it."""
    num_fixed: int
    """Number of the tokens that no cut removes: the special ones, or those of a template."""


class PoolingParams(msgspec.Struct, kw_only=True, tag="pooling", metaclass=CheckedCall):
    """One request's way of making a pooled row."""

    dimensions: int | None = None
    """Number of the first components kept, before normalizing; None: all."""
    normalize: bool | None = None
    """Whether an embedding gets the length 1; None: as the checkpoint says."""
    truncate_prompt_tokens: int | None = None
    """Most tokens of a text, special ones included, beyond which its end is cut off; -1: as many as
    the model takes; None: a longer text is refused.
    """
    activation: PoolingActivation | None = None
    """Function that turns a classifier's scores into probabilities; None: as the checkpoint says.
    """

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
        _check_number("dimensions", self.dimensions, 1)
        if self.truncate_prompt_tokens != MODEL_LIMIT:
            _check_number("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, " or -1")
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise _refused("normalize", self.normalize, "True or False")
        if self.activation not in (None, *get_args(PoolingActivation)):
            raise _refused("activation", self.activation, ", ".join(get_args(PoolingActivation)))


RequestParams: TypeAlias = SamplingParams | PoolingParams


def _check_number(name: str, value: object, low: int, others: str = "") -> None:
    if value is None:
        return
    number = whole_number(value)
    if number is None or not low <= number < 1 << 31:
        raise _refused(name, value, f"a whole number from {low} to {(1 << 31) - 1}{others}")


def _refused(name: str, value: Any, allowed: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: got {shown(value)}, allowed is {allowed}", param=name)
