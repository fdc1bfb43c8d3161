"""Models on this machine: lists those in Octavo's cache and in huggingface-hub's, and removes them.

A name is one that `--model` takes: a short name, OWNER/REPO for a directory of safetensors, or
OWNER/REPO/FILE.gguf for one GGUF file of a repository (the first part of a split one). Models that
lie elsewhere are not listed and not removed. Reads file names and sizes only.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.checkpoint.catalogue import CATALOGUE, REPOSITORY, cache_dir, fetched
from octavo.checkpoint.gguf import PART_NAME

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in a cache of this machine."""

    name: str
    path: Path
    """What `resolve(name)` returns: a file, or the directory of the model's files."""
    num_bytes: int
    modified_s: float
    """Time of its newest file, in seconds since the epoch."""
    removed: tuple[Path, ...]
    """Files and directories that are deleted with the model."""


def list_local_models() -> list[CachedModel]:
    """Returns the complete models of both caches, the newest first."""
    names = (name for name in CATALOGUE if fetched(name) is not None)
    catalogued = (model for name in names if (model := _catalogue_model(name)) is not None)
    found = [*catalogued, *_hub_models()]
    return sorted(found, key=lambda model: (-model.modified_s, model.name))


def find_local_model(name: str) -> CachedModel | None:
    """Returns the cached model of a name; None if there is none.

    OWNER/REPO finds everything that is cached of a repository. An incomplete download is found
    too, so that it can be removed.
    """
    if name in CATALOGUE:
        return _catalogue_model(name)
    if REPOSITORY.fullmatch(name):
        return _repository(name)
    return next((model for model in _hub_models() if model.name == name), None)


def remove_local_model(model: CachedModel) -> None:
    """Deletes a model's files from its cache."""
    for path in model.removed:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _catalogue_model(name: str) -> CachedModel | None:
    folder = cache_dir() / "models" / name
    return _local_model(name, CATALOGUE[name].path(folder), folder.rglob("*"), [folder])


def _repository(name: str) -> CachedModel | None:
    """Returns everything that is cached of a repository, incomplete downloads included."""
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
            yield from _models_of(repo)


def _models_of(repo: CachedRepoInfo) -> Iterator[CachedModel]:
    """Yields a repository's safetensors as one model, and each of its GGUF files as another."""
    has_safetensors, ggufs = False, defaultdict(list)
    for revision in sorted(repo.revisions, key=lambda each: -each.last_modified):
        for path in sorted(file.file_path for file in revision.files):
            file = path.relative_to(revision.snapshot_path).as_posix()
            has_safetensors |= path.suffix == ".safetensors"
            if path.suffix == ".gguf":
                ggufs[_first_part(file)].append(path)
    whole = _repository(repo.repo_id) if has_safetensors else None
    if whole is not None:
        yield whole
    for file, paths in ggufs.items():
        blobs = {path.resolve() for path in paths}
        # Without its only model a repository has nothing left to run.
        is_only = len(ggufs) == 1 and not has_safetensors
        removed = [repo.repo_path] if is_only else [*paths, *blobs]
        found = _local_model(f"{repo.repo_id}/{file}", paths[0], blobs, removed)
        if found is not None:
            yield found


def _first_part(file: str) -> str:
    """Returns the name of the first part of a split GGUF file; other names stay as they are."""
    part = PART_NAME.fullmatch(file)
    return file if part is None else f"{part['stem']}-00001-of-{part['count']}.gguf"


def _local_model(
    name: str, path: Path, files: Iterable[Path], removed: Iterable[Path]
) -> CachedModel | None:
    """Returns a model with the size and time of its files; None if there is no file."""
    found = [file.stat() for file in files if file.is_file()]
    if not found:
        return None
    num_bytes, modified_s = sum(f.st_size for f in found), max(f.st_mtime for f in found)
    return CachedModel(name, path, num_bytes, modified_s, tuple(removed))
