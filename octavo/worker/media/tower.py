"""Prepared Programs of a tower, and all towers of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from octavo.engine.protocol.step import MediaContent
from octavo.executor.base import Backend, Runnable
from octavo.executor.batch import StepBatch
from octavo.program.program import Program
from octavo.worker.media.patches import Rows, get_num_blocks, rows_batch


@dataclass(frozen=True, slots=True)
class TowerPrograms:
    """Prepared Programs of a tower."""

    programs: Mapping[str, Program]
    runnables: Mapping[str, Runnable]
    backend: Backend
    """Backend that prepared the Programs, with separate limits."""

    def run(self, name: str, batch: StepBatch) -> Rows:
        """Runs a Program over a step with blocks of its own, and returns its rows."""
        program, runnable = self.programs[name], self.runnables[name]
        num_blocks = get_num_blocks(batch) if program.groups else []
        kv = self.backend.allocate(runnable.kv_layouts, num_blocks)
        rows: Rows = runnable.run(batch, kv).arrays["rows"]
        return rows

    def project(self, name: str, groups: Rows) -> Rows:
        """Runs a projector over groups of rows `[groups, rows, W]`, which it reduces to one row or
        reads side by side.
        """
        count, size, _ = groups.shape
        outputs = self.programs[name].outputs.values()
        if any(value.axis == "requests" for value in outputs):
            return self.run(name, rows_batch(groups.reshape(count * size, -1), size))
        return self.run(name, rows_batch(groups.reshape(count, -1), 1))

    @property
    def progress(self) -> int:
        """Counter that increases while a Program runs; other threads may read it."""
        return sum(runnable.progress for runnable in self.runnables.values())

    def close(self) -> None:
        self.backend.close()


class Tower(Protocol):
    """Encodes one kind of media."""

    @property
    def parts(self) -> TowerPrograms | None:
        """Programs that encode; None if the content is the decoder's rows."""
        ...

    def encode(self, content: MediaContent) -> Rows:
        """Returns the decoder's rows of a medium in the order of its tokens."""
        ...


@dataclass(frozen=True, slots=True)
class EmbedsTower:
    """Reads prompt embeddings, which need no Program."""

    scale: float
    """Factor by which the model multiplies embeddings after their lookup."""
    parts: None = None

    def encode(self, content: MediaContent) -> Rows:
        """Returns the decoder's rows `[height, width]`."""
        rows = np.frombuffer(content.data, "<f4").reshape(content.height, content.width)
        return rows * np.float32(self.scale)


@dataclass(frozen=True, slots=True)
class Towers:
    """The towers of a model by kind of media: "image", "audio" and "embeds"."""

    by_kind: Mapping[str, Tower]

    def encode(self, content: MediaContent) -> Rows:
        """Returns the decoder's rows of a medium in the order of its tokens, `[num_tokens, W]`."""
        rows = self.by_kind[content.kind].encode(content)
        if not np.isfinite(rows).all():
            raise ValueError(f"the tower's rows of an {content.kind} contain NaN")
        return np.ascontiguousarray(rows)

    @property
    def progress(self) -> int:
        """Counter that increases while a medium is encoded; other threads may read it."""
        return sum(parts.progress for parts in self._parts)

    def close(self) -> None:
        for parts in self._parts:
            parts.close()

    @property
    def _parts(self) -> list[TowerPrograms]:
        return [tower.parts for tower in self.by_kind.values() if tower.parts is not None]
