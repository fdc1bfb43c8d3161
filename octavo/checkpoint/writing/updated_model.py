"""Writes a model directory whose tensors are partly replaced: the result of a weight update.

The directory is an ordinary model: an engine that loads it is a fresh engine with these weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError, InvalidRequest
from octavo.checkpoint.ports import Checkpoint
from octavo.checkpoint.safetensors import DTYPES, INTEGERS, SafetensorsCheckpoint, read_mapped
from octavo.checkpoint.writing.destination import CONFIG, copy_small_files
from octavo.checkpoint.writing.safetensors_file import SafetensorsWriter, TensorSpec


def check_updatable(checkpoint: Checkpoint) -> None:
    """Raises ConfigError if tensors of this model cannot be replaced by name."""
    if not isinstance(checkpoint, SafetensorsCheckpoint):
        raise ConfigError(
            f"{checkpoint.path}: weight updates require a directory with safetensors",
            hint="serve the model's safetensors files",
        )
    if checkpoint.is_quantized:
        raise ConfigError(
            f"{checkpoint.path}: weight updates require plain tensors, the files are quantized",
            hint="serve the model before quantization, with --quantization if desired",
        )


def write_updated_model(
    checkpoint: Checkpoint, files: Sequence[Path], folder: Path, *, keeps_types: bool
) -> None:
    """Writes the model to `folder` with the tensors of the safetensors `files`; later files
    override earlier ones.

    With `keeps_types`, a tensor gets the type of the one that it replaces, else it keeps its own.
    Raises InvalidRequest for a tensor that the model does not have, or with another shape.
    """
    check_updatable(checkpoint)
    names = [name for name in checkpoint.names() if checkpoint.get_format(name) not in INTEGERS]
    updates: dict[str, NDArray] = {}
    for file in files:
        updates |= read_mapped(file)
    specs = []
    for name in names:
        shape, kind = checkpoint.stored(name).shape, checkpoint.get_format(name)
        if name in updates:
            if updates[name].shape != shape:
                raise InvalidRequest(
                    f"{name}: got the shape {list(updates[name].shape)}, expected {list(shape)}",
                    hint="send tensors with the shapes of the model's safetensors files",
                )
            if not keeps_types:
                kind = next(each for each, dtype in DTYPES.items() if dtype == updates[name].dtype)
        specs.append(TensorSpec(name, kind, shape))
    if unknown := sorted(updates.keys() - set(names)):
        raise InvalidRequest(
            f"{unknown[0]}: the model has no such tensor"
            + (f" ({len(unknown)} of the tensors are unknown)" if len(unknown) > 1 else ""),
            hint=f"use the names of the model's safetensors files, such as {names[0]}",
        )
    writer = SafetensorsWriter(folder, specs, keeps=False)
    for spec in specs:
        stored = updates.get(spec.name)
        array = checkpoint.tensor(spec.name).packed().codes if stored is None else stored
        writer.write(spec.name, np.ascontiguousarray(array).astype(DTYPES[spec.dtype], copy=False))
    copy_small_files(checkpoint.path, folder)
    (folder / CONFIG).write_bytes((checkpoint.path / CONFIG).read_bytes())
