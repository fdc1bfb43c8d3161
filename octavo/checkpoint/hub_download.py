"""Downloads a repository of the Hugging Face hub into huggingface-hub's own cache.

Large files go on where a process that was cut off left them, and each file is checked by the
hash that the hub names it by: SHA-256 of large files, git's SHA-1 of small ones. The cache's layout
and small files are huggingface-hub's business; the choice of files is the catalogue's.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from octavo.errors import DownloadFailed
from octavo.progress import Report

TIMEOUT_S = 10
CHUNK_BYTES = 1 << 20
SHA256_LENGTH = 64
HTTP_SERVER_ERROR = 500
"""Least status with which a hub says that it is out of order."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository, and patterns of the files that are wanted of it."""

    name: str
    allowed: Sequence[str]
    ignored: Sequence[str]

    def fetch(self, *, progress: bool, verify: bool, report: Report) -> Path:
        """Returns the folder of the repository's files, which are fetched where they are missing.

        `verify` checks files that were there before, too. Offline, the cache's files are taken.
        Raises huggingface-hub's errors, OSError, and DownloadFailed for a file of another hash.
        """
        from huggingface_hub import snapshot_download

        before = set(self._blobs().glob("*"))
        with _bars(progress):
            self._fetch_large(report)
            folder = Path(
                snapshot_download(
                    self.name,
                    allow_patterns=list(self.allowed),
                    ignore_patterns=list(self.ignored),
                    etag_timeout=TIMEOUT_S,
                )
            )
        for file in sorted(folder.rglob("*")):
            blob = file.resolve()
            if blob.is_file() and (verify or blob not in before):
                _check(self.name, file, blob)
        return folder

    def _fetch_large(self, report: Report) -> None:
        """Fetches the files that the hub stores by SHA-256; without a network none."""
        from huggingface_hub import HfApi
        from huggingface_hub.constants import ENDPOINT
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
        from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

        try:
            info = HfApi().model_info(self.name, files_metadata=True, timeout=TIMEOUT_S)
        except HFValidationError:
            raise
        except HfHubHTTPError as error:
            if error.response.status_code < HTTP_SERVER_ERROR:
                raise
            return
        except Exception:
            # Offline, by choice or not: which error says so depends on huggingface-hub's HTTP
            # library. Its own download finds what the cache has, or says that nothing is there.
            return
        stored = {file.rfilename: file.lfs for file in info.siblings or [] if file.lfs is not None}
        wanted = filter_repo_objects(
            stored, allow_patterns=list(self.allowed), ignore_patterns=list(self.ignored)
        )
        missing = [file for file in wanted if not (self._blobs() / stored[file].sha256).exists()]
        if missing:
            total = sum(stored[file].size for file in missing)
            where = f"{ENDPOINT}/{self.name} at {str(info.sha)[:12]}"
            report(f"fetching {self.name} from {where}: {_size(total)}")
        for file in missing:
            self._fetch_one(file, str(info.sha), stored[file].sha256, stored[file].size)

    def _fetch_one(self, file: str, revision: str, sha256: str, num_bytes: int) -> None:
        """Fetches a file into the cache, from where the last try ended; two at once fetch once."""
        blob = self._blobs() / sha256
        part = blob.with_name(f"{sha256}.octavo-part")
        blob.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            if blob.exists():
                return
            if out.tell() > num_bytes:
                out.truncate(0)
            self._transfer(file, revision, out.seek(0, os.SEEK_END), num_bytes, part)
            found = _digest(part, hashlib.sha256())
            if found != sha256:
                part.unlink()
                raise _other_hash(self.name, file, "SHA-256", found, sha256)
            os.replace(part, blob)

    def _transfer(
        self, file: str, revision: str, resume_bytes: int, num_bytes: int, part: Path
    ) -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(self.name, file, revision=revision)
        location = get_hf_file_metadata(url, timeout=TIMEOUT_S).location
        # A token is for the hub alone, not for the store of files that it names.
        is_hub = urlsplit(location).netloc == urlsplit(url).netloc
        headers = build_hf_headers() if is_hub else build_hf_headers(token=False)
        with part.open("r+b") as out:
            out.seek(resume_bytes)
            http_get(
                location,
                out,
                resume_size=resume_bytes,
                headers=headers,
                expected_size=num_bytes,
                displayed_filename=file,
            )

    def _blobs(self) -> Path:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        folder = repo_folder_name(repo_id=self.name, repo_type="model")
        return Path(constants.HF_HUB_CACHE) / folder / "blobs"


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Has huggingface-hub show its progress bars, or none; a bar needs a terminal anyway."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    silent = are_progress_bars_disabled()
    if shown:
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
    """Raises DownloadFailed, and removes the file, if its content has another hash than its
    name.
    """
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


def _other_hash(name: str, file: str, kind: str, found: str, expected: str) -> DownloadFailed:
    return DownloadFailed(
        f"{name}: {file} has {kind} {found}, expected {expected}; nothing of it was kept",
        hint="fetch it again; if that repeats, what lies between changes files",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
