"""EngineConfig: all options of the engine, frozen.

A field's name with dashes is its flag. `EngineConfig.from_options` takes flat names (LLM's
keywords, the CLI's flags) and rejects unknown ones. Names and defaults are vLLM's if they mean the
same. Options that depend on the model or the machine are None here and derived in
`config/derive.py`. The options are declared in `model_options.py`, `cache_options.py`,
`scheduler_options.py` and `backend_options.py`.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, TypeVar

from octavo.api.errors import ConfigError, did_you_mean
from octavo.config.backend_options import (
    BackendChoice,
    FleetOptions,
    OffloadOptions,
)
from octavo.config.cache_options import CacheOptions
from octavo.config.model_options import LoraOptions, MediaOptions, ModelOptions, SamplerOptions
from octavo.config.option import OptionField, convert, get_options
from octavo.config.scheduler_options import ObserveOptions, SchedulerOptions
from octavo.utils.extensions import extension_options

Options = TypeVar("Options")

OPTIONS_PAGE = "docs/reference/options.md"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    lora: LoraOptions = field(default_factory=LoraOptions)
    media: MediaOptions = field(default_factory=MediaOptions)
    backend: BackendChoice = field(default_factory=BackendChoice)
    fleet: FleetOptions = field(default_factory=FleetOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    observe: ObserveOptions = field(default_factory=ObserveOptions)
    extensions: tuple[Any, ...] = field(default_factory=extension_options)
    """Options of the extensions, one dataclass for each group."""

    @staticmethod
    def from_options(**options: Any) -> EngineConfig:
        """Builds a config from flat names, such as `from_options(model="smollm2", threads=2)`.
        Raises ConfigError for an unknown name or invalid value.
        """
        known = option_fields()
        for name in options:
            if name not in known:
                raise _unknown(name, list(known))

        def parse(defaults: Any) -> Any:
            names = [entry.name for entry in fields(defaults) if entry.name in options]
            return replace(
                defaults, **{name: convert(known[name], options[name]) for name in names}
            )

        sections = {section.name: parse(_default(section)) for section in _own_sections()}
        return EngineConfig(**sections, extensions=tuple(map(parse, extension_options())))

    def to_options(self) -> dict[str, Any]:
        """Returns flat options from which `from_options` builds an equal config."""
        own = [getattr(self, section.name) for section in _own_sections()]
        return {
            entry.name: getattr(section, entry.name)
            for section in (*own, *self.extensions)
            for entry in fields(section)
        }

    def of(self, kind: type[Options]) -> Options:
        """Returns an extension's options by their dataclass."""
        found: Options = next(each for each in self.extensions if type(each) is kind)
        return found

    def replace_options(self, options: Any) -> EngineConfig:
        """Returns a copy with an extension's options replaced."""
        kept = (options if type(each) is type(options) else each for each in self.extensions)
        return replace(self, extensions=tuple(kept))


def option_fields() -> dict[str, OptionField]:
    """Returns all options by flat name, in order."""
    found: dict[str, OptionField] = {}
    for defaults in (*map(_default, _own_sections()), *extension_options()):
        found |= get_options(type(defaults))
    return found


def _own_sections() -> list[Field[Any]]:
    return [section for section in fields(EngineConfig) if section.name != "extensions"]


def _default(section: Field[Any]) -> Any:
    assert section.default_factory is not MISSING
    return section.default_factory()


def _unknown(name: str, known: list[str]) -> ConfigError:
    hint = did_you_mean(name, known, listed_in=OPTIONS_PAGE)
    return ConfigError(f"unknown option {name!r}", hint=hint)
