"""Worker half of a connector to other engines: stores blocks in slots of host memory, and sends and
fetches them over ZeroMQ.

Owns the slots' memory and one thread, which has all sockets. A block is requested by its hash,
often before it is computed: the computing engine sends it after its scheduler half has saved it,
and blocks of a prompt's last step layer by layer, while the step writes them. The fetching side
reserves the slots until it has reported the outcome, so late bytes cannot overwrite other blocks. A
failure counts as a miss: the prompt is computed here. With several ranks, each has a worker for its
own heads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import zmq
from numpy.typing import NDArray

from octavo.distributed.transfer.address import TransferAddresses
from octavo.distributed.transfer.block_fetcher import BlockFetcher
from octavo.distributed.transfer.block_sender import BlockSender
from octavo.distributed.transfer.block_transport import BlockTransport
from octavo.distributed.transfer.kv_head_partition import (
    KVHeadPartition,
    make_single_rank_partition,
)
from octavo.distributed.transfer.layer_stream import LayerStream
from octavo.distributed.transfer.report_box import ReportBox, Reports
from octavo.distributed.transfer.transfer_status import BUSY_MS, IDLE_MS, ReportBlocks
from octavo.engine.protocol.kv_messages import (
    BlockHashWithGroupId,
    ConnectorPlan,
    ConnectorReport,
    SlotBlock,
    StoredBytes,
    StreamedBlock,
)
from octavo.worker.cache_engine import HostShape
from octavo.worker.kv_layers import KvLayers

SIGN_S = 1.0
"""Seconds between keep-alive messages to a peer that waits for blocks."""
logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Timeout for the thread's end, in seconds."""


class TransferWorker:
    """Slots of host memory and their transfer channel. Implements `ports.ConnectorWorker` and
    `kv_layers.LayerSender`.
    """

    def __init__(
        self,
        shapes: Sequence[HostShape],
        addresses: TransferAddresses,
        mover: BlockTransport | None = None,
        heads: KVHeadPartition | None = None,
        reports: Reports | None = None,
    ) -> None:
        """`mover` reads complete blocks from other engines' memory; without it, they arrive in
        messages, as layers always do. `heads` are the KV heads of this rank, by default all.
        `reports` collects this rank's reports, by default a new `ReportBox`.
        """
        self._slots = [
            np.empty((shape.num_blocks, shape.block_bytes), np.uint8) for shape in shapes
        ]
        self._reports: Reports = reports or ReportBox()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake, listener = self._pair()
        self.sends_layers = addresses.listen is not None
        """Whether layers of a block may be sent while its step is computed."""
        self._stream: LayerStream | None = None
        """Blocks of the step that is being computed."""
        self._plans: deque[ConnectorPlan | LayerStream | None] = deque()
        """Plans and streams for the thread; None ends it."""
        try:
            self._channel = TransferChannel(
                self._context,
                self._slots,
                addresses,
                self._note,
                mover=mover,
                heads=heads or make_single_rank_partition([shape.block_bytes for shape in shapes]),
            )
        except BaseException:
            # A ZeroMQ context that is garbage-collected with open sockets blocks forever.
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="octavo-kv-transfer", daemon=True
        )
        self._thread.start()

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Returns two connected sockets, one for each thread."""
        sockets = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        sockets[0].bind("inproc://plans")
        sockets[1].connect("inproc://plans")
        return sockets

    def slot(self, group: int, slot: int) -> NDArray[np.uint8]:
        slot_bytes: NDArray[np.uint8] = self._slots[group][slot]
        return slot_bytes

    def begin(self, plan: ConnectorPlan) -> None:
        self._reports.begin(plan)
        self._tell(plan)

    def begin_stream(self, blocks: Sequence[StreamedBlock], layers: KvLayers) -> None:
        self._stream = LayerStream(blocks, layers)
        self._tell(self._stream)

    def end_stream(self) -> None:
        assert self._stream is not None, "it was begun"
        self._stream.end()
        self._stream = None

    def _tell(self, plan: ConnectorPlan | LayerStream | None) -> None:
        self._plans.append(plan)
        self._wake.send(b"")

    def report(self, *, wait_s: float) -> ConnectorReport | None:
        return self._reports.take(wait_s=wait_s)

    def _note(self, **found: list[BlockHashWithGroupId]) -> None:
        """Adds to the report; called by the thread."""
        send_buffer, link = self._channel.sender.send_buffer, self._channel.fetcher.link
        stored = StoredBytes(
            send_buffer.num_bytes,
            num_expired_leases=send_buffer.num_expired,
            link_bytes=link.num_bytes,
            link_s=link.seconds,
        )
        report = ConnectorReport(stored=stored)
        for name, blocks in found.items():
            setattr(report, name, blocks)
        self._reports.add(report)

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        self._tell(None)
        self._thread.join(CLOSE_S)
        self._wake.close()
        if not self._thread.is_alive():
            self._context.term()

    def _run(self, listener: zmq.Socket[bytes]) -> None:
        """Processes messages until the worker is closed; an error in one message does not affect
        others.
        """
        with contextlib.closing(self._channel), contextlib.closing(listener):
            self._channel.poller.register(listener, zmq.POLLIN)
            while True:
                self._channel.wait()
                try:
                    while listener.poll(0):
                        listener.recv()
                        plan = self._plans.popleft()
                        if plan is None:
                            return
                        if isinstance(plan, LayerStream):
                            self._channel.stream(plan)
                        else:
                            self._channel.carry_out(plan)
                    self._channel.move()
                except Exception:
                    logger.exception("the KV transfer thread continues after an error")


class TransferChannel:
    """Sends and fetches the blocks of one worker.

    Used only by the worker's thread.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        slots: Sequence[NDArray[np.uint8]],
        addresses: TransferAddresses,
        note: ReportBlocks,
        *,
        mover: BlockTransport | None,
        heads: KVHeadPartition,
    ) -> None:
        self.poller = zmq.Poller()
        self._slots = slots
        self._note = note
        self.sender = BlockSender(context, slots, addresses, note, mover=mover, heads=heads)
        """Serves the requests of other engines."""
        self.fetcher = BlockFetcher(
            context, slots, addresses, note, mover=mover, heads=heads, poller=self.poller
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
        self.sender.send_layers()  # from the previous step, whose blocks may be buffered now
        if plan.forget_all:
            self.sender.send_buffer.clear()
        for name in plan.forget:
            self.sender.send_buffer.remove(name)
        blocks_by_source: defaultdict[str, list[SlotBlock]] = defaultdict(list)
        for block in plan.fetch:
            blocks_by_source[block.source].append(block)
        for source, blocks in blocks_by_source.items():
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
        """Waits for a message, or until there is other work."""
        self.poller.poll(self._pause_ms)

    def move(self) -> None:
        """Processes received messages, sends queued ones, and ends transfers that timed out."""
        self.sender.process_requests()
        self.fetcher.process_replies()
        self.sender.send_layers()
        self._pause_ms = self.sender.send_leaving()
        self.fetcher.process_reads()
        now = time.monotonic()
        self.fetcher.expire(now)
        if now - self._signed_at > SIGN_S:
            self._signed_at = now
            self.sender.sign(now)
        if self.fetcher.is_reading:
            self._pause_ms = min(self._pause_ms, BUSY_MS)
