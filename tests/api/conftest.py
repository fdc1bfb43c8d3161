"""What tests of engines share that keep something on a disk."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from octavo.executor.native.weight_file import get_file_system


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory on a disk."""
    if get_file_system(tmp_path) not in ("tmpfs", "ramfs"):
        return tmp_path
    on_disk = Path(__file__).parents[2] / "build" / tmp_path.name
    shutil.rmtree(on_disk, ignore_errors=True)
    return on_disk
