"""A model to serve: its public name and engine options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.config.model_options import DEFAULT_MODEL
from octavo.config.paths import expand_path, path_exists, public_name

NAMED = re.compile(r"([\w.:-]+)=(.+)")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's public name and its engine options by flat name."""

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Includes `model`, the reference to load, and `served_model_name`."""
    is_pinned: bool = False
    """Whether the model stays loaded until an operator unloads it."""
    is_remote: bool = False
    """Whether the model was added over HTTP: pulled, or found in this machine's caches. Requests
    without a model name never select it.
    """

    @property
    def model(self) -> str:
        """Short name, path or repository of the model."""
        return str(self.options.get("model", DEFAULT_MODEL))

    @staticmethod
    def of(
        options: Mapping[str, Any], *, is_pinned: bool = False, is_remote: bool = False
    ) -> ModelSpec:
        """Makes a spec from options; its name is served_model_name, or the model's own."""
        model = str(options.get("model", DEFAULT_MODEL))
        name = options.get("served_model_name") or public_name(model)
        options = {**options, "model": model, "served_model_name": name}
        return ModelSpec(name, options, is_pinned, is_remote)


def name_and_model(text: str) -> tuple[str | None, str]:
    """Splits NAME=MODEL; the name is None if the text is a model or a file."""
    match = NAMED.fullmatch(text)
    if match is None or path_exists(expand_path(text)):
        return None, text
    return match[1], match[2]
