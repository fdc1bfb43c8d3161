"""The ranks of one engine, each a process with a device, and what they exchange: sums, columns,
drawn tokens. By torch.distributed.

Gloo on a CPU, NCCL on CUDA, as process groups of their own: nothing of PyTorch's default group is
touched, so one process may belong to several engines. They meet at a store that listens on
127.0.0.1 only. Knows tensors and no op's meaning beside the two collectives'.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import Tensor

from octavo.backends.torch.sampling import Drawn
from octavo.backends.torch.step import Made, Step
from octavo.errors import BackendUnavailable
from octavo.program import ops
from octavo.program.program import Op

dist: Any = torch_distributed  # its stores and groups are not in its typed names

HOST = "127.0.0.1"

MEETING_S = 120.0
"""How long the first rank waits for the last one to start."""

PATIENCE_S = 24 * 3600.0
"""A collective waits for as long as a step of another rank takes; who watches that steps get ahead
is the front (`stall_timeout`).
"""


class Meeting:
    """The store of the first rank, at which the others join. `port` is what they have to be
    told."""

    def __init__(self, num_ranks: int) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self.store = dist.TCPStore(
            HOST,
            self.port,
            num_ranks,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.fileno(),
            timeout=timedelta(seconds=MEETING_S),
        )
        self._listener.detach()  # the store closes it


class TorchRanks:
    """This process among the ranks."""

    def __init__(self, rank: int, num_ranks: int, device: str, meeting: Meeting | int) -> None:
        """Waits until all are there. Each of them computes on a CUDA device of its own. `meeting`:
        on the first rank its own, on the others its port.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self.device = torch.device(device, rank) if device == "cuda" else torch.device(device)
        if isinstance(meeting, Meeting):
            self._store = meeting.store
        else:
            timeout = timedelta(seconds=MEETING_S)
            self._store = dist.TCPStore(
                HOST, meeting, num_ranks, is_master=False, wait_for_workers=False, timeout=timeout
            )
        self._group = _nccl(self) if device == "cuda" else _gloo(self)
        self.all_reduce(torch.zeros(1, device=self.device))

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in fp32 on the way; x is left alone."""
        total = x.float() if x.dtype != torch.float32 else x.clone()
        self._group.allreduce([total]).wait()
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """`x [T, widths[rank]]` to `[T, sum of widths]`: filled up to the widest on the way."""
        widest = max(widths)
        mine = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        parts = [torch.empty_like(mine) for _ in widths]
        self._group.allgather([parts], [mine]).wait()
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1
        )

    def from_first(self, x: Tensor) -> Tensor:
        """What the first rank has there; `x` is written over on the others."""
        self._group.broadcast([x]).wait()
        return x

    def abort(self) -> None:
        """Ends a collective that waits for a rank that is gone, with an error. Gloo's ends by
        itself: its connection breaks.
        """
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):
                self._group.abort()


def told_by_first(ranks: TorchRanks, drawn: Drawn | None, count: int) -> Drawn:
    """What the first rank has drawn of `count` rows; the others (None) get its tokens and failures,
    without logprobs.
    """
    message = torch.zeros(2, count, dtype=torch.int32, device=ranks.device)
    if drawn is not None:
        message.copy_(torch.stack([drawn.token_ids, drawn.failed]))
    if count:
        message = ranks.from_first(message)
    return drawn or Drawn(message[0], message[1].bool(), None)


def _gloo(ranks: TorchRanks) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=PATIENCE_S)
    return dist.ProcessGroupGloo(ranks._store, ranks.rank, ranks.num_ranks, options)


def _nccl(ranks: TorchRanks) -> Any:
    if not dist.is_nccl_available():
        raise BackendUnavailable(
            "tensor_parallel_size: this PyTorch is built without NCCL",
            hint="`octavo doctor` says what is here",
        )
    torch.cuda.set_device(ranks.device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=PATIENCE_S)
    return dist.ProcessGroupNCCL(ranks._store, ranks.rank, ranks.num_ranks, options)


def all_reduce(op: ops.AllReduce, step: Step) -> Made:
    return (step.ranks.all_reduce(step.get(op.x)),)


def all_gather(op: ops.AllGather, step: Step) -> Made:
    return (step.ranks.all_gather(step.get(op.x), op.widths),)


RANK_FORMULAS: dict[type[Op], Callable[[Any, Step], Made]] = {
    ops.AllReduce: all_reduce,
    ops.AllGather: all_gather,
}
