"""The state that every route works with: the models, the settings, the metrics, the jobs.

Holds no route and knows no wire format.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastapi import Request

from octavo.api.async_llm import AsyncLLM
from octavo.server.http.request_limits import RequestLimits
from octavo.server.known_models import KnownModels
from octavo.server.loader import ModelLoader
from octavo.server.pulls import Pulls
from octavo.server.residency import Residency
from octavo.server.settings import ServerSettings
from octavo.server.state.directory import ModelDirectory
from octavo.server.state.jobs import Jobs
from octavo.server.state.key_ring import KeyRing
from octavo.server.state.metrics import ServerMetrics
from octavo.server.state.recent_parsers import RecentParsers
from octavo.server.state.request_record import RequestRecord, record_of
from octavo.server.state.served_model import ServedModel
from octavo.server.state.slot import EngineSlot
from octavo.server.state.store import Store


@dataclass(frozen=True, slots=True)
class Service:
    """One server's state, shared by its routes."""

    models: ModelDirectory
    loader: ModelLoader
    residency: Residency
    known: KnownModels
    pulls: Pulls
    settings: ServerSettings
    metrics: ServerMetrics
    jobs: Jobs
    keys: KeyRing
    store: Store | None = None
    """Responses, files and batches on disk; None where the server keeps nothing."""
    parsers: RecentParsers = field(default_factory=RecentParsers)
    """How the latest chats' answers are read."""
    record: RequestRecord = field(default_factory=RequestRecord)
    """Record of the HTTP request that is answered; an empty one outside of requests."""

    async def model(self, name: str | None = None) -> ServedModel:
        """Returns the model that a request names, for new work; None stands for the only one. An
        adapter's name is one of its model. Answers repeat the name that the request has, also if it
        is an alias, as vLLM's, llama-server's and Ollama's do.

        A model that is not in memory is loaded first, if that is allowed, and stays there until the
        request has been answered. Raises ModelNotFound for an unknown one, and Unavailable for one
        that cannot be used.
        """
        slot = await self.residency.find(name)
        self.record.hold(slot.uses)
        load_s = await self.residency.load(slot)
        served = self._named(slot, name)
        return replace(served, name=name or served.name, load_s=load_s)

    def loaded_model(self, name: str | None = None) -> ServedModel:
        """Returns the model that a request names if it is in memory, without holding it there;
        raises ModelNotFound, and Unavailable.
        """
        return self._named(self.models.find(name), name)

    def _named(self, slot: EngineSlot, name: str | None) -> ServedModel:
        """Returns a slot's model, with the adapter if the name is one's."""
        served = self._served(slot, slot.llm)
        adapter = None if name is None else slot.adapters.get(self.models.resolve(name))
        return (
            served if adapter is None else replace(served, name=adapter.name, adapter=adapter.ref)
        )

    def background_record(self, owner: str) -> RequestRecord:
        """Returns the record of work that the server does by itself for a key."""
        account = self.keys.account(owner)
        return RequestRecord(owner=owner, account=account, is_background=True)

    def ready_models(self) -> list[ServedModel]:
        """Returns every model whose requests can be seen and changed, draining ones too."""
        return [self._served(slot, slot.loaded) for slot in self.models if slot.loaded is not None]

    def _served(self, slot: EngineSlot, llm: AsyncLLM) -> ServedModel:
        limits = RequestLimits.of(self.settings)
        return ServedModel(
            slot.name,
            llm,
            slot.metrics,
            limits,
            self.record,
            slot.formats(llm),
            uses=slot.uses,
        )


async def service_of(request: Request) -> Service:
    """Returns the state of the server that a request came to, with the record of the request."""
    service: Service = request.app.state.service
    return replace(service, record=record_of(request.scope))
