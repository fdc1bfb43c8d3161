"""Derives the Program of an unknown model type when a model of it is opened."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

from octavo.api.errors import UnsupportedModel
from octavo.models.derived import program_path
from octavo.models.registry import FAMILIES
from octavo.wiring.model_hooks import ModelHooks

NEEDED = ("torch", "transformers")
"""Packages of the [derive] extra."""

logger = logging.getLogger(__name__)


class DeriveHooks(ModelHooks):
    def add_family(self, config: Mapping[str, Any]) -> None:
        model_type = str(config.get("model_type"))
        if model_type in FAMILIES or program_path(config).is_file():
            return
        check_packages(model_type)
        from transformers import CONFIG_MAPPING

        if model_type not in CONFIG_MAPPING:
            return
        from octavo.derive.derive import derive, store

        store(derive(config, logger.info), config)


def check_packages(model_type: str) -> None:
    """Raises UnsupportedModel if the packages that deriving needs are not installed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UnsupportedModel(
            f"model type {model_type!r} has no module in Octavo, and to derive it from transformers"
            f" {' and '.join(missing)} must be installed",
            hint="pip install 'octavo[derive]'; `octavo models` lists the supported types",
        )
