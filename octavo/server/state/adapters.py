"""Named LoRA adapters of a server, from the command line or loaded by operators.

A name refers to the contents at the time of loading; the engine stores the weights.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import ConfigError, InvalidRequest, shown
from octavo.api.lora_request import LoRARequest
from octavo.config.paths import expand_path
from octavo.engine.protocol.step import AdapterRef

NAME = re.compile(r"(?!(?:.*/)?\.{1,2}(?:/|\Z))[\w.:/-]{1,200}")
"""A public name. It is part of the path /v1/models/NAME, from which clients remove `.` and `..`."""

NAME_RULE = "1 to 200 letters, digits and any of . : / _ -, and no part between slashes is . or .."

FILES = ("adapter_config.json", "adapter_model.safetensors")

MODULE_KEYS = {"name", "path", "base_model_name"}


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter and its public name."""

    name: str
    ref: AdapterRef
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of loading, in seconds."""

    @staticmethod
    def read(llm: AsyncLLM, name: str, path: Path, *, again: bool = False) -> ServedAdapter:
        """Reads and checks an adapter (blocking); raises InvalidRequest."""
        request = LoRARequest(name, 1, str(path), load_inplace=again)
        return ServedAdapter(name, llm.adapter(request))


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapter of the command line."""

    name: str
    path: Path
    base_model_name: str | None = None
    """Public name of its model; None: the server's first model."""

    @staticmethod
    def parse(text: str) -> LoraModule:
        """Parses NAME=PATH, or a JSON object of name, path and base_model_name; raises
        ConfigError.
        """
        fields = _object(text) if text.lstrip().startswith("{") else _pair(text)
        name, path, base = (fields.get(key) for key in ("name", "path", "base_model_name"))
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise _bad(text, f"a name has {NAME_RULE}")
        if not isinstance(path, str) or not path or not isinstance(base, str | None):
            raise _bad(text, "a path is required, and base_model_name is a string")
        return LoraModule(name, expand_path(path), base)

    @staticmethod
    def parse_all(texts: Sequence[str]) -> list[LoraModule]:
        modules = [LoraModule.parse(text) for text in texts]
        names = [module.name for module in modules]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"lora_modules: two adapters are named {twice}", hint="choose different names"
            )
        return modules


def _object(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        raise _bad(text, "it is not valid JSON") from None
    if unknown := sorted(parsed.keys() - MODULE_KEYS):
        raise _bad(text, f"it has the unknown key {unknown[0]}")
    return dict(parsed)


def _pair(text: str) -> dict[str, Any]:
    name, _, path = text.partition("=")
    return {"name": name, "path": path}


def _bad(text: str, why: str) -> ConfigError:
    return ConfigError(f"lora_modules: got {shown(text)}: {why}", hint="use NAME=PATH")


def path_within(folder: str | None, text: str) -> Path:
    """Returns the path of a requested adapter. Raises InvalidRequest unless the path and its files
    are inside the server's adapter folder.
    """
    if folder is None:
        raise InvalidRequest(
            "lora_path: this server does not load adapters on request",
            hint="start it with --lora-dir FOLDER",
            param="lora_path",
        )
    try:
        root = expand_path(folder).resolve()
        path = (root / text).resolve()
        places = [path, *((path / name).resolve() for name in FILES)]
        is_inside = path != root and all(place.is_relative_to(root) for place in places)
    except (OSError, ValueError, RuntimeError):
        is_inside = False
    if not is_inside:
        raise InvalidRequest(
            f"lora_path: got {shown(text)}, expected folders under --lora-dir", param="lora_path"
        )
    return path
