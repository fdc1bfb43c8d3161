"""Effects of the sparsity options on results, prefix reuse and speculation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.config.config_hooks import ConfigHooks
from octavo.config.engine_config import EngineConfig
from octavo.sparsity.checks import check_sparsity
from octavo.sparsity.options import PrefixWeighingOptions, SparsityOptions


class SparsityConfigHooks(ConfigHooks):
    def check(self, config: EngineConfig) -> None:
        check_sparsity(config)

    def draft_config(self, config: EngineConfig) -> EngineConfig:
        """Resets options that are calibrated for the target's weights."""
        options, defaults = config.of(SparsityOptions), SparsityOptions()
        return config.replace_options(
            replace(
                options,
                sparsity_predictor=None,
                predicted_share=defaults.predicted_share,
                kv_selection=None,
                kv_budget=defaults.kv_budget,
            )
        )

    def allows_drafts(self, config: EngineConfig) -> bool:
        return not config.of(PrefixWeighingOptions).weighs_prefixes

    def numbers(self, config: EngineConfig) -> dict[str, Any]:
        options, weighing = config.of(SparsityOptions), config.of(PrefixWeighingOptions)
        return {
            **({"sparsity": options.numbers()} if options.is_approximate else {}),
            **({"prefix load": weighing.prefix_cache_load} if weighing.loads_in_part else {}),
        }

    def reuses_generated(self, config: EngineConfig) -> bool:
        return not config.of(SparsityOptions).is_approximate

    def skips_blocks(self, config: EngineConfig) -> bool:
        return config.of(PrefixWeighingOptions).loads_in_part

    def describe(self, config: EngineConfig) -> list[str]:
        lines = (
            _describe_sparsity(config.of(SparsityOptions)),
            _describe_weighing(config.of(PrefixWeighingOptions)),
        )
        return [line for line in lines if line]


def _describe_sparsity(options: SparsityOptions) -> str:
    """Returns the start-up message about approximate computation; "" if results are exact."""
    if not options.is_approximate:
        return ""
    zeros, unread = [], []
    if options.activation_sparsity:
        zeros.append(
            f"{options.activation_sparsity:.0%} of the matmul inputs"
            f" ({options.activation_sparsity_plan})"
        )
    if options.gate_sparsity:
        zeros.append(f"{options.gate_sparsity:.0%} of the gates")
    if options.sparsity_predictor:
        zeros.append(f"{options.neuron_sparsity:.0%} of the neurons that a predictor knows")
    if options.kv_selection:
        unread.append(f"{options.key_sparsity:.0%} of the blocks of keys ({options.kv_selection})")
    effects = [
        f"{' and '.join(parts)} {what}"
        for parts, what in ((zeros, "are treated as zero"), (unread, "are not read"))
        if parts
    ]
    return f"approximate: in generated tokens, {', '.join(effects)}; their KV blocks are not cached"


def _describe_weighing(options: PrefixWeighingOptions) -> str:
    """Returns the start-up message about partly loaded prefixes; "" if results are exact."""
    if not options.loads_in_part:
        return ""
    return (
        f"approximate: prompts skip up to {options.prefix_sparsity:.0%} of the stored prefix"
        f" blocks;"
        " their KV blocks are not cached"
    )
