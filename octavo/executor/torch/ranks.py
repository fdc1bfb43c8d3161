"""Ranks of one engine, each a process with a device, connected through torch.distributed: sums,
gathers, sampled tokens.

Uses Gloo on a CPU and NCCL on CUDA, in separate process groups: PyTorch's default group is not
touched, so one process may belong to several engines. Rendezvous is a store on the first rank, on
127.0.0.1 unless other machines take part.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_distributed
from torch import Tensor

from octavo.api.errors import BackendUnavailable
from octavo.executor.rank_grid import RankGrid
from octavo.executor.torch.sampling import SamplerOutput

dist: Any = torch_distributed  # stores and groups are missing from the package's type stubs

HOST = "127.0.0.1"
"""Rendezvous address for ranks on one machine."""

RENDEZVOUS_S = 120.0
"""Seconds that the first rank waits for the others to start."""

COLLECTIVE_TIMEOUT_S = 24 * 3600.0
"""Timeout of a collective in seconds. A rank may have to wait for another rank's complete step, so
this timeout is long; the watchdog is the frontend's `stall_timeout`.
"""


class Rendezvous:
    """The first rank's store, which the other ranks join. Implements `ranks.RankRendezvous`."""

    def __init__(self, num_ranks: int, host: str = HOST) -> None:
        """`host` is this machine's address, reachable by the other ranks."""
        self.host = host
        self._listener = socket.create_server((host, 0))
        self.address: int = self._listener.getsockname()[1]
        """Port of the store."""
        self.store = dist.TCPStore(
            host,
            self.address,
            num_ranks,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._listener.fileno(),
            timeout=timedelta(seconds=RENDEZVOUS_S),
        )
        self._listener.detach()  # the store closes the socket

    def get_address(self, rank: int) -> list[int]:
        return [self.address]

    def get_inherited(self, rank: int) -> tuple[int, ...]:
        return ()

    def close(self) -> None:
        """Does nothing: the first rank keeps the store."""


class TorchRanks:
    """This process's rank and its connection to the others. Implements `ranks.Ranks`."""

    def __init__(
        self, grid: RankGrid, device: str, rendezvous: Rendezvous | int, host: str = HOST
    ) -> None:
        """Waits until all ranks are connected.

        `rendezvous` is the store on the first rank and its port at `host` on others. On one machine
        rank r uses CUDA device r; on several machines each rank uses the first device.
        """
        self.grid = grid
        self.rank = rank = grid.rank
        self.num_ranks = num_ranks = grid.num_ranks
        device_index = rank if host == HOST else 0
        self.device = (
            torch.device(device, device_index) if device == "cuda" else torch.device(device)
        )
        self.host = own_address(host)
        """This machine's address as the others reach it."""
        self._store = (
            rendezvous.store
            if isinstance(rendezvous, Rendezvous)
            else dist.TCPStore(
                host,
                rendezvous,
                num_ranks,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=RENDEZVOUS_S),
            )
        )
        self._group = _nccl(self) if device == "cuda" else _gloo(self)
        self.all_reduce(torch.zeros(1, device=self.device))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Returns the sum over tensor-parallel ranks, added in fp32 in rank order; x is unchanged.

        Parts are gathered and added here, because a library's all-reduce adds in an order that
        depends on the element's position.
        """
        everyone = self._parts(x)
        parts = [everyone[rank] for rank in self.grid.tensor_ranks]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def all_gather(self, x: Tensor, widths: tuple[int, ...]) -> Tensor:
        """Concatenates columns over tensor-parallel ranks: `x [T, widths[rank]]` to `[T, sum of
        widths]`.

        Parts are padded to the widest for the transfer.
        """
        everyone = self._parts(torch.nn.functional.pad(x, (0, max(widths) - x.shape[1])))
        parts = [everyone[rank] for rank in self.grid.tensor_ranks]
        return torch.cat(
            [part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1
        )

    def collect(self, x: Tensor, owners: Tensor) -> Tensor:
        """Returns each row of `x [R, W]` from the expert-parallel rank that `owners [R]` names."""
        everyone = self._parts(x)
        parts = torch.stack([everyone[rank] for rank in self.grid.expert_ranks])
        return parts[owners, torch.arange(len(owners), device=x.device)]

    def _parts(self, x: Tensor) -> list[Tensor]:
        mine = x.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        self._group.allgather([parts], [mine]).wait()
        return parts

    def from_first(self, x: Tensor) -> Tensor:
        """Broadcasts the first rank's x in place."""
        self._group.broadcast([x]).wait()
        return x

    def abort(self) -> None:
        """Aborts a collective that waits for a dead rank. Does nothing with Gloo, whose connection
        breaks by itself.
        """
        if self.device.type == "cuda":
            with contextlib.suppress(Exception):
                self._group.abort()


def broadcast_sampled(
    ranks: TorchRanks, sampled: SamplerOutput | None, count: int
) -> SamplerOutput:
    """Broadcasts the tokens sampled by the first rank for `count` rows.

    Other ranks pass None and receive tokens and failures, without logprobs.
    """
    message = torch.zeros(2, count, dtype=torch.int32, device=ranks.device)
    if sampled is not None:
        message.copy_(torch.stack([sampled.token_ids, sampled.failed]))
    if count:
        message = ranks.from_first(message)
    return sampled or SamplerOutput(message[0], message[1].bool(), None)


def own_address(host: str) -> str:
    """Returns this machine's address as seen from a host; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))
        address: str = probe.getsockname()[0]
    return address


def _gloo(ranks: TorchRanks) -> Any:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=ranks.host)]
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    return dist.ProcessGroupGloo(ranks._store, ranks.rank, ranks.num_ranks, options)


def _nccl(ranks: TorchRanks) -> Any:
    if not dist.is_nccl_available():
        raise BackendUnavailable(
            "tensor_parallel_size: this PyTorch build has no NCCL",
            hint="run `octavo doctor` to see what is installed",
        )
    torch.cuda.set_device(ranks.device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    return dist.ProcessGroupNCCL(ranks._store, ranks.rank, ranks.num_ranks, options)
