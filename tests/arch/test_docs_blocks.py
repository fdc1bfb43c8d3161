"""Code blocks of the documents parse: YAML by the loader that it is for, JSON, TOML, shell, bodies
of curl by their routes, and octavo's command lines, values too, by its own parser.
"""

import json
import re
from functools import cache
from pathlib import Path

import pytest
import typer

from octavo.cli.app import build_app
from octavo.cli.common.serve_config import read_config
from octavo.config.data_file import read_data_file
from octavo.config.engine_config import EngineConfig, option_fields
from octavo.config.option import convert, get_options
from octavo.distributed.cluster.plan import read_plan
from octavo.distributed.router.settings import RouterSettings
from octavo.server.app import ROUTES
from octavo.server.http.key_file import read_key_file
from octavo.server.http.openapi import get_bodies
from octavo.server.settings import ServerSettings
from tests.arch.test_docs import PAGES, ROOT
from tests.support.doc_blocks import Block, blocks, commands

PAGES = [*PAGES, ROOT / "deploy" / "README.md"]
LOADERS = {"keys": lambda path: read_key_file(str(path)), "serve": read_config, "plan": read_plan}
PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_:=]*|.*[A-Z]{3,}.*|N|\.\.\.")
"""A word that stands for a value."""


BLOCKS = [block for page in PAGES for block in blocks(page)]


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


COMMANDS = [(block, words) for block in BLOCKS for words in commands(block)]
OCTAVO = [
    pytest.param(words[1:], id=f"{block}") for block, words in COMMANDS if words[0] == "octavo"
]
CURL = [pytest.param(words[1:], id=f"{block}") for block, words in COMMANDS if words[0] == "curl"]


def test_the_blocks_are_found():
    """Fails where the reader of this file finds next to nothing."""
    assert len(OCTAVO) > 60 and len(CURL) > 3 and len(of("yaml")) >= 3 and len(of("python")) > 12


@pytest.mark.parametrize("block", of("yaml", "toml", "json"), ids=str)
def test_data_is_read_by_its_loader(block, tmp_path):
    path = tmp_path / f"block.{block.language}"
    path.write_text(block.text)
    if block.mark:
        LOADERS[block.mark](path)
    else:
        read_data_file(path, name="block", max_bytes=1 << 20)


@pytest.mark.parametrize("block", of(""), ids=str)
def test_data_is_in_a_fence_that_names_its_format(block):
    """An indented block of YAML or TOML would go unread, and its lines may be filled."""
    assert not re.search(r"^[\w-]+:(\n| *- )|^\[\[?\w+\]\]?$", block.text), (
        "write ```yaml or ```toml"
    )
    if block.text.startswith(("{", "[{")):
        json.loads(block.text)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_compiles(block):
    compile(block.text, str(block), "exec")


@cache
def bodies():
    return {route: body for part in ROUTES for route, body in get_bodies(part.router).items()}


@pytest.mark.parametrize("words", CURL)
def test_the_body_of_curl_is_one_that_its_route_takes(words):
    options = [at for at, word in enumerate(words) if word in ("-d", "--data", "--json")]
    urls = [word for word in words if word.startswith("http")]
    assert len(urls) == 1, "one URL"
    for at in options:
        data = words[at + 1]
        if data.startswith("@"):
            continue
        content = json.loads(data)
        path = re.sub(r"^https?://[^/]+", "", urls[0]).partition("?")[0]
        kind = bodies().get(f"POST {path}")
        if kind is not None:
            unknown = content.keys() - kind.model_fields.keys()
            assert not unknown, f"{path} has no fields {unknown}"
            kind.model_validate(content)


@cache
def root():
    return typer.main.get_command(build_app(add_completion=True))


@pytest.mark.parametrize("words", OCTAVO)
def test_octavos_command_lines_parse(words):
    """Values too: each is converted as the command converts it, but for placeholders."""
    command, rest = root(), list(words)
    context = command.make_context("octavo", [], resilient_parsing=True)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        command = command.commands[rest.pop(0)]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    if hasattr(command, "commands"):
        assert rest in ([], ["--version"], ["--install-completion"], ["--help"])
        return
    rest = [_filled(word) for word in rest]
    given = command.make_context(command.name, rest, parent=context.parent).params
    engine, options = option_fields(), {}
    others = get_options(RouterSettings if command.name == "route" else ServerSettings)
    for name, value in given.items():
        spec = engine.get(name) or others.get(name)
        if spec is None or value in (None, []) or isinstance(value, Path):
            continue
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, str) and PLACEHOLDER.fullmatch(text) for text in texts):
            continue
        converted = convert(spec, value) if isinstance(value, str | list | bool) else value
        if name in engine and isinstance(value, str | list | bool):
            options[name] = converted
    EngineConfig.from_options(**options)


def _filled(word: str) -> str:
    """Returns a word with a value for a placeholder that a number must stand for."""
    name, equals, value = word.partition("=")
    return f"{name}=1" if equals and value == "N" and name.startswith("--") else word
