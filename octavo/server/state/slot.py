"""The slot of one model's engine: unloaded, loading, ready, draining or failed.

Requests for an unloaded model trigger its load (`residency.py`); without an engine they get a 503.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import EngineDead, OctavoError, Unavailable
from octavo.api.pooling_params import PoolingTask
from octavo.config.model_reference import same_model
from octavo.engine.clients.client import ModelFacts
from octavo.server.state.adapters import ServedAdapter
from octavo.server.state.model_formats import ModelFormats
from octavo.server.state.model_metrics import ModelMetrics
from octavo.server.state.model_spec import ModelSpec
from octavo.server.state.model_uses import ModelUses
from octavo.wiring.model_outline import ModelOutline

SlotState = Literal["unloaded", "loading", "ready", "draining", "failed"]

CAPABILITIES: Mapping[PoolingTask, str] = {
    "embed": "embeddings",
    "classify": "classify",
    "token_embed": "token_embeddings",
    "token_classify": "token_classify",
}
"""Capability of a pooling model in its card."""

MEDIA = {"image": "images", "audio": "audio"}
"""Capability of a model that reads a kind of media."""


class EngineSlot:
    """A served model: its name, its engine once loaded, and its metrics."""

    def __init__(
        self,
        spec: ModelSpec | None = None,
        llm: AsyncLLM | None = None,
        *,
        is_unloaded: bool = False,
    ) -> None:
        """`is_unloaded` defers the load to the first request."""
        self.spec = spec or ModelSpec()
        self.created = int(time.time())
        """Unix time of creation, in seconds."""
        self.metrics = ModelMetrics()
        self.memory_bytes = 0
        """Planned memory of the engine in bytes; 0 if not planned."""
        self.adapters: dict[str, ServedAdapter] = {}
        """Adapters by public name."""
        self.uses = ModelUses()
        self._is_unloaded = is_unloaded
        self._outline: ModelOutline | None = None
        self._llm = llm
        self._formats: ModelFormats | None = None
        self._progress = "starting"
        self._drain_reason = ""
        """Reason for rejecting new requests while draining."""
        self._failure = ""
        self.error: Exception | None = None
        """Error of the latest load."""
        self._cancel: Callable[[], None] | None = None

    @staticmethod
    def of(llm: AsyncLLM) -> EngineSlot:
        return EngineSlot(ModelSpec.of(llm.config.to_options()), llm)

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def state(self) -> SlotState:
        if self._failure:
            return "failed"
        if self._drain_reason:
            return "draining"
        if self._is_unloaded:
            return "unloaded"
        return "loading" if self._llm is None else "ready"

    @property
    def reason(self) -> str:
        """Load progress, or why it accepts no requests; "" if it is ready."""
        words = {"failed": self._failure, "draining": self._drain_reason, "loading": self._progress}
        return words.get(self.state, "")

    @property
    def llm(self) -> AsyncLLM:
        """The engine, for new requests; raises Unavailable unless it is ready."""
        if self._drain_reason:
            raise Unavailable(self._drain_reason)
        if self._failure:
            raise Unavailable(
                f"the model `{self.name}` failed to load: {self._failure}",
                hint="an operator can load it again with POST /v1/models/load",
            )
        if self._is_unloaded:
            raise Unavailable(
                f"the model `{self.name}` is not loaded", hint="the next request loads it"
            )
        if self._llm is None:
            raise Unavailable(f"the model `{self.name}` is not ready yet: {self._progress}")
        return self._llm

    @property
    def loaded(self) -> AsyncLLM | None:
        """The engine, for reading its state, even while draining; None without one."""
        return self._llm

    @property
    def trouble(self) -> str:
        """Reason why a request would fail now; "" if it would succeed or trigger the load."""
        if self.state == "unloaded" or (self.uses.loads_on_request and self.state == "loading"):
            return ""
        try:
            self.llm.check_health()
        except (Unavailable, EngineDead) as error:
            return error.message
        return ""

    @property
    def outline(self) -> ModelOutline | None:
        """Size, format and capabilities, from the engine or the files' headers; None before either
        is read.
        """
        if self._outline is None and self._llm is not None:
            self._outline = _make_outline(self._llm, self.formats(self._llm))
        return self._outline

    def describe(self, outline: ModelOutline | None) -> None:
        """Sets the description of a model that is not loaded."""
        if self._llm is None:
            self._outline = outline

    @property
    def facts(self) -> ModelFacts:
        """Size and format of the model; empty before its files are read."""
        if self._llm is not None:
            return self._llm.info.model
        return ModelFacts() if self._outline is None else self._outline.facts

    @property
    def max_model_len(self) -> int | None:
        """Context length in tokens; None before its files are read."""
        if self._llm is not None:
            return self._llm.info.max_model_len
        return None if self._outline is None else self._outline.max_model_len

    @property
    def capabilities(self) -> list[str]:
        """Kinds of requests that the model supports; [] before its files are read."""
        known = self.outline
        if known is None:
            return []
        if known.pools is not None:
            return [CAPABILITIES[known.pools]]
        if "speech" in known.media:
            return ["transcriptions"]
        chats = bool(known.chat_template)
        media = [name for kind, name in MEDIA.items() if kind in known.media]
        return ["completions", *(["chat"] if chats else []), *media]

    def formats(self, llm: AsyncLLM) -> ModelFormats:
        """Returns the model's output formats, cached after the first request."""
        if self._formats is None:
            self._formats = ModelFormats.of(llm)
        return self._formats

    @property
    def is_draining(self) -> bool:
        return bool(self._drain_reason)

    def answers_to(self, name: str) -> bool:
        """Returns whether a name is the model's public name or its reference, in any spelling of
        the hub's names.
        """
        own = (self.name, self.spec.model)
        return name in own or any(same_model(name, own_name) for own_name in own)

    def rename(self, name: str, model: str) -> None:
        options = {**self.spec.options, "model": model, "served_model_name": name}
        self.spec = replace(self.spec, name=name, options=options)

    def report(self, text: str) -> None:
        """Sets the load progress, shown by 503 errors and the model's card."""
        self._progress = text

    def set_cancel(self, cancel: Callable[[], None]) -> None:
        """Sets the function that cancels the load; calls it if the load was already cancelled."""
        self._cancel = cancel
        if self._drain_reason:
            cancel()

    def begin_load(self) -> None:
        """Leaves the states unloaded and failed."""
        self._is_unloaded = False
        self._failure = ""
        self._progress = "starting"
        self.error = None

    def fill(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._outline = None

    def drop_engine(self) -> None:
        """Drops the reference to an engine that has ended."""
        self._llm = self._formats = self._cancel = None

    def reset(self) -> None:
        """Returns to the state unloaded, after the engine has ended."""
        self.drop_engine()
        self._drain_reason = self._failure = ""
        self._is_unloaded = True
        self.memory_bytes = 0

    def fail(self, error: Exception) -> None:
        """Records the error of a load; unexpected exceptions reveal no details."""
        unknown = f"an internal error ({type(error).__name__})"
        self.error = error
        self._failure = error.message if isinstance(error, OctavoError) else unknown

    def drain(self, reason: str = "the server is stopping") -> None:
        """Rejects new requests; running ones continue."""
        self._drain_reason = reason

    def close(self) -> None:
        """Shuts down the engine, or cancels its load; running requests fail."""
        self._drain_reason = self._drain_reason or "the server is stopping"
        if self._llm is not None:
            self._llm.close()
        elif self._cancel is not None:
            self._cancel()


def _make_outline(llm: AsyncLLM, formats: ModelFormats) -> ModelOutline:
    """Returns the description of a loaded model."""
    tokenizer = None if llm.config.model.skip_tokenizer_init else llm.get_tokenizer()
    return ModelOutline(
        facts=llm.info.model,
        max_model_len=llm.info.max_model_len,
        pools=llm.pools,
        media=llm.media,
        chat_template="" if tokenizer is None else tokenizer.chat_template or "",
        infills=tokenizer is not None and tokenizer.infill_format is not None,
        reasons=formats.reasoning is not None,
        sampling=None if llm.pools is not None else llm.get_default_sampling_params(),
    )
