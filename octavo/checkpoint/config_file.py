"""A model of which only config.json is there: enough to plan its memory, not to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.checkpoint.json_file import read_json, read_json_if_there
from octavo.checkpoint.sentence_modules import with_pooling
from octavo.quant.fp8 import fp8_scheme

FORMATS = {"bfloat16": "BF16", "float16": "F16"}

PROJECTION = "_proj"
"""Part of the names of the matrices that fp8 checkpoints quantise; embeddings, routers and output
layers stay floats.
"""


class ConfigFile:
    """Implements `ports.ModelHeader`."""

    has_config_file = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = with_pooling(read_json(path), path.parent)
        self._fp8 = fp8_scheme(self.config)
        self.generation_config: dict[str, Any] = read_json_if_there(
            path.parent / "generation_config.json"
        )

    def format_of(self, name: str) -> str:
        """Returns the config's dtype for every tensor, or fp8 for the projections' matrices."""
        if self._fp8 is not None and PROJECTION in name and name.endswith("weight"):
            return self._fp8.format_name
        dtype = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        return FORMATS.get(dtype.removeprefix("torch."), "F32")
