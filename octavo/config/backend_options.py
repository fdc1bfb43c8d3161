"""Options of what computes, where, on how many processes, and what it may leave out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from octavo.config.option import option


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """Options of what computes, and where."""

    backend: Literal["native", "torch", "reference"] | None = option(
        None,
        "what computes: native (C++ kernels), torch (any device PyTorch has) or reference (NumPy"
        " float64, slow); default torch where it has a CUDA device, else native",
    )
    device: Literal["cpu", "cuda"] | None = option(
        None, "where torch computes; default cuda where there is one, else cpu"
    )
    attention_backend: Literal["auto", "triton", "sdpa", "flashinfer"] = option(
        "auto",
        "torch: which kernels compute attention; sdpa: PyTorch's own, on any device; flashinfer:"
        " where it is installed, on CUDA; auto: triton on CUDA where it is installed, else sdpa",
    )
    torch_kernels: Literal["auto", "plain", "triton"] = option(
        "auto",
        "torch: what computes norms, gates, few rows' products with packed weights, experts and"
        " draws; auto: triton on CUDA, else plain",
    )
    enforce_eager: bool = option(False, "torch on CUDA: capture no decode steps as graphs")
    batch_invariant: bool = option(
        False,
        "torch: a request's tokens and logprobs are the same bits in any company, as they always"
        " are on the others; slower",
    )
    tensor_parallel_size: int = option(
        1,
        "native, torch: processes that share out the heads and widths of every layer; on CUDA each"
        " has a device of its own",
        low=1,
        short="-tp",
    )
    pipeline_parallel_size: int = option(
        1,
        "native, reference: processes that share out the layers and compute one behind another,"
        " with as many steps in flight",
        low=1,
        short="-pp",
    )
    expert_parallel_size: int = option(
        1,
        "native, torch: groups of ranks that share out the experts of every layer, whole ones each;"
        " every group computes all else",
        low=1,
        short="-ep",
    )
    rank_address: str | None = option(
        None,
        "torch: HOST:PORT of this machine to which the other ranks come from theirs (octavo rank);"
        " default they are processes of this machine",
    )
    rank_secret: str | None = option(
        None, "secret that these ranks share; without one they come from this machine only"
    )
    cpu_level: Literal[
        "auto", "portable", "avx2", "avx2_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"
    ] = option(
        "auto",
        "native: the instruction set that its kernels use, lower to compare or to have another"
        " machine's numbers",
    )
    threads: int | None = option(
        None,
        "compute threads of each process; default the physical cores this process may use",
        low=1,
    )

    @property
    def num_ranks(self) -> int:
        """Processes that compute one engine's model."""
        return self.num_stage_ranks * self.pipeline_parallel_size

    @property
    def num_stage_ranks(self) -> int:
        """Processes that compute one stage of the model, and meet within its steps."""
        return self.tensor_parallel_size * self.expert_parallel_size

    @property
    def meeting_option(self) -> tuple[str, int]:
        """Name and value of the option because of which ranks meet within a step."""
        if self.tensor_parallel_size == 1 < self.expert_parallel_size:
            return "expert_parallel_size", self.expert_parallel_size
        return "tensor_parallel_size", self.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Options of several engines of one model behind one front."""

    data_parallel_size: int = option(
        1,
        "engines of the model, each a process of its own with its weights and KV cache, which share"
        " out the requests; kv_cache_memory_bytes, swap_space, threads and max_num_seqs are each"
        " one's",
        low=1,
        short="-dp",
    )
    enable_expert_parallel: bool = option(
        False,
        "native, with data_parallel_size: each expert is in one of the engines alone, and computes"
        " the rows of all of them; they step together, those without work too",
    )
    routing_policy: Literal["kv", "least_tokens", "round_robin", "sticky"] = option(
        "kv",
        "which engine computes a request: kv, the soonest by queue, cached blocks and measured"
        " rate; the one with the fewest tokens; each in turn; or one for each tenant and beginning"
        " of a prompt",
    )

    @property
    def num_sharing(self) -> int:
        """Engines that share their experts; 1 where each has all of them."""
        return self.data_parallel_size if self.enable_expert_parallel else 1


@dataclass(frozen=True, slots=True)
class OffloadOptions:
    """Options of weights that are not all in memory."""

    weights_memory_bytes: int | None = option(
        None,
        "native: most memory of the weights, e.g. 512MiB; the others are read from weights_dir for"
        " each step; default all are in memory",
        unit="bytes",
        low=1,
    )
    weights_dir: str | None = option(
        None,
        "with weights_memory_bytes: directory of the file that weights are packed into once and"
        " read from, on a disk",
    )
    weights_schedule: Literal["pinned", "layers"] = option(
        "pinned",
        "with weights_memory_bytes: keep a part and read the rest product by product; or read whole"
        " layers in order and keep nothing",
    )
    neuron_cache_bytes: int | None = option(
        None,
        "with weights_memory_bytes, of which it is a part, and ffn_sparsity: memory of feed-forward"
        " weights that are read neuron by neuron, those that a token uses (LLM in a Flash); takes"
        " weights in int8",
        unit="bytes",
        low=1,
    )
    neuron_window: int = option(
        0,
        "with neuron_cache_bytes: tokens for which a neuron stays in memory that none of them uses;"
        " 0: as long as there is room",
        low=0,
    )
    weights_lookahead: int = option(
        0,
        "with neuron_cache_bytes and sparsity_predictor: layers ahead whose neurons are guessed,"
        " and read while the disk is idle (ActiveFlow); no result depends on it",
        low=0,
    )
    hot_neurons: str | None = option(
        None,
        "with neuron_cache_bytes: file of `octavo calibrate` for the same weights; the neurons that"
        " its text used most stay in half of that memory for good (PowerInfer)",
    )


@dataclass(frozen=True, slots=True)
class SparsityOptions:
    """Options of work that need not be done."""

    ffn_sparsity: str | None = option(
        None,
        "exact, native: read no weight of a feed-forward layer whose input is zero after a relu,"
        " where one or two requests decode; the results are the same bits. gate:SHARE, e.g."
        " gate:0.3: take that share of the gates of generated tokens for zero (CATS); needs a"
        " calibration and changes results",
    )
    activation_sparsity: float = option(
        0.0,
        "share of the inputs of each layer's products, up to 0.95, that are taken for zero, the"
        " smallest ones, in generated tokens (TEAL); needs a calibration and changes results",
        low=0,
    )
    activation_sparsity_plan: Literal["uniform", "greedy"] = option(
        "uniform",
        "whether each product has that share, or each layer has it on average, more where its"
        " output changes less",
    )
    calibration: str | None = option(
        None, "file of `octavo calibrate` for the same weights, which says what is small"
    )

    sparsity_predictor: str | None = option(
        None,
        "file of `octavo calibrate --predictor-rank` for the same weights: of generated tokens only"
        " the neurons are computed of which a low-rank predictor says, from the attention's input,"
        " that they add most to the layer's output (DejaVu); native takes weights in int8; changes"
        " results",
    )
    predicted_share: float = option(
        0.5, "with sparsity_predictor: share of each layer's neurons that are computed", low=0
    )

    kv_selection: Literal["speculated"] | None = option(
        None,
        "native, reference: generated tokens read, in all layers but the first two, the blocks of"
        " keys to which most of their attention goes, guessed from the layer before (InfiniGen);"
        " changes results",
    )
    kv_budget: float = option(
        0.3, "with kv_selection: share of a request's blocks of keys that a token reads", low=0
    )

    @property
    def gate_sparsity(self) -> float:
        """Share of gates that are taken for zero; NaN where the option is of no form."""
        if self.ffn_sparsity is None or not self.ffn_sparsity.startswith("gate:"):
            return 0.0
        try:
            return float(self.ffn_sparsity.removeprefix("gate:"))
        except ValueError:
            return math.nan

    @property
    def is_approximate(self) -> bool:
        """Whether generated tokens are computed otherwise than a prompt's."""
        return bool(
            self.activation_sparsity
            or self.gate_sparsity
            or self.sparsity_predictor
            or self.kv_selection
        )

    def numbers(self) -> list[Any]:
        """Returns what decides the numbers of generated tokens, beside the calibration."""
        thresholds = [self.activation_sparsity, self.activation_sparsity_plan, self.gate_sparsity]
        predicted = [] if self.sparsity_predictor is None else ["predicted", self.predicted_share]
        selected = [] if self.kv_selection is None else [self.kv_selection, self.kv_budget]
        return thresholds + predicted + selected

    @property
    def neuron_sparsity(self) -> float:
        """Share of a feed-forward layer's neurons that a predictor leaves out."""
        return 0.0 if self.sparsity_predictor is None else 1.0 - self.predicted_share

    @property
    def key_sparsity(self) -> float:
        """Share of the blocks of keys that generated tokens do not read."""
        return 0.0 if self.kv_selection is None else 1.0 - self.kv_budget
