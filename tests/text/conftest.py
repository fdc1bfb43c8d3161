"""A tokenizer of few bytes and marks, and the grammars over its vocabulary."""

import pytest

from octavo.checkpoint.ports import TokenizerSource
from octavo.text.grammar.lazy import GrammarSetup, LazyGrammars
from octavo.text.tokenizer import load_tokenizer
from tests.support.tiny_tokenizer import SPECIALS, save_tiny_tokenizer

END = SPECIALS.index("<eos>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    source = TokenizerSource(folder, json=folder / "tokenizer.json", eos_token_ids=(END,))
    return load_tokenizer(source)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return LazyGrammars(lambda: GrammarSetup(tokenizer, 300, (END,)))
