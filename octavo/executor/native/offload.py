"""Weights streamed from a file during computation.

Splits an optimized Program's weights into units, one per matmul; packs their tiles into the file
once (weight_file.py) and maps tiles onto the memory that the extension reads into
(csrc/runtime/weight_stream.h). The offload pass chooses what stays in memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.api.errors import ConfigError
from octavo.engine.protocol.step import WeightArrivals
from octavo.executor.base import LoadWeight, WeightsOffDevice
from octavo.executor.native.extension import native_module
from octavo.executor.native.formats import PRODUCTS, get_matrices
from octavo.executor.native.native_hooks import OpenedRecords, WeightRecords
from octavo.executor.native.packed_units import LINE, Product, fill_up, pack_unit, round_up
from octavo.executor.native.stages import get_stages, sort_token_ops_first
from octavo.executor.native.weight_file import (
    StoredUnit,
    check_directory,
    read_index,
    writing,
)
from octavo.executor.native.weights import NativeWeights
from octavo.program.expert_ops import GroupedLinear
from octavo.program.ops import (
    Embedding,
    HeadLinear,
)
from octavo.program.passes.offload import ALIGN, OffloadPlan, Unit, least_ring, plan_offload
from octavo.program.program import Op, Program, Weight

logger = logging.getLogger(__name__)

BLOCK_BYTES = 512 << 10
"""Read size in bytes. With several reads in flight, larger reads were not faster on the disks that
were measured.
"""

DEPTH = 16
"""Reads in flight; each uses a thread."""


@dataclass(frozen=True, slots=True)
class OffloadedProgram:
    """Matmuls of a Program with weights in the file, and the memory plan."""

    products: tuple[Product, ...]
    units: tuple[Unit, ...]
    plan: OffloadPlan
    always_bytes: int
    """Bytes of weights outside the units: tables, norms, biases, and records in memory."""
    records: WeightRecords | None = None
    """Records in the file, if any."""

    @property
    def file_bytes(self) -> int:
        """Size of the file without its index."""
        records = () if self.records is None else self.records.sizes
        return ALIGN + sum(unit.num_bytes for unit in self.units) + sum(records)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return self.always_bytes + self.plan.memory_bytes

    @property
    def least_memory_bytes(self) -> int:
        """Smallest number of bytes of memory for weights with which a plan is possible."""
        return self.always_bytes + least_ring(self.units)


def offload(
    optimized: Program,
    sizes: Mapping[Weight, int],
    off_device: WeightsOffDevice,
    records: WeightRecords | None = None,
) -> OffloadedProgram:
    """Plans a Program's weights; raises ConfigError if the allowed memory is too small."""
    program = sort_token_ops_first(optimized)
    in_records = frozenset() if records is None else records.weights
    used = Counter(weight for op in program.ops for weight in get_matrices(op))
    tables = {op.table for op in program.ops if isinstance(op, Embedding)}
    products, units = [], []
    for stage in get_stages(program):
        for op in stage.ops:
            if not isinstance(op, PRODUCTS):
                continue
            weights = get_matrices(op)
            if in_records.issuperset(weights):
                continue
            if any(used[weight] > 1 or weight in tables for weight in weights):
                continue
            num_bytes = sum(_padded_bytes(op, sizes[weight]) for weight in weights)
            products.append(op)
            units.append(Unit(weights[0].name, round_up(num_bytes, ALIGN), stage.range))
    own = in_records.union(*map(get_matrices, products))
    always = sum(size for weight, size in sizes.items() if weight not in own)
    if not units:
        raise ConfigError(
            "weights_memory_bytes: this model has no matmul weights to stream",
            hint="omit weights_memory_bytes",
        )
    if records is not None:
        always += records.memory_bytes
    in_file = records if records is not None and records.in_file else None
    plan = plan_offload(
        units,
        allowed_bytes=off_device.memory_bytes,
        other_bytes=always,
        schedule="layers" if off_device.schedule == "layers" else "pinned",
    )
    return OffloadedProgram(tuple(products), tuple(units), plan, always, in_file)


class StreamedWeights:
    """Weights of an offloaded Program, read into memory while steps run."""

    def __init__(
        self, device: Any, offloaded: OffloadedProgram, off_device: WeightsOffDevice, numerics: str
    ) -> None:
        self._device = device
        self._offloaded = offloaded
        of_records = () if offloaded.records is None else offloaded.records.key
        shape = repr([(unit.name, unit.num_bytes) for unit in offloaded.units] + [*of_records])
        self._key = hashlib.sha256(f"{off_device.fingerprint} {numerics} {shape}".encode()).digest()
        self.path = off_device.directory / f"{self._key.hex()[:32]}.weights"
        self._chunks = {
            id(offloaded.products[unit]): index
            for index, chunk in enumerate(offloaded.plan.streamed)
            for unit in chunk.units
        }
        self.stream: Any = None
        self.records: OpenedRecords | None = None
        """The records in the file once opened; None if there are none."""

    def check(self) -> None:
        """Raises ConfigError if the directory cannot hold the file."""
        check_directory(self.path.parent, self.path, self._offloaded.file_bytes)

    def open(self, load: LoadWeight, dtype: str, into: NativeWeights) -> None:
        """Opens the file, creating it if necessary, and assigns tiles to the matmuls."""
        units = read_index(self.path, self._key) or self._write(load, dtype)
        plan = self._offloaded.plan

        def spans(chunks: Any) -> list[tuple[int, int, int]]:
            return [(units[c.units[0]].offset, c.num_bytes, c.offset) for c in chunks]

        native = native_module()
        try:
            self.stream = native.WeightStream(
                str(self.path),
                spans(plan.resident),
                spans(plan.streamed),
                memory_bytes=plan.memory_bytes,
                num_threads=DEPTH,
                block_bytes=BLOCK_BYTES,
            )
            if self._offloaded.records is not None:
                in_records = units[len(self._offloaded.units) :]
                self.records = self._offloaded.records.open_file(self.path, in_records, into)
        except (native.WeightReadError, native.WeightFileTruncated) as error:
            raise ConfigError(
                f"weights_dir: {error}",
                hint="delete the file, and the next start writes it again; or use a directory on"
                " another disk",
            ) from None
        if not self.stream.is_direct:
            logger.warning(
                "%s: this file system has no direct reads (O_DIRECT); weights also occupy the page"
                " cache, in addition to weights_memory_bytes",
                self.path.parent,
            )
        for chunk in (*plan.resident, *plan.streamed):
            offset = chunk.offset
            for index in chunk.units:
                self._adopt(self._offloaded.products[index], units[index], offset, into)
                offset += units[index].num_bytes

    def get_chunk(self, op: Op) -> int | None:
        """Returns the chunk that a matmul waits for; None if its weights stay in memory."""
        return self._chunks.get(id(op))

    def arrivals(self) -> WeightArrivals:
        """Returns the counts of reads during steps."""
        stream = self.stream
        counts = WeightArrivals(
            stream.bytes_read, stream.num_found, stream.num_waited, stream.wait_seconds
        )
        return counts if self.records is None else counts + self.records.arrivals()

    def _adopt(self, op: Product, unit: StoredUnit, offset: int, into: NativeWeights) -> None:
        into.adopt(
            op, [self.stream.tiles(offset + placed.offset, placed.layout) for placed in unit.tiles]
        )

    def _write(self, load: LoadWeight, dtype: str) -> list[StoredUnit]:
        """Packs and writes the units one by one, so that only one is in memory."""
        with writing(self.path, self._key) as writer:
            if writer is not None:
                for op, unit in zip(self._offloaded.products, self._offloaded.units, strict=True):
                    packed = pack_unit(self._device, op, load, dtype)
                    size = round_up(packed.num_bytes, ALIGN)
                    assert size == unit.num_bytes, f"{unit.name}: other bytes than planned"
                    writer.add(fill_up(packed.data, size), packed.tiles)
                records = self._offloaded.records
                for index in range(0 if records is None else len(records.sizes)):
                    assert records is not None
                    writer.add(*records.data(index, self._device, load, dtype))
                writer.finish()
        units = read_index(self.path, self._key)
        assert units is not None, "the file that was just written"
        return units


def _padded_bytes(op: Product, num_bytes: int) -> int:
    """Returns a weight's bytes in its unit, padded per expert or head."""
    if isinstance(op, GroupedLinear):
        parts = op.weight.shape[0]
    else:
        parts = op.num_heads if isinstance(op, HeadLinear) else 1
    return parts * round_up(num_bytes // parts, LINE)
