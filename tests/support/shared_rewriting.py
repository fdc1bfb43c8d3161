"""How xdist's workers share the rewriting of asserts, which is half of a first collection.

Each worker imports a part of the test files before all of them collect everything; the others find
those files' compiled code in Python's cache.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Sequence
from pathlib import Path

import pytest


def import_part(session: pytest.Session) -> None:
    """Imports this worker's part of the test files that pytest was asked to collect, if it is a
    worker; what cannot be imported is reported by the collection.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in _test_files(session.config)[number::count]:
        name = ".".join(path.relative_to(session.config.rootpath).with_suffix("").parts)
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def _test_files(config: pytest.Config) -> Sequence[Path]:
    """Returns the test files in the folders of the command line, but for those left out."""
    left_out = [*config.getini("norecursedirs"), *(config.getoption("ignore") or [])]
    folders = [config.rootpath / folder for folder in left_out]
    return sorted(
        path
        for folder in config.args
        for path in (config.rootpath / folder).rglob("test_*.py")
        if not any(path.is_relative_to(each) for each in folders)
    )
