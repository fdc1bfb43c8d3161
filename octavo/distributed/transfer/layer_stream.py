"""Sends the blocks that a step fills layer by layer while the step is computed.

A layer is copied once the step has counted its write: by the sending thread or, at the end of the
step, by the computing thread. If a step fails or is recomputed, the stream lacks its last layers;
its blocks are then sent completely later, or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.kv_messages import StreamedBlock
from octavo.worker.kv_layers import KvLayers


@dataclass(frozen=True, slots=True)
class StreamedLayer:
    """One layer of all blocks of a group."""

    offset: int
    """Offset of the layer's bytes in a block."""
    data: NDArray[np.uint8]
    """Bytes, `[blocks, layer_bytes]`."""


@dataclass(slots=True)
class StreamedGroup:
    """The blocks of one cache group, and the layers that have been copied so far."""

    blocks: list[StreamedBlock]
    num_layers: int
    layers: list[StreamedLayer] = field(default_factory=list)


class LayerStream:
    """The layers of one step's blocks. Two threads may use it."""

    def __init__(self, blocks: Sequence[StreamedBlock], layers: KvLayers) -> None:
        """`blocks` are the blocks that the step fills."""
        self._layers = layers
        self._step = layers.written[0] + 1
        self._lock = threading.Lock()
        self._num_copied = 0
        """Number of the step's writes that have been copied."""
        self.is_over = False
        """Whether copying has ended."""
        self.groups = {
            index: StreamedGroup(
                [block for block in blocks if block.group == index],
                sum(group == index for group, _ in layers.writes),
            )
            for index in sorted({block.group for block in blocks})
        }
        """Groups with blocks, by index."""

    def copy_written(self) -> None:
        """Copies the layers that have been written since the last call."""
        with self._lock:
            if not self.is_over:
                self._copy()

    def end(self) -> None:
        """Copies the remaining layers at the end of the step, and ends copying."""
        with self._lock:
            self._copy()
            self.is_over = True

    def _copy(self) -> None:
        step, num_written = self._layers.written
        if step != self._step:
            return  # the step has not begun, or its rows are recomputed in another step
        for group, layer in self._layers.writes[self._num_copied : num_written]:
            if streamed_group := self.groups.get(group):
                ids = [block.block_id for block in streamed_group.blocks]
                data = self._layers.read(group, layer, ids)
                streamed_group.layers.append(
                    StreamedLayer(layer * self._layers.layer_bytes(group), data)
                )
        self._num_copied = max(self._num_copied, num_written)
