"""Opens the model at a path: a GGUF file, a directory with one, or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from octavo.api.errors import ConfigError, SetupError, UnsupportedModel, WeightMismatch
from octavo.checkpoint.formats.format import prefix_errors
from octavo.checkpoint.formats.table import quantized_format, with_quantization
from octavo.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from octavo.checkpoint.gguf.mmproj import MmprojCheckpoint, find_mmproj
from octavo.checkpoint.hub_files import is_tower_name
from octavo.checkpoint.json_file import read_json, read_json_if_there
from octavo.checkpoint.model_file import PART_NAME
from octavo.checkpoint.nested_config import with_text_config
from octavo.checkpoint.pickled import PICKLE, find_pickled_files, no_weights
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.checkpoint.safetensors import SafetensorsCheckpoint
from octavo.checkpoint.sentence_modules import with_pooling

FORMATS = {"bfloat16": "BF16", "float16": "F16"}

Header = TypeVar("Header", bound=ModelHeader)


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint; reads only headers and small files.

    Raises SetupError if the path has no model, several models, or a damaged one.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(
                f"{path}: expected a .gguf file or a directory with config.json and *.safetensors",
                hint=_hint_of_file(path),
            )
        return GgufCheckpoint(path)
    if not path.is_dir():
        raise WeightMismatch(
            f"{path}: no such file or directory",
            hint="check the path; octavo pull downloads a model",
        )
    if (path / "config.json").exists():
        return SafetensorsCheckpoint(path)
    files = sorted(file for file in path.glob("*.gguf") if not is_tower_name(file.name))
    if len(files) == 1 or (files and all(map(_make_part_test(files[0]), files))):
        return GgufCheckpoint(files[0])
    if files:
        raise WeightMismatch(
            f"{path}: holds {len(files)} .gguf files", hint=f"specify one of them, e.g. {files[0]}"
        )
    raise no_weights(f"{path}: holds neither config.json with *.safetensors nor a .gguf file", path)


def with_tower_file(header: Header, mmproj: Path | None) -> Header | MmprojCheckpoint:
    """Returns a GGUF checkpoint with the vision tower of the `mmproj` file; None: of the file
    beside the model, if it is this model's. Other checkpoints are returned unchanged.

    Raises ConfigError if the model is in another format, SetupError if the given tower does not
    fit.
    """
    is_gguf = isinstance(header, GgufCheckpoint)
    if mmproj is not None and not is_gguf:
        raise ConfigError(
            f"mmproj: got {mmproj} with {header.path}, which is not a GGUF file",
            hint="remove mmproj: models in other formats contain their vision tower",
        )
    if not is_gguf:
        return header
    if mmproj is not None:
        return MmprojCheckpoint(header.path, mmproj)
    found = find_mmproj(header.path)
    try:
        return header if found is None else MmprojCheckpoint(header.path, found)
    except SetupError:
        return header


def describe_tower_file(header: ModelHeader) -> str:
    """Returns a message about the mmproj file that is used, or found but not used; "" if there is
    none.
    """
    if isinstance(header, MmprojCheckpoint):
        towers = {"images": "vision_config", "audio": "audio_config"}
        kinds = [kind for kind, name in towers.items() if name in header.config]
        return f"reads {' and '.join(kinds)} with {header.mmproj.name}"
    found = find_mmproj(header.path) if isinstance(header, GgufCheckpoint) else None
    if found is None:
        return ""
    try:
        MmprojCheckpoint(header.path, found)
    except SetupError as error:
        return f"{found.name} is not used: {error.message}"
    return f"{found.name} is not used"


def _hint_of_file(path: Path) -> str | None:
    """Returns advice for a file that is not a model on its own."""
    if path.suffix == ".safetensors" or path.name.startswith(PICKLE.removesuffix(".bin")):
        return f"use its directory: {path.parent}"
    return no_weights("", path).hint


def _make_part_test(first: Path) -> Callable[[Path], bool]:
    """Returns a predicate for files of the same split model as `first`."""
    named = PART_NAME.fullmatch(first.name)

    def is_part(file: Path) -> bool:
        match = PART_NAME.fullmatch(file.name)
        return named is not None and match is not None and match["stem"] == named["stem"]

    return is_part


def open_header(path: Path) -> ModelHeader:
    """Opens a model's description; config.json, or a directory with only that, is enough."""
    if path.suffix == ".json" and path.is_file():
        return ConfigFile(path)
    has_weights = list(path.glob("*.safetensors")) or find_pickled_files(path)
    if (path / "config.json").exists() and not has_weights:
        return ConfigFile(path / "config.json")
    return open_checkpoint(path)


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
