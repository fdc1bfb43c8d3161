"""Opens whatever a path holds: a GGUF file, a directory with one, or a Hugging Face directory; or only its tokenizer."""

from __future__ import annotations

from pathlib import Path

from octavo.checkpoint.gguf_checkpoint import GgufCheckpoint
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.json_file import read_json_if_there
from octavo.checkpoint.safetensors import SafetensorsCheckpoint
from octavo.errors import UnsupportedModel, WeightMismatch
from octavo.ports import Checkpoint, TokenizerSource


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads headers and small files only; SetupError where the path holds no model, several, or a damaged one."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(f"{path}: allowed are a .gguf file or a directory with config.json and *.safetensors")
        return GgufCheckpoint(path)
    if not path.is_dir():
        raise WeightMismatch(f"{path}: no such file or directory")
    if (path / "config.json").exists():
        return SafetensorsCheckpoint(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GgufCheckpoint(files[0])
    if files:
        raise WeightMismatch(f"{path}: holds {len(files)} .gguf files", hint=f"name one of them, e.g. {files[0]}")
    raise WeightMismatch(f"{path}: holds neither config.json with *.safetensors nor a .gguf file")


def open_tokenizer(path: Path) -> TokenizerSource:
    """The tokenizer in a GGUF file, or in a directory with tokenizer.json, with or without weights."""
    if path.is_dir() and not list(path.glob("*.gguf")):
        config, generation_config = (read_json_if_there(path / name) for name in ("config.json", "generation_config.json"))
        return _present(tokenizer_source(path, config, generation_config), path)
    return tokenizer_of(open_checkpoint(path))


def tokenizer_of(checkpoint: Checkpoint) -> TokenizerSource:
    """The checkpoint's own tokenizer; WeightMismatch where it has none."""
    return _present(checkpoint.tokenizer_source(), checkpoint.path)


def _present(source: TokenizerSource | None, path: Path) -> TokenizerSource:
    if source is None:
        hint = "pass skip_tokenizer_init and prompts as token ids, or name another with --tokenizer"
        raise WeightMismatch(f"{path}: holds no tokenizer (tokenizer.json)", hint=hint)
    return source
