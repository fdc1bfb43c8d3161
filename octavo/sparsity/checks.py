"""Validates the sparsity options."""

from __future__ import annotations

from octavo.api.errors import ConfigError
from octavo.config.config_hooks import transfer_option
from octavo.config.engine_config import EngineConfig
from octavo.config.scheduler_options import PROGRAM_METHODS
from octavo.config.sizes import format_bytes
from octavo.sparsity.options import (
    KvSpillOptions,
    NeuronOptions,
    PrefixWeighingOptions,
    SparsityOptions,
)

MAX_SPARSITY = 0.95
"""Maximum fraction of inputs or gates that may be zeroed."""

MAX_LOOKAHEAD = 4
"""Maximum number of layers to predict ahead."""

MIN_LOAD = 0.05
"""Minimum fraction of a stored prefix's blocks that may be loaded."""

AGAINST_STAGES = ("ffn_sparsity", "activation_sparsity", "sparsity_predictor", "kv_selection")
"""Options that are not supported with pipeline parallelism."""
AGAINST_SHARED_EXPERTS = ("ffn_sparsity", "activation_sparsity")
"""Options that are not supported with expert-parallel engines."""


def check_sparsity(config: EngineConfig) -> None:
    """Raises ConfigError if a sparsity option is out of range or incompatible with another."""
    _check_importance(config)
    _check_spill(config)
    _check_neurons(config)
    _check_activations(config)
    _check_processes(config)


def _check_processes(config: EngineConfig) -> None:
    """Raises ConfigError for options that pipeline or expert parallelism does not support."""
    options, defaults = config.of(SparsityOptions), SparsityOptions()
    num_stages = config.backend.pipeline_parallel_size
    for name in AGAINST_STAGES if num_stages > 1 else ():
        if (value := getattr(options, name)) != getattr(defaults, name):
            raise ConfigError(
                f"pipeline_parallel_size: got {num_stages}, not supported with {name} {value}",
                hint=f"remove {name}, or set pipeline_parallel_size to 1",
            )
    for name in AGAINST_SHARED_EXPERTS if config.fleet.num_expert_engines > 1 else ():
        if (value := getattr(options, name)) != getattr(defaults, name):
            raise ConfigError(
                f"enable_expert_parallel: not supported with {name} {value}",
                hint=f"remove {name}, or set enable_expert_parallel to False",
            )


def _check_importance(config: EngineConfig) -> None:
    """Raises ConfigError if prefix_cache_policy importance or prefix_cache_load cannot be used."""
    options, defaults = config.of(PrefixWeighingOptions), PrefixWeighingOptions()
    if not options.weighs_prefixes:
        if options.prefix_cache_load != defaults.prefix_cache_load:
            raise ConfigError(
                "prefix_cache_load: requires prefix_cache_policy importance",
                hint="set prefix_cache_policy to importance, or remove prefix_cache_load",
            )
        return
    if not MIN_LOAD <= options.prefix_cache_load + 1e-9 <= 1 + 1e-9:
        raise ConfigError(
            f"prefix_cache_load: got {options.prefix_cache_load:g}, expected {MIN_LOAD:g} to 1"
        )
    backend, cache = config.backend, config.cache
    sparsity = config.of(SparsityOptions)
    against = {
        "without prefix_cache_dir": cache.prefix_cache_dir is None,
        "with the backend torch": backend.backend == "torch",
        f"with {backend.rank_option[0]}": backend.num_stage_ranks > 1,
        "with expert-parallel engines": config.fleet.num_expert_engines > 1,
        f"with {transfer_option(config)}": transfer_option(config) != "",
        "with spec_method": config.scheduler.uses_speculation,
        "with weights_memory_bytes": config.offload.weights_memory_bytes is not None,
        "with sparsity_predictor": sparsity.sparsity_predictor is not None,
        "with kv_selection": sparsity.kv_selection is not None,
        "with enable_lora": config.lora.enable_lora,
        f"with kv_cache_dtype {cache.kv_cache_dtype}": cache.kv_cache_dtype
        not in ("auto", "fp32", "bf16"),
    }
    for where, is_so in against.items():
        if is_so:
            raise ConfigError(
                f"prefix_cache_policy: got importance, expected lru {where}",
                hint="remove prefix_cache_policy",
            )


def _check_spill(config: EngineConfig) -> None:
    """Raises ConfigError if the KV spill options are invalid or incomplete."""
    options, cache = config.of(KvSpillOptions), config.cache
    if options.kv_spill_dir is None:
        values = {
            "kv_spill_bytes": options.kv_spill_bytes,
            "kv_spill_ahead": options.kv_spill_ahead,
        }
        for name, value in values.items():
            if value:
                raise ConfigError(
                    f"{name}: requires kv_spill_dir",
                    hint="use a directory on a disk with enough space for the KV cache",
                )
        return
    missing = {
        "kv_spill_bytes": (options.kv_spill_bytes, "set the maximum size of the file"),
        "kv_cache_memory_bytes": (
            cache.kv_cache_memory_bytes,
            "set the amount that stays in memory",
        ),
        "kv_selection": (
            config.of(SparsityOptions).kv_selection,
            "set kv_selection to speculated: KV spilling requires layers that select their keys",
        ),
    }
    for name, (wanted, hint) in missing.items():
        if wanted is None:
            raise ConfigError(f"kv_spill_dir: requires {name}", hint=hint)
    against = {
        f"with the backend {config.backend.backend}": config.backend.backend != "native",
        "with kv_layout virtual": cache.kv_layout == "virtual",
        "without a kv_cache": not cache.kv_cache,
        f"with {transfer_option(config)}": transfer_option(config) != "",
        "with expert-parallel engines": config.fleet.num_expert_engines > 1,
        f"with spec_method {config.scheduler.spec_method}": (
            config.scheduler.spec_method in PROGRAM_METHODS
        ),
    }
    for where, is_so in against.items():
        if is_so:
            raise ConfigError(
                f"kv_spill_dir: not supported {where}, got {options.kv_spill_dir}",
                hint="remove kv_spill_dir",
            )


def _check_neurons(config: EngineConfig) -> None:
    options, sparsity = config.of(NeuronOptions), config.of(SparsityOptions)
    if options.neuron_cache_bytes is None:
        for name in ("neuron_window", "weights_lookahead", "hot_neurons"):
            if getattr(options, name):
                raise ConfigError(
                    f"{name}: requires neuron_cache_bytes",
                    hint="set neuron_cache_bytes to the memory for neurons",
                )
        return
    max_bytes = config.offload.weights_memory_bytes
    if max_bytes is None:
        raise ConfigError(
            "neuron_cache_bytes: requires weights_memory_bytes",
            hint="set weights_memory_bytes to the memory available for weights",
        )
    hint = "remove neuron_cache_bytes"
    if sparsity.ffn_sparsity is None and sparsity.sparsity_predictor is None:
        raise ConfigError(
            "neuron_cache_bytes: requires ffn_sparsity or sparsity_predictor, which select the"
            " neurons of a token",
            hint="set ffn_sparsity to exact for a model with relu, else to gate:SHARE",
        )
    if options.weights_lookahead and sparsity.sparsity_predictor is None:
        raise ConfigError(
            "weights_lookahead: requires sparsity_predictor",
            hint="create one: octavo calibrate MODEL --predictor-rank 64",
        )
    if options.weights_lookahead > MAX_LOOKAHEAD:
        raise ConfigError(
            f"weights_lookahead: got {options.weights_lookahead}, expected at most {MAX_LOOKAHEAD}"
        )
    if config.lora.enable_lora:
        raise ConfigError("neuron_cache_bytes: not supported with enable_lora", hint=hint)
    if options.neuron_cache_bytes >= max_bytes:
        raise ConfigError(
            f"neuron_cache_bytes: got {format_bytes(options.neuron_cache_bytes)}, expected less"
            f" than weights_memory_bytes, {format_bytes(max_bytes)}, which includes it",
            hint="raise weights_memory_bytes",
        )


def _check_activations(config: EngineConfig) -> None:
    """Raises ConfigError if the activation sparsity options are invalid."""
    options, defaults = config.of(SparsityOptions), SparsityOptions()
    backend = config.backend.backend
    ffn = options.ffn_sparsity
    if ffn not in (None, "exact") and not 0 < options.gate_sparsity <= MAX_SPARSITY:
        raise ConfigError(
            f"ffn_sparsity: got {ffn!r}, expected 'exact', or gate:SHARE with a fraction above 0"
            f" and at most {MAX_SPARSITY}, such as 'gate:0.3'"
        )
    if not options.activation_sparsity <= MAX_SPARSITY:
        raise ConfigError(
            f"activation_sparsity: got {options.activation_sparsity:g}, expected 0 to"
            f" {MAX_SPARSITY}"
        )
    if ffn == "exact" and backend != "native":
        raise ConfigError(
            f"ffn_sparsity: requires the native backend, got {backend!r}",
            hint="set backend to native",
        )
    _check_share(config, "sparsity_predictor", "predicted_share", changed="the gates")
    _check_share(config, "kv_selection", "kv_budget", changed="queries and keys")
    if not options.activation_sparsity and not options.gate_sparsity:
        for unused in ("calibration", "activation_sparsity_plan"):
            if getattr(options, unused) != getattr(defaults, unused):
                raise ConfigError(
                    f"{unused}: requires activation_sparsity or ffn_sparsity gate:SHARE",
                    hint=f"remove {unused}",
                )
    if not options.is_approximate:
        return
    name = next(
        name
        for name, value in (
            ("activation_sparsity", options.activation_sparsity),
            ("ffn_sparsity", options.gate_sparsity),
            ("sparsity_predictor", options.sparsity_predictor),
            ("kv_selection", options.kv_selection),
        )
        if value
    )
    if backend == "torch":
        raise ConfigError(
            f"{name}: requires the native or reference backend, got 'torch'",
            hint=f"set backend to native, or remove {name}",
        )
    if config.backend.num_stage_ranks > 1:
        option, size = config.backend.rank_option
        raise ConfigError(f"{name}: requires {option} 1, got {size}", hint=f"remove {name}")
    if not options.calibration and name not in ("sparsity_predictor", "kv_selection"):
        raise ConfigError(
            f"{name}: requires a calibration",
            hint="create one: octavo calibrate MODEL --text FILE --out FILE",
        )


def _check_share(config: EngineConfig, name: str, share: str, *, changed: str) -> None:
    """Checks an option that selects keys or neurons.

    `name` is the option that enables selection, `share` the option that sets the selected fraction.
    `changed` describes the inputs on which LoRA adapters are not supported together with it.
    """
    options, defaults = config.of(SparsityOptions), SparsityOptions()
    value: float = getattr(options, share)
    if getattr(options, name) is None:
        if value != getattr(defaults, share):
            raise ConfigError(f"{share}: requires {name}", hint=f"remove {share}")
        return
    if not 1 - MAX_SPARSITY <= value + 1e-9 <= 1 + 1e-9:
        raise ConfigError(f"{share}: got {value:g}, expected {1 - MAX_SPARSITY:.2f} to 1")
    if config.lora.enable_lora:
        raise ConfigError(
            f"{name}: not supported with enable_lora, which changes {changed}",
            hint="merge the adapter into the model, and use the merged model",
        )
