"""Control tokens of a speech model, and the logits processor for its timestamps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octavo.checkpoint.ports import ModelHeader
from octavo.config.engine_config import EngineConfig
from octavo.frontend.transcription import TIMESTAMPS, SpeechTokens
from octavo.models.hf_config import HfConfig


def speech_tokens(values: Mapping[str, Any]) -> SpeechTokens:
    """Returns the control tokens; `values` are config.json, overridden by
    generation_config.json.
    """
    config = HfConfig(values)
    languages = config.table("lang_to_id") if config.flag("is_multilingual", True) else {}
    return SpeechTokens(
        start=config.integer("decoder_start_token_id"),
        languages={name.strip("<|>"): int(token) for name, token in languages.items()},
        tasks=config.table("task_to_id") if languages else {},
        no_timestamps=config.optional_integer("no_timestamps_token_id"),
        banned_at_start=tuple(
            token
            for token in config.integers("begin_suppress_tokens")
            if token not in config.integers("eos_token_id") and token < config.integer("vocab_size")
        ),
        num_timestamps=_num_timestamps(config),
        max_tokens=config.integer("max_target_positions", 448, low=1) // 2,
        previous=config.optional_integer("prev_sot_token_id"),
        ends=config.integers("eos_token_id"),
    )


def _num_timestamps(config: HfConfig) -> int:
    """Returns the number of timestamp tokens, which are the last ones of the vocabulary."""
    no_timestamps = config.optional_integer("no_timestamps_token_id")
    behind = 0 if no_timestamps is None else config.integer("vocab_size") - no_timestamps - 1
    return max(min(behind, config.integer("max_source_positions", 1500, low=1) + 1), 0)


def with_timestamps(config: EngineConfig, header: ModelHeader) -> EngineConfig:
    """Adds the timestamp processor to the config of a speech model."""
    values = header.config | header.generation_config
    tokens, hf_config = speech_tokens(values), HfConfig(values)
    has_them = any(entry.name == TIMESTAMPS for entry in config.sampler.processors)
    if not tokens.num_timestamps or tokens.no_timestamps is None or has_them:
        return config
    max_initial = hf_config.optional_integer("max_initial_timestamp_index")
    numbers = (
        tokens.start,
        tokens.prompt_tokens,
        hf_config.integers("eos_token_id")[0],
        tokens.no_timestamps,
        -1 if max_initial is None else max_initial,
        *(token for token in hf_config.integers("suppress_tokens") if token >= 0),
    )
    source = f"octavo.worker.sampling.timestamps:TimestampRules({','.join(map(str, numbers))})"
    processors = (*config.sampler.logits_processors, f"{TIMESTAMPS}={source}")
    return replace(config, sampler=replace(config.sampler, logits_processors=processors))
