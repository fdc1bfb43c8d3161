"""Lists and removes the models in Octavo's and huggingface-hub's caches.

Names are those that `--model` accepts: a catalogue name, OWNER/REPO for a directory of safetensors,
or OWNER/REPO/FILE.gguf for a GGUF file (the first part of a split one). Models outside the caches
are neither listed nor removed. Reads only file names and sizes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.checkpoint.catalogue import CATALOGUE, find_downloaded, short_name
from octavo.checkpoint.hub_files import (
    GgufModel,
    choose_default,
    find_quant,
    first_part,
    gguf_models,
)
from octavo.config.model_reference import parse_hub_reference
from octavo.config.paths import cache_dir

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""GGUF's names of config.json's data types."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    name: str
    path: Path
    """The path that `resolve(name)` returns: a file, or the directory of the model's files."""
    num_bytes: int
    modified_s: float
    """Modification time of the newest file, in seconds since the epoch."""
    removed: tuple[Path, ...]
    """Files and directories to delete with the model."""

    @property
    def quantization(self) -> str:
        return get_quantization(self.path)


def get_quantization(path: Path) -> str:
    """Returns the quantization in the file name or config.json, else the data type by GGUF's name;
    "" if unknown.
    """
    if path.suffix == ".gguf":
        return GgufModel((path.name,), 1).quant
    try:
        config = json.loads((path / "config.json").read_bytes())
        method = (config.get("quantization_config") or {}).get("quant_method")
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    except (OSError, ValueError, AttributeError):
        return ""
    return str(method or DTYPE_NAMES.get(dtype, dtype))


def list_local_models() -> list[CachedModel]:
    """Returns the complete models in both caches, newest first."""
    names = (name for name in CATALOGUE if find_downloaded(name) is not None)
    catalogued = (model for name in names if (model := _catalogue_model(name)) is not None)
    models = [*catalogued, *_hub_models()]
    return sorted(models, key=lambda model: (-model.modified_s, model.name))


def find_local_model(name: str) -> CachedModel | None:
    """Returns the cached model for a `--model` name; None if there is none.

    OWNER/REPO refers to everything cached of a repository. Incomplete downloads are found too, so
    that they can be removed.
    """
    short = short_name(name)
    if short is not None:
        return _catalogue_model(short)
    reference = parse_hub_reference(name)
    if reference is None:
        return None
    if not reference.file and not reference.quant:
        return _repository(reference.repository)
    return match_local_model(name, list(_hub_models()))


def match_local_model(name: str, models: Sequence[CachedModel]) -> CachedModel | None:
    """Returns the model that a `--model` name refers to, without network access; None if there is
    none.
    """
    by_name = {model.name: model for model in models}
    short, reference = short_name(name), parse_hub_reference(name)
    if short is not None or reference is None:
        return by_name.get(short or "")
    start = f"{reference.repository}/"
    if reference.file:
        return by_name.get(start + first_part(reference.file))
    if not reference.quant and reference.repository in by_name:
        return by_name[reference.repository]
    files = [GgufModel((each.removeprefix(start),), 1) for each in by_name if start in each]
    matching = find_quant(files, reference.quant) if reference.quant else files
    return by_name[start + choose_default(matching).main] if matching else None


def find_cached(model: str, models: Sequence[CachedModel]) -> CachedModel | None:
    """Returns the model at a path or with a `--model` name; None if there is none."""
    at_path = (each for each in models if str(each.path) == model)
    return next(at_path, None) or match_local_model(model, models)


def remove_local_model(model: CachedModel) -> None:
    """Deletes a model's files from its cache; a link is removed, not its target."""
    for path in model.removed:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _catalogue_model(name: str) -> CachedModel | None:
    folder = cache_dir() / "models" / name
    return _local_model(name, CATALOGUE[name].path(folder), folder.rglob("*"), [folder])


def _repository(name: str) -> CachedModel | None:
    """Returns everything cached of a repository, including incomplete downloads; None if there is
    nothing.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.file_download import repo_folder_name

    try:
        folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    except HFValidationError:
        return None
    snapshots = sorted(folder.glob("snapshots/*"), key=lambda path: path.stat().st_mtime)
    files = [*folder.glob("blobs/*"), *folder.glob("snapshots/**/*")]
    own = (file for file in files if not file.is_symlink())
    return _local_model(name, snapshots[-1] if snapshots else folder, own, [folder])


def _hub_models() -> Iterator[CachedModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return
    for repo in repos:
        if repo.repo_type == "model":
            yield from _list_repo_models(repo)


def _list_repo_models(repo: CachedRepoInfo) -> Iterator[CachedModel]:
    """Yields a repository's safetensors as one model, and each of its GGUF models."""
    has_safetensors = False
    files_by_model: dict[str, list[Path]] = {}
    for revision in sorted(repo.revisions, key=lambda each: -each.last_modified):
        names = [
            file.file_path.relative_to(revision.snapshot_path).as_posix() for file in revision.files
        ]
        has_safetensors |= any(name.endswith(".safetensors") for name in names)
        for model in gguf_models(names):
            if model.is_whole:
                paths = [revision.snapshot_path / file for file in model.files]
                files_by_model.setdefault(model.main, []).extend(paths)
    whole = _repository(repo.repo_id) if has_safetensors else None
    if whole is not None:
        yield whole
    for file, paths in files_by_model.items():
        blobs = {path.resolve() for path in paths}
        # If its only model is removed, the rest of the repository is useless.
        is_only = len(files_by_model) == 1 and not has_safetensors
        own = [blob for blob in blobs if blob.is_relative_to(repo.repo_path.resolve())]
        removed = [repo.repo_path] if is_only else [*paths, *own]
        local = _local_model(f"{repo.repo_id}/{file}", paths[0], blobs, removed)
        if local is not None:
            yield local


def _local_model(
    name: str, path: Path, files: Iterable[Path], removed: Iterable[Path]
) -> CachedModel | None:
    """Returns a model with the total size and newest time of its files; None if there are none."""
    stats = [file.stat() for file in files if file.is_file()]
    if not stats:
        return None
    num_bytes, modified_s = sum(f.st_size for f in stats), max(f.st_mtime for f in stats)
    return CachedModel(name, path, num_bytes, modified_s, tuple(removed))
