"""Worker half of a connector to other engines: blocks in slots of host memory, sent and fetched
over ZeroMQ.

Owns the slots' memory and one thread, which has all sockets. A block is requested by its hash,
often before it is computed: the computing engine sends it after its scheduler half has saved it,
and blocks of a prompt's last step layer by layer, while the step writes them. Bytes are written to
memory that the fetching side reserves until it has reported the outcome, so late bytes cannot be
written elsewhere. A failure is a miss: the prompt is computed here. With several ranks, each has a
worker for its own heads.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import zmq
from numpy.typing import NDArray

from octavo.distributed.transfer.address import TransferEnds
from octavo.distributed.transfer.block_transport import BlockTransport
from octavo.distributed.transfer.kv_head_partition import (
    KVHeadPartition,
    make_single_rank_partition,
)
from octavo.distributed.transfer.layer_stream import LayerStream
from octavo.distributed.transfer.report_box import ReportBox, Reports
from octavo.distributed.transfer.transfer_channel import TransferChannel
from octavo.engine.protocol.kv_messages import (
    BlockName,
    ConnectorPlan,
    ConnectorReport,
    StoredBytes,
    StreamedBlock,
)
from octavo.worker.cache_engine import HostShape
from octavo.worker.kv_layers import KvLayers

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Seconds in which the thread must end."""


class TransferWorker:
    """Slots of host memory and their transfer channel. Implements `ports.ConnectorWorker` and
    `kv_layers.LayerSender`.
    """

    def __init__(
        self,
        shapes: Sequence[HostShape],
        ends: TransferEnds,
        mover: BlockTransport | None = None,
        heads: KVHeadPartition | None = None,
        reports: Reports | None = None,
    ) -> None:
        """`mover`: reads whole blocks from other engines' memory; without it they arrive in
        messages, as layers always do. `heads`: KV heads of this rank, by default all. `reports`:
        receives this rank's reports, by default its own `ReportBox`.
        """
        self._slots = [
            np.empty((shape.num_blocks, shape.block_bytes), np.uint8) for shape in shapes
        ]
        self._reports: Reports = reports or ReportBox()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wake, listener = self._pair()
        self.sends_layers = ends.listen is not None
        """Whether layers of a block may be sent while its step is computed."""
        self._stream: LayerStream | None = None
        """Blocks of the step that is being computed."""
        self._plans: deque[ConnectorPlan | LayerStream | None] = deque()
        """Plans and streams for the thread; None ends it."""
        try:
            self._channel = TransferChannel(
                self._context,
                self._slots,
                ends,
                self._note,
                mover=mover,
                heads=heads or make_single_rank_partition([shape.block_bytes for shape in shapes]),
            )
        except BaseException:
            # A context that is collected with open sockets waits for them without end.
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(
            target=self._run, args=(listener,), name="octavo-kv-transfer", daemon=True
        )
        self._thread.start()

    def _pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """Returns two connected sockets, one for each thread."""
        ends = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        ends[0].bind("inproc://plans")
        ends[1].connect("inproc://plans")
        return ends

    def slot(self, group: int, slot: int) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = self._slots[group][slot]
        return found

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

    def _note(self, **found: list[BlockName]) -> None:
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
        """Processes messages until the worker is closed; a faulty message affects no other."""
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
                    logger.exception("the transfer of KV blocks goes on after a fault")
