"""Named chat templates are found and chosen as transformers finds and chooses them: `tool_use` for
conversations with tools, any other by its name.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from transformers import AutoTokenizer

from octavo.api.errors import ConfigError, WeightMismatch
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.open import open_checkpoint
from octavo.text.ports import Rendering
from octavo.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.tiny_gguf import tiny_model, write_tiny_gguf
from tests.support.tiny_vocabularies import bpe_with_specials, save_tokenizer_json

TALK = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NAMED = {
    "default": "plain {{ messages[0].content }}",
    "tool_use": "tools {{ messages[0].content }}{{ tools | length }}",
    "rag": "documents {{ messages[0].content }}",
}
AS_LIST = [{"name": name, "template": text} for name, text in NAMED.items()]


def render(tokenizer: TextTokenizer, *, tools=None, template: str | None = None) -> str:
    variables = {} if tools is None else {"tools": tools}
    return tokenizer.render_chat(TALK, Rendering(variables=variables, template=template))


def directory(folder: Path, files: dict[str, str], **settings) -> Path:
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>"}
    path = save_tokenizer_json(folder / "m", bpe_with_specials(), **settings)
    for name, text in files.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")
    return path


def write_gguf(path: Path, keys: dict[str, str]) -> None:
    pieces = {"<x>": 3, "a": 1, "b": 1, "ab": 1}
    write_tiny_gguf(path, "llama", tiny_model("llama"), tokens=96, extra=keys, special=pieces)


MAIN, MORE = "chat_template.jinja", "additional_chat_templates"
PLACES = {
    "list": ({}, {"chat_template": AS_LIST}),
    "object": ({}, {"chat_template": NAMED}),
    "text": ({}, {"chat_template": "one {{ messages[0].content }}"}),
    "files": (
        {MAIN: NAMED["default"], f"{MORE}/tool_use.jinja": NAMED["tool_use"]},
        {},
    ),
    "file": ({MAIN: "file {{ messages[0].content }}"}, {"chat_template": AS_LIST}),
    "all": (
        {MAIN: "file", f"{MORE}/tool_use.jinja": "more", f"{MORE}/rag.jinja": NAMED["rag"]},
        {"chat_template": AS_LIST},
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_transformers_chooses_the_same(tmp_path: Path, place: str) -> None:
    files, settings = PLACES[place]
    path = directory(tmp_path, files, **settings)
    theirs = AutoTokenizer.from_pretrained(path)
    ours = load_tokenizer(tokenizer_source(path, {}, {}))
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(TALK, tools=tools, tokenize=False)
        assert render(ours, tools=tools) == expected
    for name in ours.chat_template_names:
        chosen = name if isinstance(theirs.chat_template, dict) else None
        expected = theirs.apply_chat_template(
            TALK, tools=TOOLS, chat_template=chosen, tokenize=False
        )
        assert render(ours, tools=TOOLS, template=name) == expected


def test_a_gguf_header_names_templates(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    keys = {"tokenizer.chat_template": NAMED["default"]} | {
        f"tokenizer.chat_template.{name}": NAMED[name] for name in ("tool_use", "rag")
    }
    write_gguf(path, keys)
    tokenizer = load_tokenizer(open_checkpoint(path).tokenizer_source())
    assert set(tokenizer.chat_template_names) == set(NAMED)
    assert render(tokenizer).startswith("plain")
    assert render(tokenizer, tools=TOOLS) == "tools hi1"
    assert render(tokenizer, template="rag").startswith("documents")


def test_gguf_py_writes_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_chat_template(AS_LIST)
    assert {key for key in writer.kv_data[0] if "chat_template" in key} == {
        "tokenizer.chat_template",
        "tokenizer.chat_template.tool_use",
        "tokenizer.chat_template.rag",
        "tokenizer.chat_templates",
    }


def test_the_option_may_name_one(tmp_path: Path) -> None:
    source = tokenizer_source(directory(tmp_path, {}, chat_template=AS_LIST), {}, {})
    chosen = load_tokenizer(source, chat_template="rag")
    assert render(chosen) == render(chosen, tools=TOOLS) == "documents hi"
    assert render(chosen, template="tool_use", tools=TOOLS) == "tools hi1"
    assert render(load_tokenizer(source, chat_template="default"), tools=TOOLS) == "plain hi"
    with pytest.raises(ConfigError) as error:
        load_tokenizer(source, chat_template="rga")
    assert str(error.value) == (
        "chat_template: got 'rga', expected a Jinja template or the model's templates 'tool_use',"
        " 'rag', 'default' or the path of a file with one"
    )


def test_templates_without_a_default(tmp_path: Path) -> None:
    path = directory(tmp_path, {}, chat_template=AS_LIST[:0:-1])
    tokenizer = load_tokenizer(tokenizer_source(path, {}, {}))
    assert render(tokenizer) == "documents hi"
    assert render(tokenizer, tools=TOOLS) == "tools hi1"


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = directory(tmp_path, {}, chat_template=[{"name": "rag", "template": 5}])
    with pytest.raises(WeightMismatch, match="'rag' of chat_template is a int"):
        tokenizer_source(path, {}, {})


def test_tokens_of_one_model_are_variables(tmp_path: Path) -> None:
    path = directory(
        tmp_path,
        {MAIN: "{{ bos_token }}{{ image_token }}{{ eoi_token }}{{ add_bos_token }}"},
        extra_special_tokens={"image_token": "<|image|>", "eoi_token": {"content": "<eoi>"}},
        add_bos_token=False,
    )
    ours = load_tokenizer(tokenizer_source(path, {}, {}))
    assert render(ours) == "<|im_start|><|image|><eoi>"


def test_a_copy_keeps_the_names(tmp_path: Path) -> None:
    from octavo.tools.quantize import write_tokenizer

    keys = {"tokenizer.chat_template": "a", "tokenizer.chat_template.tool_use": "b"}
    path = tmp_path / "m.gguf"
    write_gguf(path, keys)
    source = open_checkpoint(path).tokenizer_source()
    write_tokenizer(source, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert {each["name"]: each["template"] for each in settings["chat_template"]} == {
        "default": "a",
        "tool_use": "b",
    }
