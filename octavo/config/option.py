"""One option: how a field of a dataclass declares it, and how a value in any form becomes its own.

Knows no option by name; `engine_config.py` has the engine's, `server/settings.py` the server's.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_size, parse_bytes, parse_count, read_seconds

MAX_COUNT = (1 << 31) - 1
"""Most requests, tokens or threads that an option may name: arrays of them have 32-bit indices."""

MAX_CHOICES_LENGTH = 40
"""Most characters of a flag's name and its choices on one line of the help."""


Group = Literal[
    "Model",
    "Sampling",
    "Memory and KV cache",
    "Scheduling",
    "Speculative decoding",
    "Structured output",
    "LoRA",
    "Multimodal",
    "Backend",
    "Distributed",
    "Server",
    "Server limits",
    "Security",
    "Logging",
    "Experimental",
]
"""Groups of options, in the order in which `--help-all` and the reference show them."""

COMMON = "Common"
"""Group of the most used options, which `--help` shows."""


def option(
    default: Any,
    group: Group,
    text: str,
    *,
    details: str = "",
    derived: str = "",
    common: bool = False,
    metavar: str | None = None,
    unit: Literal["bytes", "count", "seconds"] | None = None,
    low: float | None = None,
    short: str | None = None,
) -> Any:
    """Makes a field with its group and its help text.

    `text` is one line in the imperative; `details` is the rest, for the reference page. `derived`
    says what a default of None becomes. A `common` option is part of `--help`; the others are shown
    by `--help-all`. `unit` lets texts such as "2GiB", "8k" or "5m" stand for numbers, `low` is the
    least value, `short` a short flag beside the long one.
    """
    return field(
        default=default,
        metadata={
            "group": group,
            "help": text,
            "details": details,
            "derived": derived,
            "common": common,
            "metavar": metavar,
            "unit": unit,
            "low": low,
            "short": short,
        },
    )


@dataclass(frozen=True, slots=True)
class OptionField:
    """Declaration and type of one option, for what makes flags or documents of it."""

    entry: Field[Any]
    type: Any

    @property
    def help(self) -> str:
        """One line that its flag and the documents show."""
        return str(self.entry.metadata["help"])

    @property
    def details(self) -> str:
        """Sentences that follow the help text in the documents."""
        return str(self.entry.metadata["details"])

    @property
    def group(self) -> str:
        """Group in the documents."""
        return str(self.entry.metadata["group"])

    @property
    def panel(self) -> str:
        """Group in the help of a command."""
        return COMMON if self.entry.metadata["common"] else self.group

    @property
    def default_text(self) -> str:
        """The default as a reader sees it; "" if there is none."""
        default: Any = self.entry.default
        if default in (None, (), "") or isinstance(default, bool):
            return str(self.entry.metadata["derived"])
        if isinstance(default, float):
            return f"{default:g}"
        return format_size(default) if self.entry.metadata["unit"] == "bytes" else str(default)

    @property
    def metavar(self) -> str:
        """Placeholder of the value in the help: the choices, or a word for what it is."""
        if given := self.entry.metadata["metavar"]:
            return str(given)
        choices, word = "|".join(self.choices), self.entry.name.rpartition("_")[2].upper()
        if choices:
            is_short = len(self.entry.name) + len(choices) <= MAX_CHOICES_LENGTH
            return choices if is_short else word
        if self.number is not None:
            return "SIZE" if self.entry.metadata["unit"] == "bytes" else "N"
        return word

    @property
    def choices(self) -> tuple[str, ...]:
        """Texts that are allowed; () where it is not a choice."""
        inner = (
            [part for part in get_args(self.type) if part is not type(None)]
            if get_origin(self.type) is not Literal
            else [self.type]
        )
        return next((get_args(part) for part in inner if get_origin(part) is Literal), ())

    @property
    def is_list(self) -> bool:
        """Whether the option takes any number of texts."""
        return get_origin(self.type) is tuple

    @property
    def number(self) -> type[int] | type[float] | None:
        """Kind of number that it holds, if any."""
        kinds = get_args(self.type) or (self.type,)
        return int if int in kinds else float if float in kinds else None


def options_of(kind: type) -> dict[str, OptionField]:
    """Returns the options that are a dataclass's fields, by name."""
    hints = get_type_hints(kind)
    return {entry.name: OptionField(entry, hints[entry.name]) for entry in fields(kind)}


def convert(spec: OptionField, value: Any) -> Any:
    """Returns the value in the option's own type, or raises ConfigError. Texts stand for numbers,
    as a shell has them.
    """
    name, unit = spec.entry.name, spec.entry.metadata["unit"]
    if value is None:
        if spec.entry.default is None:
            return None
        raise ConfigError(f"{name}: got None, allowed is {_allowed(spec)}")
    if isinstance(value, list):
        value = tuple(value)
    if isinstance(value, str) and unit == "seconds":
        seconds = read_seconds(value)
        value = value if seconds is None else seconds
    elif isinstance(value, str) and unit:
        value = (parse_bytes if unit == "bytes" else parse_count)(value, name=name)
    elif isinstance(value, str) and spec.number is not None:
        value = _parse_number(value, spec.number)
    if spec.number is float and type(value) is int:
        value = float(value)
    if not _fits(spec, value):
        raise ConfigError(f"{name}: got {value!r}, allowed is {_allowed(spec)}")
    if (
        type(value) is int
        and unit != "bytes"
        and spec.entry.metadata["low"] is not None
        and value > MAX_COUNT
    ):
        raise ConfigError(f"{name}: got {value}, allowed is at most {MAX_COUNT:,}")
    return value


def _parse_number(text: str, kind: type[int] | type[float]) -> Any:
    """Returns the number that a text holds, or the text where it holds none."""
    try:
        return kind(text)
    except ValueError:
        return text


def _fits(spec: OptionField, value: Any) -> bool:
    if spec.choices:
        return value in spec.choices
    if spec.is_list:
        return isinstance(value, tuple) and all(isinstance(text, str) for text in value)
    kinds = get_args(spec.type) or (spec.type,)
    low = spec.entry.metadata["low"]
    return any(type(value) is kind for kind in kinds) and (low is None or value >= low)


def _allowed(spec: OptionField) -> str:
    if spec.choices:
        return " or ".join(map(repr, spec.choices))
    kinds = [
        kind.__name__ for kind in get_args(spec.type) or (spec.type,) if kind is not type(None)
    ]
    words = {"int": "a whole number", "str": "a text", "bool": "True or False", "float": "a number"}
    low = spec.entry.metadata["low"]
    if spec.entry.metadata["unit"] == "seconds":
        return f"a number of seconds of at least {low}, or a time such as 30s, 5m or 1h30m"
    return words[kinds[0]] + ("" if low is None else f" of at least {low}")
