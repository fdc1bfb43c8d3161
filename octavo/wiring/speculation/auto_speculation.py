"""Chooses the speculation method if the options do not.

spec_method auto means suffix lookup, plus the checkpoint's MTP head if it is usable. Without
spec_method, structured output drafts tokens if this leaves results bitwise unchanged. Automatic
choices never raise an error.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

from octavo.api.errors import ConfigError, UnsupportedModel
from octavo.checkpoint.ports import ModelHeader
from octavo.config.config_hooks import config_hooks, transfer_option
from octavo.config.engine_config import EngineConfig
from octavo.models.draft_heads import mtp_head
from octavo.program.program import Program
from octavo.wiring.speculation.draft import check_keeps_tokens


def with_spec_method(
    config: EngineConfig, header: ModelHeader, program: Program, names: Collection[str] | None
) -> EngineConfig:
    """Resolves spec_method auto: auto for suffix lookup with the checkpoint's head, suffix without
    one, None if drafts cannot be verified.

    `names` are the checkpoint's tensors; None if only its header is known.
    """
    options = config.scheduler
    if options.spec_method != "auto":
        return config
    method: Literal["suffix", "auto"] | None = None
    if _can_verify_drafts(config, program):
        method = "auto" if _can_use_head(config) and _has_head(header, program, names) else "suffix"
    return replace(config, scheduler=replace(options, spec_method=method))


def with_forced_drafts(config: EngineConfig, program: Program) -> EngineConfig:
    """Resolves a missing spec_method to grammar, if outputs with drafts are bitwise equal to those
    without and drafts do not prevent async scheduling.
    """
    options, backend = config.scheduler, config.backend
    if options.spec_method is not None or not _can_verify_drafts(config, program):
        return config
    if not all(hooks.allows_drafts(config) for hooks in config_hooks()):
        return config
    keeps = backend.backend != "torch" or (
        backend.batch_invariant and options.async_scheduling == "off"
    )
    return replace(config, scheduler=replace(options, spec_method="grammar")) if keeps else config


def _can_verify_drafts(config: EngineConfig, program: Program) -> bool:
    """Returns whether drafts can be verified with this model and these stages."""
    return config.backend.pipeline_parallel_size == 1 and "pooled" not in program.outputs


def _can_use_head(config: EngineConfig) -> bool:
    """Returns whether the options support a draft head."""
    return (
        config.offload.weights_memory_bytes is None
        and not transfer_option(config)
        and config.cache.kv_cache
    )


def _has_head(header: ModelHeader, program: Program, names: Collection[str] | None) -> bool:
    """Returns whether the checkpoint has a usable MTP head and the model stores the KV of every
    token.
    """
    try:
        check_keeps_tokens(program, "the model", "mtp")
        head = mtp_head(header.config, program, names or ())
    except (ConfigError, UnsupportedModel):
        return False
    # Some checkpoints are published without the layer that their config declares.
    return names is None or any(name.startswith(head.module) for name in names)
