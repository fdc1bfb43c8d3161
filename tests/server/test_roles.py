"""Conversations in the sequence of roles that a template takes: no text is lost, no template
raises.
"""

from itertools import product

import pytest

from octavo.server.roles import fit_roles, move_tool_images
from octavo.server.tool_use import parse_arguments
from octavo.text.chat_template import ChatTemplate
from octavo.text.ports import RoleRules
from tests.support.role_templates import NULL_CONTENT, TEMPLATES

CALL = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": {}}}
CHAT_TEMPLATES = {name: ChatTemplate(source, {}) for name, source in TEMPLATES.items()}
IMAGE = {"type": "image", "image": "data:image/png;base64,AA"}


def message(role, index):
    if role == "call":
        return {"role": "assistant", "content": "", "tool_calls": [CALL]}
    about = {"tool_call_id": CALL["id"], "name": "f"} if role == "tool" else {}
    return {"role": role, "content": f"<text {index}>", **about}


def conversation(roles):
    return [message(role, index) for index, role in enumerate(roles)]


def render(name, roles):
    template = CHAT_TEMPLATES[name]
    return template.render(fit_roles(conversation(roles), template.role_rules), True, {})


def test_leading_system_messages_are_one():
    talk = conversation(["system", "developer", "system", "user"])
    merged = fit_roles(talk, RoleRules())
    assert merged == [
        {"role": "system", "content": "<text 0>\n\n<text 1>\n\n<text 2>"},
        talk[-1],
    ]
    alone = conversation(["system", "user"])
    assert all(a is b for a, b in zip(fit_roles(alone, RoleRules()), alone, strict=True))


@pytest.mark.parametrize(
    ("name", "roles", "expected"),
    [
        ("free", "system user system", "[system]<text 0>[user]<text 1>[system]<text 2>"),
        ("forgetful", "system user system", "[system]<text 0>[user]<text 1>[user]<text 2>"),
        ("forgetful", "user developer", "[user]<text 0>[user]<text 1>"),
        ("strict", "system user system", "[system]<text 0>[user]<text 1>\n\n<text 2>"),
        ("strict", "user assistant assistant", "[user]<text 0>[assistant]<text 1>\n\n<text 2>"),
        ("strict", "assistant user", "[user][assistant]<text 0>[user]<text 1>"),
        ("strict", "system", "[user]<text 0>"),
        (
            "strict",
            "user call tool user",
            "[user]<text 0>[assistant]<call>f</call>[tool]<text 2>[assistant] [user]<text 3>",
        ),
        ("no-system", "system user", "[user]<text 0>\n\n<text 1>"),
        ("no-system", "system assistant user", "[user]<text 0>[assistant]<text 1>[user]<text 2>"),
        ("no-system", "developer", "[user]<text 0>"),
    ],
)
def test_what_a_template_refuses_is_changed(name, roles, expected):
    assert render(name, roles.split()) == f"{expected}[assistant]"


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_short_conversation_renders_with_all_of_its_texts(name):
    kinds = ("system", "developer", "user", "assistant")
    kinds += ("tool", "call") if name != "no-system" else ()
    for length in (1, 2, 3, 4):
        for roles in product(kinds, repeat=length):
            text = render(name, roles)
            told = [index for index, role in enumerate(roles) if role != "call"]
            places = [text.find(f"<text {index}>") for index in told] or [0]
            assert text.count("<call>f") == roles.count("call"), (roles, text)
            assert min(places) >= 0 and places == sorted(places), (roles, text)


def test_merged_assistants_keep_their_calls_and_thoughts():
    talk = [
        message("user", 0),
        {"role": "assistant", "content": "a", "reasoning_content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "y"},
    ]
    *_, last = fit_roles(talk, RoleRules(repeats=False))
    assert last["content"] == "a" and last["tool_calls"] == [CALL]
    assert last["reasoning_content"] == "x\n\ny"


def test_calls_have_the_form_that_the_template_takes():
    template = ChatTemplate(NULL_CONTENT, {})
    call = {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}
    talk = [message("user", 0), {"role": "assistant", "content": "b", "tool_calls": [call]}]
    text = template.render(fit_roles(talk, template.role_rules), False, {})
    assert text == '[user]<text 0>[assistant]b[assistant]<call>f{"a": 1}</call>'


def test_images_of_tool_results_follow_in_a_users_message():
    result = {"role": "tool", "content": [{"type": "text", "text": "seen"}, IMAGE]}
    talk = [message("call", 0), result, message("tool", 2), message("user", 3)]
    assert [(one["role"], one["content"]) for one in move_tool_images(talk)] == [
        ("assistant", ""),
        ("tool", "seen"),
        ("tool", "<text 2>"),
        ("user", [IMAGE]),
        ("user", "<text 3>"),
    ]
    merged = fit_roles(move_tool_images(talk), RoleRules(repeats=False))
    assert merged[-1]["content"] == [IMAGE, {"type": "text", "text": "<text 3>"}]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{", {}),
        ('{"a": ', {}),
        ('{"a": "x", "b": "long te', {"a": "x", "b": "long te"}),
        ('{"a": [1, 2, {"b": tr', {"a": [1, 2, {}]}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ("7", {"arguments": "7"}),
        ("call it", {"arguments": "call it"}),
        ("[" * 5000, {"arguments": "[" * 5000}),
    ],
)
def test_arguments_of_the_history_are_read_as_far_as_they_go(given, expected):
    assert parse_arguments(given) == expected
