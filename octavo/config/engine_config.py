"""The engine's options: frozen, typed, each with the text its CLI flag and the docs show.

A field's name with dashes is its flag. `EngineConfig.from_options` takes them flat (LLM's keywords,
the CLI's flags) and refuses what it does not know. Names and defaults are vLLM's where they mean
the same. What depends on the model or the machine (None here) is derived in `config/derive.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal

from octavo.config.option import OptionField, convert, option, options_of
from octavo.config.processors import ProcessorEntry, processor_entries
from octavo.errors import ConfigError, did_you_mean

DEFAULT_MODEL = "smollm2"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of the model, its numbers and its tokenizer."""

    model: str = option(
        DEFAULT_MODEL, "short name, local path (directory or .gguf) or Hugging Face repository"
    )
    tokenizer: str | None = option(None, "path of a tokenizer, where it is not the model's own")
    skip_tokenizer_init: bool = option(False, "load no tokenizer; prompts are token ids")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "precision of the arithmetic; auto keeps the file's"
    )
    load_format: Literal["auto", "dummy"] = option(
        "auto",
        "auto: the model's files; dummy: random weights, for which its config.json is enough (to"
        " measure speed and memory)",
    )
    quantization: Literal["int8", "int4", "fp8"] | None = option(
        None, "pack the weights at load; fp8 (e4m3) on torch and reference"
    )
    max_model_len: int | None = option(
        None, "longest context (prompt + output); default the model's", unit="count", low=1
    )
    max_encoder_len: int | None = option(
        None,
        "longest input of an encoder before a decoder, in its rows (a text's tokens, 50 a second of"
        " audio); default the model's",
        unit="count",
        low=1,
    )
    served_model_name: str | None = option(
        None, "name in the API; default the model as given, without folders"
    )
    chat_template: str | None = option(
        None, "a Jinja template, or the path of one, in place of the model's"
    )
    tool_call_parser: str | None = option(
        None,
        "format in which the model calls functions, e.g. hermes; default the chat template's",
    )
    reasoning_parser: str | None = option(
        None,
        "tags of the model's reasoning, e.g. qwen3, or none; default the chat template's",
    )
    classifier_from_token: str | None = option(
        None,
        "make a decoder a classifier whose score is the second token's logit less the first one's,"
        " e.g. no,yes for Qwen3-Reranker; default what modules.json says",
    )
    seed: int = option(0, "seed from which unseeded requests draw theirs")
    max_logprobs: int = option(20, "most alternatives a request may ask for", low=0)


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Options of the KV cache, on the device and off it."""

    kv_cache_memory_bytes: int | None = option(
        None,
        "memory of the KV cache, e.g. 2GiB; default a safe share of what is free",
        unit="bytes",
        low=1,
    )
    gpu_memory_utilization: float = option(
        0.92,
        "share of a GPU's memory taken in all, where kv_cache_memory_bytes is not given",
        low=0,
    )
    kv_cache_dtype: Literal["auto", "fp32", "bf16", "int8", "fp8"] = option(
        "auto",
        "precision of K and V; auto: the compute dtype's (native: bf16 where that is not fp32);"
        " int8, and fp8 (e4m3; torch, reference): a scale for each token and head",
    )
    kv_layout: Literal["paged", "virtual"] = option(
        "paged",
        "where blocks lie: anywhere; or virtual, each request's in a range of addresses of its own,"
        " without sharing (Linux)",
    )
    enable_prefix_caching: bool = option(True, "reuse the KV blocks of prompts that start alike")
    shared_prefix_attention: bool = option(
        True,
        "read blocks that several running requests share once for all of them (native; torch with"
        " triton)",
    )
    swap_space: int = option(
        1 << 30,
        "host memory for KV blocks of preempted requests, e.g. 4GiB, at most the KV cache's size;"
        " default 1GiB",
        unit="bytes",
        low=0,
    )
    kv_offloading_size: int | None = option(
        None,
        "host memory in which the prefix cache keeps blocks that left the device; default none,"
        " with prefix_cache_dir 1GiB",
        unit="bytes",
    )
    prefix_cache_dir: str | None = option(
        None,
        "directory in which the prefix cache outlives the engine; several engines may share it",
    )
    prefix_cache_size: int = option(
        10 << 30, "most bytes in prefix_cache_dir, e.g. 50GiB; default 10GiB", unit="bytes", low=1
    )
    kv_events_config: str | None = option(
        None,
        "JSON object of what is published of blocks that the prefix cache gains and loses, in"
        " vLLM's form and with its fields: enable_kv_cache_events, publisher, endpoint,"
        " replay_endpoint, topic, buffer_steps, hwm; and secret",
    )
    media_cache_tokens: int = option(
        8192,
        "rows of encoded images that are kept for images that come again, beside those that a step"
        " reads",
        low=0,
    )
    kv_cache: bool = option(
        True,
        "keep K and V; without, every step computes all of a request's tokens again (for"
        " comparison)",
    )


@dataclass(frozen=True, slots=True)
class TransferOptions:
    """Options of KV blocks that go from one engine to another."""

    kv_transfer: Literal["zmq", "mooncake"] | None = option(
        None,
        "how KV blocks go to other engines and come from them: zmq, in messages over TCP; mooncake,"
        " read out of memory by its transfer engine; default not",
    )
    role: Literal["prefill", "decode", "both"] = option(
        "both",
        "with kv_transfer: prefill computes prompts for other engines, decode has long prompts"
        " computed by its prefill_peers",
    )
    kv_transfer_address: str = option(
        "127.0.0.1:8998",
        "HOST:PORT where other engines ask for prompts; their blocks leave by the port above it",
    )
    prefill_peer: tuple[str, ...] = option(
        (), "HOST:PORT of an engine that computes prompts for this one; may be given several times"
    )
    kv_transfer_secret: str | None = option(
        None, "secret that these engines share; without one they meet on this machine only"
    )
    kv_transfer_min_tokens: int = option(
        256, "shortest prompt that is computed elsewhere", unit="count", low=1
    )
    kv_transfer_timeout: float = option(
        30.0, "seconds for which a prompt's blocks are waited for before it is computed here", low=1
    )
    kv_transfer_size: int = option(
        1 << 30, "most bytes of blocks kept for other engines; default 1GiB", unit="bytes", low=1
    )

    @property
    def computes_for_others(self) -> bool:
        """Whether other engines may have their prompts computed here."""
        return self.kv_transfer is not None and self.role != "decode"


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Options of the queue and of what runs together in a step."""

    max_num_batched_tokens: int = option(
        2048, "most tokens computed in one step", unit="count", low=1
    )
    itl_target_ms: float | None = option(
        None,
        "bound on what a running request waits between two tokens, in milliseconds, where decoding"
        " alone allows it: prompts are cut by the predicted time of a step",
        low=1,
    )
    max_num_seqs: int = option(128, "most requests running at once", low=1)
    max_num_queued_reqs: int = option(
        1024, "most requests waiting; beyond it a server answers 429", low=1
    )
    max_num_queued_tokens: int | None = option(
        None, "most prompt tokens waiting; beyond it a server answers 429", unit="count", low=1
    )
    max_predicted_ttft_s: float | None = option(
        None,
        "predicted seconds to a request's first token, by the queue and by measured costs, beyond"
        " which a server answers 429",
        low=0,
    )
    max_predicted_tpot_s: float | None = option(
        None,
        "predicted seconds between a request's tokens beyond which a server answers 429",
        low=0,
    )
    max_prompt_len: int | None = option(
        None, "longest prompt taken; default what the context has room for", unit="count", low=1
    )
    scheduling_policy: Literal["fcfs", "priority", "fair"] = option(
        "fcfs",
        "who starts first: by arrival; by priority, lower first; or the tenant served least for its"
        " weight",
    )
    tenant_weight: tuple[str, ...] = option(
        (), "NAME=WEIGHT of a tenant under the fair policy, else 1; may be given several times"
    )
    max_num_seqs_per_tenant: int | None = option(
        None, "most requests of one tenant running under the fair policy", low=1
    )
    watermark: float = option(
        0.01, "share of the KV blocks that stay free when a request starts beside others", low=0
    )
    enable_chunked_prefill: bool = option(
        True, "compute long prompts in pieces, beside the requests that generate"
    )
    long_prefill_token_threshold: int = option(
        0,
        "most tokens of one prompt in a step, so that others start beside it; default 0, as many as"
        " the step has",
        unit="count",
        low=0,
    )
    scheduler_delay_factor: float = option(
        0.0,
        "without chunked prefill: after a step with a prompt, so many times as long without one,"
        " for those that generate",
        low=0,
    )
    batching: Literal["continuous", "static", "dynamic", "none"] = option(
        "continuous",
        "start requests at any step, or (to compare) in batches that run to their end: as they"
        " wait, when full, singly",
    )
    batch_window_ms: int = option(50, "how long dynamic batching waits for a batch to fill", low=0)
    num_scheduler_steps: int | None = option(
        None,
        "most decode steps computed for one plan, in one native call, while no request waits;"
        " default 8 with native on one rank, else 1",
        low=1,
    )
    preemption_mode: Literal["auto", "swap", "recompute"] = option(
        "auto",
        "what happens to a request that gives up its KV blocks: to host memory, computed again, or"
        " the cheaper as measured",
    )
    spec_method: Literal["ngram", "suffix", "draft_model", "grammar"] | None = option(
        None,
        "guess tokens and verify several in one step, where that is measured to pay: ngram, what"
        " followed the last few tokens before; suffix, the same of the longest match; draft_model,"
        " what the model of spec_model would write; grammar, only text that a form leaves no choice"
        " of, which the others guess too; no token changes",
    )
    spec_model: str | None = option(
        None,
        "a smaller model with the same tokens that guesses them (spec_method draft_model); a name"
        " or a path, as for model",
    )
    spec_tokens: int = option(8, "most tokens of one guess", low=1)
    async_scheduling: Literal["auto", "on", "off"] = option(
        "auto",
        "plan a step while the device computes the one before (torch); auto: on CUDA, where nothing"
        " speaks against it",
    )


@dataclass(frozen=True, slots=True)
class DrawOptions:
    """Options of how tokens are drawn."""

    logits_processors: tuple[str, ...] = option(
        (),
        "NAME=MODULE:FUNCTION that requests may name to change their logits (native, reference);"
        " may be given several times",
    )
    logits_processor_timeout: float = option(
        1.0, "seconds after which a logits processor's call fails its request", low=0.001
    )

    structured_close: bool = option(
        False,
        "complete an answer of a given form by a short way before its length ends, where enough"
        " tokens remain (native, reference); changes its last tokens",
    )

    @property
    def processors(self) -> list[ProcessorEntry]:
        """The functions that requests may name; ConfigError where the option is no list of them."""
        return processor_entries(self.logits_processors)


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """Options of adapters (LoRA) that requests may name."""

    enable_lora: bool = option(False, "take adapters (LoRA, as PEFT saves them), by request")
    max_loras: int = option(8, "most adapters on the device, in use or not", low=1)
    max_cpu_loras: int | None = option(
        None, "most adapters in host memory; default max_loras, and no fewer", low=1
    )
    max_lora_rank: int = option(64, "highest rank of an adapter's matrices, at most 1024", low=1)
    lora_dtype: Literal["auto", "float32", "bfloat16"] = option(
        "auto", "precision that adapters are kept in; auto: the file's own"
    )

    @property
    def num_slots(self) -> int:
        """Adapters on the device; 0 where none are taken."""
        return self.max_loras if self.enable_lora else 0

    @staticmethod
    def slots_in(options: Mapping[str, Any]) -> int:
        """Returns `num_slots` by an engine's flat options."""
        return EngineConfig.from_options(**options).lora.num_slots


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
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @staticmethod
    def lanes_in(options: Mapping[str, Any]) -> int:
        """Returns the steps in flight at once for which requests are shared out, by an engine's
        flat options.
        """
        return EngineConfig.from_options(**options).backend.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class MediaOptions:
    """Options of the images that prompts may hold."""

    max_images: int = option(16, "most images of one prompt", low=1)
    max_image_tokens: int = option(
        2048, "most tokens of an image that keeps its shape; larger ones are scaled down", low=1
    )
    max_image_bytes: int = option(
        20 << 20, "most bytes of a file with an image; default 20MiB", unit="bytes", low=1
    )
    max_image_pixels: int = option(
        50_000_000, "most pixels of an image as it is sent", unit="count", low=1
    )
    media_dir: str | None = option(
        None, "folder whose files prompts may name as images; default none may be named"
    )
    allow_media_urls: bool = option(
        False, "fetch images from the http and https addresses that prompts name"
    )


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
    routing_policy: Literal["kv", "least_tokens", "round_robin", "sticky"] = option(
        "kv",
        "which engine computes a request: kv, the soonest by queue, cached blocks and measured"
        " rate; the one with the fewest tokens; each in turn; or one for each tenant and beginning"
        " of a prompt",
    )


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
        return bool(self.activation_sparsity or self.gate_sparsity)

    def numbers(self) -> list[Any]:
        """Returns what decides the numbers of generated tokens, beside the calibration."""
        return [self.activation_sparsity, self.activation_sparsity_plan, self.gate_sparsity]

    @staticmethod
    def is_approximate_in(options: Mapping[str, Any]) -> bool:
        """Returns `is_approximate` by an engine's flat options."""
        return EngineConfig.from_options(**options).sparsity.is_approximate


@dataclass(frozen=True, slots=True)
class ObserveOptions:
    """Options of recording and watching an engine."""

    record: str | None = option(
        None,
        "file that every request, plan and result is written to, for `octavo replay`; overwritten",
    )
    stall_timeout: float = option(
        60.0,
        "seconds in which a step must get ahead: a server's engine that hangs is replaced, and what"
        " hung it fails; 0 waits forever",
        low=0,
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All options of one engine."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    transfer: TransferOptions = field(default_factory=TransferOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    draws: DrawOptions = field(default_factory=DrawOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    backend: BackendChoice = field(default_factory=BackendChoice)
    fleet: FleetOptions = field(default_factory=FleetOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    sparsity: SparsityOptions = field(default_factory=SparsityOptions)
    observe: ObserveOptions = field(default_factory=ObserveOptions)

    @staticmethod
    def from_options(**options: Any) -> EngineConfig:
        """Makes a config from flat names, e.g. `from_options(model="smollm2", threads=2)`;
        ConfigError names an unknown or bad one.
        """
        known = option_fields()
        for name in options:
            if name not in known:
                raise _unknown(name, list(known))
        parts = {}
        for section in fields(EngineConfig):
            given = {
                name: convert(known[name], options[name])
                for name in options
                if known[name].section == section.name
            }
            parts[section.name] = replace(_default(section), **given)
        return EngineConfig(**parts)

    def to_options(self) -> dict[str, Any]:
        """Returns the flat options of which `from_options` makes the same config."""
        sections = [getattr(self, section.name) for section in fields(self)]
        return {
            entry.name: getattr(section, entry.name)
            for section in sections
            for entry in fields(section)
        }


def option_fields() -> dict[str, OptionField]:
    """Returns every option by its flat name, in order."""
    found: dict[str, OptionField] = {}
    for section in fields(EngineConfig):
        found |= options_of(type(_default(section)), section.name)
    return found


def _default(section: Field[Any]) -> Any:
    assert section.default_factory is not MISSING
    return section.default_factory()


def _unknown(name: str, known: list[str]) -> ConfigError:
    return ConfigError(f"unknown option {name!r}", hint=did_you_mean(name, known))
