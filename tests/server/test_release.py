"""The checks of a release, on texts and files made here."""

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "release.py"


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("release", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_changelog_has_entries_of_the_version(release):
    text = (
        "# Changelog\n\n## [1.2.0] - 2026-11-28\n\n### Added\n\n- One.\n\n## [1.1.0] - unreleased\n"
    )
    assert release.check_changelog("1.2.0", text) == "2026-11-28"
    for version in ("1.1.0", "1.0.0", "1.2"):
        with pytest.raises(SystemExit, match="expected a section"):
            release.check_changelog(version, text)


def test_a_wheel_is_of_the_version_and_whole(release, tmp_path):
    wheel = tmp_path / "octavo-1.2.0-cp311-cp311-manylinux_2_28_x86_64.whl"
    parts = [
        "octavo-1.2.0.dist-info/licenses/LICENSE",
        "octavo/site/index.html",
        "octavo/executor/native/_native.cpython-311-x86_64-linux-gnu.so",
    ]
    for count in (len(parts) - 1, len(parts)):
        with zipfile.ZipFile(wheel, "w") as file:
            for part in parts[:count]:
                file.writestr(part, "")
        if count < len(parts):
            with pytest.raises(SystemExit, match="no file"):
                release.check_wheel(wheel, "1.2.0")
    release.check_wheel(wheel, "1.2.0")
    with pytest.raises(SystemExit, match=r"expected version 1\.3\.0"):
        release.check_wheel(wheel, "1.3.0")


def test_each_architecture_has_one_wheel(release, tmp_path):
    names = [
        f"octavo-1.2.0-cp311-cp311-manylinux_2_28_{name}.whl" for name in ("aarch64", "x86_64")
    ]
    (tmp_path / names[1]).touch()
    with pytest.raises(SystemExit, match="got 0 wheels for aarch64, expected 1"):
        release.get_wheels(tmp_path)
    (tmp_path / names[0]).touch()
    assert [wheel.name for wheel in release.get_wheels(tmp_path).values()] == names
    (tmp_path / names[1].replace("1.2.0", "1.1.0")).touch()
    with pytest.raises(SystemExit, match="got 2 wheels for x86_64"):
        release.get_wheels(tmp_path)


def test_sums_are_those_that_sha256sum_checks(release, tmp_path):
    file = tmp_path / "octavo-1.2.0.tar.gz"
    file.write_bytes(b"content")
    release.write_sums([file], tmp_path / release.SUMS)
    digest = hashlib.sha256(b"content").hexdigest()
    assert (tmp_path / release.SUMS).read_text() == f"{digest}  octavo-1.2.0.tar.gz\n"
