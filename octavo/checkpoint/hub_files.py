"""Chooses the files of a repository that a model reference refers to.

Works on file names, from the hub or the cache. GGUF files are grouped into models: parts of a split
model belong together. The file of the towers (`mmproj`) comes with every model; other companion
files (importance matrices) are skipped.
Quantizations have the names of llama.cpp and Ollama: the end of the file name, or the folder.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from octavo.api.errors import NotOnHub
from octavo.checkpoint.model_file import PART_NAME
from octavo.config.model_reference import HubReference

HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "tokenizer.model", "*.jinja"]
HUB_DUPLICATES = ["original/*", "onnx/*", "openvino/*", "consolidated*"]
"""Patterns of files that repeat the weights in unsupported formats."""

PREFERRED = (
    *("Q4_K_M", "Q4_0", "UD-Q4_K_XL", "Q4_K_S", "Q4_1", "IQ4_XS", "IQ4_NL", "MXFP4", "MXFP4_MOE"),
    *("Q4_K", "Q5_K_M", "Q5_K_S", "Q5_0", "Q5_1", "Q6_K", "Q8_0", "Q3_K_M", "Q3_K_L", "Q3_K_S"),
    *("Q2_K", "BF16", "F16", "F32"),
)
"""Quantizations in order of preference: first llama.cpp's two defaults for -hf, then those near 4
bits, then larger ones.
"""

QUANT_NAME = re.compile(
    r"(?<![A-Za-z0-9])(UD-)?((?:I?Q|TQ)\d\w*|MXFP\d\w*|NVFP\d\w*|BF16|FP?16|FP?32)(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
TOWER = "mmproj"
"""Part of the names of towers' files, in lower case."""
COMPANIONS = re.compile(rf"{TOWER}|imatrix|^ggml-vocab", re.IGNORECASE)
TOWER_QUANTS = ("F16", "BF16", "")
"""Precisions of which the first is chosen if there are several files of the towers."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A model among a repository's GGUF files."""

    files: tuple[str, ...]
    """Its parts in order; one file if it is not split."""
    num_parts: int

    @property
    def main(self) -> str:
        """The file to open."""
        return self.files[0]

    @property
    def quant(self) -> str:
        """Name of the quantization in upper case; "" if neither the file nor the folder has one."""
        return quant_of(self.main)

    @property
    def is_whole(self) -> bool:
        return len(self.files) == self.num_parts


@dataclass(frozen=True, slots=True)
class ChosenFiles:
    """The files of a model in its repository."""

    files: tuple[str, ...]
    main: str = ""
    """GGUF file to open; "" for the folder of all files."""


def choose_files(reference: HubReference, names: Collection[str]) -> ChosenFiles:
    """Returns the files of a reference.

    Without a file or quantization in the reference, safetensors are preferred. Raises NotOnHub if
    the requested file or quantization is missing.
    """
    whole = [name for name in sorted(names) if is_wanted(name)]
    models = gguf_models(names)
    if reference.file or reference.quant:
        chosen = _named(reference, models)
    elif has_safetensors(whole) or not models:
        return ChosenFiles(tuple(whole))
    else:
        chosen = choose_default(models)
    if not chosen.is_whole:
        raise NotOnHub(
            f"{reference}: the repository has {len(chosen.files)} of the model's"
            f" {chosen.num_parts} parts",
            hint=_hint(reference, [model for model in models if model.is_whole]),
        )
    tower = choose_tower(names, chosen.main)
    return ChosenFiles((*chosen.files, *([tower] if tower else [])), chosen.main)


def has_safetensors(names: Iterable[str]) -> bool:
    return any(name.endswith(".safetensors") and "/" not in name for name in names)


def is_wanted(name: str) -> bool:
    """Returns whether a file belongs to a model in Hugging Face's layout."""

    def fits(patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return fits(HUB_FILES) and not fits(HUB_DUPLICATES)


def gguf_models(names: Iterable[str]) -> list[GgufModel]:
    """Returns the models among GGUF files, sorted by name."""
    parts: Mapping[tuple[str, int], list[str]] = defaultdict(list)
    for name in sorted(names):
        if not name.lower().endswith(".gguf") or COMPANIONS.search(name.rpartition("/")[2]):
            continue
        match = PART_NAME.fullmatch(name)
        parts[(match["stem"], int(match["count"])) if match else (name, 1)].append(name)
    return [GgufModel(tuple(files), count) for (_, count), files in parts.items()]


def choose_tower(names: Iterable[str], model: str) -> str | None:
    """Returns the file of a GGUF model's towers: one in the model's folder, or else in the
    folder above if the model's is that of a quantization. None if there is none.
    """
    towers = [name for name in sorted(names) if is_tower_name(name)]
    folder = PurePosixPath(model).parent
    folders = [folder, folder.parent] if QUANT_NAME.search(folder.name) else [folder]
    for each in folders:
        found = [name for name in towers if PurePosixPath(name).parent == each]
        if found:
            return min(found, key=_rank_tower)
    return None


def is_tower_name(name: str) -> bool:
    file = name.lower().rpartition("/")[2]
    return file.endswith(".gguf") and TOWER in file


def _rank_tower(name: str) -> int:
    quant = quant_of(name)
    return TOWER_QUANTS.index(quant) if quant in TOWER_QUANTS else len(TOWER_QUANTS)


def quant_of(name: str) -> str:
    """Returns the quantization in a file's or else its folder's name in upper case; "" if they have
    none.
    """
    for part in reversed(name.split("/")):
        if found := QUANT_NAME.findall(part):
            return "".join(found[-1]).upper()
    return ""


def first_part(file: str) -> str:
    """Returns the name of the first part of a split GGUF file; other names are unchanged."""
    part = PART_NAME.fullmatch(file)
    return file if part is None else f"{part['stem']}-00001-of-{part['count']}.gguf"


def choose_default(models: Sequence[GgufModel]) -> GgufModel:
    """Returns the default model: a complete one with the most preferred quantization, else the
    first by name.
    """
    ranks = {quant: rank for rank, quant in enumerate(PREFERRED)}
    return min(models, key=lambda model: (not model.is_whole, ranks.get(model.quant, len(ranks))))


def _named(reference: HubReference, models: Sequence[GgufModel]) -> GgufModel:
    if reference.file:
        matching = [model for model in models if reference.file in model.files]
        what = f"no file {reference.file}"
    else:
        matching = find_quant(models, reference.quant)
        what = f"no quantization {reference.quant}"
    if matching:
        return matching[0]
    raise NotOnHub(
        f"{reference.repository} has {what}: {_list_models(models)}", hint=_hint(reference, models)
    )


def find_quant(models: Sequence[GgufModel], quant: str) -> list[GgufModel]:
    """Returns the models with a quantization, best matches first; case-insensitive.

    Exact names come before the UD- variant (Q4_K_XL also matches UD-Q4_K_XL), then file names and
    folders that contain it.
    """
    upper_quant = quant.upper()
    contained = re.compile(rf"(?<![A-Z0-9]){re.escape(upper_quant)}(?![A-Z0-9_])")
    ways = (
        lambda model: model.quant == upper_quant,
        lambda model: model.quant == f"UD-{upper_quant}",
        lambda model: contained.search(model.main.upper()) is not None,
    )
    return next((found for way in ways if (found := [*filter(way, models)])), [])


def _list_models(models: Sequence[GgufModel]) -> str:
    """Returns a text that lists the available models."""
    names = dict.fromkeys(model.quant or model.main for model in models)
    return f"available are {', '.join(names)}" if names else "it has no GGUF files"


def _hint(reference: HubReference, models: Sequence[GgufModel]) -> str | None:
    if not models:
        return None
    best = choose_default(models)
    return f"{reference.repository}" + (f":{best.quant}" if best.quant else f"/{best.main}")
