"""Answers' schemas judged by instances: how many schemas of a file compile, and which instances
their grammars take.

    python benchmarks/schema_suites.py FILE... [--model smollm2] [--show 20]

Each line of a file is a JSON object with `schema` and `tests`, each of these with `data` and
`valid`, as JSONSchemaBench and the JSON Schema Test Suite have them. A grammar takes an instance
where it takes its members in some order, whole numbers without a fraction. Prints one JSON line for
each file: the schemas that were admitted and those that llguidance by itself compiles, instances
judged wrongly, the keywords of refusals, CPU milliseconds to admit a schema and to make a mask and
take a token. The wrongly judged ones follow by name. In the suite these are the texts of which
`format` is only to be an annotation: an answer is held to it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher

from octavo.api.errors import InvalidRequest
from octavo.api.structured_outputs import GrammarSpec, StructuredOutputs
from octavo.config.engine_config import EngineConfig
from octavo.text.grammar.compiler import GrammarError
from octavo.text.grammar.lazy import LazyGrammars
from octavo.text.ports import Matcher
from octavo.text.tokenizer import TextTokenizer
from octavo.wiring.grammars import lazy_grammars
from octavo.wiring.model import build_tokenizer, open_model

MOST_PARTS = {True: 20_000, False: 2_000}
"""Texts that are tried for one instance, by whether it is valid: its members have many orders."""


class Place(NamedTuple):
    """A place in a grammar's text, and the text before it."""

    matcher: Matcher
    text: str


@dataclass(slots=True)
class Verdicts:
    """Verdicts on the schemas of one file."""

    num_schemas: int = 0
    num_admitted: int = 0
    num_alone: int = 0
    """Schemas that llguidance compiles by itself, read strictly."""
    num_valid: int = 0
    num_invalid: int = 0
    valid_refused: list[str] = field(default_factory=list)
    invalid_accepted: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Instances at which a bound of the compiler was met, though the schema was admitted."""
    refusals: Counter[str] = field(default_factory=Counter)
    worse: list[str] = field(default_factory=list)
    """Schemas that llguidance compiles by itself and that are refused."""
    admit_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    def line(self, name: str) -> dict[str, Any]:
        """Returns the counts as one line."""
        return {
            "file": name,
            "schemas": self.num_schemas,
            "admitted": self.num_admitted,
            "by llguidance alone": self.num_alone,
            "valid": self.num_valid,
            "valid refused": len(self.valid_refused),
            "invalid": self.num_invalid,
            "invalid accepted": len(self.invalid_accepted),
            "failed": len(self.failed),
            "admit ms": quantiles(self.admit_ms),
            "step ms": quantiles(self.step_ms),
            "refusals": dict(self.refusals.most_common()),
        }


def quantiles(found: list[float]) -> dict[str, float]:
    """Returns the median, the 99th of a hundred, and the largest."""
    ranked = sorted(found) or [0.0]
    places = {"median": 0.5, "99%": 0.99, "max": 1.0}
    return {name: round(ranked[int(part * (len(ranked) - 1))], 3) for name, part in places.items()}


class Judge:
    """Compares grammars with the instances that their schemas come with."""

    def __init__(self, model: str) -> None:
        opened = open_model(EngineConfig.from_options(model=model, structured_open_objects=True))
        tokenizer = build_tokenizer(opened)
        assert isinstance(tokenizer, TextTokenizer)
        self._tokenizer = tokenizer
        self._grammars: LazyGrammars = lazy_grammars(opened, lambda: tokenizer)
        self._ends = tokenizer.eos_token_ids
        self._grammars.admit(StructuredOutputs(json={}))

    def judge(self, path: Path) -> Verdicts:
        """Returns the verdicts on a file's schemas."""
        found = Verdicts()
        for number, line in enumerate(path.read_text().splitlines()):
            case = json.loads(line)
            name = case.get("name") or f"{case['file']}: {case['description']}"
            self._judge(f"{number} {name}", case["schema"], case["tests"], found)
        return found

    def _judge(self, name: str, schema: Any, tests: list[Any], found: Verdicts) -> None:
        found.num_schemas += 1
        is_alone = compiles_alone(schema)
        found.num_alone += is_alone
        began = time.thread_time()
        try:
            spec = self._grammars.admit(StructuredOutputs(json=schema))
        except InvalidRequest as error:
            found.refusals[keyword(str(error))] += 1
            if is_alone:
                found.worse.append(f"{name}: {error}"[:300])
            return
        finally:
            found.admit_ms.append(1e3 * (time.thread_time() - began))
        found.num_admitted += 1
        for index, test in enumerate(tests):
            found.num_valid += test["valid"]
            found.num_invalid += not test["valid"]
            at = f"{name} [{index}]"
            try:
                text = self._written(spec, test["data"], MOST_PARTS[test["valid"]])
                if text is not None:
                    found.step_ms += self._step_ms(spec, text)
            except GrammarError as error:
                found.failed.append(f"{at} {error}")
                continue
            if (text is not None) != test["valid"]:
                wrong = found.valid_refused if test["valid"] else found.invalid_accepted
                wrong.append(f"{at} {json.dumps(test['data'])[:160]}")

    def _written(self, spec: GrammarSpec, data: Any, most_parts: int) -> str | None:
        """Returns a text of an instance that a grammar takes; None where there is none."""
        ways = Writer(self._encode, most_parts).ways(Place(self._grammars.compile(spec), ""), data)
        return next((end.text for end in ways if end.matcher.allows(self._ends[0])), None)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _step_ms(self, spec: GrammarSpec, text: str) -> list[float]:
        """Returns the CPU milliseconds of each mask and token of a text that a grammar takes."""
        matcher, found = self._grammars.compile(spec), []
        for token_id in [*self._encode(text), self._ends[0]]:
            began = time.thread_time()
            mask = matcher.mask()
            matcher.take([token_id])
            found.append(1e3 * (time.thread_time() - began))
            assert mask[token_id // 8] >> token_id % 8 & 1, "what is taken is in the mask"
        return found


class Writer:
    """Writes an instance as a grammar takes it, whose order of members is its own."""

    def __init__(self, encode: Callable[[str], list[int]], most_parts: int) -> None:
        self._encode = encode
        self._num_left = most_parts

    def ways(self, place: Place, data: Any) -> Iterator[Place]:
        """Yields the places behind an instance, one for each way to write it."""
        if isinstance(data, dict):
            yield from self._members(place, "{", data)
        elif isinstance(data, list):
            yield from self._items(place, "[", data)
        else:
            is_whole = isinstance(data, float) and data.is_integer() and abs(data) <= 2**53
            yield from self._part(place, spelled(int(data) if is_whole else data))

    def _items(self, place: Place, before: str, left: list[Any]) -> Iterator[Place]:
        if not left:
            yield from self._part(place, "]" if before != "[" else "[]")
        for start in self._part(place, before) if left else ():
            for end in self.ways(start, left[0]):
                yield from self._items(end, ", ", left[1:])

    def _members(self, place: Place, before: str, left: dict[str, Any]) -> Iterator[Place]:
        if not left:
            yield from self._part(place, "}" if before != "{" else "{}")
        for name, value in left.items():
            others = {other: left[other] for other in left if other != name}
            for start in self._part(place, f"{before}{spelled(name)}: "):
                for end in self.ways(start, value):
                    yield from self._members(end, ", ", others)

    def _part(self, place: Place, text: str) -> Iterator[Place]:
        """Yields the place behind a text where the grammar takes it."""
        self._num_left -= 1
        matcher = place.matcher.copy()
        for token_id in self._encode(text) if self._num_left > 0 else ():
            if not matcher.allows(token_id):
                return
            matcher.take([token_id])
        if self._num_left > 0:
            yield Place(matcher, place.text + text)


def spelled(data: Any) -> str:
    """Returns a value's JSON."""
    return json.dumps(data, ensure_ascii=False)


def compiles_alone(schema: Any) -> bool:
    """Returns whether llguidance compiles a schema by itself, with no keyword passed over."""
    options = {"x-guidance": {"lenient": False}}
    whole = schema | options if isinstance(schema, dict) else options
    grammar = {"grammars": [{"name": "a", "json_schema": whole}]}
    return schema is not False and not LLMatcher.validate_grammar(json.dumps(grammar))


def keyword(error: str) -> str:
    """Returns what a refusal is about: the last part of the pointer, or else its first words."""
    pointer, _, words = error.removeprefix("structured_outputs: json: ").partition(": ")
    return f"{pointer.rpartition('/')[2]}: {words}"[:70]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--show", type=int, default=20, help="wrongly judged ones that are named")
    given = parser.parse_args()
    judge = Judge(given.model)
    for path in given.files:
        found = judge.judge(path)
        print(json.dumps(found.line(path.name)))
        for title in ("valid_refused", "invalid_accepted", "failed", "worse"):
            for one in getattr(found, title)[: given.show]:
                print(f"  {title}: {one}")


if __name__ == "__main__":
    main()
