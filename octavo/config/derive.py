"""Fills in the options that depend on the model or the machine; returns a new config and changes
none.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from octavo.config.engine_config import (
    BackendChoice,
    CacheOptions,
    EngineConfig,
    FleetOptions,
    ObserveOptions,
    OffloadOptions,
    SchedulerOptions,
    SparsityOptions,
    TransferOptions,
)
from octavo.config.paths import public_name
from octavo.errors import ConfigError

MIN_STALL_S = 1.0
"""Least stall_timeout, in seconds: every step reports progress several times in it."""

NUM_STEPS = 8
"""Default number of decode steps in one call; more would gain little, as Python's share of one is
already paid for by eight.
"""

LOGGED_ONLY = '{"enable_kv_cache_events": true, "publisher": "null"}'
"""Value of kv_events_config of engines whose block events their own front reads."""

MAX_ENGINES = 64
"""Most engines behind one front."""

BackendName = Literal["native", "torch", "reference"]

TORCH_ONLY = ("device", "attention_backend", "torch_kernels", "enforce_eager")
NATIVE_ONLY = ("cpu_level",)
"""Options that mean nothing elsewhere. The other backends are batch-invariant as they are."""


SENT_TOKENS = 512
"""Tokens of a prompt that an engine with the role prefill computes in a step, by default."""

TRANSFER = ("role", "prefill_peer", "kv_transfer_address", "kv_transfer_secret")
"""Options that mean nothing without kv_transfer."""


def derive(
    config: EngineConfig,
    *,
    model_context_tokens: int,
    num_threads: int,
    backend: BackendName = "native",
) -> EngineConfig:
    """Returns a config with max_model_len from the model, threads and backend from the machine and
    the served name from the model's; values that were given stay.

    Raises ConfigError where options do not go together.
    """
    config = replace(
        config, backend=replace(config.backend, backend=config.backend.backend or backend)
    )
    _check(config)
    _check_adapters(config)
    _check_draws(config)
    _check_speculation(config)
    return replace(
        config,
        cache=_with_events(config),
        model=replace(
            config.model,
            max_model_len=_max_model_len(config.model.max_model_len, model_context_tokens),
            served_model_name=config.model.served_model_name or public_name(config.model.model),
        ),
        scheduler=replace(
            config.scheduler,
            num_scheduler_steps=_num_scheduler_steps(config),
            long_prefill_token_threshold=_long_prefill_token_threshold(config),
        ),
        backend=replace(
            config.backend,
            threads=config.backend.threads or max(1, num_threads // _num_processes(config)),
        ),
    )


def _with_events(config: EngineConfig) -> CacheOptions:
    """Returns the cache's options: an engine that has prompts computed elsewhere tells its front
    what it has in its own cache.
    """
    if config.transfer.prefill_peer and config.cache.kv_events_config is None:
        return replace(config.cache, kv_events_config=LOGGED_ONLY)
    return config.cache


def _check_draws(config: EngineConfig) -> None:
    """Raises ConfigError where tokens cannot be drawn as the options say."""
    draws = config.draws
    given = {"logits_processors": draws.processors, "structured_close": draws.structured_close}
    for name, value in given.items():
        if value and config.backend.backend == "torch":
            raise ConfigError(
                f"{name}: allowed with the native and the reference backend, got 'torch'",
                hint=f"set backend to native, or leave {name} out",
            )


def _check_speculation(config: EngineConfig) -> None:
    """Raises ConfigError where the options of speculation contradict each other or others."""
    options = config.scheduler
    if (options.spec_method == "draft_model") != (options.spec_model is not None):
        raise ConfigError(
            f"spec_model: got {options.spec_model} with spec_method {options.spec_method}; the"
            " method draft_model and a spec_model belong together",
            hint="name both, or neither",
        )
    if options.spec_model is None:
        return
    others = {
        "tensor_parallel_size": config.backend.tensor_parallel_size > 1,
        "weights_memory_bytes": config.offload.weights_memory_bytes is not None,
        "kv_transfer": config.transfer.kv_transfer is not None,
        "kv_cache": not config.cache.kv_cache,
    }
    for name, is_given in others.items():
        if is_given:
            raise ConfigError(
                f"spec_model: got {options.spec_model}, which is not allowed beside {name}",
                hint=f"leave {name} or spec_model out",
            )


def _num_processes(config: EngineConfig) -> int:
    """Returns the number of processes that share the machine's threads."""
    return config.backend.num_ranks * config.fleet.data_parallel_size


MAX_LORA_RANK = 1024


def _check_adapters(config: EngineConfig) -> None:
    """Raises ConfigError where the options of adapters contradict each other."""
    lora = config.lora
    if not lora.enable_lora:
        return
    if lora.max_lora_rank > MAX_LORA_RANK:
        raise ConfigError(
            f"max_lora_rank: got {lora.max_lora_rank}, allowed is at most {MAX_LORA_RANK}"
        )
    if lora.max_cpu_loras is not None and lora.max_cpu_loras < lora.max_loras:
        raise ConfigError(
            f"max_cpu_loras: got {lora.max_cpu_loras}, allowed is at least max_loras,"
            f" {lora.max_loras}"
        )
    if config.backend.tensor_parallel_size > 1:
        raise ConfigError(
            "enable_lora: adapters are for one rank, got tensor_parallel_size"
            f" {config.backend.tensor_parallel_size}",
            hint="merge the adapter into the model",
        )


def for_whole_texts(config: EngineConfig) -> EngineConfig:
    """Returns the config of a model that reads each text whole, in one step, and keeps no KV
    beyond it: prompts are not chunked, and no prefix of one is found again.
    """
    return replace(
        config,
        scheduler=replace(config.scheduler, enable_chunked_prefill=False),
        cache=replace(config.cache, enable_prefix_caching=False),
    )


def for_encoder(config: EngineConfig, max_input_len: int) -> EngineConfig:
    """Returns the config of a decoder behind an encoder, whose longest input has `max_input_len`
    rows: each input is encoded whole, in one step, and no prefix is found again. ConfigError names
    an option that asks for what such a model cannot do.
    """
    usual = EngineConfig()
    for group, names in (
        ("cache", ("kv_cache", "kv_layout", "prefix_cache_dir", "kv_offloading_size")),
        ("transfer", ("kv_transfer",)),
        ("backend", ("tensor_parallel_size", "pipeline_parallel_size")),
        ("offload", ("weights_memory_bytes",)),
        ("lora", ("enable_lora",)),
    ):
        for name in names:
            given, allowed = (getattr(getattr(one, group), name) for one in (config, usual))
            if given != allowed:
                raise ConfigError(
                    f"{name}: got {given}, but the model is a decoder behind an encoder; allowed is"
                    f" {allowed}",
                    hint=f"leave {name} out",
                )
    if config.scheduler.spec_method == "draft_model" or config.model.quantization == "int4":
        name = "spec_method" if config.scheduler.spec_method == "draft_model" else "quantization"
        raise ConfigError(
            f"{name}: got {'draft_model' if name == 'spec_method' else 'int4'}, which is for"
            " decoders alone; the model is a decoder behind an encoder",
            hint=f"leave {name} out",
        )
    wanted = config.model.max_encoder_len
    if wanted is not None and wanted > max_input_len:
        raise ConfigError(
            f"max_encoder_len: got {wanted}, allowed is at most the model's, {max_input_len}",
            hint="leave max_encoder_len out",
        )
    max_encoder_len = wanted or max_input_len
    if config.scheduler.max_num_batched_tokens <= max_encoder_len:
        raise ConfigError(
            f"max_num_batched_tokens: got {config.scheduler.max_num_batched_tokens}, but an input"
            f" of {max_encoder_len} rows is encoded in one step, with a token behind it",
            hint=f"raise it to {max_encoder_len + 1}, or lower max_encoder_len",
        )
    return replace(
        config,
        model=replace(config.model, max_encoder_len=max_encoder_len),
        cache=replace(config.cache, enable_prefix_caching=False),
    )


def check_states(config: EngineConfig) -> None:
    """Raises ConfigError where an option asks for what a model with recurrent states cannot do."""
    backend, method = config.backend, config.scheduler.spec_method
    if method is not None and backend.backend == "torch" and backend.batch_invariant:
        raise ConfigError(
            f"spec_method: got {method} with batch_invariant on torch, where the rows of a guess"
            " are steps of their own and a recurrent state cannot return behind them",
            hint="leave spec_method or batch_invariant out",
        )


def _long_prefill_token_threshold(config: EngineConfig) -> int:
    """Returns the most tokens of a prompt in a step: fewer where the blocks of one step leave while
    the next is computed.
    """
    given = config.scheduler.long_prefill_token_threshold
    sends = config.transfer.kv_transfer is not None and config.transfer.role == "prefill"
    return SENT_TOKENS if sends and not given else given


def _num_scheduler_steps(config: EngineConfig) -> int:
    given, backend = config.scheduler.num_scheduler_steps, config.backend.backend
    if given not in (None, 1) and backend != "native":
        raise ConfigError(
            f"num_scheduler_steps: got {given}, allowed is 1 with the backend {backend}",
            hint="leave it out, or use native",
        )
    if given not in (None, 1) and config.backend.num_ranks > 1:
        name, size = _parallel_size(config)
        raise ConfigError(
            f"num_scheduler_steps: got {given}, allowed is 1 with {name} {size}",
            hint="leave it out: only the first rank would know where several steps end",
        )
    is_several = backend == "native" and config.backend.num_ranks == 1
    return given or (NUM_STEPS if is_several else 1)


def _check(config: EngineConfig) -> None:
    """Raises ConfigError where options do not go together, or a value is out of its range."""
    _check_tenants(config.scheduler)
    _check_prefill(config.scheduler)
    _check_prefix_cache(config.cache)
    _check_transfer(config)
    _check_observe(config.observe)
    _check_layout(config.cache)
    if config.scheduler.async_scheduling == "on" and (why := against_async_scheduling(config)):
        raise ConfigError(
            f"async_scheduling: got 'on', but {why}", hint="leave async_scheduling at auto"
        )
    _check_backend(config.backend)
    _check_offload(config)
    _check_sparsity(config)
    if config.model.quantization == "fp8" and config.backend.backend == "native":
        hint = "use int8, which is the more exact, or set backend to torch"
        raise ConfigError(
            "quantization: fp8 is for the torch and reference backends, got 'native'", hint=hint
        )
    _check_ranks(config)
    _check_fleet(config)
    if not 0 < config.cache.gpu_memory_utilization <= 1:
        got = f"gpu_memory_utilization: got {config.cache.gpu_memory_utilization:g}"
        raise ConfigError(f"{got}, allowed is a share above 0 and at most 1")
    if config.scheduler.watermark >= 1:
        got = f"watermark: got {config.scheduler.watermark:g}"
        raise ConfigError(f"{got}, allowed is a share below 1")


def _check_tenants(options: SchedulerOptions) -> None:
    tenant_weights(options)
    of_tenants = options.tenant_weight or options.max_num_seqs_per_tenant is not None
    if options.scheduling_policy != "fair" and of_tenants:
        got = f"got {options.scheduling_policy!r}"
        raise ConfigError(
            f"scheduling_policy: {got}, but tenants have weights or limits",
            hint="set scheduling_policy to fair",
        )


def _check_prefill(options: SchedulerOptions) -> None:
    if options.scheduler_delay_factor and options.enable_chunked_prefill:
        raise ConfigError(
            f"scheduler_delay_factor: got {options.scheduler_delay_factor:g}, allowed is 0 with"
            " chunked prefill",
            hint="set enable_chunked_prefill to False, or leave scheduler_delay_factor out: chunks"
            " hold up no request",
        )
    if options.itl_target_ms is not None and not options.enable_chunked_prefill:
        raise ConfigError(
            f"itl_target_ms: got {options.itl_target_ms:g}, allowed only with chunked prefill",
            hint="leave enable_chunked_prefill as it is: prompts that stay whole cannot be cut to"
            " fit a time",
        )
    if options.long_prefill_token_threshold and not options.enable_chunked_prefill:
        raise ConfigError(
            "long_prefill_token_threshold: allowed only with chunked prefill",
            hint="leave enable_chunked_prefill as it is",
        )


def _check_observe(options: ObserveOptions) -> None:
    if options.record == "":
        raise ConfigError("record: got an empty name, allowed is the path of a file")
    if 0 < options.stall_timeout < MIN_STALL_S:
        raise ConfigError(
            f"stall_timeout: got {options.stall_timeout:g}, allowed is 0 (off) or at least"
            f" {MIN_STALL_S:g} second"
        )


def _check_backend(options: BackendChoice) -> None:
    usual = BackendChoice()
    given = [name for name in TORCH_ONLY if getattr(options, name) != getattr(usual, name)]
    if given and options.backend != "torch":
        raise ConfigError(
            f"{given[0]}: allowed only with the torch backend, got {options.backend!r}",
            hint="set backend to torch",
        )
    native_only = [name for name in NATIVE_ONLY if getattr(options, name) != getattr(usual, name)]
    if native_only and options.backend != "native":
        raise ConfigError(
            f"{native_only[0]}: allowed only with the native backend, got {options.backend!r}",
            hint="set backend to native",
        )


def _check_offload(config: EngineConfig) -> None:
    options, usual = config.offload, OffloadOptions()
    if options.weights_memory_bytes is None:
        for name in ("weights_dir", "weights_schedule"):
            if getattr(options, name) != getattr(usual, name):
                raise ConfigError(
                    f"{name}: allowed only with weights_memory_bytes",
                    hint="set weights_memory_bytes to the memory that weights may take",
                )
        return
    if config.backend.backend != "native":
        raise ConfigError(
            "weights_memory_bytes: allowed only with the native backend, got"
            f" {config.backend.backend!r}",
            hint="set backend to native, or leave weights_memory_bytes out",
        )
    if not options.weights_dir:
        raise ConfigError(
            "weights_memory_bytes: allowed only with weights_dir",
            hint="name a directory on a disk with room for the model's weights",
        )


MAX_SPARSITY = 0.95
"""Largest share of inputs or gates that may be taken for zero."""


def _check_sparsity(config: EngineConfig) -> None:
    """Raises ConfigError where work is to be left out that cannot be, or not like this."""
    options, usual, backend = config.sparsity, SparsityOptions(), config.backend.backend
    ffn = options.ffn_sparsity
    if ffn not in (None, "exact") and not 0 < options.gate_sparsity <= MAX_SPARSITY:
        raise ConfigError(
            f"ffn_sparsity: got {ffn!r}, allowed is 'exact' or gate:SHARE with a share above 0 and"
            f" at most {MAX_SPARSITY}, as 'gate:0.3'"
        )
    if not options.activation_sparsity <= MAX_SPARSITY:
        raise ConfigError(
            f"activation_sparsity: got {options.activation_sparsity:g}, allowed is 0 to"
            f" {MAX_SPARSITY}"
        )
    if ffn == "exact" and backend != "native":
        raise ConfigError(
            f"ffn_sparsity: allowed only with the native backend, got {backend!r}",
            hint="set backend to native",
        )
    name = "activation_sparsity" if options.activation_sparsity else "ffn_sparsity"
    if not options.is_approximate:
        for unused in ("calibration", "activation_sparsity_plan"):
            if getattr(options, unused) != getattr(usual, unused):
                raise ConfigError(
                    f"{unused}: allowed only with activation_sparsity or ffn_sparsity gate:SHARE",
                    hint=f"leave {unused} out",
                )
        return
    if backend == "torch":
        raise ConfigError(
            f"{name}: allowed with the native and the reference backend, got 'torch'",
            hint=f"set backend to native, or leave {name} out",
        )
    if config.backend.tensor_parallel_size > 1:
        raise ConfigError(
            f"{name}: allowed where tensor_parallel_size is 1, got"
            f" {config.backend.tensor_parallel_size}",
            hint=f"leave {name} out",
        )
    if not options.calibration:
        raise ConfigError(
            f"{name}: allowed only with a calibration",
            hint="make one: octavo calibrate MODEL --text FILE --out FILE",
        )


def against_async_scheduling(config: EngineConfig) -> str:
    """Returns why no step can be planned while another is computed, whatever the device; "" where
    none of the options stands against it.
    """
    if config.backend.backend != "torch":
        return f"the {config.backend.backend} backend computes where the plans are made"
    if config.backend.tensor_parallel_size > 1:
        return "ranks (tensor_parallel_size) carry out one step at a time"
    if config.scheduler.spec_method is not None:
        return "what is guessed (spec_method) follows from the last token"
    if not config.cache.kv_cache:
        return "without the KV cache (kv_cache) a step computes again what the one before has drawn"
    if config.scheduler.scheduler_delay_factor:
        return (
            "scheduler_delay_factor counts from the end of a step with a prompt, which must have"
            " come back"
        )
    return ""


def _check_ranks(config: EngineConfig) -> None:
    num_ranks = config.backend.tensor_parallel_size
    if config.backend.pipeline_parallel_size > 1:
        _check_stages(config)
    if num_ranks == 1:
        return
    if config.backend.backend == "reference":
        what = (
            f"tensor_parallel_size: got {num_ranks}, allowed only with the backends native and"
            " torch, got 'reference'"
        )
        raise ConfigError(what, hint="set backend to native, or leave tensor_parallel_size at 1")
    if config.offload.weights_memory_bytes is not None:
        what = (
            f"weights_memory_bytes: allowed only where tensor_parallel_size is 1, got {num_ranks}"
        )
        raise ConfigError(what, hint="more ranks hold more weights in memory")
    for name in ("prefix_cache_dir", "kv_offloading_size"):
        if getattr(config.cache, name) is not None:
            what = f"{name}: allowed only where tensor_parallel_size is 1, got {num_ranks}"
            raise ConfigError(what, hint=f"leave out {name}, or leave tensor_parallel_size at 1")


def _parallel_size(config: EngineConfig) -> tuple[str, int]:
    """Returns the option that shares a model out among processes, and its value."""
    backend = config.backend
    if backend.tensor_parallel_size > 1:
        return "tensor_parallel_size", backend.tensor_parallel_size
    return "pipeline_parallel_size", backend.pipeline_parallel_size


def _check_stages(config: EngineConfig) -> None:
    """Raises ConfigError for options that several stages cannot keep to."""
    got = f"pipeline_parallel_size: got {config.backend.pipeline_parallel_size}"
    if config.backend.backend == "torch":
        raise ConfigError(
            f"{got}, allowed only with the backends native and reference, got 'torch'",
            hint="set backend to native, or share out the heads: tensor_parallel_size",
        )
    usual = EngineConfig()
    for part, name in (
        ("backend", "tensor_parallel_size"),
        ("fleet", "data_parallel_size"),
        ("scheduler", "spec_method"),
        ("lora", "enable_lora"),
        ("offload", "weights_memory_bytes"),
        ("cache", "prefix_cache_dir"),
        ("cache", "kv_offloading_size"),
        ("cache", "kv_cache"),
        ("transfer", "kv_transfer"),
        ("sparsity", "ffn_sparsity"),
        ("sparsity", "activation_sparsity"),
    ):
        given = getattr(getattr(config, part), name)
        if given != getattr(getattr(usual, part), name):
            raise ConfigError(
                f"{got}, which is not allowed beside {name} {given}",
                hint=f"leave {name} out, or leave pipeline_parallel_size at 1",
            )


def _check_fleet(config: EngineConfig) -> None:
    num_engines, usual = config.fleet.data_parallel_size, FleetOptions()
    if num_engines == 1:
        if config.fleet.routing_policy != usual.routing_policy:
            raise ConfigError(
                f"routing_policy: got {config.fleet.routing_policy!r}, allowed only with several"
                " engines",
                hint="set data_parallel_size above 1, or leave routing_policy out",
            )
        return
    got = f"data_parallel_size: got {num_engines}"
    if num_engines > MAX_ENGINES:
        raise ConfigError(f"{got}, allowed is at most {MAX_ENGINES}")
    if config.backend.tensor_parallel_size > 1:
        raise ConfigError(
            f"{got}, allowed is 1 with tensor_parallel_size {config.backend.tensor_parallel_size}",
            hint="start a server for each group of ranks",
        )
    if config.transfer.kv_transfer is not None:
        raise ConfigError(
            f"{got}, allowed is 1 with kv_transfer", hint="start a server for each engine"
        )
    if config.backend.backend == "torch" and config.cache.kv_cache_memory_bytes is None:
        raise ConfigError(
            f"{got} on the torch backend without kv_cache_memory_bytes",
            hint="say how much memory each engine's KV cache takes",
        )


def _check_prefix_cache(cache: CacheOptions) -> None:
    for name in ("prefix_cache_dir", "kv_offloading_size"):
        if getattr(cache, name) is not None and not (
            cache.enable_prefix_caching and cache.kv_cache
        ):
            raise ConfigError(f"{name}: allowed only where the KV cache and prefix caching are on")


def _check_transfer(config: EngineConfig) -> None:
    options, usual = config.transfer, TransferOptions()
    if options.kv_transfer is None:
        given = [name for name in TRANSFER if getattr(options, name) != getattr(usual, name)]
        if given:
            raise ConfigError(
                f"{given[0]}: allowed only with kv_transfer", hint="set kv_transfer to zmq"
            )
        return
    if not (config.cache.enable_prefix_caching and config.cache.kv_cache):
        raise ConfigError("kv_transfer: allowed only where the KV cache and prefix caching are on")
    if config.cache.prefix_cache_dir is not None:
        raise ConfigError(
            "kv_transfer: allowed only without prefix_cache_dir",
            hint="let the engines that compute prompts keep them in memory (kv_transfer_size)",
        )
    if config.backend.tensor_parallel_size > 1:
        num_ranks = config.backend.tensor_parallel_size
        raise ConfigError(
            f"kv_transfer: allowed only where tensor_parallel_size is 1, got {num_ranks}"
        )
    if options.role == "decode" and not options.prefill_peer:
        raise ConfigError(
            "role: got 'decode' without a prefill_peer",
            hint="name the kv_transfer_address of each engine with role prefill",
        )
    if options.role == "prefill" and options.prefill_peer:
        raise ConfigError("role: got 'prefill' with a prefill_peer, allowed are decode and both")


def _check_layout(cache: CacheOptions) -> None:
    if cache.kv_layout == "virtual" and cache.enable_prefix_caching:
        what = (
            "kv_layout: virtual gives each request addresses of its own, prefix caching needs"
            " shared blocks"
        )
        raise ConfigError(
            what, hint="set enable_prefix_caching to False, or leave kv_layout at paged"
        )


def tenant_weights(options: SchedulerOptions) -> dict[str, float]:
    """Parses the options "NAME=WEIGHT"; returns the weights by name."""
    weights = {}
    for text in options.tenant_weight:
        name, _, weight = text.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = 0.0
        if not name or not 0 < weights[name] < math.inf:
            raise ConfigError(
                f"tenant_weight: got {text!r}, allowed is NAME=WEIGHT with a number above 0, such"
                " as alice=2"
            )
    return weights


def _max_model_len(wanted: int | None, model_context_tokens: int) -> int:
    if wanted is None:
        return model_context_tokens
    if wanted > model_context_tokens:
        raise ConfigError(
            f"max_model_len: got {wanted}, allowed is at most the model's context,"
            f" {model_context_tokens}"
        )
    if wanted < 2:
        raise ConfigError(
            f"max_model_len: got {wanted}, allowed is at least 2 (one prompt token, one new one)"
        )
    return wanted
