"""A tokenizer of 256 bytes and four special tokens, with a chat template, saved beside a tiny
model's weights.
"""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_models import tiny_model

SPECIALS = ["<pad>", "<bos>", "<eos>", "<|turn|>"]
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}:{{ m.content }}{% endfor %}{% if"
    " add_generation_prompt %}<|turn|>assistant:{% endif %}"
)


def save_tiny_tokenizer(path: Path) -> None:
    """Writes the tokenizer and its template into a directory."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: index for index, text in enumerate([*SPECIALS, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIALS]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@cache
def tiny_model_with_text(family: str = "llama") -> Path:
    """Returns the directory of a tiny model whose ids include the tokenizer's 260."""
    path = tiny_model(family).path
    target = path.with_name("with-text" if family == "llama" else f"with-text-{family}")
    shutil.copytree(path, target, dirs_exist_ok=True)  # a named llama is the default's twin
    save_tiny_tokenizer(target)
    return target


@cache
def tiny_model_that_infills() -> Path:
    """Returns the directory of the same model with StarCoder's three tokens for infilling."""
    path = tiny_model_with_text()
    target = path.with_name("that-infills")
    shutil.copytree(path, target)
    file = str(target / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    names = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.save(file)
    return target


@cache
def tiny_model_with_named_templates() -> Path:
    """Returns the directory of the same model with the chat templates `tool_use` and `rag`."""
    path = tiny_model_with_text()
    target = path.with_name("with-named-templates")
    shutil.copytree(path, target)
    folder = target / "additional_chat_templates"
    folder.mkdir()
    tools = "{{ tools[0].function.name }}<tool_call>{{ messages[-1].tool_calls }}"
    (folder / "tool_use.jinja").write_text(tools)
    (folder / "rag.jinja").write_text("{{ documents[0].text }}:{{ messages[0].content }}")
    return target
