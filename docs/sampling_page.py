"""The reference's page on sampling: each field of SamplingParams with its range, in the order in
which the steps of a draw follow one another (`octavo/executor/sampling.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from tables import table

from octavo.api.sampling_limits import DRAWS_ONLY, NUMBERS, SEARCH_VALUES, WHOLE_NUMBERS
from octavo.api.sampling_params import CUTS, MASKED_FILTERS, SamplingParams
from octavo.executor import sampling as draw
from octavo.server.fields import described
from octavo.server.openai.bodies import ChatBody, CompletionBody
from octavo.worker.sampling import dry

STEPS = {
    "Logits are changed": (
        "logits_processors",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "structured_outputs",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    ),
    "Tokens are filtered": (
        "top_n_sigma",
        "temperature",
        "dynatemp_range",
        "dynatemp_exponent",
        "typical_p",
        "min_p",
        "top_k",
        "top_p",
        "xtc_probability",
        "xtc_threshold",
        "mirostat_mode",
        "mirostat_tau",
        "mirostat_eta",
    ),
    "A token is drawn": ("seed", "n", "best_of"),
    "An answer ends": (
        "max_tokens",
        "min_tokens",
        "ignore_eos",
        "stop",
        "stop_regex",
        "stop_token_ids",
        "include_stop_str_in_output",
        "repetition_detection",
    ),
    "A beam search takes the place of the draw": (
        "beam_width",
        "length_penalty",
        "early_stopping",
    ),
    "What is told": (
        "logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "prompt_logprob_start",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    ),
}
"""Fields by the step that they belong to."""

FILLED_IN = ("bad_words_token_ids", "answer_marks", "dry_sequence_breaker_ids")
"""Fields that the engine fills in by itself."""


def sampling() -> str:
    """Returns the page; every field of SamplingParams is in one of its tables."""
    defaults = SamplingParams()
    listed = [name for names in STEPS.values() for name in names]
    assert sorted([*listed, *FILLED_IN]) == sorted(SamplingParams.__struct_fields__)
    parts = [
        "# Sampling",
        "The fields of `SamplingParams`, in the order in which they take effect; most are fields of"
        " requests over HTTP too ([HTTP](http.md)). A field with an empty default is not set, and"
        " does nothing then unless its row says so. A value outside its range is refused by name,"
        ' and so are fields that are "not with" each other. Everything else goes together, under'
        " speculation too.",
    ]
    for title, names in STEPS.items():
        rows = [(f"`{name}`", _shown(getattr(defaults, name)), *_row(name)) for name in names]
        head = ("field", "default", "allowed", "what it does", "not with")
        parts += [f"## {title}", table(head, rows)]
    cuts = _listed(CUTS)
    others = _listed([name for name in MASKED_FILTERS if name not in CUTS])
    parts += [
        "## Beside a form",
        "A draw under `structured_outputs` is the draw among the tokens that the form allows,"
        " whatever else is set. Where no filter is on, a token is drawn and then checked; with"
        f" {cuts} too, where a few other legal tokens show that the filter would have kept it. With"
        f" one of {others}, and where those tokens do not show it, a mask of the form is made first"
        " ([draw first](../concepts/draw-first.md)). Both ways give the same tokens. `ignore_eos`"
        " and a form exclude each other.",
        "## What is added to logits",
        "The bias of step 3 below is the sum of what these give:",
        table(("field", "token", "added to its logit"), ADDED),
        "## DRY",
        "As `octavo/worker/sampling/dry.py` says it.",
        _text(dry.__doc__),
        "## Formulas and sources",
        "As `octavo/executor/sampling.py` says them; every backend follows this text. A row is one"
        " draw; z are its V logits, one for each token of the vocabulary, and p the probabilities"
        " that softmax makes of z / T, with the temperature T. (z down, id up) is the order by"
        " falling logit, equal ones by rising token id.",
        _text(draw.__doc__),
    ]
    return "\n\n".join(parts)


ADDED = [
    ("`logit_bias`", "each that it names", "the number given, where -100 is no ban but near one"),
    (
        "`bad_words`",
        "the last of a word's tokens, of those that spell it alone and of those that spell it"
        " behind a space, where the answer ends with the ones before it",
        "-inf",
    ),
    ("`min_tokens`", "those that end an answer, as long as it is shorter", "-inf"),
    ("`dry_multiplier`", "those that would go on with a repetition", "minus the penalty below"),
]
"""Parts of a draw's bias: field, tokens, number."""


def _listed(names: Iterable[str]) -> str:
    """Returns names as a sentence lists them."""
    *first, last = (f"`{name}`" for name in names)
    return f"{', '.join(first)} or {last}"


def _text(doc: str | None) -> str:
    """Returns a module's docstring as it stands."""
    return "```text\n" + (doc or "").strip() + "\n```"


def _row(name: str) -> tuple[str, str, str]:
    """Returns what a field takes, what it does and what it does not go with."""
    known = described(ChatBody) | described(CompletionBody)
    row: dict[str, Any] = known.get(name, {})
    bounds = NUMBERS.get(name) or WHOLE_NUMBERS.get(name)
    takes = bounds.words if bounds is not None else row.get("takes", "")
    others = []
    if name in SEARCH_VALUES:
        others.append("a beam search")
    if name in DRAWS_ONLY:
        others.append("temperature 0")
    return takes or WORDS[name][0], row.get("help") or WORDS[name][1], ", ".join(others)


WORDS = {
    "detokenize": ("True or False", "makes text of the tokens"),
}
"""Words for what a field takes and does where no body over HTTP has it."""


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"`{msgspec.json.encode(value).decode()}`"
