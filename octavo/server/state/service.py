"""The state that every route works with: the engine's slot, the settings, the metrics, the jobs.

Holds no route and knows no wire format.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Request

from octavo.errors import ModelNotFound
from octavo.server.settings import ServerSettings
from octavo.server.state.jobs import Jobs
from octavo.server.state.metrics import ServerMetrics
from octavo.server.state.slot import EngineSlot, served_name


@dataclass(frozen=True, slots=True)
class Service:
    """One server's state, shared by its routes."""

    slot: EngineSlot
    settings: ServerSettings
    metrics: ServerMetrics
    jobs: Jobs
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the server's start, in seconds."""

    @property
    def model_name(self) -> str:
        """The served model's public name."""
        return served_name(self.slot.llm)

    def check_model(self, name: str | None) -> str:
        """Returns the served model's name; raises ModelNotFound for another one.

        None means the served model, and so does the name or path that the server was started with.
        """
        served = self.model_name
        if name not in (None, served, self.slot.llm.config.model.model):
            raise ModelNotFound(
                f"The model `{name}` does not exist.",
                hint=f"this server has `{served}`",
                param="model",
            )
        return served


async def service_of(request: Request) -> Service:
    """Returns the state of the server that a request came to."""
    service: Service = request.app.state.service
    return service
