"""Reader of the user's YAML, TOML and JSON files; errors give line and column.

It reads key files, configuration files, cluster plans and saved chats. YAML is PyYAML's safe subset
of YAML 1.1; duplicate keys are rejected.
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
LineColumn = tuple[int, int]
"""Line and column, starting at 1."""
Keys = tuple[str | int, ...]
"""Path of keys and indices from the document's root to a value."""

FORMATS = {".yaml": "YAML", ".yml": "YAML", ".toml": "TOML", ".json": "JSON"}
HINTS = {
    "YAML": "write one `key: value` per line, and quote a value that contains `: ` or ` #`",
    "TOML": 'write one `key = value` per line, and texts in "quotes"',
    "JSON": 'write keys and texts in "quotes", and no comma after the last one',
}


@dataclass(frozen=True, slots=True)
class DataFile:
    """Parsed content of a file and the positions of its values."""

    name: str
    """Name used in errors, such as the option that gives the path."""
    path: str
    content: Any
    positions: Mapping[Keys, LineColumn] = field(default_factory=dict)

    def where(self, *keys: str | int) -> str:
        """Returns "path:line:column" of a value, or of its nearest ancestor with a known
        position.
        """
        while keys and keys not in self.positions:
            keys = keys[:-1]
        return ":".join(map(str, (self.path, *self.positions.get(keys, ()))))

    def convert(self, kind: type[T], *, hint: str | None = None) -> T:
        """Converts the content to a msgspec struct. The ConfigError for a wrong type gives the
        position and shows no value.
        """
        import msgspec

        try:
            return msgspec.convert(self.content, kind)
        except msgspec.ValidationError as error:
            text, _, at = str(error).partition(" - at `$")
            keys = _parse_keys(at.rstrip("`"))
            named = re.search(r"unknown field `(.*)`", text)
            position = self.where(*keys, *([named[1]] if named else []))
            what = f"{_format_keys(keys)}: " if keys else ""
            got = re.fullmatch(r"Expected (.*), got (.*)", text)
            if got:
                text = f"got {got[2]}, expected {got[1]}"
                if "`str" in got[1] and got[2] in ("`int`", "`float`", "`bool`"):
                    hint = 'write the text in "quotes"'
            raise ConfigError(f"{self.name}: {position}: {what}{text}", hint=hint) from None


def read_data_file(
    path: str | Path,
    *,
    name: str,
    max_bytes: int,
    kind: str | None = None,
    has_secrets: bool = False,
) -> DataFile:
    """Reads a file in the format of its extension, or of `kind`. Raises ConfigError with line and
    column if it is invalid; with `has_secrets` the error quotes nothing from the file.
    """
    kind = kind or FORMATS.get(Path(path).suffix.lower())
    if kind is None:
        raise ConfigError(f"{name}: got {path}, expected files named *{', *'.join(FORMATS)}")
    text = _read_text(Path(path), name, max_bytes)
    try:
        content, positions = PARSERS[kind](text)
    except _ParseError as error:
        line, column = error.position
        got = "" if has_secrets else _quote_line(text, line)
        reason = _without_quotes(error.reason) if has_secrets else error.reason
        raise ConfigError(
            f"{name}: {path}:{line}:{column}: not valid {kind}: {reason}{got}", hint=HINTS[kind]
        ) from None
    except RecursionError:
        raise ConfigError(f"{name}: {path}: not valid {kind}: nested too deeply") from None
    return DataFile(name, str(path), content, positions)


class _ParseError(Exception):
    """A parse error and its position."""

    def __init__(self, reason: str, position: LineColumn) -> None:
        super().__init__(reason)
        self.reason = reason
        self.position = position


def _read_text(path: Path, name: str, max_bytes: int) -> str:
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{name}: {path}: cannot be read: {reason}", hint="check the path and its permissions"
        ) from None
    if len(data) > max_bytes:
        raise ConfigError(f"{name}: {path}: too large, expected at most {max_bytes:,} bytes")
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


def _parse_yaml(text: str) -> tuple[Any, dict[Keys, LineColumn]]:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for at, (key, _) in enumerate(node.value):
                if key.value in keys[:at]:
                    raise _ParseError(
                        f"the key {key.value!r} occurs twice", _get_position(key.start_mark)
                    )
            found: dict[Any, Any] = super().construct_mapping(node, deep)
            return found

    try:
        loader = Loader(text)
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        raise _ParseError(
            f"{error.reason}: #x{error.character:04x}", _position_at(text, error.position)
        ) from None
    except yaml.MarkedYAMLError as error:
        reason = " ".join(filter(None, [error.context, error.problem]))
        mark = error.problem_mark or error.context_mark
        raise _ParseError(reason, _get_position(mark) if mark else (1, 1)) from None
    except ValueError as error:  # an invalid date
        raise _ParseError(str(error), (1, 1)) from None
    return content, {} if node is None else dict(_walk_positions(node, (), set()))


def _parse_toml(text: str) -> tuple[Any, dict[Keys, LineColumn]]:
    try:
        return tomllib.loads(text), {}
    except tomllib.TOMLDecodeError as error:
        reason, _, at = str(error).partition(" (at ")
        numbers = [int(digits) for digits in re.findall(r"\d+", at)]
        position = (numbers[0], numbers[1]) if len(numbers) == 2 else _position_at(text, len(text))
        raise _ParseError(reason, position) from None


def _parse_json(text: str) -> tuple[Any, dict[Keys, LineColumn]]:
    import yaml

    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise _ParseError(error.msg, (error.lineno, error.colno)) from None
    try:
        node = yaml.compose(text, yaml.SafeLoader)  # JSON is valid YAML, except for tabs
    except yaml.YAMLError:
        return content, {}
    return content, dict(_walk_positions(node, (), set()))


PARSERS = {"YAML": _parse_yaml, "TOML": _parse_toml, "JSON": _parse_json}


def _walk_positions(node: Any, keys: Keys, seen: set[int]) -> Iterator[tuple[Keys, LineColumn]]:
    """Yields the position of each value of a YAML node; for mapping values, the position of the
    key.
    """
    if not keys:
        yield keys, _get_position(node.start_mark)
    if id(node) in seen or isinstance(node.value, str):
        return
    seen.add(id(node))
    for at, item in enumerate(node.value):
        key, value = item if isinstance(item, tuple) else (None, item)
        inner = (*keys, at if key is None else str(key.value))
        yield inner, _get_position((key or value).start_mark)
        yield from _walk_positions(value, inner, seen)


def _get_position(mark: Any) -> LineColumn:
    return mark.line + 1, mark.column + 1


def _position_at(text: str, position: int) -> LineColumn:
    before = text[:position]
    return before.count("\n") + 1, position - before.rfind("\n")


def _quote_line(text: str, line: int) -> str:
    lines = text.splitlines()
    shown = lines[line - 1].strip() if line <= len(lines) else ""
    return f", got `{shown if len(shown) <= 60 else shown[:57] + '...'}`" if shown else ""


def _without_quotes(reason: str) -> str:
    """Removes quoted file content from a parser's message."""
    return re.sub(r"(['\"])[^'\"]{2,}\1", "...", reason)


def _parse_keys(path: str) -> Keys:
    """Parses a path in msgspec's notation, such as ".keys[0].name"."""
    return tuple(
        int(index) if index else key for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path)
    )


def _format_keys(keys: Keys) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
