"""Hooks of extensions that check a config and report how their options change results.

Each extension declares its own option group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.utils.extensions import get_hooks


class ConfigHooks:
    """Config hooks of one extension. The defaults leave the engine unchanged."""

    def check(self, config: EngineConfig) -> None:
        """Raises ConfigError if the extension's options are out of range or conflict with
        others.
        """

    def derive(self, config: EngineConfig) -> EngineConfig:
        """Returns the config with the defaults that follow from the extension's options."""
        return config

    def draft_config(self, config: EngineConfig) -> EngineConfig:
        """Derives the config of a draft model from its target's."""
        return config

    def allows_drafts(self, config: EngineConfig) -> bool:
        """Returns whether drafting may be enabled by default."""
        return True

    def numbers(self, config: EngineConfig) -> dict[str, Any]:
        """Returns the options that change K, V or outputs, by name; {} if results are exact."""
        return {}

    def reuses_generated(self, config: EngineConfig) -> bool:
        """Returns whether the KV of generated tokens equals that of a prompt, so that it can be
        reused as a prefix.
        """
        return True

    def skips_blocks(self, config: EngineConfig) -> bool:
        """Returns whether prompts may skip some blocks of a stored prefix."""
        return False

    def transfer_option(self, config: EngineConfig) -> str:
        """Returns the option that enables KV transfer to other engines; "" if it is not set."""
        return ""

    def store_option(self, config: EngineConfig) -> str:
        """Returns the option that sets a KV block store shared by engines; "" if it is not set."""
        return ""

    def describe(self, config: EngineConfig) -> Sequence[str]:
        """Returns lines to print when an engine starts."""
        return ()


def config_hooks() -> tuple[ConfigHooks, ...]:
    return get_hooks("config", ConfigHooks)


def get_result_options(config: EngineConfig) -> dict[str, Any]:
    """Returns the extensions' options that change K, V or outputs, by name."""
    found = [hooks.numbers(config) for hooks in config_hooks()]
    return {name: value for numbers in found for name, value in numbers.items()}


def reuses_generated(config: EngineConfig) -> bool:
    """Returns whether the KV of generated tokens can be reused as a prefix."""
    return all(hooks.reuses_generated(config) for hooks in config_hooks())


def skips_blocks(config: EngineConfig) -> bool:
    """Returns whether prompts may skip some blocks of a stored prefix."""
    return any(hooks.skips_blocks(config) for hooks in config_hooks())


def transfer_option(config: EngineConfig) -> str:
    """Returns the option that enables KV transfer to other engines; "" if it is not set."""
    return "".join(hooks.transfer_option(config) for hooks in config_hooks())


def store_option(config: EngineConfig) -> str:
    """Returns the option that sets a KV block store shared by engines; "" if it is not set."""
    return "".join(hooks.store_option(config) for hooks in config_hooks())
