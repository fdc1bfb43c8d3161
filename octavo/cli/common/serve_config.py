"""The file of `octavo serve --config`: YAML with flags' names as keys, and a list of models.

    port: 8080
    max-num-seqs: 64
    models:
      - smollm2
      - name: small
        model: ./checkpoints/small
        max-model-len: 4k

Options outside `models` apply to every engine, options of an entry only to its engine. The command
line overrides both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.api.errors import ConfigError, did_you_mean
from octavo.config.data_file import DataFile, read_data_file
from octavo.config.engine_config import OPTIONS_PAGE, option_fields
from octavo.config.model_options import DEFAULT_MODEL
from octavo.config.option import OptionField, convert, get_options
from octavo.server.settings import ServerSettings
from octavo.server.state.model_spec import ModelSpec, name_and_model

MAX_FILE_BYTES = 1 << 20
MODELS = "models"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Checked contents of a configuration file; empty if there is no file."""

    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Engine options of all models."""
    models: tuple[dict[str, Any], ...] = ()
    """Engine options of each model, including `model` and possibly `served_model_name`."""

    def engine_defaults(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the engine options of all models; `flags` are the command line's options."""
        options = self.options | dict(flags)
        options.pop("served_model_name", None)
        return options

    def specs(self, texts: Sequence[str], flags: Mapping[str, Any]) -> list[ModelSpec]:
        """Returns the models to serve: from the command line, else the file, else the default.

        A text that names an entry of the file selects that entry.
        """
        entries = (
            [self._entry(text) for text in texts] or [*self.models] or [{"model": DEFAULT_MODEL}]
        )
        if len(entries) > 1 and "served_model_name" in {**self.options, **flags}:
            raise ConfigError(
                "served_model_name: allowed with one model only",
                hint="name each model with NAME=MODEL",
            )
        specs = [ModelSpec.of({**self.options, **entry, **flags}) for entry in entries]
        names = [spec.name for spec in specs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"two models are named {twice}", hint="rename one with NAME=MODEL")
        return specs

    def _entry(self, text: str) -> dict[str, Any]:
        picked = (entry for entry in self.models if ModelSpec.of(entry).name == text)
        return next(picked, None) or _parse_entry(text)


def read_config(path: Path) -> ServeConfig:
    """Reads and checks a file; raises ConfigError if it is invalid."""
    file = read_data_file(path, name="config", max_bytes=MAX_FILE_BYTES, kind="YAML")
    document = {} if file.content is None else file.content
    if not isinstance(document, dict):
        raise ConfigError(
            f"config: {file.where()}: got a {type(document).__name__}, expected a mapping of"
            " options to values",
            hint="write one `option: value` per line, such as `port: 8000`",
        )
    settings, engine = get_options(ServerSettings), _engine_fields()
    known = {**settings, **engine}
    shared_options = {key: value for key, value in document.items() if key != MODELS}
    values = _values(shared_options, known, [*known, MODELS], file)
    return ServeConfig(
        settings={name: value for name, value in values.items() if name in settings},
        options={name: value for name, value in values.items() if name in engine},
        models=tuple(_models(document.get(MODELS), file)),
    )


def _models(entries: Any, file: DataFile) -> list[dict[str, Any]]:
    if entries is None:
        return []
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"config: {file.where(MODELS)}: models: got {entries!r}, expected a list of models",
            hint="write `models:`, then one `- model: NAME` per line",
        )
    return [_model(entry, file, index) for index, entry in enumerate(entries)]


def _model(entry: Any, file: DataFile, index: int) -> dict[str, Any]:
    """Returns the options of an entry, which is a text or a mapping."""
    where = f"config: {file.where(MODELS, index)}: models[{index}]"
    if isinstance(entry, str):
        return _parse_entry(entry)
    if not isinstance(entry, dict):
        raise ConfigError(
            f"{where}: got {entry!r}, expected a model or a mapping of options to values"
        )
    entry = dict(entry)
    if "name" in entry:
        entry["served_model_name"] = entry.pop("name")
    known = _engine_fields() | {"model": option_fields()["model"]}
    values = _values(entry, known, [*known, "name"], file, MODELS, index)
    if "model" not in values:
        raise ConfigError(f"{where}: model: field required", hint="add `model: NAME` to the entry")
    return values


def _values(
    options: Mapping[Any, Any],
    known: Mapping[str, OptionField],
    names: Sequence[str],
    file: DataFile,
    *above: str | int,
) -> dict[str, Any]:
    """Returns checked values by flat option names. `names` are the names that hints may suggest;
    `above` is the path of keys in the file to `options`.
    """
    values = {}
    for key, value in options.items():
        name, where = str(key).replace("-", "_"), f"config: {file.where(*above, str(key))}"
        if name not in known:
            flags = [flag_name.replace("_", "-") for flag_name in names]
            hint = did_you_mean(str(key), flags, listed_in=OPTIONS_PAGE)
            raise ConfigError(f"{where}: unknown key {str(key)!r}", hint=hint)
        try:
            values[name] = convert(known[name], _as_given(known[name], value))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
    return {name: value for name, value in values.items() if value is not None}


def _as_given(spec: OptionField, value: Any) -> Any:
    """Converts a single text to a list for a repeatable option."""
    return [value] if spec.is_list and isinstance(value, str) else value


def _engine_fields() -> dict[str, OptionField]:
    return {name: spec for name, spec in option_fields().items() if name != "model"}


def _parse_entry(text: str) -> dict[str, Any]:
    name, model = name_and_model(text)
    return {"model": model} | ({} if name is None else {"served_model_name": name})
