"""Grammars of one engine, initialized on first use: reading the vocabulary takes some tenths of a
second. Implements `Grammars`.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from octavo.api.structured_outputs import GrammarSpec, StructuredOutputs
from octavo.text.ports import Matcher, Tokenizer

if TYPE_CHECKING:
    from octavo.text.grammar.compiler import GrammarCompiler


@dataclass(frozen=True, slots=True)
class GrammarSetup:
    """Inputs for compiling grammars: tokenizer, vocabulary size, end tokens."""

    tokenizer: Tokenizer
    vocab_size: int
    end_token_ids: Sequence[int]


MAX_ADMITTED_BYTES = 4 << 20
"""Size limit of cached grammar texts."""


class AdmittedForms:
    """LRU cache of validated grammars."""

    def __init__(self, max_bytes: int = MAX_ADMITTED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._specs: OrderedDict[bytes, GrammarSpec] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, digest: bytes) -> GrammarSpec | None:
        """Returns the grammar of a request's digest, if cached."""
        with self._lock:
            if digest in self._specs:
                self._specs.move_to_end(digest)
            return self._specs.get(digest)

    def add(self, digest: bytes, spec: GrammarSpec) -> None:
        """Adds a grammar and evicts the least recently used ones."""
        with self._lock:
            if digest not in self._specs:
                self._num_bytes += len(spec.text)
            self._specs[digest] = spec
            while self._num_bytes > self._max_bytes:
                _, oldest = self._specs.popitem(last=False)
                self._num_bytes -= len(oldest.text)


def get_digest(outputs: StructuredOutputs) -> bytes | None:
    """Returns a content digest; None if the request is not valid JSON."""
    fields = {name: getattr(outputs, name) for name in outputs.__struct_fields__}
    try:
        text = json.dumps(fields, default=msgspec.to_builtins, allow_nan=False)
    except (RecursionError, TypeError, ValueError):
        return None
    return blake2b(text.encode(), digest_size=16).digest()


class LazyGrammars:
    """Compiles and validates grammars. Thread-safe."""

    def __init__(self, read: Callable[[], GrammarSetup], *, opens_objects: bool = False) -> None:
        """With `opens_objects`, objects without `additionalProperties` allow other properties."""
        self._read = read
        self._opens_objects = opens_objects
        self._admitted = AdmittedForms()
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Matcher:
        return self.compiler.compile(spec)

    def num_bytes(self, spec: GrammarSpec) -> int:
        return self.compiler.num_bytes(spec)

    def knows(self, outputs: StructuredOutputs) -> bool:
        """Returns whether a request's grammar is cached, so that `admit` is fast."""
        digest = get_digest(self._configured(outputs))
        return digest is not None and self._admitted.find(digest) is not None

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | None]:
        return self.compiler.masks(matchers)

    def admit(self, outputs: StructuredOutputs) -> GrammarSpec:
        """Returns the grammar of a request; raises InvalidRequest if it cannot be compiled."""
        from octavo.text.grammar.admission import admit

        outputs = self._configured(outputs)
        digest = get_digest(outputs)
        spec = None if digest is None else self._admitted.find(digest)
        if spec is None:
            spec = admit(outputs, self.compiler)
            if digest is not None:
                self._admitted.add(digest, spec)
        return spec

    def _configured(self, outputs: StructuredOutputs) -> StructuredOutputs:
        """Fills in the engine's default of `disable_additional_properties`."""
        if outputs.disable_additional_properties is not None:
            return outputs
        closes = not self._opens_objects
        return msgspec.structs.replace(outputs, disable_additional_properties=closes)

    def continues(self, spec: GrammarSpec, token_ids: Sequence[int]) -> bool:
        """Returns whether tokens are a valid prefix of a grammar's text."""
        from octavo.text.grammar.compiler import GrammarError

        try:
            self.compile(spec).accept_tokens(token_ids)
        except GrammarError:
            return False
        return True

    @property
    def compiler(self) -> GrammarCompiler:
        """The compiler, created on first use."""
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
