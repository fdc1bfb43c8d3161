"""The slot of one model's engine: unloaded, loading, ready, draining or failed.

An engine comes some time after the server has begun to listen, and may go before the server ends.
Requests for a slot that is unloaded have it loaded (`residency.py`); otherwise they get a 503
without an engine.
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

CAPABILITIES: Mapping[PoolingTask, str] = {"embed": "embeddings", "classify": "classify"}
"""Words of a model's card for what is made of its pooled rows."""


class EngineSlot:
    """A served model: its name, its engine once there is one, and its requests' metrics."""

    def __init__(
        self,
        spec: ModelSpec | None = None,
        llm: AsyncLLM | None = None,
        *,
        is_unloaded: bool = False,
    ) -> None:
        """`is_unloaded` leaves the load to the first request."""
        self.spec = spec or ModelSpec()
        self.created = int(time.time())
        """Unix time at which the model was asked for, in seconds."""
        self.metrics = ModelMetrics()
        self.memory_bytes = 0
        """Memory set aside for the engine, in bytes; 0 where none was planned."""
        self.adapters: dict[str, ServedAdapter] = {}
        """Adapters of the model by their public names."""
        self.uses = ModelUses()
        self._is_unloaded = is_unloaded
        self._outline: ModelOutline | None = None
        self._llm = llm
        self._formats: ModelFormats | None = None
        self._progress = "starting"
        self._refusal = ""
        """Reason why no new work is taken while it drains."""
        self._failure = ""
        self.error: Exception | None = None
        """Why the latest load failed."""
        self._cancel: Callable[[], None] | None = None

    @staticmethod
    def of(llm: AsyncLLM) -> EngineSlot:
        """Returns the slot of an engine that is ready."""
        return EngineSlot(ModelSpec.of(llm.config.to_options()), llm)

    @property
    def name(self) -> str:
        """Public name of the model, which clients send and answers repeat."""
        return self.spec.name

    @property
    def state(self) -> SlotState:
        if self._failure:
            return "failed"
        if self._refusal:
            return "draining"
        if self._is_unloaded:
            return "unloaded"
        return "loading" if self._llm is None else "ready"

    @property
    def reason(self) -> str:
        """Progress of its load, or why it takes no requests; "" where it is ready."""
        words = {"failed": self._failure, "draining": self._refusal, "loading": self._progress}
        return words.get(self.state, "")

    @property
    def llm(self) -> AsyncLLM:
        """The engine, for new work; raises Unavailable unless it is ready."""
        if self._refusal:
            raise Unavailable(self._refusal)
        if self._failure:
            raise Unavailable(
                f"the model `{self.name}` failed to load: {self._failure}",
                hint="an operator may load it again by POST /v1/models/load",
            )
        if self._is_unloaded:
            raise Unavailable(
                f"the model `{self.name}` is not loaded", hint="a request for an answer loads it"
            )
        if self._llm is None:
            raise Unavailable(
                f"the model `{self.name}` is not ready yet: {self._progress}",
                hint="try again in a few seconds",
            )
        return self._llm

    @property
    def loaded(self) -> AsyncLLM | None:
        """The engine for readers of its state, ready or draining; None where there is none."""
        return self._llm

    @property
    def trouble(self) -> str:
        """Reason why a request would not be computed at the moment; "" if all is well, or if a
        request has the model loaded.
        """
        if self.state == "unloaded" or (self.uses.loads_on_request and self.state == "loading"):
            return ""
        try:
            self.llm.check_health()
        except (Unavailable, EngineDead) as error:
            return error.message
        return ""

    @property
    def outline(self) -> ModelOutline | None:
        """Size, format and abilities of the model, by its engine or by its files' headers; None
        before either has been read.
        """
        if self._outline is None and self._llm is not None:
            self._outline = _outline_of(self._llm, self.formats(self._llm))
        return self._outline

    def describe(self, outline: ModelOutline | None) -> None:
        """Notes what the files of a model say that is not loaded."""
        if self._llm is None:
            self._outline = outline

    @property
    def facts(self) -> ModelFacts:
        """Size and format of the model; empty before its files have been read."""
        if self._llm is not None:
            return self._llm.info.model
        return ModelFacts() if self._outline is None else self._outline.facts

    @property
    def max_model_len(self) -> int | None:
        """Context of the model in tokens; None before its files have been read."""
        if self._llm is not None:
            return self._llm.info.max_model_len
        return None if self._outline is None else self._outline.max_model_len

    @property
    def capabilities(self) -> list[str]:
        """Kinds of requests that the model takes; [] before its files have been read."""
        known = self.outline
        if known is None:
            return []
        if known.pools is not None:
            return [CAPABILITIES[known.pools]]
        if "audio" in known.media:
            return ["transcriptions"]
        sees = "image" in known.media
        chats = bool(known.chat_template)
        return ["completions", *(["chat"] if chats else []), *(["images"] if sees else [])]

    def formats(self, llm: AsyncLLM) -> ModelFormats:
        """Returns the formats of its engine's answers, found at the first request."""
        if self._formats is None:
            self._formats = ModelFormats.of(llm)
        return self._formats

    @property
    def is_draining(self) -> bool:
        return bool(self._refusal)

    def answers_to(self, name: str) -> bool:
        """Tells whether a request's model is this one: by public name, or as it was asked for, also
        in another spelling of the hub's.
        """
        own = (self.name, self.spec.model)
        return name in own or any(same_model(name, each) for each in own)

    def rename(self, name: str, model: str) -> None:
        options = {**self.spec.options, "model": model, "served_model_name": name}
        self.spec = replace(self.spec, name=name, options=options)

    def report(self, text: str) -> None:
        """Notes the progress of the load, which a 503 and the model's card quote."""
        self._progress = text

    def on_its_way(self, cancel: Callable[[], None]) -> None:
        """Notes how to end an engine that loads; ends it where it is no longer wanted."""
        self._cancel = cancel
        if self._refusal:
            cancel()

    def begin_load(self) -> None:
        """Leaves the state unloaded or failed: a load follows."""
        self._is_unloaded = False
        self._failure = ""
        self._progress = "starting"
        self.error = None

    def fill(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._outline = None

    def forget_engine(self) -> None:
        """Lets go of an engine that has ended."""
        self._llm = self._formats = self._cancel = None

    def reset(self) -> None:
        """Returns to the state unloaded, once the engine has ended."""
        self.forget_engine()
        self._refusal = self._failure = ""
        self._is_unloaded = True
        self.memory_bytes = 0

    def fail(self, error: Exception) -> None:
        """Notes why the load failed; what is not ours shows nothing of its inside."""
        unknown = f"an internal error ({type(error).__name__})"
        self.error = error
        self._failure = error.message if isinstance(error, OctavoError) else unknown

    def drain(self, reason: str = "the server is stopping") -> None:
        """Refuses new work from now on; running requests go on."""
        self._refusal = reason

    def close(self) -> None:
        """Ends the engine, also one that is being loaded; streams that still run get an error."""
        self._refusal = self._refusal or "the server is stopping"
        if self._llm is not None:
            self._llm.close()
        elif self._cancel is not None:
            self._cancel()


def _outline_of(llm: AsyncLLM, formats: ModelFormats) -> ModelOutline:
    """Returns the outline of a loaded model."""
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
