"""The grammars of one engine, made ready when the first is asked for: reading the vocabulary takes
some tenths of a second, and llguidance is not loaded before. Implements `prompt_ports.Grammars`.
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
    """The parts of a model that its grammars are compiled over."""

    tokenizer: Tokenizer
    vocab_size: int
    end_token_ids: Sequence[int]


MAX_ADMITTED_BYTES = 4 << 20
"""Text of the grammars of forms that are known to be good."""


class AdmittedForms:
    """Grammars of the forms that were admitted last, for requests that have the same."""

    def __init__(self, max_bytes: int = MAX_ADMITTED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._specs: OrderedDict[bytes, GrammarSpec] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, digest: bytes) -> GrammarSpec | None:
        """Returns the grammar of a form; None where it is not known."""
        with self._lock:
            if digest in self._specs:
                self._specs.move_to_end(digest)
            return self._specs.get(digest)

    def add(self, digest: bytes, spec: GrammarSpec) -> None:
        """Keeps a form's grammar; those used least recently go."""
        with self._lock:
            if digest not in self._specs:
                self._num_bytes += len(spec.text)
            self._specs[digest] = spec
            while self._num_bytes > self._max_bytes:
                _, oldest = self._specs.popitem(last=False)
                self._num_bytes -= len(oldest.text)


def digest_of(form: StructuredOutputs) -> bytes | None:
    """Returns the name of a form by its content; None where it is no JSON, which is refused."""
    fields = {name: getattr(form, name) for name in form.__struct_fields__}
    try:
        text = json.dumps(fields, default=msgspec.to_builtins, allow_nan=False)
    except (RecursionError, TypeError, ValueError):
        return None
    return blake2b(text.encode(), digest_size=16).digest()


class LazyGrammars:
    """Compiles and admits grammars; any thread may."""

    def __init__(self, read: Callable[[], GrammarSetup], *, opens_objects: bool = False) -> None:
        """Takes whether objects whose schema is silent about `additionalProperties` are open."""
        self._read = read
        self._opens_objects = opens_objects
        self._admitted = AdmittedForms()
        self._compiler: GrammarCompiler | None = None
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> Matcher:
        return self.compiler.compile(spec)

    def num_bytes(self, spec: GrammarSpec) -> int:
        return self.compiler.num_bytes(spec)

    def knows(self, form: StructuredOutputs) -> bool:
        """Returns whether a form was admitted before, so that to admit it again is quick."""
        digest = digest_of(self._configured(form))
        return digest is not None and self._admitted.find(digest) is not None

    def masks(self, matchers: Sequence[Matcher]) -> list[bytes | None]:
        return self.compiler.masks(matchers)

    def admit(self, form: StructuredOutputs) -> GrammarSpec:
        """Returns the grammar of a form; InvalidRequest says why it cannot be met."""
        from octavo.text.grammar.admission import admit

        form = self._configured(form)
        digest = digest_of(form)
        found = None if digest is None else self._admitted.find(digest)
        if found is None:
            found = admit(form, self.compiler)
            if digest is not None:
                self._admitted.add(digest, found)
        return found

    def _configured(self, form: StructuredOutputs) -> StructuredOutputs:
        """Returns a form with the engine's own value where the request gives none."""
        if form.disable_additional_properties is not None:
            return form
        closes = not self._opens_objects
        return msgspec.structs.replace(form, disable_additional_properties=closes)

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
