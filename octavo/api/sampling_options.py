"""Declarations of the fields of SamplingParams: range, meaning, and the stage they act in.

A field is declared once, by the `Option` in its annotation (`sampling_params.py`). Range checks,
request bodies, GET /v1/capabilities, the sampling record of NumPy and C++, and
docs/reference/sampling.md are derived from it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from numbers import Real
from types import NoneType
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from octavo.api.errors import InvalidRequest, shown

INT32_MAX = (1 << 31) - 1
"""Maximum of counts and token ids, which a step stores as 32-bit integers."""

GREEDY_EPS = 1e-5
MAX_N = 16384
MAX_BEAMS = 1024
MAX_BREAKERS = 64
MAX_BREAKER = 64
"""Maximum length of a DRY sequence breaker in characters."""
MAX_LISTED = 128
"""Maximum length of `logprob_token_ids`."""
MAX_BIAS = 100.0
MAX_PROCESSORS = 8
MAX_LENGTH_PENALTY = 10.0
"""Bound of length_penalty: a length to a higher power overflows a float or becomes 0."""
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Smallest and largest positive 32-bit float of full precision."""

Stage = Literal["logits", "filter", "sample", "stop", "beam_search", "output"]
"""Stages of sampling, in order of application."""

FilterKind = Literal["distribution", "cutoff", "after_cutoff"]
"""Kinds of filters, in order of application: those that need the whole distribution, those that
keep the most likely tokens, and those that filter the remaining tokens.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of one field. `read_options` fills in name, type and default."""

    stage: Stage
    _: KW_ONLY
    help: str
    takes: str = ""
    """Allowed values, in the words of error messages."""
    in_beam_search: bool = True
    """Whether a beam search supports values other than the default."""
    is_extension: bool = False
    """Whether no other API has the field; every dialect accepts it under this name."""
    name: str = ""
    type: Any = None
    default: Any = None

    @property
    def is_optional(self) -> bool:
        """Whether None is allowed."""
        return NoneType in get_args(self.type)

    def parse(self, value: Any) -> Any:
        """Returns the normalized value; raises InvalidRequest if it is not allowed."""
        return value

    def check(self, value: object, ok: bool) -> None:
        if not ok:
            check(self.name, value, ok, self.takes)


@dataclass(frozen=True, slots=True)
class Flag(Option):
    takes: str = "True or False"

    def parse(self, value: Any) -> Any:
        self.check(value, isinstance(value, bool))
        return value


@dataclass(frozen=True, slots=True)
class Number(Option):
    span: tuple[float, float]
    """Allowed range, inclusive."""
    _: KW_ONLY
    above_low: bool = False
    """Whether the lower bound is exclusive."""
    takes_minus_one: bool = False
    """Whether -1 selects the default, as in other APIs."""
    hint: str | None = None
    filter: FilterKind | None = None
    """Kind of filter that a non-default value enables."""
    keeps_best: bool = False
    """Whether a filter other than a cutoff always keeps the most likely token, so that greedy
    sampling can ignore it.
    """
    host_only: bool = False
    """Whether kernels do not read the field, so that the sampling record omits it."""

    def __post_init__(self) -> None:
        if self.name and not self.takes:
            object.__setattr__(self, "takes", self._describe_span())

    def _describe_span(self) -> str:
        words = "a number above {} and at most {}" if self.above_low else "a number from {} to {}"
        return words.format(*self.span)

    def parse(self, value: Any) -> Any:
        number = value if type(value) is float else to_float(value)
        if self.takes_minus_one and number == -1:
            return self.default
        low, high = self.span
        if not low <= number <= high or (self.above_low and number == low):
            check(self.name, value, False, self.takes, hint=self.hint)
        return number


@dataclass(frozen=True, slots=True)
class Integer(Number):
    def _describe_span(self) -> str:
        prefix = "None, or " if self.is_optional else ""
        return "{}an integer from {} to {}".format(prefix, *self.span)

    def parse(self, value: Any) -> Any:
        if value is None and self.is_optional:
            return None
        number = value if type(value) is int else whole_number(value)
        if self.takes_minus_one and number == -1:
            return self.default
        low, high = self.span
        self.check(value, number is not None and low <= number <= high)
        return number


class SamplingOptions(dict[str, Option]):
    """Declarations of a class's fields, by name, and what follows from them."""

    @cached_property
    def get_values(self) -> Callable[[object], tuple[Any, ...]]:
        """Returns the values of all fields of an object, in order."""
        return operator.attrgetter(*self)

    @cached_property
    def numbers(self) -> dict[str, Number]:
        return {name: option for name, option in self.items() if isinstance(option, Number)}

    @cached_property
    def filters(self) -> dict[str, Any]:
        """Filters and the values that disable them. Their outcome depends on which tokens are
        masked.
        """
        return {name: option.default for name, option in self.numbers.items() if option.filter}

    @cached_property
    def cutoffs(self) -> list[str]:
        """Filters that keep the most likely tokens."""
        return [name for name, option in self.numbers.items() if option.filter == "cutoff"]

    @cached_property
    def ignored_by_greedy(self) -> dict[str, Any]:
        """Filters that never change a greedy choice, and the values that disable them."""
        safe = (name for name in self.filters if self.numbers[name].keeps_best)
        return {name: self.filters[name] for name in (*self.cutoffs, *safe)}

    @cached_property
    def greedy_values(self) -> dict[str, Any]:
        """Other filters, which greedy sampling rejects unless they are disabled."""
        ignored = self.ignored_by_greedy
        return {name: off for name, off in self.filters.items() if name not in ignored}

    @cached_property
    def beam_search_values(self) -> dict[str, tuple[Any, ...]]:
        """Values allowed in a beam search, for fields that would change the model's logprobs and
        for stop conditions that it does not check.
        """
        values: dict[str, tuple[Any, ...]] = {"temperature": (0.0, 1.0)}
        for name, option in self.items():
            if name in self.filters or not option.in_beam_search:
                values[name] = (option.default,)
        return values

    @cached_property
    def record(self) -> dict[str, Number]:
        """Fields of the kernels' sampling record."""
        stages = ("logits", "filter")
        return {
            name: option
            for name, option in self.numbers.items()
            if option.stage in stages and not option.host_only
        }


STRUCTURED_OUTPUT_VALUES: dict[str, tuple[Any, ...]] = {"ignore_eos": (False,)}
"""Values allowed with structured outputs, which end with an end token."""


def read_options(kind: type[msgspec.Struct]) -> SamplingOptions:
    """Returns the declarations from a class's annotations; fields without one are internal."""
    hints = get_type_hints(kind, include_extras=True)
    options = SamplingOptions()
    for name, default in zip(kind.__struct_fields__, kind.__struct_defaults__, strict=True):
        for option in getattr(hints[name], "__metadata__", ()):
            if isinstance(option, Option):
                options[name] = replace(
                    option, name=name, type=hints[name].__origin__, default=default
                )
    return options


def whole_number(value: object) -> int | None:
    """Returns an integer (NumPy's too) as an int; None for a bool or anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def to_float(value: object) -> float:
    """Returns a finite number (NumPy's too) as a float; NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def check(name: str, value: object, ok: bool, allowed: str, hint: str | None = None) -> None:
    if not ok:
        raise InvalidRequest(
            f"{name}: got {shown(value)}, expected {allowed}", param=name, hint=hint
        )
