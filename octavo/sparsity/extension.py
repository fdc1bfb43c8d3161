"""Registers this package's options, commands and hooks. No other package refers to it."""

from octavo.utils.extensions import Extension

EXTENSION = Extension(
    options=(
        "octavo.sparsity.options:KvSpillOptions",
        "octavo.sparsity.options:PrefixWeighingOptions",
        "octavo.sparsity.options:NeuronOptions",
        "octavo.sparsity.options:SparsityOptions",
    ),
    command_line_only=frozenset(
        (
            "calibration",
            "hot_neurons",
            "kv_spill_ahead",
            "kv_spill_bytes",
            "kv_spill_dir",
            "neuron_cache_bytes",
            "neuron_window",
            "sparsity_predictor",
            "weights_lookahead",
        )
    ),
    commands={
        "Manage models": {"calibrate": "octavo.sparsity.cli.calibrate"},
        "Measure and debug": {"simulate": "octavo.sparsity.cli.simulate"},
    },
    hooks={
        "config": "octavo.sparsity.config_hooks:SparsityConfigHooks",
        "model": "octavo.sparsity.model_hooks:SparsityModelHooks",
        "kv": "octavo.sparsity.kv_spill:KvSpillHooks",
        "block_choice": "octavo.sparsity.important_blocks:ImportantBlocks",
        "metrics": "octavo.sparsity.metrics:SparsityMetrics",
    },
)
