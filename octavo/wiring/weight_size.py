"""Estimates the memory of a model's weights from headers."""

from __future__ import annotations

from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.wiring.backend import build_backend
from octavo.wiring.model import get_loaded_formats, open_model


def weight_bytes(options: dict[str, Any]) -> int:
    """Returns the size of the weights as packed by the backend."""
    model = open_model(EngineConfig.from_options(**options))
    backend = build_backend(model.config)
    program = model.program()
    formats = get_loaded_formats(model.config, model.checkpoint, program)
    return sum(backend.footprint(program, formats).weight_bytes.values())
