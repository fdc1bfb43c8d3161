"""Sets up the compiler of a model's grammars, and the tokens that end its answers.

Knows no tokenizer's files: its callers say how a tokenizer is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.models.hf_config import ModelInfo
from octavo.text.grammar.lazy import GrammarSetup, LazyGrammars
from octavo.text.ports import Tokenizer
from octavo.wiring.model import Model


def end_token_ids(info: ModelInfo, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the tokens that end an answer; without a tokenizer those that the configs name."""
    return info.eos_token_ids if tokenizer is None else tokenizer.eos_token_ids


def lazy_grammars(model: Model, read: Callable[[], Tokenizer | None]) -> LazyGrammars:
    """Makes what compiles the model's grammars; `read` gives its tokenizer."""
    # What is kept here keeps no checkpoint: its file would stay mapped as long as the engine lives.
    info = model.info

    def setup() -> GrammarSetup:
        tokenizer = read()
        assert tokenizer is not None, "the front refuses grammars where there is no tokenizer"
        return GrammarSetup(tokenizer, info.vocab_size, end_token_ids(info, tokenizer))

    return LazyGrammars(setup, opens_objects=model.config.draws.structured_open_objects)
