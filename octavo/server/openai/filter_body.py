"""Request fields of the samplers that OpenAI's own API does not have: filters of whole
distributions, mirostat and DRY. Names are llama.cpp's where it has them.
"""

from __future__ import annotations

from octavo.api.stop_patterns import MAX_MATCH, MAX_PATTERN, MAX_PATTERNS
from octavo.server.fields import Whole, field, sampling
from octavo.server.http.body import Body


class FilterBody(Body):
    """Base of the bodies that say how tokens are drawn."""

    typical_p: float | None = sampling(
        "typical_p",
        "draws from the tokens nearest to the expected surprise, of this probability together",
    )
    top_n_sigma: float | None = sampling(
        "top_n_sigma", "draws from logits within this many standard deviations of the best"
    )
    dynatemp_range: float | None = sampling(
        "dynatemp_range", "lets the temperature follow the entropy, this far up and down"
    )
    dynatemp_exponent: float | None = sampling(
        "dynatemp_exponent", "power of the entropy that the temperature follows"
    )
    xtc_probability: float | None = sampling(
        "xtc_probability", "how often all top choices but the last are left out"
    )
    xtc_threshold: float | None = sampling("xtc_threshold", "least probability of a top choice")
    mirostat_mode: Whole | None = sampling(
        "mirostat_mode", "holds the surprise of tokens near mirostat_tau; 0 is off"
    )
    mirostat_tau: float | None = sampling("mirostat_tau", "surprise aimed at, in bits")
    mirostat_eta: float | None = sampling("mirostat_eta", "how fast mirostat corrects an error")
    dry_multiplier: float | None = sampling(
        "dry_multiplier", "penalty of a token that goes on with a repetition; 0 is off"
    )
    dry_base: float | None = sampling("dry_base", "factor for each further token of a repetition")
    dry_allowed_length: Whole | None = sampling(
        "dry_allowed_length", "shortest repetition that is penalised"
    )
    dry_penalty_last_n: Whole | None = sampling(
        "dry_penalty_last_n", "tokens among which repetitions are looked for"
    )
    dry_sequence_breakers: list[str] | None = field(
        "a list of at most 64 texts of 64 characters; default a newline, a colon, a double quote"
        " and an asterisk",
        "texts that end a repetition",
    )
    stop_regex: str | list[str] | None = field(
        f"a regular expression in RE2's notation, of at most {MAX_PATTERN} characters, or a list"
        f" of at most {MAX_PATTERNS}",
        f"ends the answer before its match, which has at most {MAX_MATCH} characters",
        rules={"blanks": True},
    )


FILTER_FIELDS = tuple(FilterBody.model_fields)
"""Fields that go to SamplingParams unchanged, in every API that takes them."""
