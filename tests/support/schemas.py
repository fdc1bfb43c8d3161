"""JSON schemas drawn at random, whose answers are short; and those of a file, one a line, that
OCTAVO_SCHEMAS names, such as JSONSchemaBench's.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

VARIABLE = "OCTAVO_SCHEMAS"


def schemas_of_file(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Draws schemas of the file that the environment names; none where it names none."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return []
    lines = Path(path).read_text().splitlines()
    found = [json.loads(line)["schema"] for line in rng.sample(lines, min(count, len(lines)))]
    return [schema for schema in found if isinstance(schema, dict)]


def some_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """Draws a schema whose answers are short."""
    kinds = ["integer", "boolean", "string", "enum", "const", "pattern"]
    kind = rng.choice(kinds + ["object", "array", "anyOf"] * (depth > 0))
    if kind == "object":
        names = rng.sample("abcdefgh", rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: some_schema(rng, depth - 1) for name in names},
            "required": names[: rng.randint(0, len(names))],
            "additionalProperties": False,
        }
    if kind == "array":
        least = rng.randint(0, 1)
        return {
            "type": "array",
            "items": some_schema(rng, depth - 1),
            "minItems": least,
            "maxItems": least + 1,
        }
    return {
        "integer": {"type": "integer", "minimum": -rng.randint(0, 50), "maximum": 99},
        "boolean": {"type": ["boolean", "null"]},
        "string": {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 5)},
        "enum": {"enum": rng.sample(["x", "yy", 3, None, "ß", [1], {"k": 0}], 3)},
        "const": {"const": rng.choice(["c", 1.5, True, {"a": [None]}])},
        "pattern": {"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}$"},
        "anyOf": {"anyOf": [some_schema(rng, depth - 1) for _ in range(depth and 2)]},
    }[kind]
