"""Hooks by which extensions check a config, and report how their options change results.

Owns no option: each extension declares its own group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.config.engine_config import EngineConfig
from octavo.utils.extensions import get_hooks


class ConfigHooks:
    """What one extension says about a config. The defaults are those of a plain engine."""

    def check(self, config: EngineConfig) -> None:
        """Raises ConfigError if the extension's options are out of range, or not allowed beside
        others.
        """

    def draft_config(self, config: EngineConfig) -> EngineConfig:
        """Returns the config for opening a draft model, given that of its target."""
        return config

    def allows_drafts(self, config: EngineConfig) -> bool:
        """Returns whether requests may have draft tokens that no option asks for."""
        return True

    def numbers(self, config: EngineConfig) -> dict[str, Any]:
        """Returns the options that change K, V or outputs, by name; {} if results are exact."""
        return {}

    def reuses_generated(self, config: EngineConfig) -> bool:
        """Returns whether K and V of generated tokens equal those of a prompt, and may be reused
        as a prefix.
        """
        return True

    def skips_blocks(self, config: EngineConfig) -> bool:
        """Returns whether prompts may run without some blocks of a stored prefix."""
        return False

    def describe(self, config: EngineConfig) -> Sequence[str]:
        """Returns lines to print at the start of an engine."""
        return ()


def config_hooks() -> tuple[ConfigHooks, ...]:
    """Returns the hooks of the installed extensions."""
    return get_hooks("config", ConfigHooks)


def numbers_of(config: EngineConfig) -> dict[str, Any]:
    """Returns the options of extensions that change K, V or outputs, by name."""
    found = [hooks.numbers(config) for hooks in config_hooks()]
    return {name: value for numbers in found for name, value in numbers.items()}


def reuses_generated(config: EngineConfig) -> bool:
    """Returns whether K and V of generated tokens may be reused as a prefix."""
    return all(hooks.reuses_generated(config) for hooks in config_hooks())


def skips_blocks(config: EngineConfig) -> bool:
    """Returns whether prompts may run without some blocks of a stored prefix."""
    return any(hooks.skips_blocks(config) for hooks in config_hooks())
