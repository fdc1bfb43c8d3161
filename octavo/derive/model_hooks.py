"""Derives the Program of an unknown model type when a model of this type is opened."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from octavo.api.errors import UnsupportedModel
from octavo.models.derived import program_path
from octavo.models.registry import FAMILIES
from octavo.wiring.model_hooks import ModelHooks

NEEDED = ("torch", "transformers")
"""Packages of the [derive] extra."""


class DeriveHooks(ModelHooks):
    def add_family(self, config: Mapping[str, Any]) -> None:
        model_type = str(config.get("model_type"))
        if model_type in FAMILIES or program_path(config).is_file():
            return
        check_packages(model_type)
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if model_type not in CONFIG_MAPPING:
            return
        from octavo.derive.derive import derive, store

        store(derive(config, lambda line: print(line, file=sys.stderr)), config)


def check_packages(model_type: str) -> None:
    """Raises UnsupportedModel if packages that are required for deriving are not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedModel(
            f"model type {model_type!r} is not supported; deriving it from transformers requires"
            f" {' and '.join(missing)}",
            hint="`octavo models` lists the supported types; for other types of transformers, pip"
            " install 'octavo[derive]'",
        )
