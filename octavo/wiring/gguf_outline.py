"""The GGUF header that a checkpoint in another format would have.

The header is written, read back with the engine's GGUF reader, and used only if it describes the
same model.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from octavo.checkpoint.ports import Checkpoint, TokenizerSource, Vocabulary
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.writing.gguf_keys import KeyValue
from octavo.checkpoint.writing.gguf_outline import SPECIAL_KEYS, GgufOutline
from octavo.models.registry import build_programs
from octavo.program.program import Program
from octavo.text.json_vocabulary import json_vocabulary

HINT = "convert it with llama.cpp's convert_hf_to_gguf.py --outtype bf16 first"
TOLERANCE = 1e-6
"""Relative tolerance of float32 values in a header."""


def gguf_outline(checkpoint: Checkpoint, program: Program) -> GgufCheckpoint:
    """Builds the GGUF header of a checkpoint, in memory. Raises UnsupportedModel if GGUF cannot
    describe the model or its tokenizer.
    """
    source = checkpoint.tokenizer_source()
    vocabulary = None if source is None else _vocabulary(source)
    keys = {} if source is None or vocabulary is None else _tokenizer_keys(source, vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outline.gguf"
        GgufOutline(checkpoint, vocabulary, keys).write(path)
        outline = GgufCheckpoint(path)  # the mapped pages remain after the file is deleted
    built_program = build_programs(outline.config).get(program.name)
    if built_program is None or not _is_alike(built_program, program):
        raise UnsupportedModel(
            f"format gguf: the architecture {outline.architecture} does not describe all parts of"
            f" {checkpoint.path}",
            hint=HINT,
        )
    check_tensors(outline, [built_program])
    return outline


def _vocabulary(source: TokenizerSource) -> Vocabulary | None:
    return source.vocabulary if source.json is None else json_vocabulary(source.json)


def _tokenizer_keys(source: TokenizerSource, vocabulary: Vocabulary) -> Mapping[str, KeyValue]:
    """Returns the keys of special tokens, initial tokens and the chat template."""
    ids = {token.decode(errors="replace"): i for i, token in enumerate(vocabulary.tokens)}
    keys: dict[str, KeyValue] = {
        f"tokenizer.ggml.{theirs}_token_id": ids[source.special_tokens[f"{ours}_token"]]
        for ours, theirs in SPECIAL_KEYS.items()
        if source.special_tokens.get(f"{ours}_token") in ids
    }
    ends = list(source.eos_token_ids)
    if ends:
        keys.setdefault("tokenizer.ggml.eos_token_id", ends[0])
    others = [i for i in ends if i != keys.get("tokenizer.ggml.eos_token_id")]
    for key, token_id in zip(("eot", "eom"), others, strict=False):
        keys[f"tokenizer.ggml.{key}_token_id"] = token_id
    adds_bos = source.add_bos_token
    if adds_bos is None and source.json is not None:
        adds_bos = _adds_bos(source)
    if adds_bos is not None:
        keys["tokenizer.ggml.add_bos_token"] = adds_bos
    if source.chat_template is not None:
        keys["tokenizer.chat_template"] = source.chat_template
    if source.named_templates:
        keys["tokenizer.chat_templates"] = list(source.named_templates)
    for name, text in source.named_templates.items():
        keys[f"tokenizer.chat_template.{name}"] = text
    return keys


def _adds_bos(source: TokenizerSource) -> bool:
    """Returns whether tokenizer.json adds the BOS token itself."""
    import tokenizers

    bos = source.special_tokens.get("bos_token")
    tokens = tokenizers.Tokenizer.from_file(str(source.json)).encode("a").tokens
    return bos is not None and tokens[:1] == [bos]


def _is_alike(built: Any, expected: Any) -> bool:
    """Returns whether two Programs, or parts of them, are equal up to rounding."""
    if isinstance(built, float) and isinstance(expected, float):
        return math.isclose(built, expected, rel_tol=TOLERANCE) or built == expected
    if dataclasses.is_dataclass(built):
        return type(built) is type(expected) and all(
            _is_alike(getattr(built, field.name), getattr(expected, field.name))
            for field in dataclasses.fields(built)
        )
    if isinstance(built, tuple | list):
        return (
            isinstance(expected, tuple | list)
            and len(built) == len(expected)
            and all(map(_is_alike, built, expected))
        )
    if isinstance(built, dict):
        return (
            isinstance(expected, dict)
            and built.keys() == expected.keys()
            and all(_is_alike(value, expected[key]) for key, value in built.items())
        )
    return bool(built == expected)
