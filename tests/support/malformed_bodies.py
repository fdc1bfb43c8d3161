"""Seeded malformed bodies for every POST route of a server's OpenAPI description.

Each is certain to be refused: it is no JSON, no object, or has a field that the route's schema does
not allow. Knows the names of no route; values of required fields come from one table.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

JSON_TYPE = "application/json"
SAMPLES: dict[str, Any] = {
    "model": "tiny",
    "prompt": "Hello",
    "input": "Hello",
    "messages": [{"role": "user", "content": "Hello"}],
    "tokens": [5, 6],
    "max_tokens": 2,
    "input_file_id": "file-none",
    "endpoint": "/v1/completions",
    "completion_window": "24h",
    "lora_name": "none",
    "lora_path": "none",
    "documents": ["one"],
    "query": "one",
    "text_1": "one",
    "text_2": "other",
    "source": "tiny",
    "destination": "copied",
    "action": "restore",
    "name": "none",
}
"""Right values of the fields that some route cannot do without."""
VALUES: dict[str, tuple[str, ...]] = {
    "string": ('"x"', '""', '"\\u0000"'),
    "number": ("0.5", "-1e-300", "1e400", "-1e400", "NaN", "Infinity"),
    "boolean": ("true", "false"),
    "array": ("[[[]]]", '[{"a": [1]}]'),
    "object": ('{"a": {"b": [1]}}', '{"": 0.5}'),
}
"""JSON of values that are of one type alone."""
HUGE = tuple(sign + "9" * num_digits for num_digits in (30, 400, 5000) for sign in ("", "-"))
LONG_CHARACTERS = 1 << 20


@dataclass(frozen=True, slots=True)
class BadBody:
    """A body that is to be refused, and the mutation that made it."""

    path: str
    kind: str
    body: bytes
    content_type: str = JSON_TYPE


class NoSuchField(Exception):
    """Raised where a route has no field that a mutation could make wrong."""


class BodyMutations:
    """Draws malformed bodies for the POST routes of an OpenAPI description."""

    def __init__(self, description: dict[str, Any], seed: int) -> None:
        self._draw = random.Random(seed)
        self._schemas = {
            path.replace("{", "").replace("}", ""): _schema(methods["post"])
            for path, methods in description["paths"].items()
            if "post" in methods
        }
        required = {name for schema in self._schemas.values() for name in _needed(schema or {})}
        assert required <= SAMPLES.keys(), f"no right value of {required - SAMPLES.keys()}"
        self._kinds: tuple[Callable[[dict[str, Any]], str | bytes], ...] = (
            self._wrong_type,
            self._wrong_type,
            self._huge_number,
            self._truncated,
            self._no_object,
            self._deep,
            self._surrogate,
            self._invalid_utf8,
            self._duplicate,
            self._long_text,
            self._unknown_field,
            self._trailing,
            self._noise,
        )

    @property
    def paths(self) -> list[str]:
        """Paths of all POST routes, with names in the place of ids."""
        return list(self._schemas)

    def draw(self) -> BadBody:
        """Returns the next malformed body."""
        path = self._draw.choice(self.paths)
        schema = self._schemas[path]
        if schema is None:
            return self._without_schema(path)
        while True:
            mutate = self._draw.choice(self._kinds)
            try:
                made = mutate(schema)
            except NoSuchField:
                continue
            body = made if isinstance(made, bytes) else made.encode("utf-8", "surrogatepass")
            return BadBody(path, mutate.__name__.strip("_"), body)

    def _without_schema(self, path: str) -> BadBody:
        """Returns noise for a route that takes a form, or nothing for an id that is not there."""
        boundary = self._draw.choice(("x", "x" * 71, "", "é;", 'a"b'))
        head = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n'
        form = head % self._draw.choice((b"purpose", b"file", b"\xff", b"", b"n" * 5000))
        form = (form + self._draw.randbytes(20) + b"\r\n") * self._draw.choice((1, 40))
        form += self._draw.choice((b"--x--\r\n", b"--x", b"--", b""))
        content_type = f"multipart/form-data; boundary={boundary}"
        return BadBody(path, "form", form, self._draw.choice((content_type, JSON_TYPE, "x")))

    # -- one mutation each -------------------------------------------------------------------------

    def _wrong_type(self, schema: dict[str, Any]) -> str:
        name, types = self._typed_field(schema)
        wrong = [value for kind, some in VALUES.items() if kind not in types for value in some]
        if "number" in types:
            wrong += VALUES["number"][2:]
        if "integer" in types and "number" not in types:
            wrong += VALUES["number"]
        return _with(schema, name, self._draw.choice(wrong))

    def _huge_number(self, schema: dict[str, Any]) -> str:
        name, _ = self._typed_field(schema, without=("number",))
        return _with(schema, name, self._draw.choice(HUGE))

    def _truncated(self, schema: dict[str, Any]) -> bytes:
        body = _object(_right(schema)).encode()
        return body[: self._draw.randrange(len(body))]

    def _no_object(self, schema: dict[str, Any]) -> str:
        one = self._draw.choice(("null", "0", '"x"', "[]", "true", "1e400", "NaN"))
        return self._draw.choice((one, f"[{_object(_right(schema))}]"))

    def _deep(self, schema: dict[str, Any]) -> str:
        depth = self._draw.choice((300, 5000, 200_000))
        opening, closing = self._draw.choice((("[", "]"), ('{"a":', "}")))
        value = opening * depth + "1" + closing * self._draw.choice((0, depth))
        return _with(schema, self._draw.choice(list(schema["properties"])), value)

    def _surrogate(self, schema: dict[str, Any]) -> str:
        bad = self._draw.choice(('"\\ud800"', '"\\udc00x"', '"\\ud83d\\ud83d"', '"\ud800"'))
        if self._draw.random() < 0.3:
            return _object({**_right(schema), bad[1:-1]: "1"})
        return _with(schema, self._draw.choice(list(schema["properties"])), bad)

    def _invalid_utf8(self, schema: dict[str, Any]) -> bytes:
        bad = self._draw.choice((b"\xff", b"\xc0\x80", b"\xe2\x82", b"\xf5\x80\x80\x80"))
        body = _with(schema, next(iter(schema["properties"])), '"?"').encode()
        return body.replace(b'"?"', b'"' + bad + b'"')

    def _duplicate(self, schema: dict[str, Any]) -> str:
        """Returns a body with a field twice, of which the last is wrong."""
        name, types = self._typed_field(schema)
        wrong = next(some[0] for kind, some in VALUES.items() if kind not in types)
        return f'{{"{name}": null, {_with(schema, name, wrong)[1:]}'

    def _long_text(self, schema: dict[str, Any]) -> str:
        name, _ = self._typed_field(schema, without=("string",))
        letter = self._draw.choice(("x", "é", "\\u0000", " "))
        return _with(schema, name, f'"{letter * LONG_CHARACTERS}"')

    def _unknown_field(self, schema: dict[str, Any]) -> str:
        name = self._draw.choice(
            ("unheard", "", "__class__", "max_tokens ", "x" * 100_000, "日本", "a\\nb")
        )
        return _object({**_right(schema), name: self._draw.choice(("1", '"x"', "[]"))})

    def _trailing(self, schema: dict[str, Any]) -> str:
        more = self._draw.choice(("{}", "]", "\x00", ",", "1", "\ufeff"))
        return _object(_right(schema)) + more

    def _noise(self, _: dict[str, Any]) -> bytes:
        return b"\x80" + self._draw.randbytes(self._draw.choice((0, 1, 20, 5000)))

    def _typed_field(
        self, schema: dict[str, Any], without: tuple[str, ...] = ()
    ) -> tuple[str, set[str]]:
        """Draws a field that does not allow every type, and none of `without`."""
        found = {
            name: types
            for name, entry in schema["properties"].items()
            if (types := _types(entry)) and not types & set(without)
        }
        if not found:
            raise NoSuchField
        name = self._draw.choice(list(found))
        return name, found[name]


def _schema(operation: dict[str, Any]) -> dict[str, Any] | None:
    content = operation.get("requestBody", {}).get("content", {})
    found: dict[str, Any] | None = content.get(JSON_TYPE, {}).get("schema")
    return found


def _right(schema: dict[str, Any]) -> dict[str, str]:
    """Returns the fields that a right body has, as JSON."""
    return {name: json.dumps(SAMPLES[name]) for name in _needed(schema)}


def _needed(schema: dict[str, Any]) -> list[str]:
    """Returns the names of these fields."""
    names = {*schema.get("required", ()), *({"prompt"} & {*schema.get("properties", ())})}
    return sorted(names)


def _with(schema: dict[str, Any], name: str, value: str) -> str:
    return _object({**_right(schema), name: value})


def _object(fields: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"


def _types(entry: dict[str, Any]) -> set[str]:
    """Returns the JSON types that a field may have; none where it may have any."""
    kinds = entry.get("anyOf", entry.get("oneOf", [entry]))
    found = {kind.get("type", "any") for kind in kinds}
    return set() if "any" in found else found
