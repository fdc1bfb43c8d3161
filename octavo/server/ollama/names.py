"""Ollama's model names: `smollm2` and `smollm2:latest` are the same."""

from __future__ import annotations

from octavo.server.state.service import Service
from octavo.server.state.slot import EngineSlot

LATEST = ":latest"


def tagged(name: str) -> str:
    """Adds the tag :latest, as Ollama lists names."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def known_name(service: Service, name: str) -> str:
    """Removes the tag :latest, unless the directory has a model with it."""
    return name.removesuffix(LATEST) if service.models.get(name) is None else name


def find(service: Service, name: str) -> EngineSlot:
    return service.models.find(known_name(service, name))
