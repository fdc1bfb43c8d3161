"""Hooks by which extensions add passes, record-based ops and KV layouts to the native backend.

Called when a Program is prepared, not during steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from octavo.engine.protocol.step import WeightArrivals
from octavo.executor.base import LoadWeight
from octavo.executor.kv import KvLayout
from octavo.executor.native.formats import TileFormat
from octavo.executor.native.lowering_context import LoweringContext
from octavo.executor.native.weight_file import PlacedTiles, StoredUnit
from octavo.executor.native.weights import NativeWeights
from octavo.program.ops import Attention
from octavo.program.program import Op, Program, Weight


class OpenedRecords(Protocol):
    """Opened weight records, in memory or in a file."""

    @property
    def num_bytes(self) -> int:
        """Bytes in memory that are not counted as tiles."""
        ...

    def arrivals(self) -> WeightArrivals:
        """Returns the counts of file reads so far."""
        ...

    def lowering(self, context: LoweringContext) -> Any:
        """Returns the lowering of the ops that read the records, with a method `lower_KIND`
        per op; None if there are no such ops.
        """
        ...


class WeightRecords(Protocol):
    """Weights that ops read from records, of which a step may read only parts."""

    weights: frozenset[Weight]
    """Weights stored only in records."""
    in_file: bool
    """Whether the records are in the file of streamed weights."""
    sizes: Sequence[int]
    """Bytes of each layer's records in the file, multiples of a page."""
    memory_bytes: int
    """Bytes that the records always occupy in memory."""
    key: Sequence[tuple[str, int]]
    """Name and size of each layer's records; part of the file's key."""
    read_in_part: Mapping[str, int]
    """Bytes of which a step reads only the used parts, by the name of the part."""

    def data(
        self, index: int, device: Any, load: LoadWeight, dtype: str
    ) -> tuple[bytes, Sequence[PlacedTiles]]:
        """Returns the bytes of a layer's records for the file, and the tiles in each record."""
        ...

    def open_file(
        self, path: Path, units: Sequence[StoredUnit], into: NativeWeights
    ) -> OpenedRecords:
        """Opens the records of each layer in the file; adds their tiles to `into`."""
        ...


class ExtensionRecords(WeightRecords, Protocol):
    """Records of an extension, which may also be in memory."""

    def open_in_memory(
        self, device: Any, load: LoadWeight, dtype: str, into: NativeWeights
    ) -> OpenedRecords:
        """Packs the records into memory; adds their tiles to `into`."""
        ...


class NativeHooks:
    """Hooks of one extension. The defaults do nothing."""

    def keeps_rows(self, program: Program) -> bool:
        """Returns whether the last layer must compute the rows of all tokens."""
        return False

    def optimize(self, program: Program) -> Program:
        return program

    def check(self, program: Program, formats: Mapping[Weight, TileFormat], device: Any) -> None:
        """Raises an error if the kernels cannot run the optimized Program."""

    def records(self, program: Program) -> ExtensionRecords | None:
        """Returns the weights of the optimized Program that are stored in records; None if there
        are none.
        """
        return None

    def layouts(self, program: Program, layouts: Sequence[KvLayout]) -> Sequence[KvLayout]:
        """Returns the KV cache layouts, with the layers that may be in a file."""
        return layouts

    def allocated(
        self, memory: Any, layouts: Sequence[KvLayout], num_blocks: Sequence[int]
    ) -> None:
        """Prepares newly allocated KV memory."""

    def next_attentions(self, ops: Sequence[Op]) -> Mapping[int, Attention]:
        """Maps the id of an attention to the attention whose keys it prefetches."""
        return {}
