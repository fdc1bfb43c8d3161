"""Reads layers of blocks while a step writes them, and streams them through a connector.

Owns no memory and no thread. A layer may be read after the step has counted its write and before
the step's caller has the result; later the block may belong to another request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.kv_messages import ConnectorPlan, StreamedBlock
from octavo.executor.base import Runnable
from octavo.executor.kv import KvLayout, LayeredKvCache
from octavo.worker.block_map import VirtualBlockMap
from octavo.worker.model_input import ModelInput


class KvLayers:
    """The layers that a Program's steps write, in order."""

    def __init__(
        self,
        runnable: Runnable,
        kv: LayeredKvCache,
        block_map: VirtualBlockMap | None,
        layouts: Sequence[KvLayout],
    ) -> None:
        self.writes = list(runnable.kv_writes or ())
        """(group, layer) of each write."""
        self.groups = {group for group, _ in self.writes}
        """Groups that the Program writes; a draft's are written by its own."""
        self._runnable = runnable
        self._kv = kv
        self._block_map = block_map
        self._layer_bytes = [layout.layer_bytes for layout in layouts]

    @property
    def written(self) -> tuple[int, int]:
        """Number of the newest step, and how many of `writes` it has completed."""
        return self._runnable.kv_written

    def layer_bytes(self, group: int) -> int:
        return self._layer_bytes[group]

    def read(self, group: int, layer: int, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copies one layer of several blocks, `[blocks, layer_bytes]`."""
        copies = np.empty((len(block_ids), self._layer_bytes[group]), np.uint8)
        for block_id, into in zip(block_ids, copies, strict=True):
            index = block_id if self._block_map is None else self._block_map.find(group, block_id)
            self._kv.read_layer(group, layer, index, into)
        return copies


@runtime_checkable
class LayerSender(Protocol):
    """A connector's worker half that sends layers of blocks while a step writes them."""

    @property
    def sends_layers(self) -> bool: ...

    def begin_stream(self, blocks: Sequence[StreamedBlock], layers: KvLayers) -> None:
        """Starts to send the layers that the next step writes; returns immediately."""
        ...

    def end_stream(self) -> None:
        """Sends the remaining layers at the end of the step; no block is read afterwards."""
        ...


class LayerStreaming:
    """Sends the blocks of a plan while the step that fills them is computed."""

    def __init__(self, sender: LayerSender, layers: KvLayers) -> None:
        self._sender = sender
        self._layers = layers
        self._blocks: Sequence[StreamedBlock] = ()

    def set_plan(self, plan: ConnectorPlan | None) -> None:
        """Sets the blocks of the current plan."""
        self._blocks = () if plan is None else plan.stream

    @contextmanager
    def during(self, inputs: Sequence[ModelInput]) -> Iterator[None]:
        """Streams the blocks of a step while the caller computes it. A step with several inputs is
        not streamed, since it writes each layer several times.
        """
        ids = {row.request_id for row in inputs[0].scheduled} if len(inputs) == 1 else set()
        blocks = [
            block
            for block in self._blocks
            if block.request_id in ids and block.group in self._layers.groups
        ]
        if not blocks:
            yield
            return
        self._sender.begin_stream(blocks, self._layers)
        try:
            yield
        finally:
            self._sender.end_stream()


def layer_streaming(
    connector: object,
    runnable: Runnable,
    kv: Any,
    block_map: VirtualBlockMap | None,
    layouts: Sequence[KvLayout],
) -> LayerStreaming | None:
    """Returns the streaming of a Program's blocks. Returns None if its backend does not report
    written layers, or the connector does not send layers.
    """
    if not (isinstance(connector, LayerSender) and connector.sends_layers):
        return None
    if runnable.kv_writes is None:
        return None
    return LayerStreaming(connector, KvLayers(runnable, kv, block_map, layouts))
