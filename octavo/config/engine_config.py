"""The engine's options: frozen, typed, each with the text its CLI flag and the docs show.

A field's name with dashes is its flag. `EngineConfig.from_options` takes them flat (LLM's keywords,
the CLI's flags) and refuses what it does not know. Names and defaults are vLLM's where they mean
the same. What depends on the model or the machine (None here) is derived in `config/derive.py`.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo.config.sizes import parse_bytes, parse_count
from octavo.errors import ConfigError, did_you_mean

DEFAULT_MODEL = "smollm2"
MAX_COUNT = (1 << 31) - 1
"""Most requests, tokens or threads that an option may name: arrays of them have 32-bit indices."""


def option(
    default: Any,
    text: str,
    *,
    unit: Literal["bytes", "count"] | None = None,
    low: float | None = None,
    short: str | None = None,
) -> Any:
    """Makes a field with its help text. `unit` lets texts such as "2GiB" or "8k" stand for numbers,
    `low` is the least value, `short` a short flag beside the long one.
    """
    return field(default=default, metadata={"help": text, "unit": unit, "low": low, "short": short})


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
    kv_cache: bool = option(
        True,
        "keep K and V; without, every step computes all of a request's tokens again (for"
        " comparison)",
    )


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
        " default 8 with native, else 1",
        low=1,
    )
    preemption_mode: Literal["auto", "swap", "recompute"] = option(
        "auto",
        "what happens to a request that gives up its KV blocks: to host memory, computed again, or"
        " the cheaper as measured",
    )
    async_scheduling: Literal["auto", "on", "off"] = option(
        "auto",
        "plan a step while the device computes the one before (torch); auto: on CUDA, where nothing"
        " speaks against it",
    )


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
        "torch: processes, each with a device of its own, that share out the heads and widths of"
        " every layer",
        low=1,
        short="-tp",
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
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    backend: BackendChoice = field(default_factory=BackendChoice)
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


@dataclass(frozen=True, slots=True)
class OptionField:
    """Place and type of one option, for what makes flags or documents of it."""

    section: str
    entry: Field[Any]
    type: Any

    @property
    def help(self) -> str:
        """Sentence that its flag and the documents show."""
        return str(self.entry.metadata["help"])

    @property
    def choices(self) -> tuple[str, ...]:
        """Texts that are allowed; () where it is not a choice."""
        inner = (
            [part for part in get_args(self.type) if part is not type(None)]
            if get_origin(self.type) is not Literal
            else [self.type]
        )
        return next((get_args(part) for part in inner if get_origin(part) is Literal), ())

    @property
    def is_list(self) -> bool:
        """Whether the option takes any number of texts."""
        return get_origin(self.type) is tuple

    @property
    def number(self) -> type[int] | type[float] | None:
        """Kind of number that it holds, if any."""
        kinds = get_args(self.type) or (self.type,)
        return int if int in kinds else float if float in kinds else None


def options_of(kind: type, section: str = "") -> dict[str, OptionField]:
    """Returns the options that are a dataclass's fields, by name."""
    hints = get_type_hints(kind)
    return {entry.name: OptionField(section, entry, hints[entry.name]) for entry in fields(kind)}


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


def convert(spec: OptionField, value: Any) -> Any:
    """Returns the value in the option's own type, or raises ConfigError. Texts stand for numbers,
    as a shell has them.
    """
    name, unit = spec.entry.name, spec.entry.metadata["unit"]
    if value is None:
        if spec.entry.default is None:
            return None
        raise ConfigError(f"{name}: got None, allowed is {_allowed(spec)}")
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, str) and unit:
        value = (parse_bytes if unit == "bytes" else parse_count)(value, name=name)
    elif isinstance(value, str) and spec.number is not None:
        value = _parse_number(value, spec.number)
    if spec.number is float and type(value) is int:
        value = float(value)
    if not _fits(spec, value):
        raise ConfigError(f"{name}: got {value!r}, allowed is {_allowed(spec)}")
    if (
        type(value) is int
        and unit != "bytes"
        and spec.entry.metadata["low"] is not None
        and value > MAX_COUNT
    ):
        raise ConfigError(f"{name}: got {value}, allowed is at most {MAX_COUNT:,}")
    return value


def _parse_number(text: str, kind: type[int] | type[float]) -> Any:
    """Returns the number that a text holds, or the text where it holds none."""
    try:
        return kind(text)
    except ValueError:
        return text


def _fits(spec: OptionField, value: Any) -> bool:
    if spec.choices:
        return value in spec.choices
    if spec.is_list:
        return isinstance(value, tuple) and all(isinstance(text, str) for text in value)
    kinds = get_args(spec.type) or (spec.type,)
    low = spec.entry.metadata["low"]
    return any(type(value) is kind for kind in kinds) and (low is None or value >= low)


def _allowed(spec: OptionField) -> str:
    if spec.choices:
        return " or ".join(map(repr, spec.choices))
    kinds = [
        kind.__name__ for kind in get_args(spec.type) or (spec.type,) if kind is not type(None)
    ]
    words = {"int": "a whole number", "str": "a text", "bool": "True or False", "float": "a number"}
    low = spec.entry.metadata["low"]
    return words[kinds[0]] + ("" if low is None else f" of at least {low}")
