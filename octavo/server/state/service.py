"""The state that all routes share: models, settings, metrics, jobs."""

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
from octavo.server.state.request_record import RequestRecord, get_record
from octavo.server.state.served_model import ServedModel
from octavo.server.state.slot import EngineSlot
from octavo.server.state.store import Store


@dataclass(frozen=True, slots=True)
class Service:
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
    """Responses, files and batches on disk; None if storage is disabled."""
    parsers: RecentParsers = field(default_factory=RecentParsers)
    """Output parsers of recent chats."""
    record: RequestRecord = field(default_factory=RequestRecord)
    """Record of the current HTTP request; an empty one outside of requests."""

    async def model(self, name: str | None = None) -> ServedModel:
        """Returns the model for a new request, loading it if allowed and necessary; it stays loaded
        until the response is complete.

        None selects the only model; an adapter's name selects the adapter's model. Responses repeat
        the requested name, even an alias, as in vLLM, llama-server and Ollama. Raises
        ModelNotFound, or Unavailable if the model cannot be used.
        """
        slot = await self.residency.find(name)
        self.record.hold(slot.uses)
        load_s = await self.residency.load(slot)
        served = self._serve_named(slot, name)
        return replace(served, name=name or served.name, load_s=load_s)

    def loaded_model(self, name: str | None = None) -> ServedModel:
        """Returns a model that is in memory, without keeping it loaded. Raises ModelNotFound or
        Unavailable.
        """
        return self._serve_named(self.models.find(name), name)

    def _serve_named(self, slot: EngineSlot, name: str | None) -> ServedModel:
        """Returns a slot's model, with the adapter if `name` is an adapter's."""
        served = self._serve(slot, slot.llm)
        adapter = None if name is None else slot.adapters.get(self.models.resolve(name))
        return (
            served if adapter is None else replace(served, name=adapter.name, adapter=adapter.ref)
        )

    def background_record(self, owner: str) -> RequestRecord:
        """Returns the record of an internal request for a key."""
        account = self.keys.account(owner)
        return RequestRecord(owner=owner, account=account, is_background=True)

    def ready_models(self) -> list[ServedModel]:
        """Returns the models with engines, including draining ones."""
        return [self._serve(slot, slot.loaded) for slot in self.models if slot.loaded is not None]

    def _serve(self, slot: EngineSlot, llm: AsyncLLM) -> ServedModel:
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


async def get_service(request: Request) -> Service:
    """Returns the server's state, with the record of the request."""
    service: Service = request.app.state.service
    return replace(service, record=get_record(request.scope))
