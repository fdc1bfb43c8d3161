"""Help of a command: options by group, one line each.

`--help` shows the group Common, `--help-all` all groups. Colours are those of Typer's rich help.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from octavo.cli.common.style import paint
from octavo.config.option import COMMON, Group

MAX_WIDTH = 100
"""Maximum width of the help in columns, and the width if the output is not a terminal."""
MAX_NAMES_WIDTH = 36
"""Width of the column of flags; longer flags push their text to the right."""
MAX_SUMMARY_LENGTH = 85
"""Maximum length of a command's line in the list of commands."""
PLACEHOLDERS = {
    "int": "N",
    "float": "N",
    "str": "TEXT",
    "Path": "FILE",
    "path": "FILE",
    "file": "FILE",
    "directory": "DIR",
}
"""Placeholders of values, by type."""

COLOURS = {"heading": "yellow", "name": "cyan", "short": "green", "metavar": "yellow"}


@dataclass(frozen=True, slots=True)
class HelpLine:
    """A line of the help: a flag, an argument or a command."""

    names: tuple[str, ...]
    metavar: str
    text: str

    @property
    def title(self) -> str:
        return " ".join(filter(None, [", ".join(self.names), self.metavar]))

    def paint(self) -> str:
        """Returns the title in colours."""
        names = [
            _paint(name, "name" if name.startswith("--") or "-" not in name[:1] else "short")
            for name in self.names
        ]
        return " ".join(filter(None, [", ".join(names), _paint(self.metavar, "metavar")]))


def format_help(command: Any, context: Any, *, shows_all: bool) -> str:
    """Formats the help of a command or a group of commands."""
    width = min(shutil.get_terminal_size((MAX_WIDTH, 24)).columns, MAX_WIDTH)
    parameters = [param for param in command.get_params(context) if not param.hidden]
    arguments = [param for param in parameters if param.param_type_name == "argument"]
    usage = [context.command_path, "[OPTIONS]", *(_argument_name(param) for param in arguments)]
    subcommands = getattr(command, "commands", {})
    usage += ["COMMAND"] * bool(subcommands)
    lines = [f"{_paint('Usage:', 'heading')} {' '.join(usage)}", ""]
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width, initial_indent="  ", subsequent_indent="  "), ""]
    sections = {
        "Arguments": [
            HelpLine((_argument_name(param),), "", option_text(param)) for param in arguments
        ]
    }
    for name, subcommand in subcommands.items():
        title = subcommand.rich_help_panel or "Commands"
        line = HelpLine((name,), "", subcommand.get_short_help_str(MAX_SUMMARY_LENGTH))
        sections.setdefault(title, []).append(line)
    command_titles = [*sections][1:]
    groups = options_by_group(parameters, context)
    sections |= groups if shows_all else {f"{COMMON} options": groups.pop(COMMON)}
    command_lines = [line for title in command_titles for line in sections[title]]
    for title, entries in sections.items():
        aligned = command_lines if title in command_titles else entries
        lines += _section(title, entries, _get_indent(aligned), width)
    if groups and not shows_all:
        count = sum(map(len, groups.values()))
        more = f"{count} more options ({', '.join(groups)}): {context.command_path} --help-all"
        lines += textwrap.wrap(more, width, break_on_hyphens=False)
    return "\n".join(lines).rstrip() + "\n"


def options_by_group(parameters: Iterable[Any], context: Any) -> dict[str, list[HelpLine]]:
    """Returns the options by group, in the order of the groups; options without a group are
    Common.
    """
    groups: dict[str, list[HelpLine]] = {COMMON: []} | {name: [] for name in get_args(Group)}
    for param in parameters:
        if param.param_type_name == "option":
            panel = param.rich_help_panel or COMMON
            groups.setdefault(panel, []).append(_option(param, context))
    return {name: entries for name, entries in groups.items() if entries}


def _option(param: Any, context: Any) -> HelpLine:
    names = sorted(param.opts, key=lambda name: (name.startswith("--"), len(name)))
    if param.secondary_opts == [f"--no-{names[-1][2:]}"]:
        names = [f"--[no-]{names[-1][2:]}"]
    else:
        names += param.secondary_opts
    metavar = "" if param.is_flag or param.count else param.metavar
    if metavar is None:
        kind = param.display_type(context).strip("<>").partition(" ")[0]
        metavar = PLACEHOLDERS.get(kind.removeprefix("list[").removesuffix("]"), kind)
    return HelpLine(tuple(names), metavar, option_text(param))


def _argument_name(param: Any) -> str:
    if param.metavar is not None:
        return str(param.metavar)
    name = str(param.name).upper()
    return (name if param.required else f"[{name}]") + ("" if param.nargs == 1 else "...")


def option_text(param: Any) -> str:
    """Returns the help text with the default."""
    text = " ".join(str(param.help or "").split()).removesuffix(".")
    default: object = param.show_default if isinstance(param.show_default, str) else param.default
    has_default = bool(param.show_default) and default not in (None, False, True, (), [])
    return f"{text} [default: {default}]" if has_default else text


def _get_indent(entries: list[HelpLine]) -> int:
    """Returns the column of the texts of these lines."""
    return 4 + max((len(e.title) for e in entries if len(e.title) <= MAX_NAMES_WIDTH), default=0)


def _section(title: str, entries: list[HelpLine], indent: int, width: int) -> Iterator[str]:
    if not entries:
        return
    yield _paint(f"{title}:", "heading")
    for entry in entries:
        start = max(indent, 4 + len(entry.title))
        first, *more = textwrap.wrap(
            entry.text,
            width,
            initial_indent=" " * start,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        ) or [""]
        gap = " " * (start - 2 - len(entry.title))
        yield f"  {entry.paint()}{gap}{first[start:]}".rstrip()
        yield from more
    yield ""


def _paint(text: str, kind: str) -> str:
    return paint(text, fg=COLOURS[kind], bold=True)
