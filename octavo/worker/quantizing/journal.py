"""Progress of a quantization, stored in its output directory: the finished matrices, and the state
to resume from.

The directory has a temporary name until everything is written. An interrupted run is resumed by a
run with the same options; runs with other options are rejected.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_bytes
from octavo.utils.durable import sync_path

JOURNAL = "octavo-quantize.json"
NEW_JOURNAL = f"new-{JOURNAL}"
STATE = "octavo-quantize-state-{}.npz"
PARTIAL = ".partial"
STATES = 2
"""Number of states that exist while the newer one is written."""


class Journal:
    """The journal of one quantization into `output`. Locks the directory until it is closed."""

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        """Opens the journal of an interrupted run, or creates the directory for a new one.

        Raises ConfigError if the output exists or cannot be created, if the interrupted run had
        other options, or if another run is in progress.
        """
        self._output = output.resolve()
        self._identity = dict(identity)
        self.folder = self._output.with_name(self._output.name + PARTIAL)
        self.index = 0
        self.done: list[str] = []
        self.listed: list[str] = []
        """Experts to which no calibration token was routed."""
        self.goes_on = False
        """Whether an earlier run has reserved disk space and written the unchanged tensors."""
        with writing_to(self.folder):
            self._check_output()
            self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def began(self) -> None:
        """Records that disk space is reserved and unchanged tensors are written."""
        self.goes_on = True
        self._write()

    def wrote(self, names: Sequence[str]) -> None:
        """Records matrices that were written."""
        self.done.extend(names)

    def check_room(self, num_bytes: int) -> None:
        """Raises ConfigError if the disk has no space for two states of `num_bytes`."""
        free = shutil.disk_usage(self.folder).free
        if self.index == 0 and free < STATES * num_bytes:
            raise ConfigError(
                f"{self.folder}: no room for {format_bytes(STATES * num_bytes)} of states to"
                f" resume from, {format_bytes(free)} are free next to the model",
                hint="choose a directory on another disk with --output, or use fewer or shorter"
                " --calibration-texts",
            )

    def save(self, index: int, state: Mapping[str, NDArray]) -> None:
        """Saves the index of the op to resume at, and the state there."""
        before = self._state_file
        self.index = index
        with self._state_file.open("wb") as file:
            arrays: dict[str, Any] = dict(state)
            np.savez(file, **arrays)
        self._write()
        if before != self._state_file:
            before.unlink(missing_ok=True)

    def note(self) -> None:
        self._write()

    def state(self) -> dict[str, NDArray]:
        """Returns the state saved at op `index`."""
        try:
            with np.load(self._state_file) as state:
                return {name: state[name] for name in state.files}
        except (OSError, ValueError, EOFError, BadZipFile) as error:
            raise ConfigError(
                f"output: {self._state_file} cannot be read: {error}",
                hint=f"remove {self.folder} and start over",
            ) from None

    def finish(self) -> None:
        """Removes the journal and renames the directory to its final name."""
        for file in self.folder.rglob("*"):
            if file.is_file():
                sync_path(file)
        if self._output.exists():
            self._output.rmdir()
        self.folder.rename(self._output)
        _remove_journal(self._output)
        sync_path(self._output.parent)

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _state_file(self) -> Path:
        return self.folder / STATE.format(self.index)

    def _check_output(self) -> None:
        output = self._output
        if (output / JOURNAL).exists():  # interrupted between renaming and removing the journal
            _remove_journal(output)
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"output: {output} exists", hint="set another directory")
        if output.is_mount():
            raise ConfigError(
                f"output: {output} is a mount point, which cannot be replaced atomically",
                hint=f"use a directory in it, e.g. {output / 'model'}",
            )

    def _open(self) -> None:
        """Creates the directory, or reads its journal; locks it until the end of the run."""
        has_journal = (self.folder / JOURNAL).is_file()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not has_journal and any(file.name != NEW_JOURNAL for file in self.folder.iterdir()):
            raise ConfigError(
                f"output: {self.folder} exists, the directory for temporary files of this run",
                hint="delete it, or set another --output",
            )
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        is_whole = False
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if has_journal:
                self._read()
            else:
                self._write()
            is_whole = True
        except BlockingIOError:
            raise ConfigError(
                f"output: another run is writing {self.folder}", hint="set another directory"
            ) from None
        except OSError:
            if not has_journal:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise
        finally:
            if not is_whole:
                os.close(self._lock)

    def _read(self) -> None:
        try:
            entries = json.loads((self.folder / JOURNAL).read_text())
            identity, self.index = entries["identity"], int(entries["index"])
            self.done, self.listed = list(entries["done"]), list(entries["listed"])
            self.goes_on = bool(entries["began"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"output: {self.folder / JOURNAL} cannot be read: {error}",
                hint=f"remove {self.folder} and start over",
            ) from None
        if identity != self._identity:
            changed = [key for key, value in self._identity.items() if identity.get(key) != value]
            raise ConfigError(
                f"output: {self.folder} holds an interrupted run with other values of"
                f" {', '.join(changed)}",
                hint="use the same options to resume, or delete it to start over",
            )

    def _write(self) -> None:
        temporary = self.folder / NEW_JOURNAL
        text = json.dumps(
            {
                "identity": self._identity,
                "began": self.goes_on,
                "index": self.index,
                "done": self.done,
                "listed": self.listed,
            }
        )
        temporary.write_text(text)
        temporary.replace(self.folder / JOURNAL)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raises ConfigError with the folder's name for system errors while writing."""
    try:
        yield
    except BrokenPipeError:
        raise  # of the terminal
    except OSError as error:
        raise ConfigError(
            f"output: {folder} cannot be written: {error.strerror or error}",
            hint="fix this and run the same command to resume",
        ) from error


def _remove_journal(folder: Path) -> None:
    """Removes all files that are not part of a finished model, the journal last."""
    for file in (*folder.glob(STATE.format("*")), folder / NEW_JOURNAL, folder / JOURNAL):
        file.unlink(missing_ok=True)
