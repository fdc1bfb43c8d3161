"""Downloads models from the Hugging Face hub into huggingface-hub's cache.

Interrupted downloads of large files are resumed, and every file is checked by its hash on the hub:
SHA-256 for large files, git's SHA-1 for small ones. huggingface-hub manages the cache and small
files; `hub_files.py` chooses the files of a model. Without a network, the model is chosen among the
cached files.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast
from urllib.parse import urlsplit

from octavo.api.errors import DownloadFailed, OctavoError
from octavo.checkpoint.gguf.gguf_file import header_bytes
from octavo.checkpoint.hub_files import ChosenFiles, choose_files, gguf_models, has_safetensors
from octavo.config.model_reference import HubReference
from octavo.config.paths import cache_dir
from octavo.utils.progress import FileProgress, OnProgress, Report, ignore_progress

if TYPE_CHECKING:
    from huggingface_hub.hf_api import BlobLfsInfo

TIMEOUT_S = 10
CHUNK_BYTES = 1 << 20
SHA256_LENGTH = 64
HTTP_SERVER_ERROR = 500
"""Lowest HTTP status of a server error."""
HEADER_BYTES = 4 << 20
"""Bytes of a GGUF file first downloaded for its header; more are fetched if it is longer."""
MAX_HEADER_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at a revision."""

    revision: str
    """Commit hash."""
    names: Sequence[str]
    large: Mapping[str, BlobLfsInfo] = field(default_factory=dict)
    """Hash and size of the files that the hub stores by SHA-256."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub.

    Its methods raise huggingface-hub's errors, OSError, and DownloadFailed if the model is not in
    its repository or a hash does not match.
    """

    reference: HubReference
    report: Report
    watch: OnProgress = ignore_progress

    def fetch(self, *, progress: bool, verify: bool) -> Path:
        """Returns the model's GGUF file or folder, and downloads missing files.

        `verify` also checks cached files. Offline, only cached files are used.
        """
        listing = self._list()
        if listing is None:
            return self._find_cached(verify=verify)
        chosen = choose_files(self.reference, listing.names)
        before = set(self._blobs().glob("*"))
        with _bars(progress):
            self._fetch_large(listing, chosen.files)
            folder = self._snapshot(listing.revision, chosen.files)
        self._check(folder, chosen, before=set() if verify else before)
        if verify and before >= set(self._blobs().glob("*")):
            self.report(f"{self.reference}: already cached, and its checksums match")
        return folder / chosen.main

    def fetch_header(self) -> Path:
        """Returns the folder of config.json, or a file with only the GGUF header."""
        listing = self._list()
        if listing is None:
            return self._find_cached(verify=False, header_only=True)
        chosen = choose_files(self.reference, listing.names)
        if not chosen.main:
            return self._snapshot(listing.revision, ["config.json"])
        folder = self._snapshots() / listing.revision
        if all((folder / file).exists() for file in chosen.files):
            return folder / chosen.main
        if not set(chosen.files) <= set(listing.large):
            return self.fetch(progress=False, verify=False)
        headers = cache_dir() / "headers" / listing.large[chosen.main].sha256
        for file in chosen.files:
            self._fetch_gguf_header(file, listing, headers / Path(file).name)
        return headers / Path(chosen.main).name

    # -- what there is -----------------------------------------------------------------------------

    def _list(self) -> Listing | None:
        """Returns the repository's files; None if the hub is unreachable."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        name, revision = self.reference.repository, self.reference.revision
        try:
            info = HfApi().model_info(
                name, revision=revision, files_metadata=True, timeout=TIMEOUT_S
            )
        except HFValidationError:
            raise
        except HfHubHTTPError as error:
            if error.response.status_code < HTTP_SERVER_ERROR:
                raise
            return None
        except Exception:
            # Offline, intentionally or not; the error's class depends on huggingface-hub's HTTP
            # library. Use the cache instead.
            return None
        siblings = info.siblings or []
        large = {each.rfilename: each.lfs for each in siblings if each.lfs is not None}
        return Listing(str(info.sha), [each.rfilename for each in siblings], large)

    def _find_cached(self, *, verify: bool, header_only: bool = False) -> Path:
        """Returns the path of the cached model; raises LocalEntryNotFoundError if it is not
        cached.
        """
        from huggingface_hub.errors import LocalEntryNotFoundError

        folder = self._cached_folder()
        names = [
            path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
        ]
        named = self.reference.file or self.reference.quant
        if not names or not (named or has_safetensors(names) or gguf_models(names)):
            if header_only and "config.json" in names:
                return folder
            raise LocalEntryNotFoundError("not in the cache")
        try:
            chosen = choose_files(self.reference, names)
        except DownloadFailed as error:
            raise DownloadFailed(
                f"{error.message} (in the cache; the Hugging Face Hub cannot be reached)",
                hint=error.hint,
            ) from None
        if verify:
            self._check(folder, chosen, before=set())
            self.report(f"{self.reference}: already cached; the hub cannot be reached")
        return folder / chosen.main

    # -- transfers ---------------------------------------------------------------------------------

    def _snapshot(self, revision: str, files: Sequence[str]) -> Path:
        """Downloads files into huggingface-hub's cache; returns the folder of the revision."""
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self.reference.repository,
                revision=self.reference.revision,
                allow_patterns=[glob.escape(file) for file in files],
                etag_timeout=TIMEOUT_S,
            )
        )

    def _fetch_large(self, listing: Listing, files: Sequence[str]) -> None:
        """Downloads the files that the hub stores by SHA-256."""
        from huggingface_hub.constants import ENDPOINT

        large = {file: listing.large[file] for file in files if file in listing.large}
        missing = [file for file, lfs in large.items() if not (self._blobs() / lfs.sha256).exists()]
        if missing:
            total = sum(large[file].size for file in missing)
            self._check_room(total, [large[file].sha256 for file in missing])
            where = f"{ENDPOINT}/{self.reference.repository} at {listing.revision[:12]}"
            self.report(f"fetching {self.reference} from {where}: {_size(total)}")
        for file, lfs in large.items():
            if file in missing:
                self._fetch_one(file, listing.revision, lfs)
            self.watch(FileProgress(file, lfs.sha256, lfs.size, lfs.size))

    def _check_room(self, num_bytes: int, hashes: Sequence[str]) -> None:
        """Raises OSError if the cache's disk has no room for the remaining bytes."""
        parts = [self._part(sha256) for sha256 in hashes]
        have = sum(part.stat().st_size for part in parts if part.exists())
        self._blobs().mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._blobs()).free
        if num_bytes - have > free:
            needed = f"{_size(num_bytes - have)} are required, {_size(free)} are free"
            raise OSError(errno.ENOSPC, needed)

    def _fetch_one(self, file: str, revision: str, lfs: BlobLfsInfo) -> None:
        """Downloads a file into the cache, resuming an earlier attempt; a lock prevents duplicate
        downloads.
        """
        blob, part = self._blobs() / lfs.sha256, self._part(lfs.sha256)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            if blob.exists():
                return
            if out.tell() > lfs.size:
                out.truncate(0)
            self._transfer(file, revision, lfs, part, resume_bytes=out.seek(0, os.SEEK_END))
            digest = _digest(part, hashlib.sha256())
            if digest != lfs.sha256:
                part.unlink()
                raise _other_hash(self.reference.repository, file, "SHA-256", digest, lfs.sha256)
            os.replace(part, blob)

    def _transfer(
        self, file: str, revision: str, lfs: BlobLfsInfo, part: Path, *, resume_bytes: int
    ) -> None:
        from huggingface_hub.file_download import http_get

        location, headers = self._location(file, revision)
        with part.open("r+b") as out:
            out.seek(resume_bytes)
            watched = _WatchedFile(out, FileProgress(file, lfs.sha256, lfs.size), self.watch)
            http_get(
                location,
                cast(BinaryIO, watched),
                resume_size=resume_bytes,
                headers=headers,
                expected_size=lfs.size,
                displayed_filename=file,
            )

    def _location(self, file: str, revision: str) -> tuple[str, dict[str, str]]:
        """Returns the URL and the request headers of a file."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.reference.repository, file, revision=revision)
        location = get_hf_file_metadata(url, timeout=TIMEOUT_S).location
        # The access token is only sent to the hub, not to the file store that the URL refers to.
        is_hub = urlsplit(location).netloc == urlsplit(url).netloc
        return location, build_hf_headers() if is_hub else build_hf_headers(token=False)

    # -- headers of GGUF files ---------------------------------------------------------------------

    def _fetch_gguf_header(self, file: str, listing: Listing, target: Path) -> None:
        """Writes a sparse file of the full length that contains only the header."""
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            get_session,
            hf_raise_for_status,
        )

        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        location, headers = self._location(file, listing.revision)
        num_bytes, partial = HEADER_BYTES, target.with_name(f"{target.name}.{os.getpid()}")
        while True:
            asked = headers | {"Range": f"bytes=0-{num_bytes - 1}"}
            with get_session().stream("GET", location, headers=asked) as response:
                hf_raise_for_status(response)
                content = next(response.iter_bytes(num_bytes), b"")
            partial.write_bytes(content)
            os.truncate(partial, max(listing.large[file].size, len(content)))
            try:
                is_whole = header_bytes(partial) <= len(content)
            except OctavoError:
                is_whole = False
            if is_whole or len(content) < num_bytes or num_bytes > MAX_HEADER_BYTES:
                break
            num_bytes *= 4
        os.replace(partial, target)

    # -- places and checks -------------------------------------------------------------------------

    def _repository(self) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=self.reference.repository, repo_type="model")
        return Path(constants.HF_HUB_CACHE) / folder

    def _cached_folder(self) -> Path:
        """Returns the cached folder of the reference's revision."""
        ref = self._repository() / "refs" / self.reference.revision
        commit = ref.read_text().strip() if ref.is_file() else self.reference.revision
        return self._snapshots() / commit

    def _blobs(self) -> Path:
        return self._repository() / "blobs"

    def _snapshots(self) -> Path:
        return self._repository() / "snapshots"

    def _part(self, sha256: str) -> Path:
        """Returns the path of an incomplete file."""
        return self._blobs() / f"{sha256}.octavo-part"

    def _check(self, folder: Path, chosen: ChosenFiles, *, before: set[Path]) -> None:
        """Checks the hashes of all files except those in `before`."""
        for file in chosen.files:
            blob = (folder / file).resolve()
            if blob.is_file() and blob not in before:
                _check(self.reference.repository, folder / file, blob)


class _WatchedFile:
    """A file that reports its size after each write."""

    def __init__(self, out: BinaryIO, progress: FileProgress, watch: OnProgress) -> None:
        self._out = out
        self._progress = progress
        self._watch = watch

    def write(self, chunk: bytes) -> int:
        written = self._out.write(chunk)
        self._watch(replace(self._progress, completed_bytes=self._out.tell()))
        return written

    def tell(self) -> int:
        return self._out.tell()

    def seek(self, offset: int) -> int:
        return self._out.seek(offset)

    def truncate(self) -> int:
        return self._out.truncate()


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Enables huggingface-hub's progress bars if `shown` and stderr is a terminal, else disables
    them.
    """
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    silent = are_progress_bars_disabled()
    if shown and sys.stderr.isatty():
        enable_progress_bars()
    else:
        disable_progress_bars()
    try:
        yield
    finally:
        if silent:
            disable_progress_bars()
        else:
            enable_progress_bars()


def _check(name: str, file: Path, blob: Path) -> None:
    """Raises DownloadFailed and removes the file if its hash differs from its name."""
    if len(blob.name) == SHA256_LENGTH:
        kind, found = "SHA-256", _digest(blob, hashlib.sha256())
    else:
        header = f"blob {blob.stat().st_size}\0".encode()
        kind, found = "git SHA-1", _digest(blob, hashlib.sha1(header, usedforsecurity=False))
    if found != blob.name:
        file.unlink()
        blob.unlink(missing_ok=True)
        raise _other_hash(name, file.name, kind, found, blob.name)


def _digest(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _other_hash(name: str, file: str, kind: str, actual: str, expected: str) -> DownloadFailed:
    return DownloadFailed(
        f"{name}: {file} has {kind} {actual}, expected {expected}; the download was discarded",
        hint="download it again; if it fails again, a proxy may be modifying the file",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
