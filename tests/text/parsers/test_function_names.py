"""Names of functions in every format: each is read as it is written, or has an alias that is."""

import pytest

from octavo.text.parsers.formats import NAME_HERE, TOOL_FORMATS, ChannelFormat
from octavo.text.parsers.function_names import PLAIN, get_aliases
from octavo.text.parsers.reader import MessageForm, read_message

NAMES = [
    *["f", "server/tool", "My Tool", "a.b", "a:b", "functions.f", "f.call", "mcp__x__y", "a-b"],
    *[
        "\u67e5\u8be2",
        "My_Tool",
        'say "hi"',
        "</tool_call>",
        "a\nb",
        "[f]",
        "f()",
        "x" * 200,
        "1st",
    ],
]


@pytest.mark.parametrize("tools", TOOL_FORMATS, ids=lambda tools: tools.name)
def test_each_name_is_read_as_the_clients(tools):
    aliases = get_aliases(tools, NAMES)
    written = [aliases.get(name, name) for name in NAMES]
    assert len(set(written)) == len(NAMES), "no two are alike"
    names = {alias: name for name, alias in aliases.items()}
    reasoning = tools if isinstance(tools, ChannelFormat) else None
    form = MessageForm(tools, reasoning, {name: {} for name in written}, names=names)
    arguments = "{}" if "schema" in tools.arguments_form({"type": "object"}) else ""
    for name in NAMES:
        begin, end = tools.written
        text = f"{begin.replace(NAME_HERE, aliases.get(name, name))}{arguments}{end}"
        message = read_message(form, text)
        assert [call.name for call in message.calls] == [name], text
        assert message.content == ""


def test_plain_names_keep_their_place_in_formats_of_json():
    hermes = next(row for row in TOOL_FORMATS if row.name == "hermes")
    aliases = get_aliases(hermes, NAMES)
    assert not any(PLAIN.fullmatch(name) for name in aliases)
    assert aliases["a\nb"] == "a_b" and aliases["[f]"] == "f_2"
