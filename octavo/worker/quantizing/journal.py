"""How far a quantisation has come, in the directory that it writes: what was done, and the state
from which it goes on.

The directory bears another name until all is written. A later run goes on where this one was
interrupted if it is the same in everything; otherwise it is refused.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError

JOURNAL = "octavo-quantize.json"
STATE = "octavo-quantize-state.npz"
PARTIAL = ".partial"


class Journal:
    """The journal of one quantisation into `output`."""

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        """Opens the journal of an interrupted run, or makes the directory for a new one.

        Raises ConfigError where the output exists, or where an interrupted run was another one.
        """
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ConfigError(f"output: {output} exists", hint="name another directory")
        self._output = output
        self._identity = dict(identity)
        self.folder = output.with_name(output.name + PARTIAL)
        self.index = 0
        self.done: list[str] = []
        self.listed: list[str] = []
        """Experts that no calibration token reached."""
        self.goes_on = (self.folder / JOURNAL).exists()
        if self.goes_on:
            self._read()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def wrote(self, names: Sequence[str]) -> None:
        """Notes matrices that are written."""
        self.done.extend(names)

    def save(self, index: int, state: Mapping[str, NDArray]) -> None:
        """Notes the op to go on at, and the state there."""
        temporary = self.folder / f"new-{STATE}"
        with temporary.open("wb") as file:
            arrays: dict[str, Any] = {f"{index}/{name}": state[name] for name in state}
            np.savez(file, **arrays)
        temporary.replace(self.folder / STATE)
        self.index = index
        self._write()

    def note(self) -> None:
        """Writes what is done so far."""
        self._write()

    def state(self) -> dict[str, NDArray]:
        """Returns the state of the op `index`."""
        with np.load(self.folder / STATE) as found:
            indices = {name.split("/", 1)[0] for name in found.files}
            if indices != {str(self.index)}:  # interrupted between the state and the journal
                self.index = int(indices.pop())
            return {name.split("/", 1)[1]: found[name] for name in found.files}

    def finish(self) -> None:
        """Gives the directory its own name; only what belongs to the model is left in it."""
        for name in (JOURNAL, STATE, f"new-{STATE}"):
            (self.folder / name).unlink(missing_ok=True)
        for file in self.folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        if self._output.exists():
            self._output.rmdir()
        self.folder.rename(self._output)

    def discard(self) -> None:
        """Removes what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> None:
        try:
            found = json.loads((self.folder / JOURNAL).read_text())
            identity, self.index = found["identity"], int(found["index"])
            self.done, self.listed = list(found["done"]), list(found["listed"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"output: {self.folder / JOURNAL} cannot be read: {error}",
                hint=f"remove {self.folder} and begin again",
            ) from None
        if identity != self._identity:
            changed = [key for key, value in self._identity.items() if identity.get(key) != value]
            raise ConfigError(
                f"output: {self.folder} holds an interrupted run with other values of"
                f" {', '.join(changed)}",
                hint="give the same options to go on, or remove it to begin again",
            )

    def _write(self) -> None:
        temporary = self.folder / f"new-{JOURNAL}"
        text = json.dumps(
            {
                "identity": self._identity,
                "index": self.index,
                "done": self.done,
                "listed": self.listed,
            }
        )
        temporary.write_text(text)
        temporary.replace(self.folder / JOURNAL)
