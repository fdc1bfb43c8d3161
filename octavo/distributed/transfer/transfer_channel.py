"""Transfer channel of one worker: combines `BlockSender` and `BlockFetcher` in one polling loop.

Used by a single thread, which `transfer.py` owns.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import zmq
from numpy.typing import NDArray

from octavo.distributed.transfer.address import TransferEnds
from octavo.distributed.transfer.block_fetcher import BlockFetcher
from octavo.distributed.transfer.block_sender import BlockSender
from octavo.distributed.transfer.block_transport import BlockTransport
from octavo.distributed.transfer.kv_head_partition import KVHeadPartition
from octavo.distributed.transfer.layer_stream import LayerStream
from octavo.distributed.transfer.transfer_status import BUSY_MS, IDLE_MS, ReportBlocks
from octavo.engine.protocol.kv_messages import ConnectorPlan, SlotBlock

SIGN_S = 1.0
"""Seconds between keep-alive messages to a peer that waits for blocks."""


class TransferChannel:
    """Sends and fetches the blocks of one worker."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        slots: Sequence[NDArray[np.uint8]],
        ends: TransferEnds,
        note: ReportBlocks,
        *,
        mover: BlockTransport | None,
        heads: KVHeadPartition,
    ) -> None:
        self.poller = zmq.Poller()
        self._slots = slots
        self._note = note
        self.sender = BlockSender(context, slots, ends, note, mover=mover, heads=heads)
        """Serves the requests of other engines."""
        self.fetcher = BlockFetcher(
            context, slots, ends, note, mover=mover, heads=heads, poller=self.poller
        )
        """Sends requests to other engines."""
        if self.sender.socket is not None:
            self.poller.register(self.sender.socket, zmq.POLLIN)
        self._signed_at = 0.0
        self._pause_ms = IDLE_MS
        """Milliseconds until there is work even if no message arrives."""

    def close(self) -> None:
        self.sender.close()
        self.fetcher.close()

    def carry_out(self, plan: ConnectorPlan) -> None:
        """Starts the transfers of a plan."""
        self.sender.send_layers()  # of the previous step, whose blocks may be buffered now
        if plan.forget_all:
            self.sender.send_buffer.clear()
        for name in plan.forget:
            self.sender.send_buffer.remove(name)
        wanted: defaultdict[str, list[SlotBlock]] = defaultdict(list)
        for block in plan.fetch:
            wanted[block.source].append(block)
        for source, blocks in wanted.items():
            if source:
                self.fetcher.ask(source, blocks)
            else:
                self._take_own(blocks)
        for block in plan.keep:
            self.sender.keep(block)
        self.fetcher.cancel(plan.cancel)
        self.sender.tell_absent(plan.complete)

    def stream(self, stream: LayerStream) -> None:
        """Sends the layers of blocks as the running step writes them."""
        self.sender.stream(stream)

    def _take_own(self, blocks: Sequence[SlotBlock]) -> None:
        """Copies blocks from this worker's own send buffer into its slots."""
        for block in blocks:
            data = self.sender.send_buffer.take(block.name, block.key)
            if data is not None:
                self._slots[block.group][block.slot][:] = np.frombuffer(data, np.uint8)
            self._note(**{"not_fetched" if data is None else "fetched": [block.name]})

    def wait(self) -> None:
        """Waits for a message or until there is other work."""
        self.poller.poll(self._pause_ms)

    def move(self) -> None:
        """Processes arrived messages, sends what it can, and ends transfers that timed out."""
        self.sender.take_requests()
        self.fetcher.take_replies()
        self.sender.send_layers()
        self._pause_ms = self.sender.send_leaving()
        self.fetcher.take_read()
        now = time.monotonic()
        self.fetcher.note_time(now)
        if now - self._signed_at > SIGN_S:
            self._signed_at = now
            self.sender.sign(now)
        if self.fetcher.is_reading:
            self._pause_ms = min(self._pause_ms, BUSY_MS)
