"""Names of models as Ollama's clients spell them: `smollm2` and `smollm2:latest` are one."""

from __future__ import annotations

from octavo.server.state.service import Service
from octavo.server.state.slot import EngineSlot

LATEST = ":latest"


def tagged(name: str) -> str:
    """Returns a model's name with a tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def known_name(service: Service, name: str) -> str:
    """Returns the name by which the directory finds a model, without a tag that it does not have
    there.
    """
    return name.removesuffix(LATEST) if service.models.get(name) is None else name


def find(service: Service, name: str) -> EngineSlot:
    return service.models.find(known_name(service, name))
