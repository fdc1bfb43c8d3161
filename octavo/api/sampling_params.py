"""SamplingParams: sampling and stop options of a request. Names, defaults and ranges are vLLM's.

Each field carries its declaration (`sampling_options.py`), from which everything outside the
executors' formulas is derived. Values are checked when the params are made; limits that depend on
the model are checked when a request is admitted.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from octavo.api.checked_call import CheckedCall
from octavo.api.repetition_detection import RepetitionDetection
from octavo.api.sampling_checks import check_params
from octavo.api.sampling_options import (
    FLOAT32_MAX,
    FLOAT32_MIN,
    GREEDY_EPS,
    INT32_MAX,
    MAX_BEAMS,
    MAX_BREAKER,
    MAX_BREAKERS,
    MAX_LENGTH_PENALTY,
    MAX_LISTED,
    MAX_N,
    MAX_PROCESSORS,
    Flag,
    Integer,
    Number,
    Option,
    read_options,
)
from octavo.api.stop_patterns import MAX_MATCH, MAX_PATTERN, MAX_PATTERNS
from octavo.api.structured_outputs import StructuredOutputs
from octavo.text.answer_marks import AnswerMarks


class SamplingParams(msgspec.Struct, kw_only=True, tag="sampling", metaclass=CheckedCall):
    """Sampling and stop options of one request; checked when made.

    `temperature` below 1e-5 is greedy. `top_k` 0 or -1 is off. `logprobs` -1 means the whole
    vocabulary. `max_tokens` None means until the context ends. Within a stage, fields are in the
    order in which they take effect.
    """

    n: Annotated[int, Integer("sample", (1, MAX_N), help="number of samples for each prompt")] = 1
    best_of: Annotated[
        int | None,
        Option(
            "sample",
            takes="an integer of at least n",
            help="number of samples, of which the n most likely are returned; default n",
        ),
    ] = None
    seed: Annotated[
        int | None,
        Integer(
            "sample",
            (-(1 << 63), (1 << 63) - 1),
            takes="a signed 64-bit integer or None",
            help="random seed for reproducible sampling; default random",
            takes_minus_one=True,
        ),
    ] = None

    logits_processors: Annotated[
        list[str] | None,
        Option(
            "logits",
            takes=f"a list of at most {MAX_PROCESSORS} names of the engine's logits processors",
            help="logits processors to apply, in this order",
            in_beam_search=False,
        ),
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        Option(
            "logits",
            takes="an object of token ids and numbers from -100 to 100",
            help="added to the tokens' logits",
            in_beam_search=False,
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        Option(
            "logits",
            takes="a list of at least one token id",
            help="the only token ids that may be sampled",
            in_beam_search=False,
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        Option(
            "logits",
            takes="a list of strings",
            help="strings that are never generated",
            in_beam_search=False,
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Option(
            "logits",
            takes="an object with exactly one of json, json_object, regex, choice, grammar and"
            " structural_tag",
            help="constraint on the output (structured outputs)",
        ),
    ] = None
    dry_multiplier: Annotated[
        float,
        Number(
            "logits",
            (0, 100),
            help="penalty multiplier for tokens that extend a repetition (DRY); 0 disables it",
            in_beam_search=False,
            host_only=True,
            is_extension=True,
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        Number(
            "logits",
            (1, 100),
            help="base of the DRY penalty, which grows with the length of the repetition",
            host_only=True,
            is_extension=True,
        ),
    ] = 1.75
    dry_allowed_length: Annotated[
        int,
        Integer(
            "logits",
            (1, INT32_MAX),
            help="minimum length in tokens of a penalized repetition",
            host_only=True,
            is_extension=True,
        ),
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        Integer(
            "logits",
            (-1, INT32_MAX),
            takes=f"-1 (all tokens), or an integer from -1 to {INT32_MAX}",
            help="number of most recent tokens to search for repetitions",
            host_only=True,
            is_extension=True,
        ),
    ] = -1
    dry_sequence_breakers: Annotated[
        list[str] | None,
        Option(
            "logits",
            takes=f"a list of at most {MAX_BREAKERS} strings of {MAX_BREAKER} characters; default a"
            " newline, a colon, a double quote and an asterisk",
            help="strings that end a repetition",
            is_extension=True,
        ),
    ] = None
    repetition_penalty: Annotated[
        float,
        Number(
            "logits",
            (FLOAT32_MIN, FLOAT32_MAX),
            takes="a number above 0 (a 32-bit float)",
            help="divisor of the logits of tokens in the prompt or the output; 1 is off",
            in_beam_search=False,
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        Number(
            "logits",
            (-2, 2),
            help="subtracted from a token's logit for each occurrence in the output",
            in_beam_search=False,
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Number(
            "logits",
            (-2, 2),
            help="subtracted from the logits of tokens that occur in the output",
            in_beam_search=False,
        ),
    ] = 0.0

    top_n_sigma: Annotated[
        float,
        Number(
            "filter",
            (0, 100),
            takes="0 or -1 (off), or a number up to 100",
            help="keep tokens with logits within this many standard deviations of the highest",
            filter="distribution",
            keeps_best=True,
            takes_minus_one=True,
            is_extension=True,
        ),
    ] = 0.0
    temperature: Annotated[
        float,
        Number("filter", (0, 2), help="randomness of sampling; 0 is greedy", hint="0 is greedy"),
    ] = 1.0
    dynatemp_range: Annotated[
        float,
        Number(
            "filter",
            (0, 2),
            help="range around `temperature` in which the temperature follows the entropy",
            filter="distribution",
            is_extension=True,
        ),
    ] = 0.0
    dynatemp_exponent: Annotated[
        float,
        Number(
            "filter",
            (0, 100),
            above_low=True,
            help="exponent of the relative entropy for dynamic temperature",
            is_extension=True,
        ),
    ] = 1.0
    typical_p: Annotated[
        float,
        Number(
            "filter",
            (0, 1),
            above_low=True,
            help="keep the most typical tokens, up to this cumulative probability (locally typical"
            " sampling)",
            filter="distribution",
            is_extension=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Number(
            "filter",
            (0, 1),
            help="keep tokens with at least this fraction of the most likely token's probability",
            filter="cutoff",
        ),
    ] = 0.0
    top_k: Annotated[
        int,
        Integer(
            "filter",
            (0, INT32_MAX),
            takes=f"0 or -1 (off), or an integer from 1 to {INT32_MAX}",
            help="keep this many most likely tokens; 0 or -1 is off",
            filter="cutoff",
            takes_minus_one=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        Number(
            "filter",
            (0, 1),
            above_low=True,
            help="nucleus sampling: keep the most likely tokens, up to this cumulative probability",
            filter="cutoff",
        ),
    ] = 1.0
    xtc_probability: Annotated[
        float,
        Number(
            "filter",
            (0, 1),
            help="probability of excluding all top choices but the last (XTC)",
            filter="after_cutoff",
            is_extension=True,
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Number("filter", (0, 1), help="minimum probability of a top choice", is_extension=True),
    ] = 0.1
    mirostat_mode: Annotated[
        int,
        Integer(
            "filter",
            (0, 2),
            takes="0 (off), 1 or 2",
            help="mirostat version, which targets a surprise of mirostat_tau; 0 is off",
            filter="after_cutoff",
            is_extension=True,
        ),
    ] = 0
    mirostat_tau: Annotated[
        float,
        Number(
            "filter", (0, 100), help="target surprise in bits", host_only=True, is_extension=True
        ),
    ] = 5.0
    mirostat_eta: Annotated[
        float,
        Number(
            "filter", (0, 1), help="learning rate of mirostat", host_only=True, is_extension=True
        ),
    ] = 0.1

    max_tokens: Annotated[
        int | None,
        Integer(
            "stop",
            (1, INT32_MAX),
            takes=f"an integer from 1 to {INT32_MAX}, or None (until the context ends)",
            help="maximum number of output tokens",
        ),
    ] = 16
    min_tokens: Annotated[
        int, Integer("stop", (0, INT32_MAX), help="minimum number of output tokens")
    ] = 0
    ignore_eos: Annotated[bool, Flag("stop", help="ignore end-of-sequence tokens")] = False
    stop: Annotated[
        str | list[str] | None,
        Option("stop", takes="a string or a list of strings", help="stop before this string"),
    ] = None
    stop_regex: Annotated[
        str | list[str] | None,
        Option(
            "stop",
            takes="a regular expression in RE2's notation, of at most"
            f" {MAX_PATTERN} characters, or a list of at most {MAX_PATTERNS}",
            help=f"stop before a match of this pattern, which has at most {MAX_MATCH} characters",
            in_beam_search=False,
            is_extension=True,
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        Option("stop", takes="a list of token ids", help="token ids that stop generation"),
    ] = None
    include_stop_str_in_output: Annotated[
        bool, Flag("stop", help="include the stop string in the output")
    ] = False
    repetition_detection: Annotated[
        RepetitionDetection | None,
        Option(
            "stop",
            takes="an object of max_pattern_size, min_pattern_size and min_count",
            help="stop when a pattern of tokens repeats",
            in_beam_search=False,
        ),
    ] = None

    beam_width: Annotated[
        int | None,
        Integer("beam_search", (1, MAX_BEAMS), help="number of beams; default n"),
    ] = None
    length_penalty: Annotated[
        float,
        Option(
            "beam_search",
            takes=f"a number from -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}",
            help="exponent of the length by which a beam's cumulative logprob is divided",
        ),
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        Option(
            "beam_search",
            takes='true, false or "never"',
            help="when the search ends: at beam_width finished sequences (true), or when a better"
            ' one is unlikely (false) or impossible ("never")',
        ),
    ] = False

    logprobs: Annotated[
        int | None,
        Integer(
            "output",
            (-1, INT32_MAX),
            takes="None, -1 (the whole vocabulary), or an integer of at least 0",
            help="number of most likely alternatives returned for each output token",
        ),
    ] = None
    logprob_token_ids: Annotated[
        list[int] | None,
        Option(
            "output",
            takes=f"a list of 1 to {MAX_LISTED} distinct token ids; logprobs must be omitted or"
            f" equal their number",
            help="token ids whose logprobs are returned at each position, in addition to the"
            " sampled token",
            in_beam_search=False,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Integer(
            "output",
            (-1, INT32_MAX),
            takes="None, -1 (the whole vocabulary), or an integer of at least 0",
            help="number of most likely alternatives returned for each prompt token",
        ),
    ] = None
    prompt_logprob_start: Annotated[
        int | None,
        Integer("output", (0, INT32_MAX), help="index of the first prompt token with a logprob"),
    ] = None
    detokenize: Annotated[bool, Flag("output", help="convert the tokens to text")] = True
    skip_special_tokens: Annotated[
        bool, Flag("output", help="omit special tokens from the text")
    ] = True
    spaces_between_special_tokens: Annotated[
        bool, Flag("output", help="insert spaces between special tokens")
    ] = True

    bad_words_token_ids: list[list[int]] | None = None
    answer_marks: AnswerMarks | None = None
    """Control tokens and marker texts of the model's output format."""
    dry_sequence_breaker_ids: list[int] | None = None
    """Ids of tokens that contain one of `dry_sequence_breakers`."""

    num_needed_tokens: ClassVar[int] = 1
    """Number of tokens after the prompt that must fit the context."""

    def __post_init__(self) -> None:
        check_params(self, OPTIONS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPS

    @property
    def depends_on_mask(self) -> bool:
        """Whether an optimistic sample may differ from a masked one. With filters on, masked tokens
        change which other tokens pass them.
        """
        return any(getattr(self, name) != off for name, off in OPTIONS.filters.items())

    @property
    def has_cutoffs_alone(self) -> bool:
        """Whether every enabled filter is a cutoff."""
        on = [name for name, off in OPTIONS.filters.items() if getattr(self, name) != off]
        return bool(on) and all(name in OPTIONS.cutoffs for name in on)

    @property
    def num_shown_logprobs(self) -> int | None:
        """Number of logprobs returned for each position: the most likely tokens, or
        `logprob_token_ids` and the sampled one; None without logprobs.
        """
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids) + 1

    @property
    def num_samples(self) -> int:
        """Number of samples to generate; a beam search counts as one."""
        if self.beam_width is not None:
            return 1
        return self.n if self.best_of is None else self.best_of

    @property
    def is_ranked(self) -> bool:
        """Whether more samples are generated than returned, so that all must end first."""
        return self.num_samples > self.n

    @property
    def first_prompt_logprob(self) -> int:
        """Index of the first prompt token with a logprob; token 0 has none."""
        return max(1, self.prompt_logprob_start or 0)

    @property
    def stop_strings(self) -> list[str]:
        return self.stop if isinstance(self.stop, list) else []

    @property
    def stop_patterns(self) -> list[str]:
        return self.stop_regex if isinstance(self.stop_regex, list) else []

    @property
    def ends_by_text(self) -> bool:
        """Whether the request has stop conditions on its text."""
        return bool(self.stop or self.stop_regex)


OPTIONS = read_options(SamplingParams)
