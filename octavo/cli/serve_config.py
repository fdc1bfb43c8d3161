"""The file of `octavo serve --config`: YAML with flags' names as keys, and a list of models.

    port: 8080
    max-num-seqs: 64
    models:
      - smollm2
      - name: small
        model: ./checkpoints/small
        max-model-len: 4k

Options outside `models` apply to every engine, those of an entry to its own; the command line wins
over both. Source of the format: PyYAML's safe subset of YAML 1.1, without repeated keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config.engine_config import option_fields
from octavo.config.model_options import DEFAULT_MODEL
from octavo.config.option import OptionField, convert, options_of
from octavo.errors import ConfigError, did_you_mean
from octavo.server.settings import ServerSettings
from octavo.server.state.model_spec import ModelSpec, name_and_model

MAX_FILE_BYTES = 1 << 20
MODELS = "models"


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Checked contents of a configuration file; all empty without one."""

    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Engine options of every model."""
    models: tuple[dict[str, Any], ...] = ()
    """Engine options of each model, `model` and perhaps `served_model_name` among them."""

    def engine_defaults(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the engine options of every model; `given` are the command line's."""
        options = self.options | dict(given)
        options.pop("served_model_name", None)
        return options

    def specs(self, texts: Sequence[str], given: Mapping[str, Any]) -> list[ModelSpec]:
        """Returns what to serve: the models of the command line, else the file's, else the default.

        A text that is the name of an entry of the file picks this entry.
        """
        entries = [self._entry(text) for text in texts] or [*self.models] or [_default_entry()]
        if len(entries) > 1 and "served_model_name" in {**self.options, **given}:
            raise ConfigError(
                "served_model_name: allowed with one model only",
                hint="name each of several by NAME=MODEL",
            )
        specs = [ModelSpec.of({**self.options, **entry, **given}) for entry in entries]
        names = [spec.name for spec in specs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(
                f"two models are called {twice}", hint="give one another name by NAME=MODEL"
            )
        return specs

    def _entry(self, text: str) -> dict[str, Any]:
        picked = (entry for entry in self.models if ModelSpec.of(entry).name == text)
        return next(picked, None) or _entry_of(text)


def read_config(path: Path) -> ServeConfig:
    """Reads and checks a file; ConfigError names what is wrong in it."""
    document = _parse(path)
    settings, engine = options_of(ServerSettings), _engine_fields()
    entries = document.pop(MODELS, None)
    known = {**settings, **engine}
    values = _values(document, known, [*known, MODELS], str(path))
    return ServeConfig(
        settings={name: value for name, value in values.items() if name in settings},
        options={name: value for name, value in values.items() if name in engine},
        models=tuple(_models(entries, str(path))),
    )


def _parse(path: Path) -> dict[Any, Any]:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that refuses a key that stands twice in a mapping."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for key, _ in node.value:
                if keys.count(key.value) > 1:
                    mark = key.start_mark
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", mark
                    )
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        with path.expanduser().open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"config: {path} cannot be read: {error}") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"config: {path} is too large: allowed are {MAX_FILE_BYTES:,} bytes")
    try:
        document = yaml.load(text, Loader)  # a subclass of SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"config: {path} is not valid YAML: {reason}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"config: {path} holds no mapping of options to values")
    return document


def _models(entries: Any, where: str) -> list[dict[str, Any]]:
    if entries is None:
        return []
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{where}: models: allowed is a list of models, got {entries!r}")
    return [_model(entry, f"{where}: models[{at}]") for at, entry in enumerate(entries)]


def _model(entry: Any, where: str) -> dict[str, Any]:
    """Returns the options of an entry, which is a text or a mapping."""
    if isinstance(entry, str):
        return _entry_of(entry)
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: allowed is a model or a mapping of options, got {entry!r}")
    entry = dict(entry)
    if "name" in entry:
        entry["served_model_name"] = entry.pop("name")
    known = _engine_fields() | {"model": option_fields()["model"]}
    values = _values(entry, known, [*known, "name"], where)
    if "model" not in values:
        raise ConfigError(f"{where}: model: needed, and not given")
    return values


def _values(
    given: Mapping[Any, Any], known: Mapping[str, OptionField], names: Sequence[str], where: str
) -> dict[str, Any]:
    """Returns checked values by their options' flat names; `names` are all that a hint may name."""
    values = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name not in known:
            flags = [each.replace("_", "-") for each in names]
            raise ConfigError(
                f"{where}: unknown key {str(key)!r}", hint=did_you_mean(str(key), flags)
            )
        try:
            values[name] = convert(known[name], _as_given(known[name], value))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", hint=error.hint) from None
    return {name: value for name, value in values.items() if value is not None}


def _as_given(spec: OptionField, value: Any) -> Any:
    """Returns a value as the command line would give it: one text stands for a list of one."""
    return [value] if spec.is_list and isinstance(value, str) else value


def _engine_fields() -> dict[str, OptionField]:
    return {name: spec for name, spec in option_fields().items() if name != "model"}


def _entry_of(text: str) -> dict[str, Any]:
    name, model = name_and_model(text)
    return {"model": model} | ({} if name is None else {"served_model_name": name})


def _default_entry() -> dict[str, Any]:
    return {"model": DEFAULT_MODEL}
