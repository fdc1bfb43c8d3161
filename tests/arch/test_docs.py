"""The documents match the code: names, paths, links, routes and commands exist, Python in them
runs, generated pages are up to date.
"""

import ast
import importlib.util
import json
import re
import shlex
from collections import defaultdict
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
import typer
import yaml

from octavo.checkpoint.family_cards import get_cards
from octavo.cli.app import build_app
from octavo.cli.common.help import format_help
from octavo.cli.foreign.translate_flags import FOREIGN_FLAGS
from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.server.state.slot import EngineSlot
from tests.support.commands import every_command
from tests.support.tiny_tokenizer import tiny_model_with_text

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
PAGES += [ROOT / "examples" / "README.md", ROOT / "benchmarks" / "README.md"]
PAGES += [*(ROOT / "benchmarks" / "results").glob("*.md")]
PAGES += sorted(page for page in (ROOT / "docs").rglob("*.md") if page.parent != REFERENCE)
SOURCES = [
    path
    for folder in ("octavo", "csrc", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".h", ".cpp", ".inl", ".cmake") and path != Path(__file__)
]
SOURCES += [ROOT / name for name in ("Makefile", "CMakeLists.txt", "pyproject.toml")]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def quoted(page: Path) -> set[str]:
    """Returns the texts in backticks of a page."""
    return set(re.findall(r"`([^`\n]+)`", without_code(page.read_text())))


def python_blocks(page: Path) -> list[tuple[str, str]]:
    """Returns (mark after "python", code) of each Python block."""
    return re.findall(
        r"^```python *(\w*)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )


# -- what the code has -----------------------------------------------------------------------------


@cache
def words() -> set[str]:
    """Returns every word of the sources; dots, dashes and colons divide, underscores do not."""
    return {word for path in SOURCES for word in re.findall(r"\w+", path.read_text())}


@cache
def members() -> dict[str, set[str]]:
    """Returns the names in each Python module (by its last name) and class; of C++ classes, every
    word of their file.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        if path.suffix == ".py":
            tree = ast.parse(path.read_text())
            found[path.stem] |= set(bound_names(tree.body))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    own = {
                        part.attr
                        for part in ast.walk(node)
                        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
                    }
                    found[node.name] |= set(bound_names(node.body)) | own
        elif path.suffix == ".h":
            text = path.read_text()
            for name in re.findall(r"(?:struct|class) (\w+)", text):
                found[name] |= set(re.findall(r"\w+", text))
    return found


def bound_names(body: list[ast.stmt]) -> list[str]:
    names = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


@cache
def routes() -> set[str]:
    app = create_app(EngineSlot(), ServerSettings(training_routes=True))
    return {re.sub(r"{.*?}", "{}", path) for path in app.openapi()["paths"]}


@cache
def flags_of() -> dict[str, set[str]]:
    """Returns the flags of each command, other engines' too, and all of them under ""."""
    found: dict[str, set[str]] = defaultdict(set)

    def walk(command, path: str) -> None:
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{path} {name}".strip())
        own = {
            flag
            for param in getattr(command, "params", ())
            for flag in (*param.opts, *param.secondary_opts)
        } | {*FOREIGN_FLAGS, "--help", "--help-all"}
        found[path] |= own
        found[""] |= own

    walk(typer.main.get_command(build_app()), "")
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


# -- the tests -------------------------------------------------------------------------------------


def is_known(text: str) -> bool:
    """Returns whether the code has a name; formulas, commands with arguments and samples are not
    judged.
    """
    text = text.removesuffix("()")
    if re.fullmatch(r"/[\w/{}]+", text):
        return re.sub(r"{.*?}", "{}", text) in routes()
    if re.fullmatch(r"[\w.-]+/[\w./-]*|[\w-]+\.(py|md|toml|txt|h|cpp|inl|yml)|Makefile", text):
        is_hub_name = text.startswith(("OWNER/REPO", "hf.co/", "huggingface.co/"))
        return is_hub_name or text.startswith(".venv") or (ROOT / text).exists()  # make makes .venv
    if re.fullmatch(r"--[a-z][a-z-]*", text):
        return text in flags_of()[""]
    if match := re.fullmatch(r"make ([\w-]+)", text):
        return match[1] in targets()
    if match := re.fullmatch(r"([\w.]+)(?:\.|::)(\w+)", text):
        owner = match[1].rpartition(".")[2]
        return match[2] in members()[owner] or (
            owner == "octavo" and match[2] in members()["__init__"]
        )
    if re.fullmatch(r"[A-Za-z_]\w+", text):
        return text in words()
    return True


@every_page
def test_what_is_named_exists(page):
    unknown = sorted(text for text in quoted(page) if not is_known(text))
    assert not unknown, f"{page.name} names what the code does not have: {unknown}"


def test_a_name_that_is_gone_is_seen():
    gone = (
        "octavo/engine/beam.py",
        "Scheduler.swap",
        "scheduler.Swapper",
        "ThreadPool::steal_all",
        "/v1/moderations",
        "--swap-speed",
    )
    assert not [
        text for text in (*gone, "make coffee", "num_swapped_blocks_ever") if is_known(text)
    ]
    known = (
        "octavo/engine/core.py",
        "Scheduler.update",
        "engine.build_core",
        "ThreadPool::run",
        "/result/{id}",
        "--max-num-seqs",
        "make test",
    )
    assert all(map(is_known, known))


@every_page
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", without_code(page.read_text())):
        assert link.startswith("http") or (page.parent / link).exists(), (
            f"{page.name} links to {link}"
        )


@every_page
def test_paragraphs_fit_in_100_columns(page):
    """Tables and indented blocks of code cannot be wrapped."""
    long = [
        f"{number}: {line}"
        for number, line in enumerate(without_code(page.read_text()).splitlines(), 1)
        if len(line) > 100 and not line.lstrip().startswith("|") and not line.startswith("    ")
    ]
    assert not long, f"{page.name} has lines of over 100 columns: {long}"


@every_page
def test_commands_exist(page):
    """Lines of code blocks that call octavo or make name commands and flags that exist."""
    text = re.sub(r"\\\n *", "", page.read_text())  # lines that go on
    for line in re.findall(r"^(?: {4})?(?:\$ )?((?:octavo|make) .*)$", text, flags=re.MULTILINE):
        program, *rest = shlex.split(line, comments=True)
        if program == "make":
            assert {word for word in rest if "=" not in word} <= targets(), line
            continue
        command = " ".join(rest[: 2 if rest[0] == "bench" else 1])
        assert command in flags_of(), line
        assert {word.partition("=")[0] for word in rest if word.startswith("--")} <= flags_of()[
            command
        ], line


@every_page
def test_python_blocks_run(page, monkeypatch):
    """Blocks marked `python run` run with a tiny model; the others are parsed."""
    for mark, code in python_blocks(page):
        compiled = compile(
            code.replace('"smollm2"', repr(str(tiny_model_with_text()))), page.name, "exec"
        )
        if mark == "run":
            exec(compiled, {"__name__": "__main__"})


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_reference_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    generate = load_script("generate")
    made = generate.pages()
    assert {path.name for path in REFERENCE.iterdir()} == set(made)
    stale = [name for name, text in made.items() if (REFERENCE / name).read_text() != text]
    assert not stale, "run `python docs/generate.py`"
    assert generate.GUIDE.read_text() == generate.guide(), "run `python docs/generate.py`"
    header = generate.HEADER.read_text()
    assert header == generate.sampling_fields(), "run `python docs/generate.py`"


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("name", get_cards())
def test_the_page_of_a_family_is_up_to_date(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    generate = load_script("generate")
    file = generate.MODEL_FOLDER / generate.page_files()[name]
    made = generate.page(generate.family_page(name))
    assert file.read_text() == made, "run `python docs/generate.py`"


def test_every_family_has_a_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    generate = load_script("generate")
    files = {generate.INDEX, *generate.page_files().values()}
    assert {path.name for path in generate.MODEL_FOLDER.iterdir()} == files
    index = (generate.MODEL_FOLDER / generate.INDEX).read_text()
    assert index == generate.page(generate.index_page()), "run `python docs/generate.py`"


def test_an_option_takes_one_line_of_help(monkeypatch):
    """At 100 columns, with its default; see `option` in octavo/config/option.py."""
    monkeypatch.setenv("COLUMNS", "100")
    long = [
        f"{context.command_path}: {line}"
        for command, context in every_command()
        for line in format_help(command, context, shows_all=True).splitlines()
        if line.startswith("   ")
    ]
    assert not long, "shorten the help text, and move the rest into `details`"


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md"])
def test_the_path_of_a_request_is_as_long_as_is_said(page):
    """ARCHITECTURE.md lists its files; the pages may round their lines to hundreds."""
    rows = re.findall(
        r"^\| \d+ \| `([^`]+)` \|", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.M
    )
    count = sum(len((ROOT / path).read_text().splitlines()) for path in rows)
    said = re.search(
        r"[Tt]welve files,?\s(?:and\s)?about\s([\d,]+)\slines", (ROOT / page).read_text()
    )
    assert len(rows) == 12
    assert int(said[1].replace(",", "")) == pytest.approx(count, abs=100)


# -- the site --------------------------------------------------------------------------------------


def test_every_example_is_listed_and_linked_from_a_guide():
    programs = {path.name for path in (ROOT / "examples").glob("*.py")}
    linked = {
        page: set(re.findall(r"\]\((?:\S*examples/)?(\w+\.py)\)", page.read_text()))
        for page in PAGES
    }
    assert linked.pop(ROOT / "examples" / "README.md") == programs
    assert set().union(*linked.values()) == programs


def test_the_site_lists_every_page():
    """`make docs` checks links and anchors too, but needs MkDocs."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w./-]+\.md", json.dumps(config["nav"])))
    hidden = config["not_in_nav"].split()
    pages = {str(page.relative_to(ROOT)) for page in load_script("build_site").find_pages()}
    assert listed <= pages
    missing = [
        page for page in pages - listed if not any(fnmatch(f"/{page}", each) for each in hidden)
    ]
    assert not missing, "list them in mkdocs.yml"
