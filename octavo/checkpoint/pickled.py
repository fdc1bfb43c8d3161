"""Reads pickled weights: pytorch_model.bin, whole or in shards.

PyTorch loads them without executing the pickle. Files of other programs are rejected with the
command that converts them. Source: `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.json_file import read_json

if TYPE_CHECKING:
    import torch

PICKLE = "pytorch_model.bin"
PICKLE_INDEX = "pytorch_model.bin.index.json"

CONVERT = (
    "python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{path}')"
    ".save_pretrained('{path}')\""
)
"""Command that saves a directory's weights as safetensors."""

OTHER_WEIGHTS = {
    "consolidated.*.pth": "Meta's own format",
    "*.bin": "pickled",
    "*.pth": "pickled",
    "*.pt": "pickled",
    "*.ckpt": "a training checkpoint",
    "*.h5": "TensorFlow's format",
    "*.msgpack": "Flax's format",
    "*.onnx": "ONNX",
    "*.ot": "rust-bert's format",
    "*.ggml": "the format before GGUF",
}
"""Unsupported files of weights by pattern, and their format."""

HINTS = {
    "consolidated.*.pth": "convert it with transformers' convert_llama_weights_to_hf.py, or"
    " download the model's Hugging Face files",
    "*.h5": 'python -c "from transformers import AutoModelForCausalLM as M;'
    " M.from_pretrained('{path}', from_tf=True).save_pretrained('{path}')\" (transformers 4)",
    "*.msgpack": 'python -c "from transformers import AutoModelForCausalLM as M;'
    " M.from_pretrained('{path}', from_flax=True).save_pretrained('{path}')\" (transformers 4)",
    "*.ggml": "convert it with llama.cpp's convert_llama_ggml_to_gguf.py",
}

TYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
}
"""Safetensors' dtype names by those of PyTorch."""


def find_pickled_files(path: Path) -> list[Path]:
    """Returns the pickled weight files of a directory; empty if there are none.

    Raises WeightMismatch for missing shards.
    """
    index = path / PICKLE_INDEX
    if not index.exists():
        return [path / PICKLE] if (path / PICKLE).exists() else []
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightMismatch(f"{index}: has no weight_map from tensors to files")
    files = [path / str(name) for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise WeightMismatch(
            f"{path}: missing shards: {', '.join(missing)} ({len(missing)} of {len(files)})",
            hint="the download may be incomplete; run octavo pull again",
        )
    return files


def read_pickled(file: Path) -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
    """Yields the name, safetensors dtype, shape and bytes of each tensor.

    Raises UnsupportedModel, with the command to convert the file, if PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise UnsupportedModel(
            f"{file}: reading pickled weights requires PyTorch, which is not installed",
            hint=f"pip install torch, or convert it elsewhere: {CONVERT.format(path=file.parent)}",
        )
    for name, tensor in _load(file).items():
        kind = str(tensor.dtype).removeprefix("torch.")
        yield name, TYPES.get(kind, kind), tuple(tensor.shape), _bytes(tensor)


def _load(file: Path) -> Mapping[str, torch.Tensor]:
    import torch

    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except Exception as error:  # PyTorch raises many kinds of errors for a damaged or unsafe pickle
        reason = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
        reason = reason.partition(" Please use ")[0].partition("\n")[0] or type(error).__name__
        raise WeightMismatch(
            f"{file}: cannot be read with torch.load(weights_only=True): {reason}",
            hint="download the file again, or convert it: " + CONVERT.format(path=file.parent),
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise WeightMismatch(f"{file}: holds a {type(loaded).__name__}, expected a state dict")
    return {str(name): each for name, each in loaded.items() if isinstance(each, torch.Tensor)}


def _is_zip(file: Path) -> bool:
    """Returns whether PyTorch can memory-map the file (the format since 1.6)."""
    with file.open("rb") as opened:
        return opened.read(2) == b"PK"


def _bytes(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    numbers: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(numbers)


def no_weights(message: str, path: Path) -> WeightMismatch:
    """Returns the error for a file or directory without readable weights; names weights in other
    formats and how to convert them.
    """
    folder = path if path.is_dir() else path.parent
    for pattern, kind in OTHER_WEIGHTS.items():
        paths = sorted(folder.glob(pattern)) if path.is_dir() else [path]
        if paths and fnmatch(paths[0].name, pattern):
            return WeightMismatch(
                f"{message}; {paths[0].name} is {kind}, which is not supported",
                hint=HINTS.get(pattern, CONVERT).format(path=folder),
            )
    return WeightMismatch(message, hint="download *.safetensors, pytorch_model.bin or *.gguf")
