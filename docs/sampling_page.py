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
    "logits": "Logits",
    "filter": "Filters",
    "sample": "Sampling",
    "stop": "Stop conditions",
    "beam_search": "Beam search",
    "output": "Output",
}
"""Titles of the stages, in the order in which they take effect."""


def sampling() -> str:
    """Returns the page; every declared field of SamplingParams is in one of its tables."""
    parts = [
        "# Sampling",
        "The fields of `SamplingParams`, in the order in which they take effect. Most are also"
        " fields of HTTP requests ([HTTP](http.md)). Fields without a default are not set by"
        ' default. Values outside their range, and the combinations listed under "not with", are'
        " rejected. All other combinations are supported, also with speculative decoding.",
    ]
    head = ("field", "default", "allowed", "description", "not with")
    for stage, title in STAGES.items():
        options = (option for option in OPTIONS.values() if option.stage == stage)
        parts += [f"## {title}", table(head, map(_row, options))]
    cutoffs = _listed(OPTIONS.cutoffs)
    others = _listed([name for name in OPTIONS.filters if name not in OPTIONS.cutoffs])
    parts += [
        "## With structured outputs",
        "With `structured_outputs`, only tokens that the grammar allows are sampled. Without"
        " filters, a token is sampled and then verified against the grammar. This also applies to"
        f" {cutoffs}, if a few other legal tokens prove that the filter would have kept the token."
        f" With {others}, or without that proof, the grammar mask is computed first"
        " ([optimistic sampling](../concepts/optimistic-sampling.md)). Both give the same tokens."
        " `ignore_eos` cannot be combined with `structured_outputs`.",
        "## Logit bias",
        "The bias of step 3 below is the sum of these values:",
        table(("field", "token", "added to its logit"), ADDED),
        "## DRY",
        "From `octavo/worker/sampling/dry.py`:",
        _text(dry.__doc__),
        "## Formulas and sources",
        "From `octavo/executor/sampling.py`; all backends implement these formulas. A row is one"
        " sample; z are its V logits, one per token of the vocabulary, and p is softmax(z / T) with"
        " the temperature T. (z down, id up) is the order by descending logit, then ascending token"
        " id.",
        _text(draw.__doc__),
        "## Formulas of the filters",
        "From `octavo/executor/filters.py`:",
        _text(filters.__doc__),
    ]
    return "\n\n".join(parts)


ADDED = [
    ("`logit_bias`", "the listed tokens", "the given number; -100 almost excludes a token"),
    (
        "`bad_words`",
        "the last token of a word, with or without a space before it, if the output ends with the"
        " previous tokens of the word",
        "-inf",
    ),
    ("`min_tokens`", "end tokens, until the minimum length", "-inf"),
    ("`dry_multiplier`", "tokens that would continue a repetition", "minus the penalty below"),
]
"""Parts of the logit bias: field, tokens, number."""


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
