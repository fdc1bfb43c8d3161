"""The reference's page on sampling: each field of SamplingParams with its range, by stage, and the
formulas of `octavo/executor/sampling.py` and `octavo/executor/filters.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from tables import table

from octavo.api.sampling_options import Option, Stage
from octavo.api.sampling_params import OPTIONS
from octavo.executor import filters
from octavo.executor import sampling as draw
from octavo.worker.sampling import dry

STAGES: dict[Stage, str] = {
    "logits": "Logits are changed",
    "filter": "Tokens are filtered",
    "sample": "A token is sampled",
    "stop": "Generation ends",
    "beam_search": "Beam search replaces sampling",
    "output": "What is returned",
}
"""Titles of the stages, in the order in which they take effect."""


def sampling() -> str:
    """Returns the page; every declared field of SamplingParams is in one of its tables."""
    parts = [
        "# Sampling",
        "The fields of `SamplingParams`, in the order in which they take effect; most are fields of"
        " requests over HTTP too ([HTTP](http.md)). A field with an empty default is not set, and"
        " does nothing then unless its row says so. A value outside its range is refused by name,"
        ' and so are fields that are "not with" each other. Everything else goes together, under'
        " speculation too.",
    ]
    head = ("field", "default", "allowed", "what it does", "not with")
    for stage, title in STAGES.items():
        options = (option for option in OPTIONS.values() if option.stage == stage)
        parts += [f"## {title}", table(head, map(_row, options))]
    cutoffs = _listed(OPTIONS.cutoffs)
    others = _listed([name for name in OPTIONS.filters if name not in OPTIONS.cutoffs])
    parts += [
        "## With structured outputs",
        "Sampling under `structured_outputs` chooses among the tokens that the grammar allows,"
        " whatever else is set. Without a filter, a token is sampled and then verified; with"
        f" {cutoffs} too, if a few other legal tokens prove that the filter would have kept it."
        f" With {others}, and without that proof, the mask of the grammar is built first"
        " ([optimistic sampling](../concepts/optimistic-sampling.md)). Both ways give the same"
        " tokens. `ignore_eos` and `structured_outputs` exclude each other.",
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
        "## Filters",
        "As `octavo/executor/filters.py` says them.",
        _text(filters.__doc__),
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


def _row(option: Option) -> tuple[str, ...]:
    """Returns a field's default, what it takes, what it does and what excludes it."""
    others = []
    if option.name in OPTIONS.beam_search_values:
        others.append("a beam search")
    if option.name in OPTIONS.greedy_values:
        others.append("temperature 0")
    default = _shown(option.default)
    return f"`{option.name}`", default, option.takes, option.help, ", ".join(others)


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f"`{msgspec.json.encode(value).decode()}`"
