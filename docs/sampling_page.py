"""The reference's page on sampling: each field of SamplingParams with its range, in the order in
which the steps of a draw follow one another (`octavo/backends/sampling.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec
from tables import table

from octavo.backends import sampling as draw
from octavo.sampling_limits import DRAWS_ONLY, NUMBERS, SEARCH_VALUES, WHOLE_NUMBERS
from octavo.sampling_params import MASKED_FILTERS, SamplingParams
from octavo.server.fields import described
from octavo.server.openai.bodies import ChatBody, CompletionBody

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
        " requests over HTTP too ([HTTP](http.md)). A value outside its range is refused by name.",
    ]
    for title, names in STEPS.items():
        rows = [(f"`{name}`", _shown(getattr(defaults, name)), *_row(name)) for name in names]
        head = ("field", "default", "allowed", "what it does", "not with")
        parts += [f"## {title}", table(head, rows)]
    masked = ", ".join(f"`{name}`" for name in MASKED_FILTERS)
    parts += [
        "Beside an answer's form (`structured_outputs`) everything but a beam search and"
        f" `ignore_eos` is honoured. With one of {masked} the form's mask is made before the draw;"
        " without them the drawn token is checked ([draw first](../concepts/draw-first.md)). Both"
        " give the same tokens.",
        "## Formulas and sources",
        "As `octavo/backends/sampling.py` says them; every backend follows this text.",
        "```text\n" + (draw.__doc__ or "").strip() + "\n```",
    ]
    return "\n\n".join(parts)


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
