"""Import rules: downwards only (ARCHITECTURE.md draws them), no circles, and quick to load."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent
LEAVES = {
    "api",
    "config",
    "checkpoint.ports",
    "engine.protocol",
    "text.answer_marks",
    "text.end_tokens",
    "text.ports",
    "utils",
}
"""Parts that any part may import."""
BELOW = {
    "derive": {"cli", "wiring"},
    "sparsity": {"cli", "wiring"},
    "distributed": {
        "distributed.cli",
        "distributed.disaggregation",
        "distributed.pool",
        "wiring",
    },
    "distributed.cli": {"cli", "distributed.cluster", "distributed.router"},
    "distributed.cluster": set(),
    "distributed.disaggregation": {"distributed.options", "distributed.transfer", "frontend"},
    "distributed.options": set(),
    "distributed.pool": {"distributed.transfer"},
    "distributed.router": {"distributed.transfer", "server"},
    "distributed.transfer": {"worker"},
    "cli": {"server", "tools"},
    "tools": {"api.llm"},
    "server": {"api.async_llm"},
    "api.llm": {"wiring"},
    "api.async_llm": {"wiring"},
    "wiring": {"frontend", "worker", "media", "audio"},
    "frontend": {"engine"},
    "engine": {"text", "engine.routing"},
    "engine.routing": set(),
    "media": {"audio"},
    "worker": {"executor", "models", "checkpoint"},
    "audio": set(),
    "executor": {"program", "quant"},
    "models": {"program"},
    "checkpoint": {"program", "quant"},
    "quant": {"program"},
    "program": set(),
    "text": set(),
}
MAX_LOOSE_FILES = 30
"""Modules that may lie directly in one package; `models` has one for each family."""
MAX_LINES = 500
"""Lines of one module."""
OPTIONAL = {"torch", "triton", "ray", "nixl", "mooncake", "transformers", "gguf"}
FILES = sorted(ROOT.rglob("*.py"))


def allowed(part: str) -> set[str]:
    """Returns a part itself, the leaves, and all parts below it."""
    return {part} | LEAVES | {name for below in BELOW.get(part, set()) for name in allowed(below)}


def part_of(module: str) -> str:
    """Returns the most specific part that holds a module, named without "octavo."."""
    names = module.split(".")
    prefixes = (".".join(names[:count]) for count in range(len(names), 0, -1))
    return next((name for name in prefixes if name in BELOW or name in LEAVES), "")


def imported(file: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(file.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                f"{node.module}.{alias.name}" if node.module == "octavo" else node.module
                for alias in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize(
    "file",
    [file for file in FILES if file.parent != ROOT or file.stem != "__init__"],
    ids=lambda f: str(f.relative_to(ROOT)),
)
def test_imports_go_downwards(file):
    part = part_of(".".join(file.relative_to(ROOT).with_suffix("").parts))
    assert part, f"{file} belongs to no package that tests/arch/test_imports.py lists"
    names = {name.removeprefix("octavo.") for name in imported(file) if name.startswith("octavo.")}
    others = {part_of(name) for name in names - {"__version__"}}
    assert others <= allowed(part), f"{part} may not import {sorted(others - allowed(part))}"


def test_packages_are_small_enough_to_read():
    """Only `__init__.py` lies in `octavo/` itself, and few modules directly in each package."""
    loose: dict[Path, int] = {}
    for file in FILES:
        loose[file.parent] = loose.get(file.parent, 0) + (file.stem != "__init__")
    assert loose.pop(ROOT) == 0
    loose.pop(ROOT / "models")
    assert not {str(folder): count for folder, count in loose.items() if count > MAX_LOOSE_FILES}


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_by_module() -> dict[str, set[str]]:
    """Returns every module's imports of the package: lazy and TYPE_CHECKING ones too."""
    modules = {module_of(file): file for file in FILES}
    found: dict[str, set[str]] = {}
    for module, file in modules.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    names.add(inner if inner in modules else node.module)
        found[module] = (names & set(modules)) - {module}
    return found


def test_no_modules_import_each_other_in_a_circle():
    try:
        TopologicalSorter(imports_by_module()).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_a_class_name_means_one_thing():
    homes: dict[str, list[str]] = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(file.relative_to(ROOT)))
    assert not {name: files for name, files in homes.items() if len(files) > 1}


PROTOCOL = ("octavo.engine.protocol",)
"""Modules of what crosses between the frontend's process and the engine's."""


@pytest.mark.parametrize(
    ("package", "allowed_modules"),
    [
        ("frontend", (*PROTOCOL, "octavo.engine.clients.client")),
        ("engine/protocol", PROTOCOL),
    ],
)
def test_the_frontend_sees_no_more_of_the_engine_than_its_protocol(package, allowed_modules):
    for file in (ROOT / package).rglob("*.py"):
        seen = {name for name in imported(file) if name.startswith("octavo.engine")}
        assert all(name.startswith(allowed_modules) for name in seen), (file, seen)


def test_the_frontend_loads_no_scheduler():
    code = (
        "import sys, octavo.frontend.async_jobs, octavo.distributed.disaggregation.transfers;"
        " print([name for name in sys.modules if name.startswith(('octavo.engine.scheduler',"
        " 'octavo.engine.requests', 'octavo.engine.core', 'octavo.engine.kv'))])"
    )
    assert python(code) == "[]"


def test_no_module_is_too_long():
    long = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    assert not {name: count for name, count in long.items() if count > MAX_LINES}


def test_the_engine_and_the_frontend_know_no_arrays():
    for file in FILES:
        if file.relative_to(ROOT).parts[0] in ("engine", "frontend"):
            assert "numpy" not in {name.split(".")[0] for name in imported(file)}, file


NEEDS_TORCH = (ROOT / "executor" / "torch", ROOT / "derive")
"""Folders whose modules may import PyTorch at their top; importers check first, inside a function,
whether it is installed.
"""


def test_optional_packages_are_imported_inside_functions():
    for file in FILES:
        if {*NEEDS_TORCH} & {*file.parents}:
            continue
        assert not {
            name
            for name in imported(file, top_level_only=True)
            if name.startswith("octavo.executor.torch")
        }, file
        assert not OPTIONAL & {
            name.split(".")[0] for name in imported(file, top_level_only=True)
        }, file


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.alone
def test_importing_octavo_is_quick_and_pulls_in_nothing():
    """Importing octavo costs little processor time; the clock would count other work."""
    code = (
        "import time; t = time.process_time(); import octavo; import sys; print(time.process_time()"
        " - t, 'numpy' in sys.modules)"
    )
    runs = [python(code).split() for _ in range(3)]
    assert min(float(seconds) for seconds, _ in runs) < 0.1
    assert all(numpy == "False" for _, numpy in runs)


def test_the_engine_loads_without_numpy():
    modules = (
        "octavo.engine.core, octavo.engine.clients.client, octavo.frontend.input_processor,"
        " octavo.frontend.output_processor"
    )
    assert python(f"import {modules}, sys; print('numpy' in sys.modules)") == "False"


def test_exported_names():
    assert set(octavo.__all__) == {
        "LLM",
        "AsyncLLM",
        "BeamSearchParams",
        "LoRARequest",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingRequestOutput",
        "Logprob",
        "PoolingParams",
        "PoolingRequestOutput",
        "RepetitionDetection",
        "RequestOutput",
        "SamplingParams",
        "ScoringRequestOutput",
        "StructuredOutputs",
        "TextPair",
        "VoiceActivity",
        "__version__",
    }
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError, match="'octavo' has no attribute 'Llm'"):
        octavo.Llm  # noqa: B018
