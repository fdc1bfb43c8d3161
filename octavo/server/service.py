"""What every route works with: the engine and where it stands, the settings, the metrics, the jobs.

The engine comes some time after the server has begun to listen, and goes before it ends: what asks
for it in between gets a 503.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastapi import Request

from octavo.async_llm import AsyncLLM
from octavo.errors import ModelNotFound, Unavailable
from octavo.ports import Tokenizer
from octavo.server.settings import ServerSettings

if TYPE_CHECKING:
    from octavo.server.jobs import Jobs
    from octavo.server.metrics import ServerMetrics


class EngineSlot:
    """An engine that is loading, ready or draining."""

    def __init__(self, llm: AsyncLLM | None = None) -> None:
        self._llm = llm
        self._progress = "starting"
        self._draining = False

    @property
    def llm(self) -> AsyncLLM:
        """The engine, for new work; Unavailable where there is none to be had."""
        if self._draining:
            raise Unavailable("the server is stopping")
        if self._llm is None:
            raise Unavailable(
                f"the server is not ready yet: {self._progress}", hint="try again in a few seconds"
            )
        return self._llm

    @property
    def loaded(self) -> AsyncLLM | None:
        """The engine, for those who look at it only."""
        return self._llm

    @property
    def is_draining(self) -> bool:
        return self._draining

    def report(self, text: str) -> None:
        """What the load is doing."""
        self._progress = text

    def fill(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def drain(self) -> None:
        """No new work; what runs goes on."""
        self._draining = True

    def close(self) -> None:
        """Ends the engine; streams that still run get an error."""
        self.drain()
        if self._llm is not None:
            self._llm.close()


@dataclass(frozen=True, slots=True)
class Service:
    slot: EngineSlot
    settings: ServerSettings
    metrics: ServerMetrics
    jobs: Jobs
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_name(self) -> str:
        return self.slot.llm.config.model.served_model_name or self.slot.llm.config.model.model

    def check_model(self, name: str | None) -> str:
        """The served model's name; None asks for whatever there is."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(
                f"The model `{name}` does not exist.",
                hint=f"this server has `{self.model_name}`",
                param="model",
            )
        return self.model_name


def tokenizer_of(llm: AsyncLLM) -> Tokenizer | None:
    """None with skip_tokenizer_init."""
    return None if llm.config.model.skip_tokenizer_init else llm.get_tokenizer()


async def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
