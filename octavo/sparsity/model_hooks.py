"""Changes that the sparsity options make to a model: passes, predictor tensors, native backend
hooks and the prefix weigher.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.api.errors import ConfigError
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import expand_path
from octavo.engine.kv.kv_connector import BlockChoiceSpec
from octavo.executor.base import Backend, BackendOptions
from octavo.program.program import Program
from octavo.sparsity.kv_spill import KvOffDevice
from octavo.sparsity.native_hooks import NativeSparsity
from octavo.sparsity.neuron_records import NeuronCacheOptions
from octavo.sparsity.options import (
    KvSpillOptions,
    NeuronOptions,
    PrefixWeighingOptions,
    SparsityOptions,
)
from octavo.sparsity.passes.probe_prefixes import get_probe, probe_prefixes, probing_part
from octavo.sparsity.passes.select_keys import select_keys
from octavo.sparsity.predictors import (
    PredictorCheckpoint,
    PredictorHeader,
    open_predictors,
    predictors_in,
)
from octavo.sparsity.prefix_weigher import MAX_TOKENS, NUM_BLOCKS, PrefixWeigher
from octavo.sparsity.thresholds import add_placeholder_thresholds, for_sparsity, hot_neurons
from octavo.wiring.model_hooks import ModelHooks, SideProgram
from octavo.worker.kv_connectors.tiers import BlockRater
from octavo.worker.loaded_model import LoadedModel


class SparsityModelHooks(ModelHooks):
    def open_checkpoint(self, config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
        predictors = open_predictors(config, checkpoint)
        return checkpoint if predictors is None else PredictorCheckpoint(checkpoint, predictors)

    def open_header(self, config: EngineConfig, header: ModelHeader) -> ModelHeader:
        predictors = open_predictors(config, None)
        return header if predictors is None else PredictorHeader(header, predictors)

    def transform(self, config: EngineConfig, header: ModelHeader, program: Program) -> Program:
        options, predictors = config.of(SparsityOptions), predictors_in(header)
        if predictors is not None:
            program = predictors.apply(program)
        if options.kv_selection is not None:
            program = select_keys(program, options.kv_budget)
        weighs = config.of(PrefixWeighingOptions).weighs_prefixes
        return probe_prefixes(program) if weighs else program

    def transform_part(
        self, config: EngineConfig, checkpoint: Checkpoint | None, program: Program
    ) -> Program:
        if checkpoint is None:
            return add_placeholder_thresholds(config, program)
        return for_sparsity(config, checkpoint, program)

    def packing(self, checkpoint: Checkpoint) -> dict[str, Any]:
        predictors = predictors_in(checkpoint)
        return {} if predictors is None else {"predictors": predictors.digest}

    def backend_options(
        self, config: EngineConfig, checkpoint: Checkpoint | None, options: BackendOptions
    ) -> BackendOptions:
        hooks = NativeSparsity(
            skips_zeros=config.of(SparsityOptions).ffn_sparsity == "exact",
            neurons=_neuron_cache(config, checkpoint),
            spill=_kv_off_device(config),
        )
        return replace(options, hooks=(*options.hooks, hooks))

    def check_backend(self, config: EngineConfig, backend: Backend) -> None:
        weighs = config.of(PrefixWeighingOptions).weighs_prefixes
        if weighs and not backend.prepares_parts:
            raise ConfigError(
                f"prefix_cache_policy: importance is not supported by the {backend.name} backend",
                hint="set backend to native",
            )

    def side_program(self, config: EngineConfig, program: Program) -> SideProgram | None:
        weighs = config.of(PrefixWeighingOptions).weighs_prefixes
        return SideProgram(probing_part(program), MAX_TOKENS) if weighs else None

    def block_choice(self, loaded: LoadedModel) -> tuple[BlockChoiceSpec, BlockRater] | None:
        """Creates the prefix weigher with a separate KV memory. Returns None if the option is
        off.
        """
        options = loaded.config.of(PrefixWeighingOptions)
        if not options.weighs_prefixes:
            return None
        backend, part = loaded.backend, loaded.side
        assert part is not None, "checked before weights were read"
        kv = backend.allocate(part.kv_layouts, [NUM_BLOCKS] * len(part.kv_layouts))
        probe = get_probe(loaded.program)
        weigher = PrefixWeigher(backend, part, kv, loaded.layouts[probe.group], probe)
        return BlockChoiceSpec(probe.group, options.prefix_cache_load), weigher


def _neuron_cache(config: EngineConfig, checkpoint: Checkpoint | None) -> NeuronCacheOptions | None:
    """Returns the options of the neuron cache; None if it is off. Without a checkpoint (when only
    planning), no neuron is pinned.
    """
    options = config.of(NeuronOptions)
    if options.neuron_cache_bytes is None:
        return None
    hot = None if checkpoint is None else hot_neurons(config, checkpoint)
    return NeuronCacheOptions(options.neuron_cache_bytes, options.neuron_window, hot)


def _kv_off_device(config: EngineConfig) -> KvOffDevice | None:
    options, memory_bytes = config.of(KvSpillOptions), config.cache.kv_cache_memory_bytes
    if options.kv_spill_dir is None:
        return None
    assert options.kv_spill_bytes and memory_bytes, "the options were checked"
    return KvOffDevice(
        expand_path(options.kv_spill_dir),
        options.kv_spill_bytes,
        memory_bytes,
        options.kv_spill_ahead,
    )
