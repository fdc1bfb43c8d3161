"""Options of the backend, parallelism and weight offloading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import option


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Options of the backend, its devices and its ranks."""

    backend: Literal["native", "torch", "reference"] | None = option(
        None,
        "Backend",
        "Compute in C++, PyTorch or NumPy",
        details="native: C++ kernels on the CPU; torch: any device that PyTorch has; reference:"
        " NumPy in float64, slow. The default is torch with a CUDA device, else native.",
        derived="by device",
        common=True,
    )
    device: Literal["cpu", "cuda"] | None = option(
        None, "Backend", "Run torch on this device", derived="cuda, else cpu"
    )
    attention_backend: Literal["auto", "triton", "sdpa", "flashinfer"] = option(
        "auto",
        "Backend",
        "Choose torch's attention kernels",
        details="sdpa: PyTorch's own, on any device; flashinfer: on CUDA, if it is installed; auto:"
        " triton on CUDA if it is installed, else sdpa.",
    )
    torch_kernels: Literal["auto", "plain", "triton"] = option(
        "auto",
        "Backend",
        "Choose torch's kernels other than attention",
        details="Norms, gates, products of few rows with packed weights, experts and sampling."
        " auto: triton on CUDA, else plain.",
    )
    enforce_eager: bool = option(False, "Backend", "Capture no CUDA graphs (torch)")
    batch_invariant: bool = option(
        False,
        "Backend",
        "Make torch's results independent of the batch",
        details="A request's tokens and logprobs are then the same bits in any batch, as they"
        " always are on the other backends. Slower.",
    )
    tensor_parallel_size: int = option(
        1,
        "Distributed",
        "Split every layer over N processes",
        details="native, torch; on CUDA each process has a device of its own.",
        common=True,
        low=1,
        short="-tp",
    )
    pipeline_parallel_size: int = option(
        1,
        "Distributed",
        "Split the layers over N processes",
        details="native, reference; as many steps are in flight.",
        low=1,
        short="-pp",
    )
    expert_parallel_size: int = option(
        1,
        "Distributed",
        "Split the experts of each layer over N groups",
        details="native, torch; a group has whole experts, and computes everything else.",
        low=1,
        short="-ep",
    )
    rank_address: str | None = option(
        None,
        "Distributed",
        "Wait here for ranks on other machines",
        details="torch: HOST:PORT of this machine, to which `octavo rank` on the others connects."
        " By default all ranks run on this machine.",
        metavar="HOST:PORT",
    )
    rank_secret: str | None = option(
        None,
        "Distributed",
        "Authenticate ranks by this secret",
        details="Without one, only ranks of this machine may join.",
        secret=True,
    )
    cpu_level: Literal[
        "auto", "portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"
    ] = option(
        "auto",
        "Backend",
        "Limit the CPU instructions used, e.g. avx2",
        details="To compare, or to get the numbers of another machine.",
    )
    threads: int | None = option(
        None,
        "Backend",
        "Use N compute threads in each process",
        details="The default is the physical cores that the process may use.",
        derived="the cores",
        common=True,
        low=1,
    )

    @property
    def num_ranks(self) -> int:
        """Number of processes of one engine."""
        return self.num_stage_ranks * self.pipeline_parallel_size

    @property
    def num_stage_ranks(self) -> int:
        """Number of processes of one pipeline stage, which synchronize within each step."""
        return self.tensor_parallel_size * self.expert_parallel_size

    @property
    def rank_option(self) -> tuple[str, int]:
        """Name and value of the option that makes ranks synchronize within a step."""
        if self.tensor_parallel_size == 1 < self.expert_parallel_size:
            return "expert_parallel_size", self.expert_parallel_size
        return "tensor_parallel_size", self.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options of data parallelism."""

    data_parallel_size: int = option(
        1,
        "Distributed",
        "Run N engines of the model behind one server",
        details="Each is a process with its own weights and KV cache; kv_cache_memory_bytes,"
        " swap_space, threads and max_num_seqs apply to each.",
        low=1,
        short="-dp",
    )
    enable_expert_parallel: bool = option(
        False,
        "Distributed",
        "Share the experts among data-parallel engines",
        details="native, with data_parallel_size. Each expert is in one engine, which computes its"
        " rows for all engines; they step together, idle ones too.",
    )
    routing_policy: Literal["kv", "least_tokens", "round_robin", "sticky"] = option(
        "kv",
        "Distributed",
        "Choose the engine of a request",
        details="kv: the soonest by queue, cached blocks and measured rate; least_tokens: the one"
        " with the fewest tokens; round_robin: each in turn; sticky: one for each tenant and prompt"
        " prefix.",
    )

    @property
    def num_expert_engines(self) -> int:
        """Number of engines that share experts; 1 if each engine has all experts."""
        return self.data_parallel_size if self.enable_expert_parallel else 1


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Options of weight offloading."""

    weights_memory_bytes: int | None = option(
        None,
        "Memory and KV cache",
        "Keep only this much of the weights in memory",
        details="e.g. 512MiB; native: the rest is read from weights_dir at each step.",
        derived="all",
        unit="bytes",
        low=1,
    )
    weights_dir: str | None = option(
        None,
        "Memory and KV cache",
        "Read the rest of the weights from a file here",
        details="With weights_memory_bytes. The weights are packed into the file once.",
    )
    weights_schedule: Literal["pinned", "layers"] = option(
        "pinned",
        "Experimental",
        "Choose how streamed weights are read",
        details="With weights_memory_bytes. pinned keeps a part and reads the rest product by"
        " product; layers reads whole layers in order and keeps nothing.",
    )
