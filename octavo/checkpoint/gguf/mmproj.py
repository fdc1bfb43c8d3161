"""A language model and its vision tower in two .gguf files, as one Checkpoint of the family with
images.

The tower's file is the `mmproj` file of llama.cpp, of the architecture `clip`. Knows no projector
type; they are in `mmproj_families.py`.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.clip_bounds import CLIP_BOUNDS, NAMES, read_clip_bounds
from octavo.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from octavo.checkpoint.gguf.gguf_family import Header
from octavo.checkpoint.gguf.gguf_file import GgufFile, read_gguf
from octavo.checkpoint.gguf.mmproj_families import DEEPSTACK, PROJECTORS, pixel_statistics
from octavo.checkpoint.gguf.mmproj_projector import Projector, TowerFile
from octavo.checkpoint.hub_files import choose_tower
from octavo.checkpoint.ports import StoredTensor
from octavo.quant.blocks import StoredWeight
from octavo.quant.packed import PackedWeight

ARCHITECTURE = "clip"


@dataclass(frozen=True, slots=True)
class TowerTensor:
    """A tensor in safetensors' form, and how it is read from the file."""

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    build: Callable[..., NDArray[Any]] | None = None
    """Computes it from the sources' numbers; None: it is stored as it is."""


def find_mmproj(model: Path) -> Path | None:
    """Returns the mmproj file beside a .gguf file (`hub_files.choose_tower`); None if there is
    none.
    """
    model = model.absolute()
    root = model.parent.parent
    files = (*model.parent.glob("*.gguf"), *root.glob("*.gguf"))
    names = [file.relative_to(root).as_posix() for file in files]
    found = choose_tower(names, model.relative_to(root).as_posix())
    return None if found is None else root / found


class MmprojCheckpoint(GgufCheckpoint):
    """A language model with the tower of a second file."""

    def __init__(self, path: Path, mmproj: Path) -> None:
        """Raises UnsupportedModel if the tower is of an unknown type or of another model."""
        super().__init__(path)
        self.mmproj = mmproj
        self._tower = read_gguf(mmproj)
        self._projector = _get_projector(self._tower, self.config["model_type"], path)
        tower = TowerFile(
            Header(self._tower, ARCHITECTURE), self._header, self.config, self._find_token
        )
        self._check_width(tower.header)
        own = self._projector.config(tower)
        family = self._projector.families[self.config["model_type"]]
        text_type = self.config["model_type"]
        text = {"text_model_type": text_type} if self._projector.has_text_type else {}
        processor = {**self._projector.processor(tower), **pixel_statistics(tower.header)}
        self.config = {**self.config, **text, "model_type": family, **own}
        self.config["image_processor"] = processor
        self._tower_tensors = dict(self._read_names())
        if bounds := self._read_bounds():
            self.config[CLIP_BOUNDS] = bounds
        self.weight_files = (*self.weight_files, mmproj)

    def names(self) -> Collection[str]:
        return [*super().names(), *self._tower_tensors]

    def get_format(self, name: str) -> str:
        found = self._tower_tensors.get(name)
        if found is None:
            return super().get_format(name)
        kind = self._tower.tensors[found.sources[0]].kind
        return "F32" if found.build is not None else kind.form

    def stored(self, name: str) -> StoredTensor:
        found = self._tower_tensors.get(name)
        if found is None:
            return super().stored(name)
        return StoredTensor(name, found.shape, self.mmproj)

    def tensor(self, name: str) -> StoredWeight:
        found = self._tower_tensors.get(name)
        if found is None:
            return super().tensor(name)
        if found.build is None:
            return self._tower.tensor(found.sources[0])
        parts = [self._tower.tensor(source).dequantize() for source in found.sources]
        return PackedWeight.plain(np.ascontiguousarray(found.build(*parts)))

    def release(self) -> None:
        super().release()
        self._tower.mapped.madvise(mmap.MADV_DONTNEED)

    def _find_token(self, text: str, default: int) -> int:
        tokens = self.file.metadata.get("tokenizer.ggml.tokens") or []
        wanted = text.encode()
        return next((index for index, token in enumerate(tokens) if token == wanted), default)

    def _check_width(self, header: Header) -> None:
        kind = "audio" if header.get("vision.projection_dim") is None else "vision"
        width = header.count(f"{kind}.projection_dim")
        if width != self.config["hidden_size"]:
            raise UnsupportedModel(
                f"mmproj: {self.mmproj} projects to {width} columns, the model has hidden_size"
                f" {self.config['hidden_size']}",
                hint="use the mmproj file that was published with this model",
            )

    def _read_names(self) -> list[tuple[str, TowerTensor]]:
        """Returns the safetensors names of all tensors; raises UnsupportedModel for an unknown
        one.
        """
        entries: list[tuple[str, TowerTensor]] = []
        deep = self.config.get("vision_config", {}).get("deepstack_visual_indexes", [])
        for source, entry in self._tower.tensors.items():
            if self._is_part(source):
                continue
            name = _get_name(self._projector, source, deep)
            if name is None:
                raise UnsupportedModel(
                    f"mmproj: {self.mmproj} has the tensor {source}, which is unknown for the"
                    f" projector type {_get_type(self._tower)}"
                )
            entries.append((name, self._get_tensor(name, source, entry.shape)))
        if not entries:
            raise WeightMismatch(f"{self.mmproj}: the file has no tensors")
        return entries

    def _read_bounds(self) -> dict[str, list[float]]:
        """Returns the bounds of linear layers' inputs and outputs, as `read_clip_bounds`."""
        sources = {}
        for source in self._tower.tensors:
            stem, _, name = source.rpartition(".")
            weight = _get_name(self._projector, f"{stem}.weight", []) if name in NAMES else None
            if weight is not None:
                sources[f"{weight.removesuffix('.linear.weight')}.{name}"] = source

        def read(name: str) -> NDArray[Any] | None:
            found = sources.get(name)
            return None if found is None else self._tower.tensor(found).dequantize()

        return read_clip_bounds(sources, read)

    def _is_part(self, source: str) -> bool:
        """Returns whether a tensor is read elsewhere, or repeats one of the model."""
        parts = [part for stems in self._projector.joined.values() for part in stems[1:]]
        layer = re.fullmatch(r"v\.blk\.\d+\.(\w+)\.(?:weight|bias)", source)
        is_part = layer is not None and layer[1] in parts
        is_part = is_part or source == "v.patch_embd.weight.1"
        return is_part or source.endswith(NAMES) or source in self._projector.unread

    def _get_tensor(self, name: str, source: str, shape: tuple[int, ...]) -> TowerTensor:
        projector = self._projector
        if source == "v.patch_embd.weight" and projector.has_frames:
            both = (source, f"{source}.1")
            frames = (shape[0], shape[1], 2, *shape[2:])
            return TowerTensor(both, frames, lambda *parts: np.stack(parts, axis=2))
        stem = _get_stem(source)
        stems = next((each for each in projector.joined.values() if each[0] == stem), None)
        if stems is not None:
            sources = tuple(source.replace(stem, each) for each in stems)
            whole = (len(stems) * shape[0], *shape[1:])
            return TowerTensor(sources, whole, lambda *parts: np.concatenate(parts))
        if stem in projector.row_orders:
            order = projector.row_orders[stem](self.config["vision_config"], shape[0])
            return TowerTensor((source,), shape, lambda rows: rows[order])
        restore = projector.restored.get(name, projector.restored.get(stem))
        if restore is not None:
            return TowerTensor((source,), restore.shape(shape), restore.numbers)
        return TowerTensor((source,), shape)


def _get_type(tower: GgufFile) -> str:
    keys = ("clip.projector_type", "clip.vision.projector_type")
    return str(next((tower.metadata[key] for key in keys if key in tower.metadata), None))


def _get_projector(tower: GgufFile, model_type: str, model: Path) -> Projector:
    """Returns the projector of a tower's file; raises UnsupportedModel if it is unknown, or not one
    for this language model.
    """
    architecture = tower.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise UnsupportedModel(
            f"mmproj: {tower.path} has the architecture {architecture!r}, expected"
            f" {ARCHITECTURE!r}",
            hint="the language model is the value of --model, its vision tower of --mmproj",
        )
    named = _get_type(tower)
    if named not in PROJECTORS:
        raise UnsupportedModel(
            f"mmproj: {tower.path} has the projector type {named!r}, supported:"
            f" {', '.join(PROJECTORS)}",
            hint="use the safetensors version of the model, if its family is supported",
        )
    projector = PROJECTORS[named]
    if model_type not in projector.families:
        raise UnsupportedModel(
            f"mmproj: {tower.path} is a tower for {' or '.join(projector.families)}, but {model} is"
            f" a {model_type} model",
            hint="use the mmproj file that was published with this model",
        )
    return projector


def _get_stem(source: str) -> str:
    return source.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def _get_name(projector: Projector, source: str, deep: list[int]) -> str | None:
    """Returns the safetensors name of a tensor; `deep` are the layers with a DeepStack merger."""
    stem, _, suffix = source.rpartition(".")
    if suffix not in ("weight", "bias"):
        stem, suffix = source, ""
    stem = stem.removeprefix("v.")
    end = f".{suffix}" if suffix else ""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem.removeprefix("a."))
    if layer:
        prefix, tensors = projector.layer_prefix, projector.layer_tensors
        if stem.startswith("a."):
            prefix, tensors = projector.audio_layer_prefix, projector.audio_layer_tensors
        known = tensors.get(layer[2])
        joined = {stems[0]: name for name, stems in projector.joined.items()}
        known = joined.get(layer[2], known)
        end = "" if layer[2] in projector.whole_names else end
        return known and f"{prefix}.{layer[1]}.{known}{end}"
    merger = re.fullmatch(r"deepstack\.(\d+)\.(\w+)", stem)
    if merger and int(merger[1]) in deep and merger[2] in DEEPSTACK:
        number = deep.index(int(merger[1]))
        return f"visual.deepstack_merger_list.{number}.{DEEPSTACK[merger[2]]}{end}"
    known = projector.tensors.get(stem)
    return known and f"{known}{'' if stem in projector.whole_names else end}"
