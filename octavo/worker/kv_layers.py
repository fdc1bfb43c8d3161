"""Layers of blocks on the device, read while a step writes them; and what has a connector send
them.

Owns no byte and no thread. A layer may be read once the step has counted its write, and until the
step's caller has the result: afterwards the block may be another request's.
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
from octavo.worker.block_places import BlockPlaces
from octavo.worker.model_input import ModelInput


class KvLayers:
    """The layers that a Program's steps write, in the order in which they do."""

    def __init__(
        self,
        runnable: Runnable,
        kv: LayeredKvCache,
        places: BlockPlaces,
        layouts: Sequence[KvLayout],
    ) -> None:
        self.writes = list(runnable.kv_writes or ())
        """The (group, layer) of each write."""
        self._runnable = runnable
        self._kv = kv
        self._places = places
        self._layer_bytes = [layout.layer_bytes for layout in layouts]

    @property
    def written(self) -> tuple[int, int]:
        """Number of the newest step, and how many of `writes` it has done."""
        return self._runnable.kv_written

    def layer_bytes(self, group: int) -> int:
        """Returns the bytes of a group's block in one layer."""
        return self._layer_bytes[group]

    def read(self, group: int, layer: int, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copies one layer of some blocks, `[blocks, layer_bytes]`."""
        found = np.empty((len(block_ids), self._layer_bytes[group]), np.uint8)
        for block_id, into in zip(block_ids, found, strict=True):
            self._kv.read_layer(group, layer, self._places.find(group, block_id), into)
        return found


@runtime_checkable
class LayerSender(Protocol):
    """A connector's worker half that sends layers of blocks while a step writes them."""

    @property
    def sends_layers(self) -> bool: ...

    def begin_stream(self, blocks: Sequence[StreamedBlock], layers: KvLayers) -> None:
        """Begins to send the layers that the coming step writes; returns at once."""
        ...

    def end_stream(self) -> None:
        """Takes what the step has written by its end; afterwards no block is read."""
        ...


class LayerStreaming:
    """Has the blocks of a plan sent while the rows are computed that fill them."""

    def __init__(self, sender: LayerSender, layers: KvLayers) -> None:
        self._sender = sender
        self._layers = layers
        self._blocks: Sequence[StreamedBlock] = ()

    def take(self, plan: ConnectorPlan | None) -> None:
        """Notes the blocks of the plan that is carried out now."""
        self._blocks = () if plan is None else plan.stream

    @contextmanager
    def during(self, inputs: Sequence[ModelInput]) -> Iterator[None]:
        """Streams the blocks of a step's rows while the caller computes it. A step of several
        inputs writes the layers of each in turn, so that their count says nothing of a block's:
        its blocks come whole.
        """
        ids = {row.request_id for row in inputs[0].scheduled} if len(inputs) == 1 else set()
        blocks = [block for block in self._blocks if block.request_id in ids]
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
    places: BlockPlaces,
    layouts: Sequence[KvLayout],
) -> LayerStreaming | None:
    """Returns what streams a Program's blocks; None where its backend cannot say which layers are
    written, or no other engine would get them.
    """
    if not (isinstance(connector, LayerSender) and connector.sends_layers):
        return None
    if runnable.kv_writes is None:
        return None
    return LayerStreaming(connector, KvLayers(runnable, kv, places, layouts))
