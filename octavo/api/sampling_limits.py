"""What the fields of SamplingParams may hold: ranges, flags, and the values that a beam search and
a greedy choice take.

Owns the tables and their words; `sampling_params` checks by them, the server's fields show them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

INT32_MAX = (1 << 31) - 1
"""Highest count or token id: the arrays of a step hold 32-bit integers."""

GREEDY_EPS = 1e-5
MAX_N = 16384
MAX_BEAMS = 1024
MAX_BREAKERS = 64
MAX_BREAKER = 64
"""Most characters of one of at most MAX_BREAKERS sequence breakers."""
MAX_LISTED = 128
"""Most tokens whose logprobs a request may ask for by their ids."""
MAX_BIAS = 100.0
MAX_PROCESSORS = 8
"""Most logits processors of a request."""
MAX_LENGTH_PENALTY = 10.0
"""Bound on length_penalty either way: a length to a higher power overflows a float, or is 0."""
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Least and greatest number above 0 that 32-bit floats hold at full precision."""


@dataclass(frozen=True, slots=True)
class WholeRange:
    """Numbers that an integer field may hold, and the words that say so."""

    low: int
    high: int
    words: str
    optional: bool = False
    """Whether None is allowed too."""


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Finite numbers that a float field may hold."""

    low: float
    high: float
    special_words: str = ""
    """Words for the range where its two ends do not say all."""
    above_low: bool = False
    """Whether the low end itself is outside."""
    hint: str | None = None

    @property
    def words(self) -> str:
        return self.special_words or f"a number from {self.low} to {self.high}"

    def holds(self, number: float) -> bool:
        """Returns whether a number is within the range; NaN is in none."""
        return self.low <= number <= self.high and not (self.above_low and number == self.low)


def _range(low: int, high: int, words: str = "{}", *, optional: bool = False) -> WholeRange:
    return WholeRange(low, high, words.format(f"a whole number from {low} to {high}"), optional)


WHOLE_NUMBERS = {
    "beam_width": _range(1, MAX_BEAMS, "None, or {}", optional=True),
    "n": _range(1, MAX_N),
    "top_k": _range(0, INT32_MAX, "0 or -1 (off), or a whole number from 1 to 2147483647"),
    "seed": WholeRange(
        -(1 << 63), (1 << 63) - 1, "a signed 64-bit whole number or None", optional=True
    ),
    "max_tokens": _range(1, INT32_MAX, "{}, or None (until the context ends)", optional=True),
    "min_tokens": _range(0, INT32_MAX),
    "logprobs": _range(
        -1, INT32_MAX, "None, -1 (the whole vocabulary), or a whole number from 0 up", optional=True
    ),
    "prompt_logprobs": _range(
        -1, INT32_MAX, "None, -1 (the whole vocabulary), or a whole number from 0 up", optional=True
    ),
    "prompt_logprob_start": _range(0, INT32_MAX, "None, or {}", optional=True),
    "mirostat_mode": _range(0, 2, "0 (off), 1 or 2"),
    "dry_allowed_length": _range(1, INT32_MAX),
    "dry_penalty_last_n": _range(-1, INT32_MAX, "-1 (all tokens), or {}"),
}
"""Integer fields and their bounds; best_of has its own, which depends on n."""

NUMBERS = {
    "presence_penalty": NumberRange(-2, 2),
    "frequency_penalty": NumberRange(-2, 2),
    "repetition_penalty": NumberRange(
        FLOAT32_MIN, FLOAT32_MAX, "a number above 0 (a 32-bit float)"
    ),
    "temperature": NumberRange(0, 2, hint="0 is greedy"),
    "top_p": NumberRange(0, 1, "a number above 0 and at most 1", above_low=True),
    "min_p": NumberRange(0, 1),
    "typical_p": NumberRange(0, 1, "a number above 0 and at most 1", above_low=True),
    "top_n_sigma": NumberRange(0, 100, "0 or -1 (off), or a number up to 100"),
    "dynatemp_range": NumberRange(0, 2),
    "dynatemp_exponent": NumberRange(0, 100, "a number above 0 and at most 100", above_low=True),
    "xtc_probability": NumberRange(0, 1),
    "xtc_threshold": NumberRange(0, 1),
    "mirostat_tau": NumberRange(0, 100),
    "mirostat_eta": NumberRange(0, 1),
    "dry_multiplier": NumberRange(0, 100),
    "dry_base": NumberRange(1, 100),
}
"""Fields that hold a float, and their bounds."""

FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)

SEARCH_VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (0.0,),
    "typical_p": (1.0,),
    "top_n_sigma": (0.0,),
    "dynatemp_range": (0.0,),
    "xtc_probability": (0.0,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None,),
    "logits_processors": (None,),
    "stop_regex": (None,),
    "repetition_detection": (None,),
    "logprob_token_ids": (None,),
}
"""Values that a beam search takes for the fields that would change the model's own logprobs, and
for ends that it does not look for.
"""


FORM_VALUES: dict[str, tuple[Any, ...]] = {"ignore_eos": (False,)}
"""Values that fields may have beside a form of the answer, whose end tells that it is complete."""

DRAWS_ONLY: dict[str, float] = {
    "typical_p": 1.0,
    "dynatemp_range": 0.0,
    "xtc_probability": 0.0,
    "mirostat_mode": 0,
}
"""Neutral values of the fields that would change a greedy choice; temperature 0 takes no other."""
