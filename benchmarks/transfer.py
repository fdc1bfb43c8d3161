"""How fast KV blocks go from one engine's worker to another's, beside raw TCP in turns.

    python benchmarks/transfer.py --blocks 256 --block-kib 720 --rounds 5 [--transport mooncake]
    PYTHONPATH=. python benchmarks/transfer.py --rate 1gbit --blocks 64

Sender and receiver are two processes on this machine's loopback, or with --rate (as root) on two
machines, which are network namespaces with a link of that rate. A round sends the same bytes once
over a plain TCP socket and once through two `TransferWorker`s; the last line has the medians. The
goal is 0.8 of the socket's rate. Beside each rate stands the processor time of both sides together,
which other work on the machine changes less. With messages blocks go in those of
ZeroMQ, as zmq sends them where there is a secret, which encrypts them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

from octavo.distributed.transfer.address import TransferAddresses
from octavo.distributed.transfer.block_transport import BlockTransport
from octavo.distributed.transfer.mooncake_mover import MooncakeMover
from octavo.distributed.transfer.nixl_mover import NixlMover
from octavo.distributed.transfer.socket_mover import SocketMover
from octavo.distributed.transfer.transfer_worker import TransferWorker
from octavo.engine.protocol.kv_messages import BlockKey, ConnectorPlan, SlotBlock
from octavo.worker.cache_engine import HostShape

HOST = "127.0.0.1"
CHUNK = 1 << 20
TRANSPORTS = ("zmq", "messages", "mooncake", "nixl")
CLONE_NEWNET = 0x40000000


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), bytes(16), (number,))


def free_port() -> int:
    with socket.socket() as found:
        found.bind((HOST, 0))
        port: int = found.getsockname()[1]
    return port


@dataclass(frozen=True, slots=True)
class SendingWay:
    """How blocks go from the sender to the receiver."""

    host: str
    """Address of the sender's machine."""
    listen: str
    secret: str | None
    transport: str
    own_host: str = HOST
    """Address of the receiver's machine."""
    machine: str | None = None
    """Network namespace of the sender; None: that of this process."""


def worker_of(shape: HostShape, way: SendingWay, *, sends: bool) -> TransferWorker:
    listen, num_bytes = way.listen if sends else None, shape.num_blocks * shape.block_bytes
    ends = TransferAddresses(bytes(32), listen, way.secret, timeout_s=60.0, max_bytes=num_bytes)
    return TransferWorker([shape], ends, mover_of(way, sends=sends))


def mover_of(way: SendingWay, *, sends: bool) -> BlockTransport | None:
    if way.transport == "mooncake":
        return MooncakeMover(way.host if sends else way.own_host)
    if way.transport == "nixl":
        return NixlMover()
    in_messages = way.secret is not None or way.transport == "messages"
    return None if in_messages else SocketMover(way.host if sends else None)


def enter(machine: str | None) -> None:
    """Moves this thread, and those that it starts, to a network namespace."""
    if machine is None:
        return
    file = os.open(f"/var/run/netns/{machine}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(file)


def wait_for(worker: TransferWorker, num_blocks: int, field: str) -> None:
    """Waits until the worker has reported a number of blocks."""
    found = 0
    while found < num_blocks:
        report = worker.report(wait_s=0.1)
        if report is not None:
            found += len(getattr(report, field))
            if report.not_fetched or report.not_kept:
                raise SystemExit("a block was lost")


# -- the sending process ---------------------------------------------------------------------------


def send_blocks(shape: HostShape, way: SendingWay, pipe: Connection) -> None:
    """Keeps all blocks and sends them to all that ask, until the pipe closes."""
    enter(way.machine)
    worker = worker_of(shape, way, sends=True)
    for index in range(shape.num_blocks):
        worker.slot(0, index)[:] = index % 251
    worker.begin(
        ConnectorPlan(
            keep=[SlotBlock(0, index, key_of(index)) for index in range(shape.num_blocks)]
        )
    )
    wait_for(worker, shape.num_blocks, "kept")
    pipe.send("ready")
    while pipe.recv() == "time":
        pipe.send(time.process_time())
    worker.close()


def send_raw(num_bytes: int, port: int, way: SendingWay, pipe: Connection) -> None:
    """Sends a number of bytes to each connection, until the pipe closes."""
    enter(way.machine)
    data = bytes(CHUNK)
    with socket.create_server((way.host, port)) as server:
        pipe.send("ready")
        while (word := pipe.recv()) != "end":
            if word == "time":
                pipe.send(time.process_time())
                continue
            connection, _ = server.accept()
            with connection:
                for start in range(0, num_bytes, CHUNK):
                    connection.sendall(data[: min(CHUNK, num_bytes - start)])


@contextlib.contextmanager
def process(target: object, *arguments: object) -> Iterator[Connection]:
    """Runs a sender in a process of its own; yields the pipe to it once it is ready."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    child = context.Process(target=target, args=(*arguments, far), daemon=True)  # type: ignore[arg-type]
    child.start()
    assert near.recv() == "ready"
    yield near
    near.send("end")
    child.join(10)


# -- the receiving process -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that have come once, and what that took."""

    num_bytes: int
    seconds: float
    processor_s: float
    """Processor time of both sides."""

    @property
    def rate(self) -> float:
        """Gigabytes a second."""
        return self.num_bytes / self.seconds / 1e9

    @property
    def cost(self) -> float:
        """Seconds of processor time for each gigabyte."""
        return self.processor_s / self.num_bytes * 1e9

    def __str__(self) -> str:
        return f"{self.rate:.3f} GB/s, {self.cost:.2f} s/GB"


class Stopwatch:
    """Time since it was made, and processor time of this process and a sender's."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._processor_s = self._used()
        self._began = time.perf_counter()

    def _used(self) -> float:
        self._pipe.send("time")
        others: float = self._pipe.recv()
        return others + time.process_time()

    def sent(self, num_bytes: int) -> Sent:
        seconds = time.perf_counter() - self._began
        return Sent(num_bytes, seconds, self._used() - self._processor_s)


def fetch_all(shape: HostShape, way: SendingWay, pipe: Connection) -> Sent:
    """Fetches all blocks with a worker of its own."""
    worker = worker_of(shape, way, sends=False)
    for index in range(shape.num_blocks):
        worker.slot(0, index)[:] = 255  # memory that was never written costs a fault for each page
    wanted = [SlotBlock(0, index, key_of(index), way.listen) for index in range(shape.num_blocks)]
    watch = Stopwatch(pipe)
    worker.begin(ConnectorPlan(fetch=wanted))
    wait_for(worker, shape.num_blocks, "fetched")
    sent = watch.sent(shape.num_blocks * shape.block_bytes)
    assert all((worker.slot(0, index) == index % 251).all() for index in range(shape.num_blocks))
    worker.close()
    return sent


def receive_raw(num_bytes: int, port: int, way: SendingWay, pipe: Connection) -> Sent:
    memory = memoryview(bytearray(num_bytes))
    watch = Stopwatch(pipe)
    pipe.send("go")
    with socket.create_connection((way.host, port)) as connection:
        num_read = 0
        while num_read < num_bytes:
            num_read += connection.recv_into(memory[num_read:])
    return watch.sent(num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=256)
    parser.add_argument("--block-kib", type=int, default=720)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--secret", help="lock the sockets with it")
    parser.add_argument("--transport", choices=TRANSPORTS, default="zmq")
    parser.add_argument("--rate", help="such as 200mbit or 1gbit: of a link between two machines")
    args = parser.parse_args()
    if args.rate is None:
        port = free_port()
        measure(args, SendingWay(HOST, f"tcp://{HOST}:{port}", args.secret, args.transport))
        return
    from tests.support.two_machines import ADDRESSES, two_machines

    own, host = ADDRESSES
    with two_machines(args.rate) as machines:
        way = SendingWay(
            host, f"tcp://{host}:8999", args.secret, args.transport, own, machines.names[1]
        )
        enter(machines.names[0])
        measure(args, way)


def measure(args: argparse.Namespace, way: SendingWay) -> None:
    """Sends the bytes in turns both ways, and prints the rates."""
    shape = HostShape(args.blocks, args.block_kib << 10)
    num_bytes = shape.num_blocks * shape.block_bytes
    port, raw, blocks = free_port(), list[Sent](), list[Sent]()
    with (
        process(send_raw, num_bytes, port, way) as raw_pipe,
        process(send_blocks, shape, way) as blocks_pipe,
    ):
        for _ in range(args.rounds):
            raw.append(receive_raw(num_bytes, port, way, raw_pipe))
            blocks.append(fetch_all(shape, way, blocks_pipe))
            print(f"raw TCP {raw[-1]}; blocks {blocks[-1]}", flush=True)
    pairs = list(zip(raw, blocks, strict=True))
    ratio = statistics.median(two.rate / one.rate for one, two in pairs)
    cost = statistics.median(two.cost / one.cost for one, two in pairs)
    print(
        f"{num_bytes / 1e6:.0f} MB: raw TCP {statistics.median(one.rate for one in raw):.2f},"
        f" blocks {statistics.median(one.rate for one in blocks):.2f} GB/s, median ratio"
        f" {ratio:.2f}, of processor time {cost:.2f}"
    )


if __name__ == "__main__":
    main()
