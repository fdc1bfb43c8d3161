"""What a chat template takes, found out by rendering small conversations."""

import pytest

from octavo.text.chat_template import ChatTemplate
from octavo.text.ports import RoleRules
from tests.support.role_templates import NULL_CONTENT, TEMPLATES

EXPECTED = {
    "free": RoleRules(),
    "forgetful": RoleRules(system_anywhere=False),
    "strict": RoleRules(
        system_alone=False,
        system_anywhere=False,
        repeats=False,
        assistant_first=False,
        user_after_tool=False,
    ),
    "no-system": RoleRules(
        system=False,
        developer=False,
        system_alone=False,
        system_anywhere=False,
        repeats=False,
        assistant_first=False,
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_rules_are_those_of_the_template(name):
    assert ChatTemplate(TEMPLATES[name], {}).role_rules == EXPECTED[name]


def test_the_form_of_calls_is_found_out():
    found = ChatTemplate(NULL_CONTENT, {}).role_rules
    assert found == RoleRules(calls_have_content=False, arguments_are_objects=False)


def test_a_template_that_needs_tools_is_given_one():
    source = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + TEMPLATES["forgetful"]
    assert ChatTemplate(source, {}).role_rules == RoleRules(system_anywhere=False)


def test_a_developer_that_a_template_leaves_out_is_a_system_message():
    source = (
        "{% for m in messages %}{% if m.role == 'developer' %}{% if loop.last %}{{ m.content }}"
        "{% endif %}{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source, {}).role_rules == RoleRules(developer=False)


@pytest.mark.parametrize(
    "source",
    [None, "{% for", "{{ raise_exception('never') }}", "{{ messages[0].content[0].text }}"],
)
def test_nothing_is_changed_for_a_template_that_renders_no_plain_message(source):
    assert ChatTemplate(source, {}).role_rules == RoleRules()
