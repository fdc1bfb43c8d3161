"""Formats found in chat templates, and named by options."""

import pytest

from octavo.api.errors import ConfigError
from octavo.text.parsers.choice import choose_formats

BAR, LOW = "\uff5c", "\u2581"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ '<tool_call>' }}", "hermes", None),
        ("<tool_call> {% if '</think>' in content %}", "hermes", "deepseek_r1"),
        ("<tool_call>\n<function=example>", "qwen3_coder", None),
        ("<tool_call>{{ name }}<arg_key> <think></think>", "glm45", "deepseek_r1"),
        ("[TOOL_CALLS]", "mistral", None),
        ("[TOOL_CALLS] [ARGS] [THINK] [/THINK]", "mistral_v11", "mistral"),
        ("<|start_header_id|> <|python_tag|>", "llama3_json", None),
        ('<|start_header_id|> {"name": f, "parameters": p}', "llama3_json", None),
        ("<|python_start|>", "llama4_pythonic", None),
        (f"<{BAR}tool{LOW}calls{LOW}begin{BAR}>", "deepseek_v3", None),
        (f"<{BAR}tool{LOW}calls{LOW}begin{BAR}> </think> thinking", "deepseek_v31", "deepseek_r1"),
        ("<|start|>assistant<|channel|>final<|message|>", "openai", "openai"),
        ("<|START_ACTION|> <|START_THINKING|>", "cohere", "cohere"),
        ("<function_calls>", "olmo3", None),
        ("<|tool_call>call: <tool_call|> <|channel>thought <channel|>", "gemma4", "gemma4"),
        ("<|tool_list_start|>", "lfm2", None),
        ("<tool_calls>[...]</tool_calls> </think> <answer>", "hunyuan_a13b", "hunyuan_a13b"),
        ("<tool_call> </think> <response>", "hermes", "ernie45"),
        ("{{ messages }}", None, None),
        (None, None, None),
    ],
)
def test_a_chat_template_tells_its_formats(template, tools, reasoning):
    found = choose_formats(template, None, None)
    assert (found.tools and found.tools.name) == tools
    assert (found.reasoning and found.reasoning.name) == reasoning


def test_an_option_goes_before_the_template():
    found = choose_formats("<tool_call> </think>", "pythonic", "none")
    assert found.tools is not None and found.tools.name == "pythonic"
    assert found.reasoning is None
    aliased = choose_formats(None, None, "qwen3").reasoning
    assert aliased is not None and aliased.name == "deepseek_r1"


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    given = {"tool_call_parser": None, "reasoning_parser": None, name: "mistal"}
    with pytest.raises(ConfigError, match=f"{name}: got 'mistal', expected .*mistral") as caught:
        choose_formats(None, **given)
    assert caught.value.hint is not None and "mistral" in caught.value.hint
