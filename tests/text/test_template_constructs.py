"""What chat templates are written with renders as in transformers: methods, filters, scopes and
undefined values, at the top of a template and within loops, blocks, macros and calls. All exact.
"""

from __future__ import annotations

import copy
import random
from functools import cache

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.api.errors import InvalidRequest
from octavo.text.chat_template import ChatTemplate
from tests.support.tiers import examples

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LARGE = 1_700_000_000_000
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'Weather <b>now</b> & "later", d\'été',
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "enum": ["Zürich", "Bern"]},
                    "until": {"type": ["integer", "null"], "maximum": LARGE, "default": None},
                },
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": "Zü'rich", "until": LARGE, "share": 0.5, "deep": {"b": [1, None], "a": True}}
MESSAGES = [
    {"role": "system", "content": " Be brief.\r\n\r\nNow. "},
    {"role": "user", "content": "漢字 {x} %s <b>\t'q'</b>\n\nend "},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "First.\nThen.",
        "tool_calls": [{"id": "call_1", "function": {"name": "weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": '{"t": 5}'},
    {"role": "assistant", "content": "<think>\nx\n</think>\n\n5 degrees", "thinking": "y"},
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]},
]

EXPRESSIONS = (
    # methods of texts
    "text.replace('\\r\\n', '\\n').replace('\\n\\n', '\\n')",
    "text.replace('e', 'E', 1)",
    "text.split('\\n')[-1].strip('. ')",
    "text.split('e', 1) | length",
    "text.rsplit(None, 1)[0]",
    "'</think>' in content and content.split('</think>')[0].rstrip('\\n').split('<think>')[-1]",
    "text.startswith('Be') ~ text.endswith(('x', ' '))",
    "text.lstrip() ~ '|' ~ text.rstrip()",
    "text.title() ~ text.upper() ~ text.lower() ~ text.capitalize() ~ text.swapcase()",
    "text.find('brief') ~ text.count('e') ~ text.index('B')",
    "'{} {:>5} {name!r} {0[1]}'.format('ab', 7, name='n')",
    "'{text} {values}'.format(text=1, values=2)",
    "'{:,}'.format(large) ~ '{:{}}'.format(3, 4)",
    "'%s is %d of %5.2f' % ('x', large, 0.5)",
    "'%(text)s' | format(text=large)",
    "'%s-%s' | format(large, 'b')",
    "', '.join(['a', 'b']) ~ ''.join(arguments)",
    "'a'.center(9, '*') ~ 'a'.ljust(3) ~ 'a'.rjust(3) ~ '7'.zfill(3)",
    "'a\\tb'.expandtabs(4) ~ 'ab'.isalpha() ~ '12'.isdigit() ~ ' '.isspace()",
    "'ab'.encode().decode() ~ 'a\\nb'.splitlines() ~ 'a=b'.partition('=')",
    "'ab'.translate({97: 'x'}) ~ 'pre_a'.removeprefix('pre_')",
    "text[:3] ~ text[-3:] ~ text[::-1] ~ text[3]",
    # methods of lists and objects
    "arguments.items() | list",
    "arguments.get('none', large) ~ arguments.get('city')",
    "arguments.keys() | list ~ arguments.values() | first",
    "tools[0].function.parameters.properties.until.maximum",
    "messages.index(message) ~ messages[1:] | length ~ messages[::-1] | length",
    "(1, 2, large).index(large) ~ [large].count(large)",
    "messages[0]['role'] ~ messages[-1].role",
    "message.copy().get('role')",
    "dict(a=large, **{'b': 2})",
    "dict(arguments, extra=large) | length",
    # tojson
    "arguments | tojson",
    "arguments | tojson(ensure_ascii=true)",
    "arguments | tojson(true, 2)",
    "arguments | tojson(indent=4)",
    "arguments | tojson(separators=(',', ':'), sort_keys=true)",
    "tools | tojson(indent=2) | replace('\\n', ' ')",
    "large | tojson ~ none | tojson ~ 'é\\u2028<' | tojson ~ 0.1 | tojson",
    "missing | tojson",
    # filters
    "text | trim | replace('.', '!') | indent(2, true)",
    "large | replace(17, 'x')",
    "missing | replace('a', 'b')",
    "none | string | upper",
    "arguments | dictsort",
    "arguments | dictsort(reverse=true, by='key')",
    "arguments | items | list",
    "messages | map(attribute='role') | join(', ')",
    "['a', 'b'] | map('replace', 'a', 'x') | join",
    "messages | selectattr('role', 'equalto', 'user') | list | length",
    "messages | rejectattr('tool_calls', 'defined') | map(attribute='role') | unique | list",
    "messages | groupby('role') | map(attribute='grouper') | join('|')",
    "[3, 1, 2] | sort(reverse=true) | join('-') ~ [1, 2] | sum ~ [1, 5] | max",
    "[1, 2, 3] | batch(2, 'x') | list",
    "[1, 2, 3] | slice(2) | list",
    "[large, none] | join(large)",
    "missing | default('d') ~ '' | default('e', true) ~ none | default('f')",
    "large | int ~ '12' | int ~ '1.5' | float ~ 2.6 | round ~ 7 | string | length",
    "'a b' | urlencode ~ '<b>' | escape ~ 'a b c' | wordcount ~ 'abc' | truncate(2)",
    "'ab' | list | reverse | join ~ [[1], [2]] | map('first') | list",
    "arguments | attr('city') ~ 'abc' | center(9) ~ text | wordwrap(5)",
    "'%05d' % 42 ~ 7 // 2 ~ 7 % 4 ~ 2 ** 5 ~ 'ab' * 2 ~ [1] + [2]",
    # tests, undefined values, None
    "message.tool_calls is defined ~ message.nothing is none ~ message.content is none",
    "message.content is string ~ arguments is mapping ~ messages is iterable ~ 1 is number",
    "missing is defined ~ (missing.more is defined)",
    "missing ~ '|'",
    "missing + 'a'",
    "missing.upper()",
    "missing()",
    "message.content + 'a'",
    "(missing | length) ~ (missing | list)",
    "arguments.city if arguments.city is defined else 'none'",
    "'city' in arguments and 'x' not in arguments.city",
    "'a' in none",
    "1 if missing",
    # functions
    "raise_exception('roles must alternate')",
    "raise_exception(message='named')",
    "strftime_now('%Y') | length ~ strftime_now(format='%d %b %Y') | length",
    "range(3) | list ~ range(10, 0, -3) | list",
    "namespace(a=large).a",
    "cycler('a', large).next()",
    "joiner(', ')() ~ 'x'",
    "lipsum(n=0)",
    "''.__class__",
    "messages.append(1)",
    "arguments.update({'a': 1})",
    "tools is none ~ documents is none ~ add_generation_prompt",
    "bos_token ~ eos_token ~ unk_token",
)

WRAPPERS = (
    "{{ %s }}",
    "{%% for message in messages %%}{{ %s }}{%% endfor %%}",
    "{%%- for m in [1, 2] if m > 1 -%%}\n  {{- %s -}}\n{%%- else -%%} no {%%- endfor %%}",
    "{%% for k, v in arguments.items() %%}{{ loop.index0 }}{{ %s }}{%% if loop.last %%}.{%% endif"
    " %%}{%% endfor %%}",
    "{%% block b %%}{{ %s }}{%% endblock %%}",
    "{%% macro m(message, depth=large) %%}{{ %s }}{%% endmacro %%}{{ m(messages[2]) }}",
    "{%% macro m(x) %%}[{{ caller(x) }}]{%% endmacro %%}{%% call(y) m(large) %%}{{ %s }}"
    "{%% endcall %%}",
    "{%% for i in [1] %%}{%% set found = %s %%}{{ found }}{%% endfor %%}{{ found is defined }}",
    "{%% set ns = namespace(found='', n=large) %%}{%% for i in [1, 2] %%}{%% set ns.found = %s %%}"
    "{%% endfor %%}{{ ns.found }}",
    "{%% generation %%}{%% for i in [1] %%}{{ %s }}{%% endfor %%}{%% endgeneration %%}",
    "{%% filter upper %%}{{ %s }}{%% endfilter %%}",
    "  {%% if true %%}\n  {{ %s }}\n  {%% endif %%}\n",
    "{%% set s %%}{{ %s }}{%% endset %%}{{ s | length }}{{ s }}",
)
SETTING = (
    "{% set message = messages[2] %}{% set text = messages[0].content %}"
    "{% set content = messages[4].content %}{% set large = 1700000000000 %}"
    "{% set arguments = message.tool_calls[0].function.arguments %}"
)

SCOPES = (
    "{% generation %}{% set x = 1 %}{% endgeneration %}{{ x is defined }}",
    "{% set x = 0 %}{% for i in [1, 2] %}{% set x = i %}{% endfor %}{{ x }}",
    "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}"
    "{% endif %}{{ i }}{{ loop.first }}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for i in [1, 1, 2] %}{{ loop.changed(i) }}{{ loop.previtem }}{{ loop.nextitem }}"
    "{{ loop.revindex }}{{ loop.length }}{{ loop.depth }}{% endfor %}",
    "{% for i in [[1, [2]], [3]] recursive %}{{ loop(i) if i is not number else i }}{% endfor %}",
    "{% for a, b in [(1, 2)] %}{{ a }}{{ b }}{% endfor %}{% for i in missing %}x{% else %}none"
    "{% endfor %}",
    "{% for i in none %}{% endfor %}",
    "{% for i in 5 %}{% endfor %}",
    "{% generation %}{% for i in [1] %}{% break %}{% endfor %}{% endgeneration %}x",
    "{% for m in messages %}{% generation %}{{ m.role }}{{ loop.index }}{% endgeneration %}"
    "{% endfor %}",
    "{%- macro show(schema, indent=0) -%}{% for k, v in schema.items() %}{{ ' ' * indent }}{{ k }}"
    "{% if v is mapping %}{{ show(v, indent + 2) }}{% else %}: {{ v }}{% endif %}\n{% endfor %}"
    "{%- endmacro -%}{{ show(tools[0]) }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1700000000000, a=1700000000000) }}",
    "{% set ns = namespace(a=1) %}{% set ns.b = 2 %}{{ ns.a + ns.b }}{{ ns.c is defined }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{# comment #}\n  {#- x -#}  y{% raw %}{{ z }}{% endraw %}",
    "  {% if true %}\n    a\n  {%+ if true %}b{% endif +%}\n{% endif %}\n\n",
    "{% include 'x' %}",
    "{% unknown %}",
    "{{ 'a' | unknown }}",
    "{% with a = 1 %}{{ a }}{% endwith %}{{ a is defined }}",
    "{% autoescape true %}{{ '<b>' }}{{ '<' ~ '>' }}{% endautoescape %}",
    "{{ messages | map('unknown') | list }}",
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}",
)


def theirs(template: str, **variables) -> str | None:
    """Returns transformers' text; None where it fails."""
    try:
        texts, _ = render_jinja_template(
            [copy.deepcopy(MESSAGES)],
            tools=TOOLS,
            chat_template=template,
            add_generation_prompt=True,
            **SPECIAL,
            **variables,
        )
    except Exception:
        return None
    text: str = texts[0]
    return text


def ours(template: str, **variables) -> str | None:
    """Returns this project's text; None where it fails with an error for the client."""
    variables = {"tools": TOOLS} | variables
    try:
        return ChatTemplate(template, SPECIAL).render(copy.deepcopy(MESSAGES), True, variables)
    except InvalidRequest:
        return None


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_renders_alike_wherever_it_stands(expression: str) -> None:
    for wrapper in WRAPPERS:
        template = SETTING + wrapper % f"({expression})"
        assert ours(template) == theirs(template), template


@cache
def rendering_expressions() -> list[str]:
    """Returns the expressions that render."""
    written = {each: SETTING + "{{ (" + each + ") }}" for each in EXPRESSIONS}
    return [each for each, template in written.items() if theirs(template) is not None]


def test_most_expressions_render() -> None:
    assert len(rendering_expressions()) > 0.8 * len(EXPRESSIONS)


@pytest.mark.parametrize("template", SCOPES)
def test_scopes_and_loops_render_alike(template: str) -> None:
    assert ours(template) == theirs(template)


@pytest.mark.parametrize("seed", range(examples(30)))
def test_nested_constructs_render_alike(seed: int) -> None:
    chooser = random.Random(seed)
    good = rendering_expressions()

    def build(depth: int) -> str:
        wrapper = chooser.choice([each for each in WRAPPERS if "block b" not in each])
        text = wrapper % f"({chooser.choice(good)})"
        if depth and "{% endfor %}" in text:
            return text.replace("{% endfor %}", build(depth - 1) + "{% endfor %}", 1)
        if depth:
            return text + build(depth - 1)
        return text

    template = SETTING + "".join(build(3) for _ in range(3))
    assert ours(template) == theirs(template), template
