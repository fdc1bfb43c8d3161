"""The models behind one port, by name: each has a slot with an engine of its own.

Finds the slot that a request means; loads and ends no engine (`loader.py` does).
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
    """All slots of a server by the models' public names, in the order in which they came."""

    def __init__(
        self, slots: Iterable[EngineSlot] = (), aliases: Mapping[str, str] | None = None
    ) -> None:
        """Takes other names of models and adapters, which may be patterns (`claude-*`)."""
        self._slots = {slot.name: slot for slot in slots}
        self._aliases = dict(aliases or {})
        self._stopping = False
        self._changed = False
        """Whether models have come or gone since the start."""

    @staticmethod
    def of(engine: AsyncLLM | EngineSlot | ModelDirectory) -> ModelDirectory:
        """Returns the directory of one engine, or of the slot of one; one of several as it is."""
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
        """Whether the models that the server was started with all still load."""
        states = [slot.state for slot in self if slot.state != "unloaded"]
        return not self._changed and bool(states) and set(states) == {"loading"}

    @property
    def num_in_memory(self) -> int:
        """Models that are loaded or load, failed ones too."""
        return sum(slot.state != "unloaded" for slot in self)

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def get(self, name: str) -> EngineSlot | None:
        """Returns the slot of a public name, if there is one."""
        return self._slots.get(name)

    def find(self, name: str | None = None) -> EngineSlot:
        """Returns the slot that a request means; None stands for the only one, the name of an
        adapter for its model's.

        A model also answers to the text that the server was given for it, and to its aliases.
        Raises ModelNotFound, and InvalidRequest where None may be one of several.
        """
        if name is None:
            return self._only()
        name = self.resolve(name)
        found = self._with_name(name) or self.with_adapter(name)
        if found is None:
            hint = f"this server has {self._listed()}" if self._slots else "this server has none"
            raise ModelNotFound(
                f"The model `{name[:MAX_SHOWN]}` does not exist.", hint=hint, param="model"
            )
        return found

    def resolve(self, name: str) -> str:
        """Returns the name that an alias stands for; any other name unchanged."""
        if self._is_known(name):
            return name
        if name in self._aliases:
            return self._aliases[name]
        matches = (target for alias, target in self._aliases.items() if fnmatchcase(name, alias))
        return next(matches, name)

    def set_alias(self, alias: str, name: str) -> None:
        """Gives a model or adapter another name, in place of what that name stood for."""
        self._aliases[alias] = name

    def drop_alias(self, alias: str) -> bool:
        """Removes an alias; returns False if there is none of this name."""
        return self._aliases.pop(alias, None) is not None

    def check_aliases(self, adapters: Iterable[str]) -> None:
        """Raises ConfigError for an alias of what is not served, or with the name of what is."""
        adapters = list(adapters)
        for alias, target in self._aliases.items():
            if not self._is_known(target) and target not in adapters:
                raise ConfigError(
                    f"model_alias: {alias} is for {target}, which is not served",
                    hint=f"this server has {', '.join([*self.names, *adapters])}",
                )
            if self._is_known(alias) or alias in adapters:
                raise ConfigError(f"model_alias: a model or adapter is called {alias} too")

    def aliases_of(self, slot: EngineSlot) -> list[str]:
        """Returns the aliases of a model or of its adapters that are plain names."""
        plain = (alias for alias in self._aliases if not set(alias) & set(GLOB_CHARACTERS))
        return [alias for alias in plain if self.find(alias) is slot]

    def _is_known(self, name: str) -> bool:
        return self.answers_to(name) or self.with_adapter(name) is not None

    def _with_name(self, name: str) -> EngineSlot | None:
        return self.get(name) or next((slot for slot in self if slot.answers_to(name)), None)

    def answers_to(self, name: str) -> bool:
        """Tells whether a model, rather than an adapter of one, is meant by a name."""
        return self._with_name(name) is not None

    def with_adapter(self, name: str) -> EngineSlot | None:
        """Returns the slot of the model that an adapter is for, if there is one of that name."""
        return next((slot for slot in self if name in slot.adapters), None)

    def add(self, slot: EngineSlot) -> None:
        """Takes in a slot, in place of one of the same name that failed."""
        if self._stopping:
            raise Unavailable("the server is stopping")
        self._slots[slot.name] = slot
        self._changed |= slot.state != "unloaded"

    def rename(self, slot: EngineSlot, name: str, model: str) -> None:
        """Gives a model another public name, and another text by which it is found."""
        del self._slots[slot.name]
        slot.rename(name, model)
        self._slots[name] = slot

    def remove(self, slot: EngineSlot) -> None:
        """Forgets a slot, unless another has taken its name."""
        if self._slots.get(slot.name) is slot:
            del self._slots[slot.name]
            self._changed = True

    def drain(self) -> None:
        """Refuses new work for every model from now on; running requests go on."""
        self._stopping = True
        for slot in self:
            slot.drain()

    def close(self) -> None:
        """Ends all engines, at the same time."""
        self._stopping = True
        slots = list(self)
        with ThreadPoolExecutor(max(1, len(slots))) as pool:
            list(pool.map(EngineSlot.close, slots))

    def _only(self) -> EngineSlot:
        if not self._slots:
            raise ModelNotFound("no model is loaded", hint="load one by POST /v1/models/load")
        slots = list(self)
        if len(slots) > 1:  # models that were pulled are meant by name alone
            slots = [slot for slot in slots if not slot.spec.is_remote] or slots
        if len(slots) > 1:  # one that failed to load stands in no other's way
            slots = [slot for slot in slots if slot.state != "failed"] or slots
        if len(slots) > 1:
            raise InvalidRequest(
                f"model: needed, as this server has several: {self._listed()}", param="model"
            )
        return slots[0]

    def _listed(self) -> str:
        return ", ".join(f"`{name}`" for name in self._slots)
