"""YAML, TOML and JSON files that a user hands over, read with errors that name line and column.

The one reader of key files, configuration files, cluster plans and saved chats. YAML is PyYAML's
safe subset of YAML 1.1; a key that stands twice in a mapping is refused. Knows nothing of what the
files mean.
"""

from __future__ import annotations

import codecs
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from octavo.api.errors import ConfigError

T = TypeVar("T")
Place = tuple[int, int]
"""Line and column, from 1."""
Keys = tuple[str | int, ...]
"""Keys and indices that lead from the top of a document to a value."""

FORMATS = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML", ".json": "JSON"}
HINTS = {
    "YAML": "write one `key: value` per line, and quote a value that holds `: ` or ` #`",
    "TOML": 'write one `key = value` per line, and texts in "quotes"',
    "JSON": 'write keys and texts in "quotes", and no comma after the last one',
}


@dataclass(frozen=True, slots=True)
class DataFile:
    """The contents of a file, and where they stand in it."""

    name: str
    """What the file is for, e.g. the option that names it; errors begin with it."""
    path: str
    content: Any
    places: Mapping[Keys, Place] = field(default_factory=dict)

    def where(self, *keys: str | int) -> str:
        """Returns "path:line:column" of a value, or of the nearest one around it."""
        while keys and keys not in self.places:
            keys = keys[:-1]
        return ":".join(map(str, (self.path, *self.places.get(keys, ()))))

    def convert(self, kind: type[T], *, hint: str | None = None) -> T:
        """Returns the contents as a msgspec struct; raises ConfigError that says where they are of
        another type, and shows no value.
        """
        import msgspec

        try:
            return msgspec.convert(self.content, kind)
        except msgspec.ValidationError as error:
            text, _, at = str(error).partition(" - at `$")
            keys = _keys_of(at.rstrip("`"))
            named = re.search(r"unknown field `(.*)`", text)
            place = self.where(*keys, *([named[1]] if named else []))
            what = f"{_joined(keys)}: " if keys else ""
            got = re.fullmatch(r"Expected (.*), got (.*)", text)
            if got:
                text = f"got {got[2]}, allowed is {got[1]}"
                if "`str" in got[1] and got[2] in ("`int`", "`float`", "`bool`"):
                    hint = 'write the text in "quotes"'
            raise ConfigError(f"{self.name}: {place}: {what}{text}", hint=hint) from None


def read_data_file(
    path: str | Path,
    *,
    name: str,
    max_bytes: int,
    kind: str | None = None,
    has_secrets: bool = False,
) -> DataFile:
    """Reads a file of the format that its name says, or of `kind`; raises ConfigError with line and
    column if it is broken. The error shows nothing of a file that `has_secrets`.
    """
    kind = kind or FORMATS.get(Path(path).suffix.lower())
    if kind is None:
        raise ConfigError(f"{name}: got {path}, allowed are files named *{', *'.join(FORMATS)}")
    text = _read_text(Path(path), name, max_bytes)
    try:
        content, places = PARSERS[kind](text)
    except _Broken as error:
        line, column = error.place
        got = "" if has_secrets else _quote_line(text, line)
        reason = _without_quotes(error.reason) if has_secrets else error.reason
        raise ConfigError(
            f"{name}: {path}:{line}:{column}: not valid {kind}: {reason}{got}", hint=HINTS[kind]
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: {path}: not valid {kind}: it is nested too deeply") from None
    return DataFile(name, str(path), content, places)


class _Broken(Exception):
    """What a parser found wrong, and where."""

    def __init__(self, reason: str, place: Place) -> None:
        super().__init__(reason)
        self.reason = reason
        self.place = place


def _read_text(path: Path, name: str, max_bytes: int) -> str:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name}: {path}: cannot be read: {reason}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{name}: {path}: too large, allowed are {max_bytes:,} bytes")
    is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise ConfigError(
            f"{name}: {path}:{line}:{column}: got a byte that is not UTF-8",
            hint="save the file as UTF-8",
        ) from None


def _parse_yaml(text: str) -> tuple[Any, dict[Keys, Place]]:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """A loader that refuses a key that stands twice in a mapping."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for at, (key, _) in enumerate(node.value):
                if key.value in keys[:at]:
                    raise _Broken(f"the key {key.value!r} stands twice", _place(key.start_mark))
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        loader = Loader(text)
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        raise _Broken(
            f"{error.reason}: #x{error.character:04x}", _place_at(text, error.position)
        ) from None
    except yaml.MarkedYAMLError as error:
        reason = " ".join(filter(None, [error.context, error.problem]))
        mark = error.problem_mark or error.context_mark
        raise _Broken(reason, _place(mark) if mark else (1, 1)) from None
    except ValueError as error:  # a date that there is not
        raise _Broken(str(error), (1, 1)) from None
    return content, {} if node is None else dict(_places(node, (), set()))


def _parse_toml(text: str) -> tuple[Any, dict[Keys, Place]]:
    try:
        return tomllib.loads(text), {}
    except tomllib.TOMLDecodeError as error:
        reason, _, at = str(error).partition(" (at ")
        numbers = [int(digits) for digits in re.findall(r"\d+", at)]
        place = (numbers[0], numbers[1]) if len(numbers) == 2 else _place_at(text, len(text))
        raise _Broken(reason, place) from None


def _parse_json(text: str) -> tuple[Any, dict[Keys, Place]]:
    import yaml

    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Broken(error.msg, (error.lineno, error.colno)) from None
    try:
        node = yaml.compose(text, yaml.SafeLoader)  # JSON is YAML, but for tabs
    except yaml.YAMLError:
        return content, {}
    return content, dict(_places(node, (), set()))


PARSERS = {"YAML": _parse_yaml, "TOML": _parse_toml, "JSON": _parse_json}


def _places(node: Any, keys: Keys, seen: set[int]) -> Iterator[tuple[Keys, Place]]:
    """Yields the place of each value of a YAML node; those of a key for the values of a mapping."""
    if not keys:
        yield keys, _place(node.start_mark)
    if id(node) in seen or isinstance(node.value, str):
        return
    seen.add(id(node))
    for at, item in enumerate(node.value):
        key, value = item if isinstance(item, tuple) else (None, item)
        inner = (*keys, at if key is None else str(key.value))
        yield inner, _place((key or value).start_mark)
        yield from _places(value, inner, seen)


def _place(mark: Any) -> Place:
    return mark.line + 1, mark.column + 1


def _place_at(text: str, position: int) -> Place:
    before = text[:position]
    return before.count("\n") + 1, position - before.rfind("\n")


def _quote_line(text: str, line: int) -> str:
    lines = text.splitlines()
    shown = lines[line - 1].strip() if line <= len(lines) else ""
    return f", got `{shown if len(shown) <= 60 else shown[:57] + '...'}`" if shown else ""


def _without_quotes(reason: str) -> str:
    """Returns a parser's message without what it quotes of the file."""
    return re.sub(r"(['\"])[^'\"]{2,}\1", "...", reason)


def _keys_of(path: str) -> Keys:
    """Returns the keys of a path as msgspec writes it: ".keys[0].name"."""
    return tuple(
        int(index) if index else key for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path)
    )


def _joined(keys: Keys) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
