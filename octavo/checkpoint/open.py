"""Opens the model at a path: a GGUF file, a directory with one, or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.config_file import ConfigFile
from octavo.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from octavo.checkpoint.model_file import PART_NAME
from octavo.checkpoint.pickled import PICKLE, find_pickled_files, no_weights
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.checkpoint.safetensors import SafetensorsCheckpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a checkpoint; reads only headers and small files.

    Raises SetupError if the path has no model, several models, or a damaged one.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(
                f"{path}: allowed are a .gguf file or a directory with config.json and"
                " *.safetensors",
                hint=_hint_of_file(path),
            )
        return GgufCheckpoint(path)
    if not path.is_dir():
        raise WeightMismatch(f"{path}: no such file or directory")
    if (path / "config.json").exists():
        return SafetensorsCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1 or (files and all(map(_make_part_test(files[0]), files))):
        return GgufCheckpoint(files[0])
    if files:
        raise WeightMismatch(
            f"{path}: holds {len(files)} .gguf files", hint=f"name one of them, e.g. {files[0]}"
        )
    raise no_weights(f"{path}: holds neither config.json with *.safetensors nor a .gguf file", path)


def _hint_of_file(path: Path) -> str | None:
    """Returns advice for a file that is not a model on its own."""
    if path.suffix == ".safetensors" or path.name.startswith(PICKLE.removesuffix(".bin")):
        return f"name its directory: {path.parent}"
    return no_weights("", path).hint


def _make_part_test(first: Path) -> Callable[[Path], bool]:
    """Returns a predicate for files of the same split model as `first`."""
    named = PART_NAME.fullmatch(first.name)

    def is_part(file: Path) -> bool:
        found = PART_NAME.fullmatch(file.name)
        return named is not None and found is not None and found["stem"] == named["stem"]

    return is_part


def open_header(path: Path) -> ModelHeader:
    """Opens a model's description; config.json, or a directory with only that, is enough."""
    if path.suffix == ".json" and path.is_file():
        return ConfigFile(path)
    has_weights = list(path.glob("*.safetensors")) or find_pickled_files(path)
    if (path / "config.json").exists() and not has_weights:
        return ConfigFile(path / "config.json")
    return open_checkpoint(path)
