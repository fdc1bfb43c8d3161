"""Resources besides KV blocks: compiled grammars, adapters in device slots, encoded media.

Plain requests need none of them. Tracks slots and digests; the worker owns the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.api.structured_outputs import GrammarSpec
from octavo.engine.adapters import NO_SLOT, AdapterSlotAllocator
from octavo.engine.media import EncoderCacheManager
from octavo.engine.protocol.requests import EngineRequest
from octavo.engine.protocol.step import StepPlan, StepResult

MAX_READY = 1_000
"""Maximum number of grammars that are remembered as compiled."""


class RequestResources:
    """The grammars, adapters and media of one engine."""

    def __init__(self, num_adapter_slots: int, media_cache_tokens: int) -> None:
        self.is_used = False
        """Whether any request has needed one."""
        self.grammars = GrammarGate()
        self._adapters = AdapterSlotAllocator(num_adapter_slots)
        self._media = EncoderCacheManager(media_cache_tokens)

    def request(self, source: EngineRequest) -> None:
        """Starts to provide the resources of a new request."""
        self.is_used = True
        if source.grammar is not None:
            self.grammars.want(source.grammar)

    def is_loaded(self, source: EngineRequest) -> bool:
        """Returns whether a request's adapter is in a slot; loads it if a slot is available."""
        adapter = source.adapter
        return adapter is None or self._adapters.is_ready(source.request_id, adapter)

    def is_compiled(self, source: EngineRequest) -> bool:
        """Returns whether a request need not wait for its grammar."""
        return source.grammar is None or self.grammars.is_ready(source.grammar)

    def hold(self, source: EngineRequest) -> None:
        """Holds the adapter of a request that starts."""
        if source.adapter is not None:
            self._adapters.hold(source.request_id, source.adapter)

    def release(self, source: EngineRequest) -> None:
        """Releases the adapter of a request that has ended."""
        if source.adapter is not None:
            self._adapters.release(source.request_id, source.adapter)

    def get_adapter_slot(self, source: EngineRequest) -> int:
        """Returns the slot of the adapter that a request holds; NO_SLOT without one."""
        return NO_SLOT if source.adapter is None else self._adapters.get_slot(source.adapter)

    def read_media(self, source: EngineRequest, start: int, end: int) -> None:
        """Schedules the encoding of the media within a request's tokens from `start` to `end`."""
        self._media.use(source, start, end)

    def add_to_plan(self, plan: StepPlan) -> None:
        """Adds the adapters to load, the grammars to compile, and the media to encode or evict to a
        plan.
        """
        if self.grammars.to_compile:
            plan.compiles = self.grammars.pop_wanted()
        if self._adapters.num_slots:
            plan.adapters = self._adapters.pop_loads()
        if self._media.kept:
            plan.encodes = self._media.pop_encodes()
            plan.dropped_media = self._media.pop_dropped()

    def update(self, result: StepResult) -> dict[bytes, str]:
        """Processes a plan's result; returns the errors of failed adapter loads by digest."""
        if result.compiled:
            self.grammars.compiled(result.compiled)
        if result.not_encoded:
            self._media.discard(result.not_encoded)
        return self._adapters.loaded(result.adapters) if result.adapters else {}

    def plan_failed(self, plan: StepPlan) -> None:
        """Repeats requests that a failed plan may not have begun."""
        # Grammars whose compilation did not begin are compiled when their rows are added.
        self.grammars.compiled(spec.digest for spec in plan.compiles)
        self._adapters.load_again(plan.adapters)
        self._media.discard(pixels.digest for pixels in plan.encodes)


class GrammarGate:
    """Grammars of one engine's requests.

    Tracks which grammars the worker is compiling or has compiled: a request waits for its grammar
    without delaying others.

    Identifies grammars by digest. The worker may evict a grammar that was not used for long, and
    compiles it again when needed.
    """

    def __init__(self) -> None:
        self.to_compile: list[GrammarSpec] = []
        self._asked: set[bytes] = set()
        self._ready: dict[bytes, None] = {}

    def want(self, spec: GrammarSpec) -> None:
        """Requests the compilation of a grammar unless it was already requested."""
        if spec.digest in self._ready or spec.digest in self._asked:
            return
        self._asked.add(spec.digest)
        self.to_compile.append(spec)

    def is_ready(self, spec: GrammarSpec) -> bool:
        """Returns whether a request with that grammar may start."""
        return spec.digest not in self._asked

    @property
    def is_compiling(self) -> bool:
        """Whether the worker is still compiling a grammar."""
        return bool(self._asked)

    def pop_wanted(self) -> list[GrammarSpec]:
        """Removes and returns the grammars that the next plan compiles."""
        grammars, self.to_compile = self.to_compile, []
        return grammars

    def compiled(self, digests: Iterable[bytes]) -> None:
        """Records that grammars were compiled, or failed to compile (their rows then report the
        error).
        """
        for digest in digests:
            self._asked.discard(digest)
            self._ready[digest] = None
        while len(self._ready) > MAX_READY:
            del self._ready[next(iter(self._ready))]
