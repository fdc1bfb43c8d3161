"""A model with only a config.json: enough to plan memory, not to run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.checkpoint.formats.format import prefix_errors
from octavo.checkpoint.formats.table import quantized_format, with_quantization
from octavo.checkpoint.json_file import read_json, read_json_if_there
from octavo.checkpoint.nested_config import with_text_config
from octavo.checkpoint.sentence_modules import with_pooling

FORMATS = {"bfloat16": "BF16", "float16": "F16"}


class ConfigFile:
    """Implements `ports.ModelHeader`."""

    has_config_file = True

    def __init__(self, path: Path) -> None:
        self.path = path
        config = with_quantization(with_text_config(read_json(path)), path.parent)
        self.config: dict[str, Any] = with_pooling(config, path.parent)
        with prefix_errors(path.parent):
            self._quantized = quantized_format(self.config)
        self.generation_config: dict[str, Any] = read_json_if_there(
            path.parent / "generation_config.json"
        )

    def get_format(self, name: str) -> str:
        """Returns the config's dtype, or for a projection matrix the format of
        `quantization_config`.
        """
        if self._quantized is not None and name.endswith(self._quantized.matrix):
            planned = self._quantized.planned_name(name.removesuffix(self._quantized.matrix))
            if planned is not None:
                return planned
        dtype = str(self.config.get("dtype") or self.config.get("torch_dtype"))
        return FORMATS.get(dtype.removeprefix("torch."), "F32")
