"""The page's files: small, complete, parsed by a JavaScript grammar, served under a strict policy,
and open to a visitor without a key.
"""

import asyncio
import json
import re
import shutil
import subprocess
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
import tree_sitter
import tree_sitter_javascript
from fastapi import FastAPI

import octavo.server
from octavo.api.repetition_detection import LOOP, RepetitionDetection
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.server.state.slot import EngineSlot
from tests.support.token_spellings import SPELLINGS

FOLDER = Path(octavo.server.__file__).parent / "web"
FILES = sorted(FOLDER.iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
MAX_BYTES = 300_000
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
NAMESPACE = "http://www.w3.org/2000/svg"

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
every_script = pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)


@cache
def app_of(key: str | None) -> FastAPI:
    return create_app(EngineSlot(), ServerSettings(api_key=(key,) if key else ()))


def get(path: str, *, key: str | None = None, **headers: str) -> httpx.Response:
    """Returns an app's answer, without a server and without an engine."""
    app = app_of(key)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(ask())


def policy(response: httpx.Response) -> dict[str, str]:
    parts = response.headers["content-security-policy"].split(";")
    return {name: value for name, _, value in (part.strip().partition(" ") for part in parts)}


class Tags(HTMLParser):
    """Collects the tags and attributes of a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_all_files_together_are_small():
    assert sum(file.stat().st_size for file in FILES) < MAX_BYTES


@every_file
def test_a_file_names_no_other_host(file):
    urls = re.findall(r"(?:https?:)?//[\w-]+\.[\w./-]+", file.read_text())
    assert set(urls) <= {NAMESPACE}


@every_file
def test_a_file_is_served_as_what_it_is_and_asked_for_again_each_time(file):
    response = get(f"/web/{file.name}")
    assert response.status_code == 200 and response.content == file.read_bytes()
    assert response.headers["content-type"] == TYPES[file.suffix]
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-content-type-options"] == "nosniff"
    tag = response.headers["etag"]
    again = get(f"/web/{file.name}", **{"If-None-Match": tag})
    assert again.status_code == 304 and again.content == b"" and again.headers["etag"] == tag


def test_the_page_allows_its_own_files_alone():
    response = get("/")
    assert response.headers["content-type"] == TYPES[".html"]
    assert policy(response) == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "img-src": "'self'",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert response.content == (FOLDER / "index.html").read_bytes()


def test_the_document_has_no_script_style_or_listener_of_its_own():
    for tag, attributes in Tags((FOLDER / "index.html").read_text()).found:
        assert tag != "style" and "style" not in attributes
        assert tag != "script" or attributes["src"]
        assert not [name for name in attributes if name.startswith("on")]


def test_what_the_document_names_exists():
    tags = Tags((FOLDER / "index.html").read_text()).found
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in tags:
        for name in ("aria-labelledby", "aria-controls", "for"):
            assert attributes.get(name) is None or attributes[name] in ids
        for name in ("src", "href"):
            path = attributes.get(name) or "#"
            assert path.startswith("#") or (FOLDER / path.removeprefix("web/")).exists()


@every_script
def test_a_script_is_javascript(file):
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_javascript.language()))
    assert not parser.parse(file.read_bytes()).root_node.has_error


@every_script
def test_a_script_finds_what_it_imports_and_makes_no_html_of_text(file):
    text = file.read_text()
    for names, path in re.findall(r"import \{([^}]*)\} from \"\./([\w.]+)\"", text):
        exported = re.findall(
            r"export (?:async )?(?:function|const|class)\*? (\w+)", (FOLDER / path).read_text()
        )
        assert {name.strip() for name in names.split(",")} - {""} <= set(exported), path
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
    ids = {attributes.get("id") for _, attributes in Tags(get("/").text).found}
    assert set(re.findall(r"byId\(\"([\w-]+)\"\)", text)) <= ids


def test_the_page_needs_no_key_and_all_else_does():
    for path in ("/", "/web/main.js"):
        assert get(path, key="secret").status_code == 200
    for path in ("/v1/models", "/web", "/webs/main.js", "/WEB/main.js"):
        assert get(path, key="secret").status_code == 401, path


@pytest.mark.parametrize("name", ["nothing.js", "../routes/page.py", "%2e%2e/settings.py"])
def test_only_the_pages_files_are_served(name):
    assert get(f"/web/{name}").status_code == 404


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
@pytest.mark.parametrize(("content", "shown"), SPELLINGS)
def test_the_token_view_spells_the_bytes_of_a_part_of_a_character(content, shown):
    script = (
        "globalThis.document = { getElementById: () => ({}), addEventListener() {} };"
        f"const {{ spelled }} = await import({json.dumps((FOLDER / 'tokens.js').as_uri())});"
        f"process.stdout.write(JSON.stringify(spelled({list(content)})));"
    )
    command = ["node", "--input-type=module", "-e", script]
    made = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert json.loads(made.stdout) == shown


def test_the_page_stops_at_the_repetition_that_the_terminal_stops_at():
    (found,) = re.findall(r"const LOOP = \{(.*)\};", (FOLDER / "chat.js").read_text())
    given = {key.strip(): int(value) for key, value in (p.split(":") for p in found.split(","))}
    assert RepetitionDetection(**given) == LOOP
