"""SamplingParams: how the next token is chosen and when a request ends. Names, defaults and ranges
are vLLM's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from octavo.errors import InvalidRequest

GREEDY_EPS = 1e-5
MIN_TEMPERATURE = 0.01
MAX_N = 16384
MAX_BEAMS = 1024
MAX_LENGTH_PENALTY = 10.0
"""Either way: a length to a higher power is beyond what a float holds, or 0."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0, 1.0),
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None,),
}
"""What a beam search can take."""

FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)
LISTS = {
    "stop_token_ids": "a list of token ids",
    "allowed_token_ids": "a list of token ids",
    "bad_words": "a list of texts",
}


class SamplingParams(msgspec.Struct, kw_only=True):
    """Validated when made; limits that depend on the model are checked when a request is admitted.

    `temperature` below 1e-5 is greedy. `top_k` 0 or -1 is off. `logprobs` -1 means the whole
    vocabulary. `max_tokens` None means until the context ends. The order of filters: bias, bans and
    penalties; temperature; min_p; top_k; top_p.
    """

    n: int = 1
    best_of: int | None = None
    """So many samples are made, and the n of them returned that have the highest cumulative
    logprob, best first; None: n.
    """
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    """Only of the prompt's tokens from this index on, so that what comes before may be found in the
    prefix cache.
    """
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    beam_width: int | None = None
    """Beam search with so many beams, of which the n best are returned; None: no search."""
    length_penalty: float = 1.0
    """Of a beam search: its scores are cumulative logprobs over the length to this power."""
    early_stopping: bool | Literal["never"] = False
    """Of a beam search: whether it ends with beam_width finished sequences (True), when no better
    one is likely (False), or possible.
    """
    bad_words_token_ids: list[list[int]] | None = None
    """Filled by the input processor from `bad_words`."""

    def __post_init__(self) -> None:
        self._check_types()
        self._normalize()
        self._check_ranges()
        self._check_lists()
        if self.beam_width is not None:
            self._make_search()
        elif self.is_greedy:
            self._make_greedy()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

    @property
    def num_samples(self) -> int:
        """That are made, each a request of the core; a beam search is one."""
        if self.beam_width is not None:
            return 1
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """More samples are made than returned: which ones is known when all have ended."""
        return self.num_samples > self.n

    @property
    def first_prompt_logprob(self) -> int:
        """Index of the first prompt token that may have one: nothing precedes token 0."""
        return max(1, self.prompt_logprob_start or 0)

    @property
    def stop_strings(self) -> list[str]:
        return self.stop if isinstance(self.stop, list) else []

    def _check_types(self) -> None:
        for name in FLAGS:
            _check(
                name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False"
            )
        for name, allowed in LISTS.items():
            value = getattr(self, name)
            _check(name, value, value is None or isinstance(value, list | tuple), allowed)
        _check(
            "stop",
            self.stop,
            self.stop is None or isinstance(self.stop, str | list | tuple),
            "one text or a list of texts",
        )
        _check(
            "logit_bias",
            self.logit_bias,
            self.logit_bias is None or isinstance(self.logit_bias, dict),
            "numbers by token id",
        )

    def _normalize(self) -> None:
        if self.stop is not None:
            self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop)
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if self.stop_token_ids is not None:
            self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))
        if self.logit_bias is not None:
            self.logit_bias = {
                _token_id(key): _bias(key, value) for key, value in self.logit_bias.items()
            }

    def _check_ranges(self) -> None:
        _check(
            "n",
            self.n,
            _is_int(self.n) and 1 <= self.n <= MAX_N,
            f"a whole number from 1 to {MAX_N}",
        )
        best_ok = self.best_of is None or (
            _is_int(self.best_of) and self.n <= self.best_of <= MAX_N
        )
        _check(
            "best_of",
            self.best_of,
            best_ok,
            f"None, or a whole number from n ({self.n}) to {MAX_N}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, _is_number(value) and -2 <= value <= 2, "a number from -2 to 2")
        value = self.repetition_penalty
        _check("repetition_penalty", value, _is_number(value) and value > 0, "a number above 0")
        value = self.temperature
        _check(
            "temperature",
            value,
            _is_number(value) and 0 <= value <= 2,
            "a number from 0 to 2",
            hint="0 is greedy",
        )
        _check(
            "top_p",
            self.top_p,
            _is_number(self.top_p) and 0 < self.top_p <= 1,
            "a number above 0 and at most 1",
        )
        _check(
            "top_k",
            self.top_k,
            _is_int(self.top_k) and self.top_k >= 0,
            "0 or -1 (off), or a whole number from 1 up",
        )
        _check(
            "min_p",
            self.min_p,
            _is_number(self.min_p) and 0 <= self.min_p <= 1,
            "a number from 0 to 1",
        )
        seed_ok = self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63)
        _check("seed", self.seed, seed_ok, "a signed 64-bit whole number or None")
        max_ok = self.max_tokens is None or (_is_int(self.max_tokens) and self.max_tokens >= 1)
        _check(
            "max_tokens",
            self.max_tokens,
            max_ok,
            "a whole number from 1 up, or None (until the context ends)",
        )
        ceiling = math.inf if self.max_tokens is None else self.max_tokens
        _check(
            "min_tokens",
            self.min_tokens,
            _is_int(self.min_tokens) and 0 <= self.min_tokens <= ceiling,
            f"a whole number from 0 to max_tokens ({self.max_tokens})",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(
                name,
                value,
                value is None or (_is_int(value) and value >= -1),
                "None, -1 (the whole vocabulary), or a whole number from 0 up",
            )

        value = self.prompt_logprob_start
        _check(
            "prompt_logprob_start",
            value,
            value is None or (_is_int(value) and value >= 0),
            "None or a whole number from 0 up",
        )
        if value is not None and self.prompt_logprobs is None:
            raise InvalidRequest(
                "prompt_logprob_start: allowed only with prompt_logprobs",
                param="prompt_logprob_start",
            )

    def _check_lists(self) -> None:
        for text in self.stop_strings:
            _check(
                "stop",
                text,
                isinstance(text, str) and text != "",
                "one text or a list of texts, none of them empty",
            )
        if self.stop_strings and not self.detokenize:
            raise InvalidRequest(
                "stop: stop texts need the text, and detokenize is False",
                param="stop",
                hint="use stop_token_ids",
            )
        for token in self.stop_token_ids or []:
            _check("stop_token_ids", token, _is_int(token) and token >= 0, "token ids")
        if self.allowed_token_ids is not None:
            ids = self.allowed_token_ids
            _check(
                "allowed_token_ids",
                ids,
                len(ids) > 0 and all(_is_int(i) and i >= 0 for i in ids),
                "a list of at least one token id",
            )
        for word in self.bad_words or []:
            _check(
                "bad_words",
                word,
                isinstance(word, str) and word.strip() != "",
                "texts, none of them empty",
            )

    def _make_search(self) -> None:
        """It draws nothing, and looks at the model's own logprobs: what would change them is
        refused.
        """
        width = self.beam_width
        _check(
            "beam_width",
            width,
            _is_int(width) and 1 <= (width or 0) <= MAX_BEAMS,
            f"None, or a whole number from 1 to {MAX_BEAMS}",
        )
        _check(
            "n",
            self.n,
            self.n <= (width or 0),
            f"at most the beam_width ({width}) in a beam search",
        )
        _check(
            "best_of",
            self.best_of,
            self.best_of in (None, self.n),
            f"n ({self.n}) in a beam search",
            hint="beam_width says how many are tried",
        )
        penalty, most = self.length_penalty, MAX_LENGTH_PENALTY
        _check(
            "length_penalty",
            penalty,
            _is_number(penalty) and abs(penalty) <= most,
            f"a number from {-most:g} to {most:g}",
        )
        _check(
            "early_stopping",
            self.early_stopping,
            self.early_stopping in (True, False, "never"),
            "True, False or 'never'",
        )
        for name, neutral in NEUTRAL.items():
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
        self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """A beam search: what `LLM.beam_search` takes. All other ways of asking have the same fields in
    SamplingParams.
    """

    beam_width: int
    max_tokens: int | None
    n: int | None = None
    """How many of the best sequences are returned; None: beam_width."""
    ignore_eos: bool = False
    temperature: float = 0.0
    """A search draws nothing; allowed are 0 and 1, which mean the same."""
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def sampling_params(self) -> SamplingParams:
        fields = msgspec.structs.asdict(self)
        return SamplingParams(**fields | {"n": self.beam_width if self.n is None else self.n})


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _token_id(key: object) -> int:
    try:
        return int(str(key))
    except (TypeError, ValueError):
        raise InvalidRequest(
            f"logit_bias: got the key {key!r}, allowed are token ids", param="logit_bias"
        ) from None


def _bias(key: object, value: float) -> float:
    _check("logit_bias", value, _is_number(value), f"a number for token id {key}")
    return min(100.0, max(-100.0, float(value)))


def _check(name: str, value: object, ok: bool, allowed: str, hint: str | None = None) -> None:
    if not ok:
        raise InvalidRequest(f"{name}: got {value!r}, allowed is {allowed}", param=name, hint=hint)


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams], count: int
) -> list[SamplingParams]:
    """One for all, or one for each of `count` prompts."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequest(
            f"sampling_params: got {len(params)}, allowed is one, or one for each of the {count}"
            " prompts"
        )
    return list(params)
