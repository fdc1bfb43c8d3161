"""The served models by name; each has a slot with its own engine.

`loader.py` loads and unloads the engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase

from octavo.api.async_llm import AsyncLLM
from octavo.api.errors import MAX_SHOWN, ConfigError, InvalidRequest, ModelNotFound, Unavailable
from octavo.server.state.slot import EngineSlot

GLOB_CHARACTERS = "*?["
"""Characters that make an alias a pattern."""


class ModelDirectory:
    """Slots by public model name, in order of addition."""

    def __init__(
        self, slots: Iterable[EngineSlot] = (), aliases: Mapping[str, str] | None = None
    ) -> None:
        """`aliases` are other names of models and adapters, and may be patterns (`claude-*`)."""
        self._slots = {slot.name: slot for slot in slots}
        self._aliases = dict(aliases or {})
        self._stopping = False
        self._changed = False
        """Whether models were added or removed since the start."""

    @staticmethod
    def of(engine: AsyncLLM | EngineSlot | ModelDirectory) -> ModelDirectory:
        """Wraps an engine or a slot in a directory; returns a directory unchanged."""
        if isinstance(engine, ModelDirectory):
            return engine
        return ModelDirectory([engine if isinstance(engine, EngineSlot) else EngineSlot.of(engine)])

    def __iter__(self) -> Iterator[EngineSlot]:
        return iter(list(self._slots.values()))

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def names(self) -> list[str]:
        return list(self._slots)

    @property
    def is_starting(self) -> bool:
        """Whether all initial models are still loading."""
        states = [slot.state for slot in self if slot.state != "unloaded"]
        return not self._changed and bool(states) and set(states) == {"loading"}

    @property
    def num_in_memory(self) -> int:
        """Number of models that are not unloaded, including failed ones."""
        return sum(slot.state != "unloaded" for slot in self)

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def get(self, name: str) -> EngineSlot | None:
        """Returns the slot with a public name; None if there is none."""
        return self._slots.get(name)

    def find(self, name: str | None = None) -> EngineSlot:
        """Returns the slot for a request. None selects the only model; an adapter's name selects
        the adapter's model.

        The model's reference on the command line and aliases are accepted too. Raises
        ModelNotFound, or InvalidRequest if the name is None and there are several models.
        """
        if name is None:
            return self._get_only()
        name = self.resolve(name)
        slot = self._with_name(name) or self.with_adapter(name)
        if slot is None:
            hint = (
                f"this server has {self._list_names()}" if self._slots else "this server has none"
            )
            raise ModelNotFound(
                f"The model `{name[:MAX_SHOWN]}` does not exist.", hint=hint, param="model"
            )
        return slot

    def resolve(self, name: str) -> str:
        """Replaces an alias by its target; returns other names unchanged."""
        if self._is_known(name):
            return name
        if name in self._aliases:
            return self._aliases[name]
        matches = (target for alias, target in self._aliases.items() if fnmatchcase(name, alias))
        return next(matches, name)

    def set_alias(self, alias: str, name: str) -> None:
        """Adds or reassigns an alias."""
        self._aliases[alias] = name

    def drop_alias(self, alias: str) -> bool:
        """Removes an alias; returns False if there is none of this name."""
        return self._aliases.pop(alias, None) is not None

    def check_aliases(self, adapters: Iterable[str]) -> None:
        """Raises ConfigError if an alias equals a served name or its target is not served."""
        adapters = list(adapters)
        for alias, target in self._aliases.items():
            if not self._is_known(target) and target not in adapters:
                raise ConfigError(
                    f"model_alias: {alias} refers to {target}, which is not served",
                    hint=f"this server has {', '.join([*self.names, *adapters])}",
                )
            if self._is_known(alias) or alias in adapters:
                raise ConfigError(
                    f"model_alias: a model or adapter is also named {alias}",
                    hint="choose another alias",
                )

    def get_aliases(self, slot: EngineSlot) -> list[str]:
        """Returns the aliases of a model and its adapters, except patterns."""
        plain = (alias for alias in self._aliases if not set(alias) & set(GLOB_CHARACTERS))
        return [alias for alias in plain if self.find(alias) is slot]

    def _is_known(self, name: str) -> bool:
        return self.answers_to(name) or self.with_adapter(name) is not None

    def _with_name(self, name: str) -> EngineSlot | None:
        return self.get(name) or next((slot for slot in self if slot.answers_to(name)), None)

    def answers_to(self, name: str) -> bool:
        """Returns whether a name refers to a model, not to an adapter."""
        return self._with_name(name) is not None

    def with_adapter(self, name: str) -> EngineSlot | None:
        """Returns the slot of an adapter's model; None if no adapter has this name."""
        return next((slot for slot in self if name in slot.adapters), None)

    def add(self, slot: EngineSlot) -> None:
        """Adds a slot, replacing a failed one of the same name."""
        if self._stopping:
            raise Unavailable("the server is stopping")
        self._slots[slot.name] = slot
        self._changed |= slot.state != "unloaded"

    def rename(self, slot: EngineSlot, name: str, model: str) -> None:
        """Changes a model's public name and its reference."""
        del self._slots[slot.name]
        slot.rename(name, model)
        self._slots[name] = slot

    def remove(self, slot: EngineSlot) -> None:
        """Removes a slot, unless its name now belongs to another."""
        if self._slots.get(slot.name) is slot:
            del self._slots[slot.name]
            self._changed = True

    def drain(self) -> None:
        """Rejects new requests for every model; running ones continue."""
        self._stopping = True
        for slot in self:
            slot.drain()

    def close(self) -> None:
        """Shuts down all engines in parallel."""
        self._stopping = True
        slots = list(self)
        with ThreadPoolExecutor(max(1, len(slots))) as pool:
            list(pool.map(EngineSlot.close, slots))

    def _get_only(self) -> EngineSlot:
        if not self._slots:
            raise ModelNotFound("no model is loaded", hint="load one with POST /v1/models/load")
        slots = list(self)
        if len(slots) > 1:  # pulled models are selected only by name
            slots = [slot for slot in slots if not slot.spec.is_remote] or slots
        if len(slots) > 1:  # a model that failed to load may be replaced
            slots = [slot for slot in slots if slot.state != "failed"] or slots
        if len(slots) > 1:
            raise InvalidRequest(
                f"model: field required, this server has several models: {self._list_names()}",
                param="model",
            )
        return slots[0]

    def _list_names(self) -> str:
        return ", ".join(f"`{name}`" for name in self._slots)
