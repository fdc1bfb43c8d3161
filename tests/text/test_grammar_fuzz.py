"""Forms drawn at random, broken and excessive ones among them: each is admitted or refused with 400
within two seconds of work, what is admitted can be followed, and the memory comes back.
"""

import ctypes
import gc
import json
import mmap
import random
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from octavo.api.errors import InvalidRequest
from octavo.api.structured_outputs import StructuredOutputs
from octavo.checkpoint.ports import TokenizerSource
from octavo.text.grammar.admission import admit
from octavo.text.grammar.compiler import LEAST_BYTES
from octavo.text.grammar.lazy import GrammarSetup, LazyGrammars
from octavo.text.ports import Matcher
from octavo.text.tokenizer import load_tokenizer
from octavo.worker.sampling.grammar_matchers import CompiledGrammars
from tests.support.schemas import some_schema
from tests.support.tiers import examples
from tests.support.tiny_tokenizer import SPECIALS, save_tiny_tokenizer

TYPES = ["null", "boolean", "object", "array", "number", "string", "integer", "strng"]
ABOUT_ALL = [
    "type",
    "enum",
    "const",
    "$ref",
    "$defs",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
]
ABOUT_OBJECTS = ["properties", "required", "additionalProperties", "patternProperties"]
ABOUT_NAMES = ["propertyNames", "minProperties", "maxProperties", "dependentRequired"]
ABOUT_LISTS = ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"]
ABOUT_TEXTS = ["minLength", "maxLength", "pattern", "format"]
ABOUT_NUMBERS = ["minimum", "maximum", "exclusiveMinimum", "multipleOf"]
OTHERS = ["$id", "$schema", "$anchor", "definitions", "title", "default", "nullable"]
KEYWORDS = [
    *[*ABOUT_ALL, *ABOUT_OBJECTS, *ABOUT_NAMES, *ABOUT_LISTS],
    *[*ABOUT_TEXTS, *ABOUT_NUMBERS, *OTHERS],
]
VALUES = [
    *[None, True, False, 0, -1, 2.0, 1e308, 10**30, "", "a", *TYPES],
    *["#", "#/$defs/a", "#/properties/a", "http://x.org/y", "^a{1,99999}$", "(", "date-time"],
    *[[], {}, [[]], [{}], ["a"], ["a", "a"], {"a": {}}, {"a": 1}, "\ud800", "\0", "é" * 50],
]
REGEX_PARTS = [
    *["a", "é", ".", "\\d", "\\p{L}", "[^a-z]", "[]", "(", ")", "(?:", "|", "*", "+", "?", "{0}"],
    *["{1,99999}", "{5,2}", "^", "$", "(?i)", "(?=a)", "\\1", "\\", "/", "\n", "\ud800", "\0"],
]
LARK_PARTS = [
    *["start: ", "\n", "a", "B", '"x"', '"x', "/y*/", "(", ")", "|", "?", "*", "~", "&", "a: "],
    *["B: ", "%json {}", '%json {"not": {}}', "@a", "<[3]>", "<|turn|>", "[lazy]", "%ignore "],
    *["{1,99999}", "root ::= ", "[a-z]", "// c", "\ud800", "[max_tokens=3]", " "],
]


def broken(rng: random.Random, schema: dict) -> dict:
    """Returns a schema with values of some keywords put at random."""
    for _ in range(rng.randint(1, 3)):
        schema = schema | {rng.choice(KEYWORDS): rng.choice(VALUES)}
    return {"type": "object", "properties": {"a": schema}} if rng.random() < 0.3 else schema


def joined(rng: random.Random, parts: list[str]) -> str:
    return "".join(rng.choices(parts, k=rng.randint(1, 12)))


DRAWN = {
    "schemas": lambda rng: {"json": broken(rng, some_schema(rng))},
    "texts of schemas": lambda rng: {
        "json": json.dumps(broken(rng, some_schema(rng)))[: rng.randint(1, 200)]
    },
    "regexes": lambda rng: {"regex": joined(rng, REGEX_PARTS)},
    "grammars": lambda rng: {"grammar": "start: " + joined(rng, LARK_PARTS)},
    "whitespace": lambda rng: {"json": {}, "whitespace_pattern": joined(rng, REGEX_PARTS)},
    "tags": lambda rng: {
        "structural_tag": {
            "triggers": rng.choice([["<"], ["<", 3], [], VALUES[-1], ["<|turn|>"]]),
            "structures": [
                {
                    "begin": rng.choice(["<a>", "<|turn|>a", "", 3]),
                    rng.choice(["schema", "regex", "grammar"]): rng.choice(VALUES),
                    "end": rng.choice(["</a>", "", None]),
                }
            ],
        }
    },
}


def chain(link: str, last: str, num: int) -> str:
    """Returns rules of which each refers to the next."""
    return "\n".join(["start: a0", *(link.format(i, i + 1) for i in range(num)), f"a{num}: {last}"])


def references(wrap, num: int) -> dict:
    """Returns a schema of definitions of which each refers to the next."""
    defs = {f"d{i}": wrap({"$ref": f"#/$defs/d{i + 1}"}) for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{num}": {"type": "string"}}}


EXCESSIVE = {
    "a chain of rules": {"grammar": chain("a{}: a{} 'x'", '"c"', 10_000)},
    "a chain of terminals": {"grammar": chain("A{}: A{}", '"c"', 10_000).replace("a", "A")},
    "a chain that ends badly": {"grammar": chain("a{}: a{}", "/(/", 3_000)},
    "references": {"json": references(lambda to: to, 5_000)},
    "references of properties": {"json": references(lambda to: {"properties": {"a": to}}, 4_000)},
    "references of items": {"json": references(lambda to: {"prefixItems": [to]}, 4_000)},
    "references of branches": {"json": references(lambda to: {"anyOf": [to, {}]}, 3_000)},
    "a schema in a grammar": {
        "grammar": "start: %json "
        + json.dumps(references(lambda to: {"properties": {"a": to}}, 3_000))
    },
    "many choices": {"choice": [f"choice {index}" for index in range(60_000)]},
    "many required names": {"json": {"type": "object", "required": [f"r{i}" for i in range(9000)]}},
    "repetitions of repetitions": {"regex": "((a{1,99999}){1,99999}b){1,99999}"},
}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tiny_tokenizer(folder)
    end = SPECIALS.index("<eos>")
    source = TokenizerSource(folder, json=folder / "tokenizer.json", eos_token_ids=(end,))
    tokenizer = load_tokenizer(source)
    made = LazyGrammars(lambda: GrammarSetup(tokenizer, 300, (end,)))
    made.admit(StructuredOutputs(json={}))
    return made


def admitted(grammars, fields) -> bool:
    """Admits a form and follows it; returns whether it was admitted."""
    began = time.process_time()
    try:
        spec = grammars.admit(StructuredOutputs(**fields))
        matcher = grammars.compile(spec)
        assert any(matcher.mask()), "an admitted form has a first token"
    except InvalidRequest as error:
        assert len(str(error)) < 1500
        return False
    finally:
        assert time.process_time() - began < 2, fields
    return True


@pytest.mark.parametrize("kind", DRAWN)
def test_drawn_forms_are_admitted_or_refused(grammars, kind):
    rng = random.Random(kind)
    found = [admitted(grammars, DRAWN[kind](rng)) for _ in range(examples(60))]
    assert not all(found)


@pytest.mark.alone
@pytest.mark.parametrize("fields", EXCESSIVE.values(), ids=EXCESSIVE)
def test_an_excessive_form_neither_ends_the_process_nor_takes_long(grammars, fields):
    admitted(grammars, fields)


def test_a_part_behind_many_references_is_refused_with_its_place(grammars):
    """Rings and definitions that nothing names do not count."""

    def property_of(to):
        return {"type": "object", "properties": {"a": to}}

    assert admitted(grammars, {"json": references(property_of, 150)})
    ring = references(property_of, 100)
    ring["$defs"]["d100"] = {"anyOf": [{"$ref": "#/$defs/d0"}, {"type": "null"}]}
    assert admitted(grammars, {"json": ring})
    unnamed = references(property_of, 300)["$defs"]
    assert admitted(grammars, {"json": {"type": "string", "$defs": unnamed}})
    with pytest.raises(InvalidRequest, match=r"#/\$defs/d200: requires more than 200"):
        grammars.admit(StructuredOutputs(json=references(property_of, 250)))


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what is resident")
def test_forms_that_are_gone_leave_no_memory_behind(grammars):
    """Forms are admitted, compiled, followed and dropped; to do all of it again takes no more."""
    kept = CompiledGrammars(grammars, max_bytes=4 * LEAST_BYTES)
    grown = []
    for _ in range(4):
        rng, before = random.Random("memory"), resident_bytes()
        for number in range(examples(100)):
            draw = list(DRAWN.values())[number % len(DRAWN)]
            with suppress(InvalidRequest):
                follow(kept.matcher(admit(StructuredOutputs(**draw(rng)), grammars.compiler)))
        grown.append(resident_bytes() - before)
    assert max(grown[1:]) < (1 << 20), grown
    assert sum(grown[1:]) < (1 << 20), grown


def follow(matcher: Matcher) -> None:
    """Goes on by some legal tokens, each on a way of its own and then on one."""
    for _ in range(4):
        legal = [token_id for token_id in range(300) if matcher.allows(token_id)]
        for token_id in legal[:10]:
            matcher.copy().accept_tokens([token_id])
        if not legal or matcher.is_complete:
            return
        assert matcher.try_accept(legal[0])
        matcher.rollback()
        matcher.accept_tokens([legal[0]])
        matcher.mask()
