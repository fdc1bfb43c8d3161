"""Default sampling values of a model, and their source.

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
"""Used if a request requires random sampling but sets no temperature, and the default is greedy:
values recommended for most chat models.
"""
NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of generation_config.json, and the corresponding names in SamplingParams."""


def params_over(defaults: SamplingParams, request_values: Mapping[str, Any]) -> SamplingParams:
    """Returns a request's params: its own values, and defaults for the others.

    A default that contradicts the request is ignored: a max_tokens below its min_tokens, or greedy
    sampling together with several samples or with filters.
    """
    values = {**msgspec.structs.asdict(defaults), **request_values}
    max_tokens, min_tokens = values["max_tokens"], values["min_tokens"]
    if (
        "max_tokens" not in request_values
        and isinstance(min_tokens, int)
        and min_tokens > (max_tokens or min_tokens)
    ):
        values["max_tokens"] = None
    if "temperature" not in request_values and defaults.is_greedy and _needs_chance(request_values):
        values |= {name: value for name, value in SAMPLED.items() if name not in request_values}
    return SamplingParams(**values)


def _needs_chance(request_values: Mapping[str, Any]) -> bool:
    """Returns whether a request sets a value that requires random sampling."""
    if any(request_values.get(name) not in (None, 1) for name in ("n", "best_of")):
        return "beam_width" not in request_values
    neutral = OPTIONS.filters.items()
    return any(request_values.get(name, value) not in (value, None, -1) for name, value in neutral)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of a generation_config that replace the defaults of SamplingParams."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """Sampling values by SamplingParams field."""
    source: str = "vllm"
    """Source of the values, for the startup message."""
    limits_chats_only: bool = False
    """Whether max_tokens applies only to chats; a completion that sets none then has at most 16
    tokens.
    """

    @staticmethod
    def from_generation_config(
        config: Mapping[str, Any], source: str, *, limits_chats_only: bool = False
    ) -> SamplingDefaults:
        """Reads the sampling values of a generation_config; raises ConfigError if one is
        invalid.
        """
        values = {ours: config[key] for key, ours in NAMES.items() if config.get(key) is not None}
        try:
            SamplingParams(**values)
        except InvalidRequest as error:
            raise ConfigError(
                f"{source}: {error.message}", hint="use --generation-config vllm to ignore it"
            ) from error
        return SamplingDefaults(values, source, limits_chats_only)

    @property
    def params(self) -> SamplingParams:
        """Default params of a completion; max_tokens is 16 unless the model recommends a value."""
        left_out = {"max_tokens"} if self.limits_chats_only else set()
        return SamplingParams(**{k: v for k, v in self.values.items() if k not in left_out})

    @property
    def chat_params(self) -> SamplingParams:
        """Default params of a chat request: same as `params`, except that without a recommended
        max_tokens the output may extend to the end of the context.
        """
        return msgspec.structs.replace(self.params, max_tokens=self.values.get("max_tokens"))

    def describe(self) -> str:
        """Returns the startup message."""
        return f"default sampling params: {self.describe_values()}"

    def describe_values(self) -> str:
        shown = ", ".join(f"{name} {value:g}" for name, value in self.values.items())
        return f"{shown or 'the defaults of SamplingParams'} ({self.source})"
