"""The grammars of one engine, made ready when the first is asked for: reading the vocabulary takes
some tenths of a second, and llguidance is not loaded before. Implements `ports.Grammars`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.ports import Matcher, Tokenizer
from octavo.structured_outputs import GrammarSpec, StructuredOutputs

if TYPE_CHECKING:
    from octavo.text.grammar.compiler import GrammarCompiler


@dataclass(frozen=True, slots=True)
class GrammarSetup:
    """The parts of a model that its grammars are compiled over."""

    tokenizer: Tokenizer
    vocab_size: int
    end_token_ids: Sequence[int]


class LazyGrammars:
    """Compiles and admits grammars; any thread may."""

    def __init__(self, read: Callable[[], GrammarSetup]) -> None:
        self._read = read
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Matcher:
        return self.compiler.compile(spec)

    def num_bytes(self, spec: GrammarSpec) -> int:
        return self.compiler.num_bytes(spec)

    def admit(self, form: StructuredOutputs) -> GrammarSpec:
        """Returns the grammar of a form; InvalidRequest says why it cannot be met."""
        from octavo.text.grammar.admission import admit

        return admit(form, self.compiler)

    def continues(self, spec: GrammarSpec, token_ids: Sequence[int]) -> bool:
        """Returns whether tokens are the beginning of a grammar's text."""
        from octavo.text.grammar.compiler import GrammarError

        try:
            self.compile(spec).take(token_ids)
        except GrammarError:
            return False
        return True

    @property
    def compiler(self) -> GrammarCompiler:
        """The compiler, made for the first who asks."""
        from octavo.text.grammar.compiler import GrammarCompiler

        with self._lock:
            if self._compiler is None:
                setup = self._read()
                self._compiler = GrammarCompiler(
                    setup.tokenizer,
                    vocab_size=setup.vocab_size,
                    end_token_ids=setup.end_token_ids,
                )
            return self._compiler
