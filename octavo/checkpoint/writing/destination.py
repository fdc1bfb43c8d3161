"""Output formats of a quantized model: a Hugging Face directory, or a directory with a GGUF
file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoint.catalogue import recommended_sampling
from octavo.checkpoint.formats.table import OLDER_FILES, OLDER_KEY
from octavo.checkpoint.gguf.gguf_checkpoint import IGNORED_TENSORS, SAMPLING_KEYS, GgufCheckpoint
from octavo.checkpoint.json_file import read_json
from octavo.checkpoint.ports import Checkpoint
from octavo.checkpoint.safetensors import DTYPES, INTEGERS
from octavo.checkpoint.sentence_modules import module_folders
from octavo.checkpoint.writing.encoders import Encoder, make_encoder
from octavo.checkpoint.writing.gguf_file import GgufWriter
from octavo.checkpoint.writing.safetensors_file import (
    SafetensorsWriter,
    TensorSpec,
)
from octavo.quant.gguf import BlockType
from octavo.quant.making.gguf_blocks import block_bytes, fit_blocks, type_for
from octavo.quant.making.gptq import FitGrid, fitted, nearest
from octavo.quant.making.grid import RoundedMatrix
from octavo.quant.making.recipe import Recipe

WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".onnx", ".msgpack", ".h5")
WEIGHT_INDEX = ".index.json"
GGUF_NAME = "model.gguf"
CONFIG = "config.json"
QUANTIZATION_KEYS = ("quantization_config", OLDER_KEY)
NOT_COPIED = (CONFIG, *OLDER_FILES)
"""Files of the source that do not apply to the new model."""


class MatrixPlan(NamedTuple):
    """A matrix to quantize."""

    name: str
    """Tensor name in the family, "...weight"."""
    shape: tuple[int, int]
    bits: int
    module: str
    """Module name in the written files."""
    source: str
    """Name of the source tensor that contains it, possibly with other experts."""


class Destination(Protocol):
    """Writer of a quantized model."""

    def supports(self, name: str, shape: tuple[int, ...], bits: int) -> bool:
        """Returns whether a matrix of this shape can be quantized."""
        ...

    def begin(self, matrices: Sequence[MatrixPlan], folder: Path, *, keeps: bool) -> None:
        """Reserves disk space in a folder and writes the tensors that are not quantized; with
        `keeps`, an earlier run has already done this.
        """
        ...

    def fit(self, plan: MatrixPlan) -> FitGrid: ...

    def write_matrix(self, plan: MatrixPlan, matrix: RoundedMatrix) -> None: ...

    def write_vector(self, name: str, numbers: NDArray[np.float32]) -> None: ...

    def round_to_stored(self, name: str, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns a vector's values as they will be read back."""
        ...

    def finish(self, left: Sequence[str]) -> None:
        """Writes the files next to the weights; `left` are the linears that are not quantized."""
        ...


class HfDirectory:
    """A directory with config.json and safetensors. Implements `Destination`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        write_tokenizer: Callable[[Path], None],
        architecture: str | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._recipe = recipe
        self._encoder: Encoder = make_encoder(recipe)
        self._write_tokenizer = write_tokenizer
        self._architecture = architecture
        self._bits_of: dict[str, int] = {}

    def supports(self, name: str, shape: tuple[int, ...], bits: int) -> bool:
        return (
            len(shape) == 2
            and name.endswith(".weight")
            and self._encoder.supports(shape[0], shape[1], bits)
        )

    def begin(self, matrices: Sequence[MatrixPlan], folder: Path, *, keeps: bool) -> None:
        self._folder = folder
        self._bits_of = {
            plan.module: plan.bits for plan in matrices if plan.bits != self._recipe.bits
        }
        quantized = {plan.source for plan in matrices}
        self._plain = {
            name: self._plain_spec(name)
            for name in self._checkpoint.names()
            if name not in quantized and self._checkpoint.get_format(name) not in INTEGERS
        }
        specs = [
            spec
            for plan in matrices
            for spec in self._encoder.specs(plan.module, *plan.shape, plan.bits)
        ]
        self._writer = SafetensorsWriter(folder, [*self._plain.values(), *specs], keeps=keeps)
        if not keeps:
            for name in self._plain:
                self._copy(name)

    def fit(self, plan: MatrixPlan) -> FitGrid:
        spec = self._recipe.grid(plan.bits)
        return fitted(spec, searches=not self._recipe.rows_are_int8)

    def write_matrix(self, plan: MatrixPlan, matrix: RoundedMatrix) -> None:
        for rest, array in self._encoder.tensors(matrix, plan.bits).items():
            self._writer.write(f"{plan.module}.{rest}", array)

    def write_vector(self, name: str, numbers: NDArray[np.float32]) -> None:
        stored = self._checkpoint.stored(name).name
        self._writer.write(stored, numbers.astype(_get_dtype(self._plain[stored])))

    def round_to_stored(self, name: str, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        dtype = _get_dtype(self._plain[self._checkpoint.stored(name).name])
        stored: NDArray[np.float32] = numbers.astype(dtype).astype(np.float32)
        return stored

    def finish(self, left: Sequence[str]) -> None:
        source = self._checkpoint.path
        if self._checkpoint.has_config_file:
            copy_small_files(source, self._folder)
        elif generation := _generation_config(self._checkpoint):
            _write_json(self._folder / "generation_config.json", generation)
        config = self._plain_config()
        if self._architecture is not None:
            config.setdefault("architectures", [self._architecture])
        config["quantization_config"] = self._encoder.config(left, self._bits_of)
        _write_json(self._folder / "config.json", config)
        self._write_tokenizer(self._folder)

    def _plain_config(self) -> dict[str, Any]:
        """Returns the config without quantization. config.json is read again if there is one,
        because a null in it differs from a missing key.
        """
        if self._checkpoint.has_config_file:
            config = read_json(self._checkpoint.path / CONFIG)
            return {key: config[key] for key in config if key not in QUANTIZATION_KEYS}
        known = {key: one for key, one in self._checkpoint.config.items() if one is not None}
        return known | {"dtype": "float16", "torch_dtype": "float16"}

    def _plain_spec(self, name: str) -> TensorSpec:
        """Returns how to store a tensor that is not quantized here: unchanged if it is floats."""
        stored = self._checkpoint.stored(name)
        known = self._checkpoint.get_format(name)
        is_vector = len(stored.shape) == 1
        dtype = known if known in DTYPES else "F32" if is_vector else "F16"
        return TensorSpec(name, dtype, tuple(stored.shape))

    def _copy(self, name: str) -> None:
        spec = self._plain[name]
        weight = self._checkpoint.tensor(name)
        dtype = _get_dtype(spec)
        codes = weight.packed().codes if weight.is_float else weight.dequantize()
        self._writer.write(name, np.ascontiguousarray(codes).astype(dtype, copy=False))


class GgufDirectory:
    """A directory with one GGUF file, based on another one or on an outline. Implements
    `Destination`.
    """

    def __init__(
        self, checkpoint: GgufCheckpoint, recipe: Recipe, source: Checkpoint | None = None
    ) -> None:
        """`checkpoint` is a GGUF file, or an outline together with the `source` of the tensors."""
        self._checkpoint = checkpoint
        self._recipe = recipe
        self._source = source

    def supports(self, name: str, shape: tuple[int, ...], bits: int) -> bool:
        if len(shape) != 2 or not self._checkpoint.is_rewritable(name):
            return False
        return type_for(shape[1], bits, symmetric=self._recipe.symmetric) is not None

    def begin(self, matrices: Sequence[MatrixPlan], folder: Path, *, keeps: bool) -> None:
        self._folder = folder
        self._plans = {plan.name: plan for plan in matrices}
        source = self._checkpoint.file
        kinds = {self._checkpoint.locate(plan.name).tensor: self._kind(plan) for plan in matrices}
        tables: dict[str, BlockType] = {
            name: kind
            for name in ("token_embd.weight", "output.weight")
            if name in source.tensors and (kind := self._table_kind(name)) is not None
        }
        holder = self._checkpoint if self._source is None else self._source
        self._writer = GgufWriter(
            folder / GGUF_NAME,
            source,
            {**tables, **kinds},
            keeps=keeps,
            added=_sampling_metadata(_generation_config(holder)),
        )
        if keeps:
            return
        for name in source.tensors:
            if name in tables:
                self._write_table(name, tables[name])
            elif name not in kinds:
                self._writer.write(name, self._tensor_bytes(name))

    def fit(self, plan: MatrixPlan) -> FitGrid:
        kind = self._kind(plan)
        return lambda weight, importance: fit_blocks(weight, importance, kind)

    def write_matrix(self, plan: MatrixPlan, matrix: RoundedMatrix) -> None:
        rows = block_bytes(matrix, self._kind(plan))
        location = self._checkpoint.locate(plan.name)
        data = self._checkpoint.in_file_order(plan.name, rows)
        self._writer.write(location.tensor, data, matrix=location.expert or 0)

    def write_vector(self, name: str, numbers: NDArray[np.float32]) -> None:
        source = self._checkpoint.locate(name).tensor
        kind = self._checkpoint.file.tensors[source].kind
        assert kind.dtype is not None, "vectors are floats"
        stored = self._checkpoint.to_stored_values(name, numbers)
        self._writer.write(source, stored.astype(kind.dtype))

    def round_to_stored(self, name: str, numbers: NDArray[np.float32]) -> NDArray[np.float32]:
        kind = self._checkpoint.file.tensors[self._checkpoint.locate(name).tensor].kind
        assert kind.dtype is not None, "vectors are floats"
        stored = self._checkpoint.to_stored_values(name, numbers).astype(kind.dtype)
        moved = stored.astype(np.float32) - self._checkpoint.to_stored_values(
            name, np.zeros_like(numbers)
        )
        rounded: NDArray[np.float32] = moved
        return rounded

    def finish(self, left: Sequence[str]) -> None:
        """Does nothing: all data is in the file."""

    def _kind(self, plan: MatrixPlan) -> BlockType:
        kind = type_for(plan.shape[1], plan.bits, symmetric=self._recipe.symmetric)
        assert kind is not None, "it was asked whether it is taken"
        return kind

    def _table_kind(self, name: str) -> BlockType | None:
        """Returns the type of an embedding or output layer, with at least 6 bits; None if it is
        stored unchanged.
        """
        entry = self._checkpoint.file.tensors[name]
        is_float = entry.kind.dtype is not None
        bits = 6 if self._recipe.bits < 8 else 8
        return type_for(entry.shape[-1], bits, symmetric=True) if is_float else None

    def _tensor_bytes(self, name: str) -> NDArray:
        """Returns a tensor's data as stored in the file."""
        file = self._checkpoint.file
        if self._source is None or name in IGNORED_TENSORS:
            return file.tensor_bytes(name)
        dtype = file.tensors[name].kind.dtype
        assert dtype is not None, "an outline has floats"
        parts = []
        for own in self._checkpoint.names_in(name):
            weight = self._source.tensor(own)
            kept = weight.packed().codes if weight.is_float else weight.dequantize()
            moved = self._checkpoint.in_file_order(own, kept)
            if self._checkpoint.has_offset(own):
                moved = self._checkpoint.to_stored_values(own, moved.astype(np.float32))
            parts.append(moved.astype(dtype, copy=False))
        return np.ascontiguousarray(np.stack(parts) if len(parts) > 1 else parts[0])

    def _write_table(self, name: str, kind: BlockType) -> None:
        (own,) = self._checkpoint.names_in(name)
        holder = self._checkpoint if self._source is None else self._source
        weight = holder.tensor(own).dequantize()
        rounded = nearest(weight, None, lambda rows, shares: fit_blocks(rows, shares, kind))
        self._writer.write(name, block_bytes(rounded, kind))


def _generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Returns the catalogue's recommended values, overridden by the model's own. The catalogue
    finds models by file, so the copy would lose its recommendations.
    """
    recommended = recommended_sampling(checkpoint.path)
    return {**(recommended[1] if recommended else {}), **checkpoint.generation_config}


def _sampling_metadata(generation: Mapping[str, Any]) -> dict[str, float]:
    """Returns the sampling values of a generation_config under GGUF's keys."""
    values = {key: generation.get(name) for key, name in SAMPLING_KEYS.items()}
    return {key: value for key, value in values.items() if isinstance(value, int | float)}


def _get_dtype(spec: TensorSpec) -> np.dtype:
    return DTYPES[spec.dtype]


def copy_small_files(source: Path, folder: Path) -> None:
    """Copies the files next to the weights, such as the tokenizer, and the folders of
    sentence-transformers modules. Overwrites files that an interrupted run may have copied
    incompletely.
    """
    for file in source.iterdir():
        is_weights = file.suffix in WEIGHT_FILES or file.name.endswith(WEIGHT_INDEX)
        if file.is_file() and not is_weights and file.name not in NOT_COPIED:
            shutil.copyfile(file, folder / file.name)
    for location in module_folders(source):
        if location.is_dir():
            shutil.copytree(location, folder / location.relative_to(source), dirs_exist_ok=True)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, default=_plain_number) + "\n", encoding="utf-8")


def _plain_number(value: Any) -> Any:
    """Returns NumPy numbers and arrays as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")
