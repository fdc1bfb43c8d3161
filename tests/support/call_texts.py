"""Calls as a model writes them, in every format; and texts that a grammar admits, sampled."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from octavo.api.structured_outputs import StructuredOutputs
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.text.grammar import raw_values
from octavo.text.grammar.admission import admit
from octavo.text.grammar.arguments import PairLayout
from octavo.text.grammar.compiler import GrammarCompiler, TokenMatcher
from octavo.text.parsers.bodies import KeyValues
from octavo.text.parsers.calls import FunctionTypes
from octavo.text.parsers.formats import HARMONY, NAME_HERE, ChannelFormat, ToolFormat
from octavo.text.parsers.gemma import GemmaCalls
from octavo.text.parsers.pythonic import PythonCalls
from octavo.text.ports import Tokenizer
from octavo.text.tokenizer import load_tokenizer
from tests.support.tiny_tokenizer import SPECIALS, save_tiny_tokenizer

MOST_TOKENS = 600
END = SPECIALS.index("<eos>")
ENDS = frozenset('"}])>\n')
"""Characters that lead to the end of a text."""


def marked_vocabulary(folder: Path) -> tuple[Tokenizer, GrammarCompiler]:
    """Returns a tokenizer of bytes and the marks of harmony's messages, and a compiler over it."""
    save_tiny_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    made = HfTokenizer.from_file(file)
    made.add_special_tokens([AddedToken(mark, special=True) for mark in HARMONY.marks])
    made.save(file)
    source = tokenizer_source(folder, {}, {})
    assert source is not None
    tokenizer = load_tokenizer(source)
    size = tokenizer.vocab_size
    return tokenizer, GrammarCompiler(tokenizer, vocab_size=size, end_token_ids=[END])


def call_text(
    tools: ToolFormat | ChannelFormat, name: str, schema: Mapping[str, Any], arguments: Any
) -> str:
    """Returns a call in a format's own notation."""
    begin, end = tools.written
    body = None if isinstance(tools, ChannelFormat) else tools.body
    if isinstance(body, KeyValues):
        types = FunctionTypes({name: schema})
        written = "".join(
            _pair(body.layout, key, value, types.get_types(name, key))
            for key, value in arguments.items()
        )
    elif isinstance(body, PythonCalls):
        written = ", ".join(_keyword(key, value) for key, value in arguments.items())
    elif isinstance(body, GemmaCalls):
        written = ",".join(_bare(key, value) for key, value in arguments.items())
    else:
        written = json.dumps(arguments, ensure_ascii=False)
    return begin.replace(NAME_HERE, name) + written + end


def ending_marks(tools: ToolFormat | ChannelFormat) -> list[str]:
    """Returns the texts that end a value without quotes; [] in formats of JSON."""
    body = None if isinstance(tools, ChannelFormat) else tools.body
    return [body.layout.line + body.layout.value_end] if isinstance(body, KeyValues) else []


def _pair(layout: PairLayout, key: str, value: Any, types: frozenset[str]) -> str:
    key = raw_values.quote(key, layout.key_end) if layout.key_end in key else key
    if not isinstance(value, str) or "string" not in types:
        text = json.dumps(value, ensure_ascii=False)
    elif raw_values.needs_quotes(value, layout.value_end, types):
        text = raw_values.quote(value, layout.value_end)
    else:
        text = value
    front = f"{layout.key_open}{key}{layout.key_end}{layout.value_open}{layout.line}"
    return f"{front}{text}{layout.line}{layout.value_end}\n"


def _keyword(key: str, value: Any) -> str:
    written = json.dumps(value, ensure_ascii=False)
    if key.isidentifier():
        return f"{key}={written}"
    return f"**{{{json.dumps(key, ensure_ascii=False)}: {written}}}"


def _bare(key: str, value: Any) -> str:
    name = key if key.isidentifier() else json.dumps(key, ensure_ascii=False)
    return f"{name}:{json.dumps(value, ensure_ascii=False)}"


def legal(matcher: TokenMatcher) -> list[int]:
    mask = matcher.mask()
    return [i for i in range(8 * len(mask)) if mask[i // 8] >> i % 8 & 1]


def admits(
    compiler: GrammarCompiler, tokenizer: Tokenizer, form: StructuredOutputs, text: str
) -> bool:
    """Returns whether the masks of a form's grammar admit a whole text, token by token."""
    matcher = compiler.compile(admit(form, compiler))
    for token_id in tokenizer.encode(text, add_special_tokens=False, allow_special_text=True):
        if token_id not in legal(matcher):
            return False
        matcher.accept_tokens([token_id])
    return matcher.allows(END)


def sampled_text(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    form: StructuredOutputs,
    rng: random.Random,
    begin: str = "",
    marks: Sequence[str] = (),
) -> str | None:
    """Returns a text that a form's grammar admits, sampled token by token: at first any token, more
    and more those that lead to its end, and now and then a mark as far as it is admitted. None if
    it has no end within many tokens.
    """
    matcher = compiler.compile(admit(form, compiler))
    ids = tokenizer.encode(begin, add_special_tokens=False, allow_special_text=True)
    matcher.accept_tokens(ids)
    spelled = [tokenizer.encode(mark, add_special_tokens=False) for mark in marks]
    mark: list[int] = []
    while len(ids) < MOST_TOKENS:
        allowed = legal(matcher)
        assert allowed, f"dead end behind {tokenizer.decode(ids, skip_special_tokens=False)!r}"
        if END in allowed:
            return tokenizer.decode(ids, skip_special_tokens=False)
        left = matcher.closing(MOST_TOKENS) if len(ids) > 100 and len(ids) % 20 == 0 else None
        if left is not None:
            return tokenizer.decode([*ids, *left[:-1]], skip_special_tokens=False)
        if spelled and not mark and rng.random() < len(ids) / 1000:
            mark = list(rng.choice(spelled))
        if mark and mark[0] in allowed:
            ids.append(mark.pop(0))
            matcher.accept_tokens(ids[-1:])
            continue
        mark = []
        plain = [i for i in allowed if tokenizer.token_bytes(i) < b"\x7f"]
        closers = [i for i in plain if tokenizer.token_text(i) in ENDS]
        pool = closers if closers and rng.random() < 0.3 else plain
        ids.append(rng.choice(pool or allowed))
        matcher.accept_tokens(ids[-1:])
    return None
