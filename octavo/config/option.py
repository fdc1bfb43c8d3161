"""Declaration of one option as a dataclass field, and conversion of its values.

The engine's options are in `engine_config.py`, the server's in `server/settings.py`.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo.api.errors import ConfigError
from octavo.config.sizes import format_size, parse_bytes, parse_count, read_seconds

MAX_COUNT = (1 << 31) - 1
"""Maximum count of requests, tokens or threads: they are indexed with 32 bits."""

MAX_CHOICES_LENGTH = 40
"""Maximum length of a flag's name and choices on one line of the help, in characters."""


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
    "KV transfer",
    "Distributed",
    "Server",
    "Server limits",
    "Security",
    "Logging",
    "Experimental",
]
"""Groups of options, in the order of `--help-all` and the reference."""

COMMON = "Common"
"""Group of the most used options, shown by `--help`."""


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
    secret: bool = False,
) -> Any:
    """Declares an option as a dataclass field.

    `text` is the help text: one line, imperative. `details` is added on the reference page.
    `derived` describes what a default of None becomes. `common` options are shown by `--help`,
    others only by `--help-all`. `unit` allows texts such as "2GiB", "8k" or "5m" for numbers; `low`
    is the minimum; `short` is a short flag. A `secret` is omitted from recordings.
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
            "secret": secret,
        },
    )


def shared_option(owner: type, name: str, *, default: Any = MISSING) -> Any:
    """Declares an option of another class again, with its default unless another one is given."""
    declared: Field[Any] = owner.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field(
        default=declared.default if default is MISSING else default, metadata=declared.metadata
    )


@dataclass(frozen=True, slots=True)
class OptionField:
    """Declaration and type of one option, from which flags and documentation are generated."""

    entry: Field[Any]
    type: Any

    @property
    def help(self) -> str:
        """Help text of one line."""
        return str(self.entry.metadata["help"])

    @property
    def details(self) -> str:
        """Additional sentences on the reference page."""
        return str(self.entry.metadata["details"])

    @property
    def group(self) -> str:
        return str(self.entry.metadata["group"])

    @property
    def panel(self) -> str:
        """Group in a command's help."""
        return COMMON if self.entry.metadata["common"] else self.group

    @property
    def default_text(self) -> str:
        """The default for display; "" if there is none."""
        default: Any = self.entry.default
        if default in (None, (), "") or isinstance(default, bool):
            return str(self.entry.metadata["derived"])
        if isinstance(default, float):
            return f"{default:g}"
        return format_size(default) if self.entry.metadata["unit"] == "bytes" else str(default)

    @property
    def metavar(self) -> str:
        """Placeholder of the value in the help: the choices, or the kind of value."""
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
        """Allowed texts; () if any are."""
        inner = (
            [part for part in get_args(self.type) if part is not type(None)]
            if get_origin(self.type) is not Literal
            else [self.type]
        )
        return next((get_args(part) for part in inner if get_origin(part) is Literal), ())

    @property
    def is_list(self) -> bool:
        """Whether the option is repeatable."""
        return get_origin(self.type) is tuple

    @property
    def number(self) -> type[int] | type[float] | None:
        """Numeric type of the option; None for other types."""
        kinds = get_args(self.type) or (self.type,)
        return int if int in kinds else float if float in kinds else None


def get_options(kind: type) -> dict[str, OptionField]:
    """Returns the options declared by a dataclass, by name."""
    hints = get_type_hints(kind)
    return {entry.name: OptionField(entry, hints[entry.name]) for entry in fields(kind)}


def convert(spec: OptionField, value: Any) -> Any:
    """Converts a value to the option's type; numbers may be given as texts. Raises ConfigError if
    it is not allowed.
    """
    name, unit = spec.entry.name, spec.entry.metadata["unit"]
    if value is None:
        if spec.entry.default is None:
            return None
        raise ConfigError(f"{name}: got None, expected {_allowed(spec)}")
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
        raise ConfigError(f"{name}: got {value!r}, expected {_allowed(spec)}")
    if (
        type(value) is int
        and unit != "bytes"
        and spec.entry.metadata["low"] is not None
        and value > MAX_COUNT
    ):
        raise ConfigError(f"{name}: got {value}, expected at most {MAX_COUNT:,}")
    return value


def _parse_number(text: str, kind: type[int] | type[float]) -> Any:
    """Parses a number; returns the text itself if it is not a number."""
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
    words = {"int": "an integer", "str": "a string", "bool": "True or False", "float": "a number"}
    low = spec.entry.metadata["low"]
    if spec.entry.metadata["unit"] == "seconds":
        return f"a number of seconds of at least {low}, or a time such as 30s, 5m or 1h30m"
    return words[kinds[0]] + ("" if low is None else f" of at least {low}")
