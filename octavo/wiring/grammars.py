"""Builds the grammar compiler of a model. Callers provide the function that loads the tokenizer."""

from __future__ import annotations

from collections.abc import Callable

from octavo.models.hf_config import ModelInfo
from octavo.text.grammar.lazy import GrammarSetup, LazyGrammars
from octavo.text.ports import Tokenizer
from octavo.wiring.model import Model


def end_token_ids(info: ModelInfo, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the end tokens: the tokenizer's, or the config's without a tokenizer."""
    return info.eos_token_ids if tokenizer is None else tokenizer.eos_token_ids


def lazy_grammars(model: Model, read: Callable[[], Tokenizer | None]) -> LazyGrammars:
    """Builds the model's grammar compiler; `read` loads the tokenizer on first use."""
    # Keeps no reference to the checkpoint, whose file would stay mapped as long as the engine runs.
    info = model.info

    def setup() -> GrammarSetup:
        tokenizer = read()
        assert tokenizer is not None, "the frontend rejects grammars without a tokenizer"
        return GrammarSetup(tokenizer, info.vocab_size, end_token_ids(info, tokenizer))

    return LazyGrammars(setup, opens_objects=model.config.sampler.structured_open_objects)
