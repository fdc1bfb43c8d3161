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
from octavo.server.state.served_model import ServedModel
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

    def model(self, name: str | None = None) -> ServedModel:
        """Returns the model that a request names; raises ModelNotFound for an unknown one.

        None means the only model, and so does the name or path that the server was started with.
        """
        llm = self.slot.llm
        served = served_name(llm)
        if name not in (None, served, llm.config.model.model):
            raise ModelNotFound(
                f"The model `{name}` does not exist.",
                hint=f"this server has `{served}`",
                param="model",
            )
        return ServedModel(served, llm, self.metrics)

    def ready_models(self) -> list[ServedModel]:
        """Returns every model whose requests can be seen and changed, draining ones too."""
        llm = self.slot.loaded
        return [] if llm is None else [ServedModel(served_name(llm), llm, self.metrics)]


async def service_of(request: Request) -> Service:
    """Returns the state of the server that a request came to."""
    service: Service = request.app.state.service
    return service
