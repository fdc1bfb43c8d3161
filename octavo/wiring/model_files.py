"""Opens a model's files: the checkpoint, and the file of its vision tower if it has its own."""

from __future__ import annotations

from typing import TypeVar

from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.gguf.mmproj import MmprojCheckpoint
from octavo.checkpoint.open import open_checkpoint, with_tower_file
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.config.model_options import ModelOptions

NO_TOWER = "none"
"""Value of the option mmproj for a language model alone."""

Header = TypeVar("Header", bound=ModelHeader)


def open_model_files(options: ModelOptions) -> Checkpoint:
    """Locates a model (downloading it if necessary) and opens it with its vision tower."""
    return with_mmproj(options, open_checkpoint(resolve(options.model, progress=True)))


def with_mmproj(options: ModelOptions, header: Header) -> Header | MmprojCheckpoint:
    """Returns a GGUF model with the tower that the option mmproj names or that lies beside it."""
    if options.mmproj == NO_TOWER:
        return header
    mmproj = None if options.mmproj is None else resolve(options.mmproj, progress=True)
    return with_tower_file(header, mmproj)
