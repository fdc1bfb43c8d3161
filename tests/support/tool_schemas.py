"""Schemas of functions' arguments, drawn at random: references, unions, nested values, limits, free
names, and names and strings that spell what formats write.
"""

from __future__ import annotations

import random
from typing import Any

NAMES = ["a", "ab", "b", "a-b", "$filter", "ids[]", "x y", "class", "日", "a>b", 'q"', "A", "", "0"]
TEXTS = [
    *["a", "", "null", "true", "12", "-", "{}", "[1]", '"a"', "a\nb", "\n", " a ", "ß", "True"],
    *[
        "</parameter>",
        "</arg_value>",
        "</function>",
        "}\n</tool_call>",
        "a</parameter>b",
        "\\",
        "'",
    ],
]
VALUES = [None, True, False, 0, -1, 7, 2.5, [], [1], {"k": 1}, {}]
PATTERNS = ["^[a-c]{1,3}$", "b", "^a|b$", "^\\d+$", '^[^"]{1,3}$', "^\\w\\s?\\w$"]
PATTERNS_OF_NAMES = ["^x-", "^[a-z]{1,2}$", "_"]
DEFINED = "#/$defs/"


class SchemaSource:
    """Draws one schema after another."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def arguments(self) -> dict[str, Any]:
        """Returns the schema of a function's arguments."""
        rng = self._rng
        definitions = {"s": self._scalar(), "o": self._object(1), "t": self._tree()}
        kind = rng.choice(["object"] * 5 + ["free", "any of", "all of", "reference", "empty"])
        root = {
            "object": lambda: self._object(2),
            "free": self._free,
            "any of": lambda: {"anyOf": [self._object(1), self._object(1)]},
            "all of": lambda: {"allOf": [self._open_object("c"), self._open_object("d")]},
            "reference": lambda: {"$ref": f"{DEFINED}o"},
            "empty": dict,
        }[kind]()
        return {**root, "$defs": definitions}

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(NAMES, rng.randint(0, 3))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._value(depth) for name in names},
            "required": [name for name in names if rng.random() < 0.5],
        }
        if rng.random() < 0.3:
            schema["additionalProperties"] = rng.choice([False, {"type": "integer"}])
        if names and rng.random() < 0.1 and schema.get("additionalProperties") is False:
            schema["minProperties"] = 1
        return schema

    def _open_object(self, name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: self._value(1)}, "required": [name]}

    def _free(self) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": "object", "additionalProperties": self._value(1)}
        if rng.random() < 0.5:
            schema["patternProperties"] = {rng.choice(PATTERNS_OF_NAMES): self._value(1)}
        if rng.random() < 0.3:
            schema["minProperties"] = 1
        if rng.random() < 0.3:
            schema["maxProperties"] = 2
        return schema

    def _value(self, depth: int) -> Any:
        rng = self._rng
        kinds = ["scalar"] * 4 + ["reference", "root", "union", "nullable", "any", "all of"]
        kind = rng.choice(kinds + ["object", "list"] * (depth > 0))
        return {
            "scalar": self._scalar,
            "reference": lambda: {"$ref": DEFINED + rng.choice("sot")},
            "root": lambda: {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
            "union": lambda: {"anyOf": [self._value(0), self._value(0)]},
            "nullable": lambda: {"anyOf": [self._scalar(), {"type": "null"}]},
            "any": lambda: rng.choice([{}, True]),
            "all of": lambda: {"allOf": [self._string(), {"type": "string", "maxLength": 4}]},
            "object": lambda: self._object(depth - 1),
            "list": lambda: {"type": "array", "items": self._value(depth - 1), "maxItems": 2},
        }[kind]()

    def _scalar(self) -> dict[str, Any]:
        rng = self._rng
        kind = rng.choice(["string"] * 3 + ["number", "types", "enum", "const", "boolean"])
        if kind == "string":
            return self._string()
        if kind == "number":
            return {"type": rng.choice(["integer", "number"]), "minimum": 0, "maximum": 99}
        types = rng.sample(["string", "null", "integer", "boolean", "number"], 2)
        mixed = rng.sample(TEXTS, 2) + rng.sample(VALUES, 2)
        return {
            "types": {"type": types},
            "enum": {"enum": mixed},
            "const": {"const": rng.choice(mixed)},
            "boolean": {"type": "boolean"},
        }[kind]

    def _string(self) -> dict[str, Any]:
        rng = self._rng
        kind = rng.choice(["any", "any", "enum", "length", "pattern", "format"])
        least = rng.randint(0, 3)
        return {"type": "string"} | {
            "any": {},
            "enum": {"enum": rng.sample(TEXTS, rng.randint(1, 3))},
            "length": {"minLength": least, "maxLength": least + rng.randint(0, 20)},
            "pattern": {"pattern": rng.choice(PATTERNS)},
            "format": {"format": rng.choice(["date", "uuid", "ipv4"])},
        }[kind]

    def _tree(self) -> dict[str, Any]:
        tree = {"$ref": f"{DEFINED}t"}
        return {"anyOf": [{"type": "integer"}, {"type": "array", "items": tree, "maxItems": 2}]}
