"""A checkpoint with extra tensors added, such as trained predictors. Independent of the purpose of
the extra tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.ports import Checkpoint, ModelHeader, StoredTensor, TokenizerSource
from octavo.quant.packed import PackedWeight

FORMATS = {np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}


class ExtendedHeader:
    """A header with extra tensors. Implements `ports.ModelHeader`."""

    def __init__(self, header: ModelHeader, tensors: Mapping[str, NDArray[Any]]) -> None:
        self._header = header
        self._tensors = tensors
        self.path: Path = header.path
        self.config: dict[str, Any] = header.config
        self.has_config_file = header.has_config_file
        self.generation_config: dict[str, Any] = header.generation_config

    def get_format(self, name: str) -> str:
        if name in self._tensors:
            return FORMATS[self._tensors[name].dtype]
        return self._header.get_format(name)


class ExtendedCheckpoint(ExtendedHeader):
    """A checkpoint with extra tensors. Implements `ports.Checkpoint`."""

    def __init__(
        self, checkpoint: Checkpoint, tensors: Mapping[str, NDArray[Any]], source: Path
    ) -> None:
        """`source` is the file of the extra tensors; it is not one of the checkpoint's
        `weight_files`.
        """
        super().__init__(checkpoint, tensors)
        self._checkpoint = checkpoint
        self._source = source
        self.output_major = checkpoint.output_major
        self.weight_files: Sequence[Path] = checkpoint.weight_files

    def names(self) -> Collection[str]:
        return [*self._checkpoint.names(), *self._tensors]

    def stored(self, name: str) -> StoredTensor:
        if name in self._tensors:
            return StoredTensor(name, self._tensors[name].shape, self._source)
        return self._checkpoint.stored(name)

    def tokenizer_source(self) -> TokenizerSource | None:
        return self._checkpoint.tokenizer_source()

    def tensor(self, name: str) -> Any:
        if name in self._tensors:
            return PackedWeight.plain(self._tensors[name])
        return self._checkpoint.tensor(name)

    def release(self) -> None:
        self._checkpoint.release()
