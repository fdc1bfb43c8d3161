"""SamplingDefaults: default sampling values of a model, and their source.

Reads no file; `octavo/wiring/sampling_defaults.py` selects the values for a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.api.errors import ConfigError, InvalidRequest
from octavo.api.sampling_params import OPTIONS, SamplingParams

SAMPLED = {"temperature": 0.7, "top_p": 0.95}
"""Values of a request that needs chance and sets no temperature, if the default is greedy: those
recommended for most chat models."""
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json and their names in SamplingParams."""


def params_over(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Returns a request's params: its own values, and defaults for the others.

    A default that contradicts the request is ignored: a max_tokens below its min_tokens, or greedy
    sampling together with several samples or with filters.
    """
    values = {**msgspec.structs.asdict(defaults), **given}
    most, least = values["max_tokens"], values["min_tokens"]
    if "max_tokens" not in given and isinstance(least, int) and least > (most or least):
        values["max_tokens"] = None
    if "temperature" not in given and defaults.is_greedy and _needs_chance(given):
        values |= {name: value for name, value in SAMPLED.items() if name not in given}
    return SamplingParams(**values)


def _needs_chance(given: Mapping[str, Any]) -> bool:
    """Returns whether a request sets a value that requires random sampling."""
    if any(given.get(name) not in (None, 1) for name in ("n", "best_of")):
        return "beam_width" not in given
    neutral = OPTIONS.filters.items()
    return any(given.get(name, value) not in (value, None, -1) for name, value in neutral)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of a generation_config that replace the defaults of SamplingParams()."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Sampling values by the names of SamplingParams."""
    source: str = "vllm"
    """Where they come from, for the line at start-up."""
    limits_chats_only: bool = False
    """Whether max_tokens is for chats; a completion that sets none then has at most 16 tokens."""

    @staticmethod
    def from_generation_config(
        given: Mapping[str, Any], source: str, *, limits_chats_only: bool = False
    ) -> SamplingDefaults:
        """Reads sampling values of a generation_config; raises ConfigError if one is invalid."""
        values = {ours: given[key] for key, ours in NAMES.items() if given.get(key) is not None}
        try:
            SamplingParams(**values)
        except InvalidRequest as error:
            raise ConfigError(
                f"{source}: {error.message}", hint="use --generation-config vllm to ignore it"
            ) from error
        return SamplingDefaults(values, source, limits_chats_only)

    @property
    def params(self) -> SamplingParams:
        """Default params of a completion; max_tokens is 16 unless the model recommends one."""
        left_out = {"max_tokens"} if self.limits_chats_only else set()
        return SamplingParams(**{k: v for k, v in self.values.items() if k not in left_out})

    @property
    def chat_params(self) -> SamplingParams:
        """Default params of a chat request: as `params`, but without a recommended max_tokens the
        output may extend to the end of the context.
        """
        return msgspec.structs.replace(self.params, max_tokens=self.values.get("max_tokens"))

    def describe(self) -> str:
        """Returns the line for the log at start-up."""
        return f"default sampling params: {self.describe_values()}"

    def describe_values(self) -> str:
        shown = ", ".join(f"{name} {value:g}" for name, value in self.values.items())
        return f"{shown or 'the defaults of SamplingParams'} ({self.source})"
