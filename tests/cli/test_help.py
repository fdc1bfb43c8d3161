"""Help: the common options in few lines, all of them by group, one line each."""

import re
import subprocess
import sys
from typing import get_args

import pytest

from octavo.cli.common.command import OTHER_NAMES
from octavo.cli.common.help import format_help
from octavo.config.engine_config import option_fields
from octavo.config.option import COMMON, Group, get_options
from octavo.distributed.router.settings import RouterSettings
from octavo.server.settings import ServerSettings
from octavo.utils.extensions import CommandGroup
from tests.support.commands import every_command
from tests.support.terminal import show_on_terminal

MAX_LINES = 60
MAX_COMMON = 27
"""Most options of a command under Common: fifteen of engine and server, and the command's own."""
OWN_GROUPS = {"Simulation of several machines"}
OPTIONS = [
    (kind, name, spec)
    for kind, specs in {
        "engine": option_fields(),
        "server": get_options(ServerSettings),
        "router": get_options(RouterSettings),
    }.items()
    for name, spec in specs.items()
]


every = pytest.mark.parametrize(
    ("command", "context"), [pytest.param(*one, id=one[1].command_path) for one in every_command()]
)


def sections_of(text: str) -> dict[str, list[str]]:
    """Returns the lines under each title of a help text."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if re.fullmatch(r"\S.*:", line):
            found[line[:-1]] = lines = []
        elif line.startswith("  ") and found:
            lines.append(line)
    return found


@every
def test_help_is_short_and_help_all_is_complete(command, context, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    short = format_help(command, context, shows_all=False)
    assert len(short.splitlines()) <= MAX_LINES
    groups = sections_of(format_help(command, context, shows_all=True))
    lines = [line for title, lines in groups.items() if title != "Arguments" for line in lines]
    assert all(re.match(r"  \S", line) for line in lines), "one line for each option"
    assert all(len(line) <= 100 for line in lines)
    shown = [
        flag
        for title, lines in groups.items()
        if title not in ("Arguments", "Commands", *get_args(CommandGroup))
        for line in lines
        for flag in re.findall(r"(?<= )--[\w\[\]-]+", line.split("   ")[0] + " ")[:1]
    ]
    options = [param for param in command.get_params(context) if param.param_type_name == "option"]
    assert len(shown) == len(set(shown)) == len([param for param in options if not param.hidden])
    known = {COMMON, *get_args(Group), *OWN_GROUPS, *get_args(CommandGroup)}
    known |= {"Arguments", "Commands"}
    assert set(groups) <= known
    assert len(groups[COMMON]) <= MAX_COMMON


@pytest.mark.parametrize(
    "spec", [spec for *_, spec in OPTIONS], ids=[f"{kind}-{name}" for kind, name, _ in OPTIONS]
)
def test_help_texts_are_one_plain_line(spec):
    """The imperative, without a full stop; sentences in the details."""
    assert spec.group in get_args(Group)
    assert len(spec.help) <= 66 and not spec.help.endswith(".") and spec.help[0].isupper()
    assert "; default" not in spec.help, "the default is shown from the field"
    assert not spec.details or spec.details.endswith(".") or spec.details.endswith("'.")


def test_about_fifteen_options_of_serve_are_common():
    specs = [*option_fields().values(), *get_options(ServerSettings).values()]
    assert 10 <= sum(spec.panel == COMMON for spec in specs) <= 16


def test_colours_are_for_terminals_only(octavo):
    """NO_COLOR turns them off (no-color.org), and so does a pipe."""
    assert "\x1b[" in show_on_terminal("serve", "--help")
    assert "\x1b[" not in show_on_terminal("serve", "--help", NO_COLOR="1")
    assert "\x1b[" not in show_on_terminal("serve", "--help", TERM="dumb")
    assert "\x1b[" not in octavo("serve", "--help").out


def test_commands_are_grouped(octavo):
    """Commands of extensions stand with those of their subject."""
    groups = sections_of(octavo("--help").out)
    names = {title: [line.split()[0] for line in lines] for title, lines in groups.items()}
    assert names["Serve models"] == ["serve", "ps", "top", "rank", "route", "cluster"]
    assert "calibrate" in names["Manage models"] and "simulate" in names["Measure and debug"]


def test_help_imports_no_rich():
    """Its import would take longer than all of the help."""
    code = "import sys; from octavo.cli.app import run_command; run_command(['serve', '--help']);"
    code += "sys.exit('rich' in sys.modules or 'octavo.cli.foreign.translate_flags' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode
        == 0
    )


def test_help_and_version_are_words_too(octavo):
    assert octavo("help").out == octavo("--help").out
    assert octavo("help", "run").out == octavo("run", "--help").out
    assert octavo("version").out == octavo("--version").out


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_command_by_another_programs_name_is_named(octavo, name):
    done = octavo(name, "x")
    assert done.code == 2 and f"It is octavo {OTHER_NAMES[name]}" in done.err
