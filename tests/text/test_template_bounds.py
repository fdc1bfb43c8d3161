"""Templates that would take too long or too much memory end with an error."""

from __future__ import annotations

import time

import pytest

from octavo.api.errors import InvalidRequest
from octavo.text import template_bounds
from octavo.text.chat_template import ChatTemplate

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = (
    "{% set n = namespace(x='abcdefgh') %}{% for i in range(60) %}{% set n.x = n.x SUM n.x %}"
    "{% endfor %}"
)
MACRO = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}"


def render(source, **variables):
    return ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], True, variables)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (LOOPS, "more than (5,000,000 steps|10 seconds)"),
        (DOUBLED.replace("SUM", "~"), "a text of more than"),
        (DOUBLED.replace("SUM", "+"), "a text of more than"),
        ("{% for i in range(99999) %}{{ big }}{% endfor %}", "a text of more than"),
        ("{{ 'a' * 10 ** 9 }}", "a text of more than"),
        ("{{ 10 ** 60000000 }}", "a text of more than"),
        ("{{ 'a'.ljust(10 ** 9) }}", "a text of more than"),
        ("{{ 'a' | center(1000000000) }}", "a text of more than"),
        ("{{ '%1000000000d' % 1 }}", "unbounded width"),
        ("{{ '%.1000000000f' | format(1.0) }}", "unbounded width"),
        ("{{ '{:>1000000000}'.format(1) }}", "unbounded width"),
        ("{{ {'a': [1]} | tojson(indent=10 ** 7) }}", "expected at most 64"),
        ("{{ {'a': [1]} | tojson(separators=[big, big]) }}", "expected at most 64"),
        ("{{ big | replace('y', big) }}", "a text of more than"),
        ("{{ big.replace('y', big) }}", "a text of more than"),
        ("{{ big.join(big) }}", "a text of more than"),
        ("{{ big | list | join(big) }}", "a text of more than"),
        ("{{ big.replace('y', '\t').expandtabs(60000) }}", "a text of more than"),
        ("{{ big.replace('y', '\n') | indent(60000) }}", "a text of more than"),
    ],
)
def test_what_would_not_end_is_refused(source, message):
    started = time.perf_counter()
    with pytest.raises(InvalidRequest, match=message):
        render(source, big="y" * 10_000)
    assert time.perf_counter() - started < 4 * template_bounds.MAX_SECONDS


def test_ordinary_filters_and_formats_are_left_alone():
    source = (
        "{{ {'a': [1]} | tojson(indent=2) }}{{ ' x ' | trim | replace('x', 'yz') }}"
        "{{ '**%s** 12345678 %%' | format('b') }}{{ '{} {:>3} 12345678'.format('a', 1) }}"
        "{{ [1, 2] | join(', ') }}{{ ','.join(['p', 'q']) }}{{ 'n' | indent(2, true) }}"
    )
    assert render(source) == (
        '{\n  "a": [\n    1\n  ]\n}yz**b** 12345678 %a   1 123456781, 2p,q  n'
    )


def test_time_is_bounded_too(monkeypatch):
    monkeypatch.setattr(template_bounds, "MAX_SECONDS", 0.05)
    for source in (LOOPS, MACRO):
        with pytest.raises(InvalidRequest, match=r"more than 0\.05 seconds"):
            render(source)


def test_loops_keep_what_templates_read_of_them():
    source = (
        "{% for a in messages + [1, 2] if a %}{{ loop.index }}/{{ loop.length }}"
        "{% if loop.last %}!{% else %},{% endif %}{% endfor %}"
        "{% for k, v in {'b': 1}.items() %}{{ k ~ v ~ none }}{% else %}-{% endfor %}"
        "{%- for a in [[1, [2]], [3]] recursive %}{% if a is iterable %}({{ loop(a) }}){% else %}"
        "{{ a }}{% endif %}{% endfor %}"
    )
    assert render(source) == "1/3,2/3,3/3!b1None(1(2))(3)"
