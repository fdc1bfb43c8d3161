"""Checks a release and writes what goes with its wheels: an sdist, an SBOM and checksums.

usage: release.py DIST            (run by `make release`, after the wheels are built)

DIST holds a wheel for each architecture. The changelog must have a section of the version, with a
date unless the version is a development version.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUMS = "SHA256SUMS"
ARCHITECTURES = ("aarch64", "x86_64")


def check_changelog(version: str, text: str) -> str:
    """Returns the date of the version's section, or "unreleased"; raises SystemExit if there is no
    section or it is empty.
    """
    found = re.search(
        rf"^## \[{re.escape(version)}\] - (unreleased|\d{{4}}-\d{{2}}-\d{{2}})\n(.*?)(?=^## |\Z)",
        text,
        re.MULTILINE | re.DOTALL,
    )
    if found is None or not re.search(r"^- ", found[2], re.MULTILINE):
        raise SystemExit(
            f"CHANGELOG.md: got no entries of {version}, expected a section"
            f" '## [{version}] - YYYY-MM-DD' with lines"
        )
    return found[1]


def check_wheel(wheel: Path, version: str) -> None:
    """Raises SystemExit if the wheel is of another version or lacks a part."""
    if f"-{version}-" not in wheel.name:
        raise SystemExit(
            f"{wheel.name}: expected version {version}; remove older wheels from dist/"
        )
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    for part in (".dist-info/licenses/LICENSE", "octavo/site/index.html", "/_native."):
        if not any(part in name for name in names):
            raise SystemExit(f"{wheel.name}: no file {part}")


def get_wheels(dist: Path) -> dict[str, Path]:
    """Returns the wheel of each architecture; raises SystemExit unless each has one."""
    wheels = {}
    for architecture in ARCHITECTURES:
        found = sorted(dist.glob(f"octavo-*_{architecture}.whl"))
        if len(found) != 1:
            raise SystemExit(
                f"{dist}: got {len(found)} wheels for {architecture}, expected 1; run make release,"
                f" and remove other wheels from {dist}"
            )
        wheels[architecture] = found[0]
    return wheels


def build_sdist(folder: Path) -> Path:
    run(sys.executable, "-m", "build", "--sdist", "--outdir", str(folder), str(ROOT))
    return max(folder.glob("octavo-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def write_sbom(wheel: Path, path: Path) -> None:
    """Writes the components of an environment with the wheel, in CycloneDX format."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        run(python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", str(wheel))
        run(
            sys.executable,
            "-m",
            "cyclonedx_py",
            "environment",
            "--of",
            "JSON",
            "-o",
            str(path),
            python,
        )


def write_sums(files: list[Path], path: Path) -> None:
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    path.write_text("".join(lines))


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def main(dist: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    date = check_changelog(version, (ROOT / "CHANGELOG.md").read_text())
    wheels = get_wheels(dist)
    for wheel in wheels.values():
        check_wheel(wheel, version)
    sdist, sbom = build_sdist(dist), dist / f"octavo-{version}.cdx.json"
    write_sbom(wheels[platform.machine()], sbom)
    write_sums([*wheels.values(), sdist, sbom], dist / SUMS)
    print((dist / SUMS).read_text(), end="")
    print(f"octavo {version}, changelog {date}")
    if date == "unreleased":
        print("not a release yet: CHANGELOG.md has no date")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
