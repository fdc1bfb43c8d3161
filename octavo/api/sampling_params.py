"""SamplingParams: how the next token is chosen and when a request ends. Names, defaults and ranges
are vLLM's.

Everything is checked when the params are made, against what the engine's arrays can hold; limits
that depend on the model are checked when a request is admitted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar, Literal

import msgspec

from octavo.api.checked_call import CheckedCall
from octavo.api.errors import InvalidRequest, shown
from octavo.api.repetition_detection import RepetitionDetection, detection_of
from octavo.api.sampling_limits import (
    DRAWS_ONLY,
    FLAGS,
    GREEDY_EPS,
    INT32_MAX,
    MAX_BIAS,
    MAX_BREAKER,
    MAX_BREAKERS,
    MAX_LENGTH_PENALTY,
    MAX_LISTED,
    MAX_N,
    MAX_PROCESSORS,
    NUMBERS,
    SEARCH_VALUES,
    WHOLE_NUMBERS,
    WholeRange,
)
from octavo.api.stop_patterns import check_patterns
from octavo.api.structured_outputs import StructuredOutputs
from octavo.text.answer_marks import AnswerMarks

MASKED_FILTERS = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "dynatemp_range": 0.0,
    "xtc_probability": 0.0,
    "mirostat_mode": 0,
}
"""Filters whose outcome depends on which tokens are masked, and their neutral values."""
CUTS = ("top_p", "top_k", "min_p")
"""Masked filters that keep a beginning of the order of all tokens."""


class SamplingParams(msgspec.Struct, kw_only=True, tag="sampling", metaclass=CheckedCall):
    """One request's way of choosing tokens and of ending; checked when made.

    `temperature` below 1e-5 is greedy. `top_k` 0 or -1 is off. `logprobs` -1 means the whole
    vocabulary. `max_tokens` None means until the context ends. The order of filters: bias, bans and
    penalties; top_n_sigma; temperature; typical_p; min_p; top_k; top_p; XTC; mirostat.
    """

    n: int = 1
    best_of: int | None = None
    """Number of samples made, of which the n with the highest cumulative logprob are returned, best
    first; None: n.
    """
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    typical_p: float = 1.0
    """Share of probability kept, of the tokens whose surprise is nearest to the entropy; 1: all."""
    top_n_sigma: float = 0.0
    """Standard deviations below the best logit at which tokens are cut; 0 or -1: off."""
    dynatemp_range: float = 0.0
    """Distance from `temperature` of the least and the greatest temperature, between which the
    entropy chooses; 0: off.
    """
    dynatemp_exponent: float = 1.0
    """Power of the relative entropy that chooses the dynamic temperature."""
    xtc_probability: float = 0.0
    """Probability that a draw excludes top choices (XTC); 0: off."""
    xtc_threshold: float = 0.1
    """Least probability of a top choice; the last of several stays."""
    mirostat_mode: int = 0
    """Version of mirostat, 1 or 2, which holds the tokens' surprise near `mirostat_tau`; 0: off."""
    mirostat_tau: float = 5.0
    """Surprise that mirostat aims at, in bits."""
    mirostat_eta: float = 0.1
    """Share of a token's error that mirostat corrects with the next one."""
    dry_multiplier: float = 0.0
    """Penalty of a token that goes on with a repetition of `dry_allowed_length` tokens; 0: off."""
    dry_base: float = 1.75
    """Factor of the penalty for each further token of the repetition."""
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    """Number of tokens among which repetitions are looked for; -1: all."""
    dry_sequence_breakers: list[str] | None = None
    """Texts whose tokens end a repetition; None: a newline, a colon, a quote and an asterisk."""
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    """Patterns in RE2's notation that end the answer before their match, which is at most 256
    characters long.
    """
    stop_token_ids: list[int] | None = None
    repetition_detection: RepetitionDetection | None = None
    """Pattern of tokens that ends the answer when it repeats; None: none."""
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    """Tokens whose logprobs are given at each place, in the place of the best ones'."""
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    """Index of the first prompt token that gets a logprob; tokens before it may be found in the
    prefix cache.
    """
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    """Form that the answer has; None: any text."""
    logits_processors: list[str] | None = None
    """Names of the engine's logits processors that change the logits of each draw, in order."""
    beam_width: int | None = None
    """Number of beams of a beam search, of which the n best are returned; None: no search."""
    length_penalty: float = 1.0
    """Power of the length by which a beam search divides cumulative logprobs to get its scores."""
    early_stopping: bool | Literal["never"] = False
    """Condition that ends a beam search: beam_width finished sequences (True), no better one is
    likely (False), or none is possible ("never").
    """
    bad_words_token_ids: list[list[int]] | None = None
    """Token ids of `bad_words`, filled in by the input processor."""
    answer_marks: AnswerMarks | None = None
    """Marks of the model's own format of answers, filled in by the server."""
    dry_sequence_breaker_ids: list[int] | None = None
    """Tokens that hold one of `dry_sequence_breakers`, filled in by the input processor."""

    def __post_init__(self) -> None:
        self._check_flags()
        self._check_whole_numbers()
        self._check_numbers()
        self._check_texts()
        self._check_token_ids()
        self._check_structure()
        if self.beam_width is not None:
            self._make_search(self.beam_width)
        elif self.is_greedy:
            self._make_greedy()

    num_needed_tokens: ClassVar[int] = 1
    """Number of tokens beyond the prompt for which there must be room."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_EPS

    @property
    def depends_on_mask(self) -> bool:
        """Whether a masked draw may differ from the first legal token of an unmasked one."""
        return any(getattr(self, name) != value for name, value in MASKED_FILTERS.items())

    @property
    def has_cuts_alone(self) -> bool:
        """Whether of the filters that depend on the mask only cuts are on."""
        others = (name for name in MASKED_FILTERS if name not in CUTS)
        is_free = all(getattr(self, name) == MASKED_FILTERS[name] for name in others)
        return is_free and self.depends_on_mask

    @property
    def num_shown_logprobs(self) -> int | None:
        """Number of tokens that an answer shows at each place: the best ones, or those that are
        asked for and the drawn one; None without logprobs.
        """
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids) + 1

    @property
    def num_samples(self) -> int:
        """Number of samples made, each a request of the core; a beam search is one."""
        if self.beam_width is not None:
            return 1
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more samples are made than returned: which ones is known when all have ended."""
        return self.num_samples > self.n

    @property
    def first_prompt_logprob(self) -> int:
        """Index of the first prompt token that may have a logprob: nothing precedes token 0."""
        return max(1, self.prompt_logprob_start or 0)

    @property
    def stop_strings(self) -> list[str]:
        """Texts that end the request."""
        return self.stop if isinstance(self.stop, list) else []

    @property
    def stop_patterns(self) -> list[str]:
        """Regular expressions that end the request."""
        return self.stop_regex if isinstance(self.stop_regex, list) else []

    @property
    def ends_by_text(self) -> bool:
        """Whether the text may end the request, and not its tokens alone."""
        return bool(self.stop or self.stop_regex)

    def _check_flags(self) -> None:
        for name in FLAGS:
            value = getattr(self, name)
            _check(name, value, isinstance(value, bool), "True or False")

    def _check_whole_numbers(self) -> None:
        # Other APIs' spellings of "off" and "one".
        self.seed = None if _is(self.seed, -1) else self.seed
        self.top_k = 0 if _is(self.top_k, -1) else self.top_k
        self.top_n_sigma = 0.0 if _number(self.top_n_sigma) == -1 else self.top_n_sigma
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        for name, allowed in WHOLE_NUMBERS.items():
            setattr(self, name, _whole_in(name, getattr(self, name), allowed))
        words = f"None, or a whole number from n ({self.n}) to {MAX_N}"
        of_n = WholeRange(self.n, MAX_N, words, optional=True)
        self.best_of = _whole_in("best_of", self.best_of, of_n)
        ceiling = math.inf if self.max_tokens is None else self.max_tokens
        _check(
            "min_tokens",
            self.min_tokens,
            self.min_tokens <= ceiling,
            f"a whole number from 0 to max_tokens ({self.max_tokens})",
        )
        if self.prompt_logprob_start is not None and self.prompt_logprobs is None:
            raise InvalidRequest(
                "prompt_logprob_start: allowed only with prompt_logprobs",
                param="prompt_logprob_start",
            )

    def _check_numbers(self) -> None:
        for name, allowed in NUMBERS.items():
            value = getattr(self, name)
            number = _number(value)
            _check(name, value, allowed.holds(number), allowed.words, hint=allowed.hint)
            setattr(self, name, number)

    def _check_texts(self) -> None:
        if self.stop is not None:
            self.stop = _texts("stop", self.stop, "one text or a list of texts", lone=True)
        if self.stop_regex is not None:
            allowed = "one regular expression or a list of them"
            self.stop_regex = _texts("stop_regex", self.stop_regex, allowed, lone=True)
            check_patterns(self.stop_regex)
        if self.bad_words is not None:
            self.bad_words = _texts("bad_words", self.bad_words, "a list of texts")
        if self.dry_sequence_breakers is not None:
            allowed = f"a list of at most {MAX_BREAKERS} texts of {MAX_BREAKER} characters"
            self.dry_sequence_breakers = _breakers(self.dry_sequence_breakers, allowed)
        for name in ("stop", "stop_regex"):
            if getattr(self, name) and not self.detokenize:
                raise InvalidRequest(
                    f"{name}: stop texts need the text, and detokenize is False",
                    param=name,
                    hint="use stop_token_ids",
                )

    def _check_token_ids(self) -> None:
        if self.stop_token_ids is not None:
            ids = _token_ids("stop_token_ids", self.stop_token_ids)
            self.stop_token_ids = list(dict.fromkeys(ids))
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids)
            _check("allowed_token_ids", ids, len(ids) > 0, "a list of at least one token id")
            self.allowed_token_ids = ids
        if self.logprob_token_ids is not None:
            self._take_listed(_token_ids("logprob_token_ids", self.logprob_token_ids))
        if self.logit_bias is not None:
            given: object = self.logit_bias
            _check("logit_bias", given, isinstance(given, Mapping), "numbers by token id")
            self.logit_bias = {
                _bias_token(key): _bias(key, value) for key, value in self.logit_bias.items()
            }

    def _take_listed(self, ids: list[int]) -> None:
        """Takes the tokens whose logprobs are wanted; `logprobs` becomes their number."""
        name = "logprob_token_ids"
        ok = 0 < len(ids) == len(set(ids)) <= MAX_LISTED
        _check(name, ids, ok, f"a list of 1 to {MAX_LISTED} different token ids")
        words = f"None, or the number of logprob_token_ids ({len(ids)})"
        _check("logprobs", self.logprobs, self.logprobs in (None, len(ids)), words)
        self.logprob_token_ids, self.logprobs = ids, len(ids)

    def _check_structure(self) -> None:
        self.repetition_detection = detection_of(self.repetition_detection)
        form: object = self.structured_outputs
        if isinstance(form, Mapping):
            form = self.structured_outputs = StructuredOutputs(**form)
        if self.logits_processors is not None:
            self.logits_processors = self._processors(self.logits_processors)
        ok = form is None or isinstance(form, StructuredOutputs)
        _check("structured_outputs", form, ok, "None, or StructuredOutputs")
        if form is not None and self.ignore_eos:
            raise InvalidRequest(
                "ignore_eos: got True with structured_outputs, whose end tells that the answer is"
                " complete",
                param="ignore_eos",
                hint="leave ignore_eos out; max_tokens bounds the length",
            )

    def _processors(self, given: object) -> list[str] | None:
        """Returns the names of logits processors, None where there are none."""
        name = "logits_processors"
        names = _texts(name, given, f"a list of at most {MAX_PROCESSORS} names")
        _check(name, names, len(names) <= MAX_PROCESSORS, f"at most {MAX_PROCESSORS} names")
        for other in ("prompt_logprobs", "logprob_token_ids"):
            if names and getattr(self, other) is not None:
                raise InvalidRequest(
                    f"{name}: got {shown(names)} with {other}, allowed is one of them",
                    param=name,
                    hint=f"leave {other} out; logprobs gives those of the model's own logits",
                )
        return names or None

    def _make_search(self, width: int) -> None:
        """Refuses what a beam search cannot honour: it draws nothing, and looks at the model's own
        logprobs.
        """
        _check("n", self.n, self.n <= width, f"at most the beam_width ({width}) in a beam search")
        _check(
            "best_of",
            self.best_of,
            self.best_of in (None, self.n),
            f"n ({self.n}) in a beam search",
            hint="beam_width says how many are tried",
        )
        penalty, most = _number(self.length_penalty), MAX_LENGTH_PENALTY
        _check(
            "length_penalty",
            self.length_penalty,
            abs(penalty) <= most,
            f"a number from {-most:g} to {most:g}",
        )
        self.length_penalty = penalty
        _check(
            "early_stopping",
            self.early_stopping,
            self.early_stopping in (True, False, "never"),
            "True, False or 'never'",
        )
        for name, neutral in SEARCH_VALUES.items():
            value = getattr(self, name)
            _check(name, value, value in neutral, f"{neutral[0]!r} in a beam search")
        self.temperature = 0.0

    def _make_greedy(self) -> None:
        for name, value in (("n", self.n), ("best_of", self.num_samples)):
            _check(
                name,
                value,
                value == 1,
                "1 when the temperature is 0",
                hint="greedy samples are all alike; set temperature above 0",
            )
        for name, neutral in DRAWS_ONLY.items():
            _check(
                name,
                getattr(self, name),
                getattr(self, name) == neutral,
                f"{neutral} when the temperature is 0",
                hint="set temperature above 0, or leave it out",
            )
        self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        self.top_n_sigma = 0.0


def whole_number(value: object) -> int | None:
    """Returns a whole number as an int, NumPy's too; None for a bool and everything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _whole_in(name: str, value: object, allowed: WholeRange) -> Any:
    """Returns the value as an int within its range, or None where that is allowed."""
    if value is None and allowed.optional:
        return None
    number = whole_number(value)
    fits = number is not None and allowed.low <= number <= allowed.high
    _check(name, value, fits, allowed.words)
    return number


def _is(value: object, number: int) -> bool:
    return whole_number(value) == number


def _number(value: object) -> float:
    """Returns a finite number as a float, NumPy's too; NaN, which is in no range, for anything
    else.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        number = float(value)
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def _texts(name: str, value: object, allowed: str, *, lone: bool = False) -> list[str]:
    """Returns a list of texts, none of them blank; with `lone` a single text is one of these."""
    texts = [value] if lone and isinstance(value, str) else value
    if not isinstance(texts, list | tuple):
        raise InvalidRequest(f"{name}: got {shown(value)}, allowed is {allowed}", param=name)
    for text in texts:
        is_there = isinstance(text, str) and (text != "" if lone else text.strip() != "")
        _check(name, text, is_there, f"{allowed}, none of them empty")
    return list(texts)


def _breakers(value: Any, allowed: str) -> list[str]:
    name = "dry_sequence_breakers"
    _check(name, value, isinstance(value, list | tuple) and len(value) <= MAX_BREAKERS, allowed)
    texts: list[str] = list(value)
    for text in texts:
        _check(name, text, isinstance(text, str) and 0 < len(text) <= MAX_BREAKER, allowed)
    return texts


def _token_ids(name: str, value: Any) -> list[int]:
    """Returns token ids as a list of ints; arrays are taken as lists are."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    _check(name, value, isinstance(ids, list | tuple), "a list of token ids")
    return [_token_id(name, token) for token in ids]


def _token_id(name: str, token: object) -> int:
    number = whole_number(token)
    if number is None or not 0 <= number <= INT32_MAX:
        raise InvalidRequest(
            f"{name}: got {shown(token)}, allowed are token ids (from 0 to {INT32_MAX})",
            param=name,
        )
    return number


def _bias_token(key: object) -> int:
    """Returns a token id that is the key of a bias; JSON has them as texts."""
    try:
        number = int(key) if isinstance(key, str) else whole_number(key)
    except ValueError:
        number = None
    if number is None or not 0 <= number <= INT32_MAX:
        raise InvalidRequest(
            f"logit_bias: got the key {shown(key)}, allowed are token ids", param="logit_bias"
        )
    return number


def _bias(key: object, value: object) -> float:
    number = _number(value)
    _check(
        "logit_bias",
        value,
        abs(number) <= MAX_BIAS,
        f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g} for token id {key}",
    )
    return number


def _check(name: str, value: object, ok: bool, allowed: str, hint: str | None = None) -> None:
    if not ok:
        raise InvalidRequest(
            f"{name}: got {shown(value)}, allowed is {allowed}", param=name, hint=hint
        )
