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
        "Choose the backend",
        details="native: C++ kernels on the CPU; torch: PyTorch on any device; reference: NumPy in"
        " float64 (slow). The default is torch if there is a CUDA device, else native.",
        derived="from device",
        common=True,
    )
    device: Literal["cpu", "cuda"] | None = option(
        None, "Backend", "Choose the device (torch)", derived="cuda, else cpu"
    )
    attention_backend: Literal["auto", "triton", "sdpa"] = option(
        "auto",
        "Backend",
        "Choose attention kernels (torch)",
        details="sdpa: PyTorch's scaled_dot_product_attention; auto: triton on CUDA if installed,"
        " else sdpa.",
    )
    torch_kernels: Literal["auto", "plain", "triton"] = option(
        "auto",
        "Backend",
        "Choose kernels other than attention (torch)",
        details="For norms, gates, small matmuls with quantized weights, experts and sampling."
        " auto: triton on CUDA, else plain.",
    )
    enforce_eager: bool = option(False, "Backend", "Disable CUDA graphs (torch)")
    batch_invariant: bool = option(
        False,
        "Backend",
        "Make results independent of the batch (torch)",
        details="Tokens and logprobs of a request are then bitwise equal in any batch, as on the"
        " other backends. Slower.",
    )
    tensor_parallel_size: int = option(
        1,
        "Distributed",
        "Use N tensor-parallel ranks",
        details="Supported by native and torch. On CUDA each rank uses its own device.",
        common=True,
        low=1,
        short="-tp",
    )
    pipeline_parallel_size: int = option(
        1,
        "Distributed",
        "Use N pipeline stages",
        details="Supported by native and reference. Up to N steps are in flight.",
        low=1,
        short="-pp",
    )
    expert_parallel_size: int = option(
        1,
        "Distributed",
        "Use N expert-parallel ranks",
        details="Supported by native and torch. Each rank has whole experts; other weights are"
        " replicated.",
        low=1,
        short="-ep",
    )
    rank_address: str | None = option(
        None,
        "Distributed",
        "Listen on this address for other ranks",
        details="torch: HOST:PORT on this machine; start `octavo rank` on the other machines. By"
        " default all ranks run on this machine.",
        metavar="HOST:PORT",
    )
    rank_secret: str | None = option(
        None,
        "Distributed",
        "Authenticate ranks with this secret",
        details="Without a secret, only ranks on this machine can join.",
        secret=True,
    )
    cpu_level: Literal[
        "auto",
        "portable",
        "avx2",
        "avx2_vnni",
        "avx512",
        "avx512_vnni",
        "avx512_bf16",
        "amx",
        "neon",
        "neon_dotprod",
        "neon_i8mm",
    ] = option(
        "auto",
        "Backend",
        "Limit the CPU instructions used, e.g. avx2",
        details="For comparison, or to reproduce the results of another machine.",
    )
    threads: int | None = option(
        None,
        "Backend",
        "Use N compute threads in each process",
        details="The default is the number of physical cores available to the process.",
        derived="physical cores",
        common=True,
        low=1,
    )
    numa_bind_nodes: str | None = option(
        None,
        "Distributed",
        "Run on these NUMA nodes, e.g. 0,1",
        details="Native only. Ranks and data-parallel engines divide the nodes, and each allocates"
        " its memory on its own. off: bind no process. By default, several processes divide all"
        " nodes, and a single process uses all of them.",
        derived="all nodes",
        metavar="NODES",
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
        "Run N engine replicas behind one server",
        details="Each replica is a process with its own weights and KV cache;"
        " kv_cache_memory_bytes, swap_space, threads and max_num_seqs apply per replica.",
        low=1,
        short="-dp",
    )
    enable_expert_parallel: bool = option(
        False,
        "Distributed",
        "Distribute experts over data-parallel engines",
        details="Native only, with data_parallel_size. Each engine owns a part of the experts and"
        " computes them for all engines, so all engines step together.",
    )
    routing_policy: Literal["kv", "least_tokens", "round_robin", "sticky"] = option(
        "kv",
        "Distributed",
        "Choose how requests are routed to engines",
        details="kv: shortest expected time by queue, cached blocks and measured speed;"
        " least_tokens: fewest tokens; round_robin: in turn; sticky: by tenant and prompt prefix.",
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
        "Keep this much of the weights in memory",
        details="For example 512MiB. Native only: the rest is streamed from weights_dir at each"
        " step.",
        derived="all",
        unit="bytes",
        low=1,
    )
    weights_dir: str | None = option(
        None,
        "Memory and KV cache",
        "Stream weights from a file in this directory",
        details="Requires weights_memory_bytes. The file is written once.",
    )
    weights_schedule: Literal["pinned", "layers", "experts"] = option(
        "pinned",
        "Memory and KV cache",
        "Choose how streamed weights are read",
        details="Requires weights_memory_bytes. pinned: keep a part in memory and stream the rest"
        " matmul by matmul; layers: stream whole layers in order; experts: keep all other weights"
        " and the experts used most often in memory, and read the others when they are chosen.",
    )
