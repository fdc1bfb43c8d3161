"""Blocks copied to the host and back beside steps: results are those of doing everything in the
order of the calls, whatever order a device's two queues are worked off in.

The stand-in for CUDA's streams does nothing when it is called, and later any work that its queue
and the other queue's events allow.
"""

import random

import numpy as np
import pytest
import torch

from octavo.engine.protocol.kv_messages import BlockMove
from octavo.executor.torch.block_copies import BlockCopies
from octavo.executor.torch.kv_cache import TorchKvCache, make_kv_layout
from octavo.executor.torch.streams import CudaStreams, SerialStreams
from octavo.program.program import CacheGroup
from octavo.worker.cache_engine import CacheEngine, HostShape, batches

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="a side stream needs a CUDA device")
LAYERS, BLOCKS = 2, 7


class AnyOrder(SerialStreams):
    """Two queues of closures. A number in a queue is an event: how much of the other queue must be
    done before. Staging memory begins as garbage.
    """

    def __init__(self, seed: int, *, waits: bool = True) -> None:
        self.draw = random.Random(seed)
        self.queues: list[list] = [[], []]
        self.done = [0, 0]
        self.waits = waits
        self.pinned_memory: list[np.ndarray] = []

    def compute(self, work) -> None:
        self.queues[0].append(work)

    def side(self, work) -> None:
        self.queues[1].append(work)

    def side_waits(self) -> None:
        if self.waits:
            self.queues[1].append(len(self.queues[0]))

    def compute_waits(self) -> None:
        if self.waits:
            self.queues[0].append(len(self.queues[1]))

    def staging(self, num_blocks, num_bytes, *, on_side):
        return torch.full((num_blocks, num_bytes), 255, dtype=torch.uint8)

    def pinned(self, num_blocks, num_bytes):
        return torch.full((num_blocks, num_bytes), 254, dtype=torch.uint8)

    def pin(self, memory) -> None:
        self.pinned_memory.append(memory)

    def is_pinned(self, memory) -> bool:
        return any(np.shares_memory(memory.numpy(), pinned) for pinned in self.pinned_memory)

    def drain(self) -> float:
        self.work_off(1)
        return 0.0

    def work_off(self, which: int) -> None:
        """Works off one queue, and as much of the other as is drawn or waited for."""
        while self.done[which] < len(self.queues[which]):
            self.one_of(self.draw.randrange(2))

    def one_of(self, which: int) -> None:
        if self.done[which] == len(self.queues[which]):
            return
        work = self.queues[which][self.done[which]]
        if not isinstance(work, int):
            work()
        elif self.done[1 - which] < work:
            return
        self.done[which] += 1


def tensors_of(draw) -> list[list[torch.Tensor]]:
    """Returns a group of K and V in bf16, and one in int8 with scales whose V has another width."""
    shapes = (
        [((3,), torch.bfloat16), ((3,), torch.bfloat16)],
        [((4,), torch.int8), ((), torch.bfloat16), ((2,), torch.int8)],
    )
    made = [
        [torch.empty(LAYERS, BLOCKS, 16, 2, *width, dtype=kind) for width, kind in group]
        for group in shapes
    ]
    for tensor in (tensor for group in made for tensor in group):
        numbers = np.array([draw.randrange(120) for _ in range(tensor.nbytes)], np.uint8)
        tensor.copy_(torch.from_numpy(numbers).view(tensor.dtype).view(tensor.shape))
    return made


class Traffic:
    """The same moves and writes of steps, done at once in NumPy and through BlockCopies."""

    def __init__(self, seed: int, *, waits: bool = True) -> None:
        self.draw = random.Random(seed)
        self.tensors = tensors_of(self.draw)
        self.streams = AnyOrder(seed, waits=waits)
        self.copies = BlockCopies(self.tensors, self.streams)
        self.blocks = [
            [self.block_bytes(group, block) for block in range(BLOCKS)] for group in (0, 1)
        ]
        sizes = [len(group[0]) for group in self.blocks]
        self.host = [np.zeros((4, size), np.uint8) for size in sizes]
        self.slots = [np.zeros((4, size), np.uint8) for size in sizes]
        self.wanted_host = [memory.copy() for memory in self.host]
        self.wanted_slots = [memory.copy() for memory in self.slots]
        for memory in self.host:
            self.copies.pin(memory)

    def block_bytes(self, group: int, block: int) -> np.ndarray:
        return np.concatenate(
            [
                tensor[:, block].contiguous().view(-1).view(torch.uint8).numpy()
                for tensor in self.tensors[group]
            ]
        )

    def act(self) -> None:
        draw, group = self.draw, self.draw.randrange(2)
        few = draw.sample(range(BLOCKS), draw.randint(1, 3))
        places = draw.sample(range(4), len(few))
        kind = draw.choice(["copy", "step", "swap_out", "swap_in", "save", "load", "settle"])
        blocks = self.blocks[group]
        if kind == "copy":
            source = draw.choice([block for block in range(BLOCKS) if block not in few])
            self.copies.copy(group, [(source, target) for target in few])
            for target in few:
                blocks[target] = blocks[source]
        elif kind == "step":
            self.write_a_step(group, few[0])
        elif kind in ("swap_out", "save"):
            memory, wanted = (
                (self.host, self.wanted_host)
                if kind == "swap_out"
                else (self.slots, self.wanted_slots)
            )
            self.copies.read(group, few, [memory[group][place] for place in places])
            for block, place in zip(few, places, strict=True):
                wanted[group][place] = blocks[block]
        elif kind in ("swap_in", "load"):
            memory, wanted = (
                (self.host, self.wanted_host)
                if kind == "swap_in"
                else (self.slots, self.wanted_slots)
            )
            if kind == "load":
                self.copies.settle()  # as a slot is ready once its step is back
            self.copies.write(group, few, [memory[group][place] for place in places])
            for block, place in zip(few, places, strict=True):
                blocks[block] = wanted[group][place].copy()
        else:
            self.settle()

    def write_a_step(self, group: int, block: int) -> None:
        """Writes a layer of a block, as a step does."""
        tensor, value = self.draw.choice(self.tensors[group]), self.draw.randrange(120)
        self.streams.compute(lambda: tensor[:, block].fill_(value))
        start = 0
        blocks = self.blocks[group]
        blocks[block] = blocks[block].copy()
        for other in self.tensors[group]:
            size = other[:, 0].nbytes
            if other is tensor:
                filled = (
                    torch.full((size // other.itemsize,), value, dtype=other.dtype)
                    .view(torch.uint8)
                    .numpy()
                )
                blocks[block][start : start + size] = filled
            start += size

    def settle(self) -> None:
        self.copies.settle()
        for found, wanted in zip(
            self.host + self.slots, self.wanted_host + self.wanted_slots, strict=True
        ):
            np.testing.assert_array_equal(found, wanted)

    def finish(self) -> None:
        self.settle()
        self.streams.work_off(0)
        for group in (0, 1):
            for block in range(BLOCKS):
                np.testing.assert_array_equal(
                    self.block_bytes(group, block), self.blocks[group][block]
                )


@pytest.mark.parametrize("seed", range(40))
def test_any_order_of_the_queues_is_the_order_asked_for(seed):
    traffic = Traffic(seed)
    for _ in range(60):
        traffic.act()
    traffic.finish()


def test_without_events_it_is_not():
    def fails(seed):
        traffic = Traffic(seed, waits=False)
        try:
            for _ in range(60):
                traffic.act()
            traffic.finish()
        except AssertionError:
            return True
        return False

    assert sum(map(fails, range(10))) > 5, "the stand-in finds what is not ordered"


def test_what_leaves_is_not_waited_for_and_what_comes_is():
    """A step waits for the gathering of blocks that leave, not for their copy to the host; and for
    the whole way of the blocks that it reads.
    """
    traffic = Traffic(1)
    queues = traffic.streams.queues
    traffic.copies.read(0, [1, 2], [traffic.host[0][0], traffic.host[0][1]])
    assert [isinstance(work, int) for work in queues[0]] == [False] and [
        isinstance(work, int) for work in queues[1]
    ] == [True, False]
    traffic.copies.write(0, [3], [traffic.host[0][1]])
    assert [isinstance(work, int) for work in queues[0]] == [False, True, False]
    assert queues[1][0] == 1 and queues[0][1] == 3 and not isinstance(queues[1][2], int), (
        "it comes while the step before computes"
    )


def test_large_batches_pass_in_parts(monkeypatch):
    monkeypatch.setattr("octavo.executor.torch.block_copies.STAGING_BYTES", 1000)
    traffic = Traffic(2)
    shapes = []
    traffic.streams.staging = lambda count, size, *, on_side: (
        shapes.append(count) or torch.empty(count, size, dtype=torch.uint8)
    )
    traffic.copies.read(0, [0, 1, 2, 3], list(traffic.host[0]))
    traffic.copies.settle()
    size = traffic.host[0].shape[1]
    assert sum(shapes) == 4 and max(shapes) == max(1, 1000 // size)
    np.testing.assert_array_equal(traffic.host[0], np.stack(traffic.blocks[0][:4]))


def test_batches_of_a_plan():
    moves = [
        BlockMove(0, 1, 2),
        BlockMove(0, 3, 4),
        BlockMove(0, 2, 5),
        BlockMove(1, 0, 1),
        BlockMove(1, 5, 6, "swap_out"),
    ]
    moves += [BlockMove(1, 6, 7, "swap_out"), BlockMove(0, 6, 7, "swap_out"), BlockMove(0, 8, 7)]
    assert [len(batch) for batch in batches(moves)] == [2, 1, 1, 2, 1, 1], (
        "what was copied to is read by a later batch"
    )
    assert [move for batch in batches(moves) for move in batch] == moves
    assert list(batches([])) == []


def engine_on(device: str, seed: int) -> tuple[CacheEngine, TorchKvCache]:
    groups = [CacheGroup("full", "full", 2, 2, 8, 8), CacheGroup("small", "full", 1, 1, 4, 8)]
    layouts = [make_kv_layout(group, torch.bfloat16) for group in groups]
    kv = TorchKvCache(layouts, [BLOCKS, BLOCKS], torch.device(device))
    torch.manual_seed(seed)
    for tensor in (tensor for group in kv.groups for tensor in group.tensors):
        tensor.copy_(torch.randn(tensor.shape))
    sizes = [sum(tensor[:, 0].nbytes for tensor in group.tensors) for group in kv.groups]
    return CacheEngine(kv, [HostShape(4, size) for size in sizes]), kv


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_swapped_out_over_and_in_again(device):
    engine, kv = engine_on(device, 1)
    before = [tensor.clone() for group in kv.groups for tensor in group.tensors]
    engine.apply(
        [BlockMove(group, block, block - 1, "swap_out") for group in (0, 1) for block in (1, 2, 3)]
    )
    for group in kv.groups:
        for tensor in group.tensors:
            tensor[:, 1:4] = 7
    moves = [
        BlockMove(group, block - 1, block + 3, "swap_in") for group in (0, 1) for block in (1, 2, 3)
    ]
    engine.apply([*moves, BlockMove(0, 5, 0)])
    engine.settle(moves)
    after = [tensor for group in kv.groups for tensor in group.tensors]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[:, 4:7], old[:, 1:4]) and bool((new[:, 1:4] == 7).all())
    assert torch.equal(after[0][:, 0], before[0][:, 2])


@CUDA
def test_cuda_streams_keep_the_order():
    """Many rounds run beside long products, so that a missing event would show."""
    engine, kv = engine_on("cuda", 2)
    assert isinstance(kv.copies.streams, CudaStreams)
    busy = torch.randn(2048, 2048, device="cuda")
    for value in range(50):
        busy = (busy @ busy).clamp(-1, 1)
        for tensor in kv.groups[0].tensors:
            tensor[:, 1] = value
        engine.apply([BlockMove(0, 1, 0, "swap_out")])
        for tensor in kv.groups[0].tensors:
            tensor[:, 1] = -1
        engine.apply([BlockMove(0, 0, 2, "swap_in")])
        assert all(bool((tensor[:, 2] == value).all()) for tensor in kv.groups[0].tensors)


class HostMemory:
    """A stand-in for CUDA's list of pinned host memory; when `full` it pins no more."""

    def __init__(self, *, full=False):
        self.full, self.pinned = full, {}

    def cudaHostRegister(self, address, num_bytes, flags):
        if self.full:
            return 2
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


def streams_over(runtime, monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    streams = object.__new__(CudaStreams)
    streams.device = torch.device("cpu")
    return streams


def test_memory_is_pinned_as_long_as_it_lives(monkeypatch):
    runtime = HostMemory()
    memory = np.zeros((4, 100), np.uint8)
    streams_over(runtime, monkeypatch).pin(memory)
    assert runtime.pinned == {memory.ctypes.data: 400}
    row = memory[1]
    del memory
    assert runtime.pinned, "a view keeps it"
    del row
    assert not runtime.pinned


def test_memory_that_cannot_be_pinned_is_said_once(monkeypatch):
    with pytest.warns(UserWarning, match="400 bytes of host memory cannot be pinned"):
        streams_over(HostMemory(full=True), monkeypatch).pin(np.zeros((4, 100), np.uint8))
