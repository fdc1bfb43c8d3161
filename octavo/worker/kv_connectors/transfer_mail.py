"""The mail of one transfer worker: what it sends, what it fetches, and when it looks again.

Puts `BlockSender` and `BlockFetcher` together, and knows when time has passed. One thread uses it;
the worker of `transfer.py` is that thread's owner.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import zmq
from numpy.typing import NDArray

from octavo.engine.protocol.kv_messages import ConnectorPlan, SlotBlock
from octavo.transfer.address import TransferEnds
from octavo.transfer.block_transport import BlockTransport
from octavo.worker.kv_connectors.block_fetcher import BlockFetcher
from octavo.worker.kv_connectors.block_sender import BlockSender
from octavo.worker.kv_connectors.held_heads import HeldHeads
from octavo.worker.kv_connectors.layer_stream import LayerStream
from octavo.worker.kv_connectors.mail_note import BUSY_MS, IDLE_MS, Note

SIGN_S = 1.0
"""Seconds between two signs of life to a peer that waits for blocks."""


class TransferMail:
    """Both directions of one worker; one thread uses it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        slots: Sequence[NDArray[np.uint8]],
        ends: TransferEnds,
        note: Note,
        *,
        mover: BlockTransport | None,
        heads: HeldHeads,
    ) -> None:
        self.poller = zmq.Poller()
        self._slots = slots
        self._note = note
        self.sender = BlockSender(context, slots, ends, note, mover=mover, heads=heads)
        """Side that other engines ask."""
        self.fetcher = BlockFetcher(
            context, slots, ends, note, mover=mover, heads=heads, poller=self.poller
        )
        """Side that asks other engines."""
        if self.sender.socket is not None:
            self.poller.register(self.sender.socket, zmq.POLLIN)
        self._signed_at = 0.0
        self._pause_ms = IDLE_MS
        """Milliseconds for which there is nothing to do unless a message comes."""

    def close(self) -> None:
        self.sender.close()
        self.fetcher.close()

    def carry_out(self, plan: ConnectorPlan) -> None:
        """Begins the work of a plan."""
        self.sender.send_layers()  # of the step before, whose blocks may be kept now
        if plan.forget_all:
            self.sender.outbox.clear()
        for name in plan.forget:
            self.sender.outbox.remove(name)
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
        self.fetcher.give_up(plan.cancel)
        self.sender.tell_absent(plan.complete)

    def stream(self, stream: LayerStream) -> None:
        """Sends the layers of blocks that are being computed, as they are written."""
        self.sender.stream(stream)

    def _take_own(self, blocks: Sequence[SlotBlock]) -> None:
        """Fetches blocks that are behind the own slots: in the outbox."""
        for block in blocks:
            data = self.sender.outbox.take(block.name, block.key)
            if data is not None:
                self._slots[block.group][block.slot][:] = np.frombuffer(data, np.uint8)
            self._note(**{"not_fetched" if data is None else "fetched": [block.name]})

    def wait(self) -> None:
        """Waits for messages, not for long."""
        self.poller.poll(self._pause_ms)

    def move(self) -> None:
        """Takes in what has come, sends what it can and ends what takes too long."""
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
