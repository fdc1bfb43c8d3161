"""Templates of requests are rendered in a process of their own, within the system's bounds."""

from __future__ import annotations

import resource

import pytest

from octavo.api.errors import InvalidRequest
from octavo.text.chat_template import ChatTemplate
from octavo.text.template_process import render_apart

HELLO = [{"role": "user", "content": "x"}]
WHOLE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ v }}{% endfor %}"
BOMBS = [
    "{{ messages | tojson(indent=1000000000) }}",
    "{{ 'a' | replace('a', 'b' * 100000) | replace('b', 'c' * 100000) }}",
]


def apart(source, **variables):
    return render_apart(ChatTemplate(source, {"bos_token": "<s>"}), HELLO, True, variables)


def test_the_text_is_that_of_this_process():
    here = ChatTemplate(WHOLE, {"bos_token": "<s>"}).render(HELLO, True, {"v": "é☃"})
    assert apart(WHOLE, v="é☃") == here == "<s>user: xé☃"


@pytest.mark.parametrize("source", ["{{ raise_exception('say why') }}", "{% for", "{{ 1 / 0 }}"])
def test_what_a_template_says_arrives(source):
    with pytest.raises(InvalidRequest) as here:
        ChatTemplate(source, {}).render(HELLO, True, {})
    with pytest.raises(InvalidRequest) as there:
        apart(source)
    assert there.value.message == here.value.message and there.value.param == "messages"


@pytest.mark.parametrize("source", BOMBS)
def test_what_one_call_makes_too_large_ends_that_process_alone(source):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidRequest, match=r"chat template failed: it (takes|makes|formats)"):
        apart(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
