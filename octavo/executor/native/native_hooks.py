"""Hooks by which extensions add passes, ops that read weights from records, and KV layouts to the
native backend.

Called when a Program is prepared, and not in its steps.
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
from octavo.executor.native.weights import NativeWeights
from octavo.program.ops import Attention
from octavo.program.program import Op, Program, Weight


class OpenedRecords(Protocol):
    """Records of weights that are opened, in memory or in a file."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the records in memory that no tiles stand for."""
        ...

    def arrivals(self) -> WeightArrivals:
        """Returns what has been read from the file so far."""
        ...

    def lowering(self, context: LoweringContext) -> Any:
        """Makes what lowers the ops that read the records: `lower_KIND` of each kind of op."""
        ...


class WeightRecords(Protocol):
    """Weights that an extension's ops read from records of their own, part by part."""

    weights: frozenset[Weight]
    """Weights that lie in records alone."""
    in_file: bool
    """Whether the records lie in the file of streamed weights."""
    sizes: Sequence[int]
    """Bytes of each layer's records in the file; each size is a multiple of a page."""
    memory_bytes: int
    """Bytes that the records always take in memory."""
    key: Sequence[tuple[str, int]]
    """Name and size of each layer's records, by which the file is found again."""
    read_in_part: Mapping[str, int]
    """Bytes of which a step reads the parts that it uses, by what a part is."""

    def data(self, index: int, device: Any, load: LoadWeight, dtype: str) -> bytes:
        """Returns the bytes of a layer's records for the file."""
        ...

    def open_file(self, path: Path, offsets: Sequence[int], into: NativeWeights) -> OpenedRecords:
        """Opens the records of each layer at its offset; gives `into` the tiles that lie in
        them.
        """
        ...

    def open_in_memory(
        self, device: Any, load: LoadWeight, dtype: str, into: NativeWeights
    ) -> OpenedRecords:
        """Packs the records into memory; gives `into` the tiles that lie in them."""
        ...


class NativeHooks:
    """What one extension adds to a native backend. The defaults add nothing."""

    def keeps_rows(self, program: Program) -> bool:
        """Returns whether all tokens' rows must go through the whole last layer."""
        return False

    def optimize(self, program: Program) -> Program:
        """Returns the fused Program with the extension's passes applied."""
        return program

    def check(self, program: Program, formats: Mapping[Weight, TileFormat], device: Any) -> None:
        """Refuses what the kernels cannot run of the optimized Program."""

    def records(self, program: Program) -> WeightRecords | None:
        """Returns the weights of the optimized Program that lie in records; None if there are
        none.
        """
        return None

    def layouts(self, program: Program, layouts: Sequence[KvLayout]) -> Sequence[KvLayout]:
        """Returns the layouts of the KV cache, with the layers that may be in a file."""
        return layouts

    def allocated(
        self, memory: Any, layouts: Sequence[KvLayout], num_blocks: Sequence[int]
    ) -> None:
        """Prepares KV memory that has just been allocated."""

    def next_attentions(self, ops: Sequence[Op]) -> Mapping[int, Attention]:
        """Returns the attention whose keys each attention, named by its identity, prefetches."""
        return {}
