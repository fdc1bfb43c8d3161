"""Converts a tokenizer.json to a GGUF header's vocabulary: the inverse of `vocabulary.py`.

A tokenizer.json defines its pre-tokenization in full, a header only by name. Each known
pre-tokenization is tried until its ids for a multilingual text equal the file's, similar to
llama.cpp's converter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from octavo.api.errors import OctavoError, UnsupportedModel
from octavo.checkpoint.ports import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary
from octavo.text.pre_tokenization import PRE_TOKENIZATIONS
from octavo.text.vocabulary import build_tokenizer

BYTE = 6
BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))

CHECKED_TEXTS = (
    "Hello, world! It's 3 o'clock; they'll come, we've 12 apples, I'D GO.\n",
    "1 22 333 4444 55555 666666 3.14159 2,718 1e-9 0x7F  ½ ² Ⅷ ٣٤٥ १२३",
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \ttabs\tand  spaces   end   ",
    "def f(x):\n    return [i**2 for i in range(x)]  # comment\r\n\r\nif a != b && !c || d --> e:",
    "!!!??? ... --- === *** ((())) {}[]<> ~^|`'\"\\ @user #tag $5 50% a_b-c http://x.org/?q=1&r=2",
    "Die Größe, naïve café, Ελληνικά, Кириллица и ещё, עברית שלום, العربية مرحبا، हिन्दी नमस्ते",
    "中文字符，標點。日本語のテキスト、カタカナ 한국어 문장 ไทยภาษา ቋንቋ ქართული বাংলা தமிழ்",
    "e\u0301 \u00e9 A\u030a \u212b ﬁ ｆｕｌｌ  \u200b\u200d\ufeff \u00a0nbsp\u2003em",
    "👍🏽 👩‍👩‍👧 🚀🦙",
    "Cameron's DON'T you'RE we'Ll \u2019s ''''''```````\"\"\"\"......!!!!!!?????? I've been ",
)


def json_vocabulary(path: Path) -> Vocabulary:
    """Returns the vocabulary of a tokenizer.json; raises UnsupportedModel if no pre-tokenization
    reproduces its ids.
    """
    try:
        described = json.loads(path.read_bytes())
        oracle = tokenizers.Tokenizer.from_str(json.dumps(described))
        candidates = list(_candidates(described))
    except Exception as error:  # the package raises no more specific error
        raise _unknown(path, f"its model cannot be read: {error}") from error
    for vocabulary in candidates:
        if _is_alike(vocabulary, oracle, path):
            return vocabulary
    raise _unknown(
        path,
        f"none of the {len(candidates)} known pre-tokenizers reproduces its token ids",
    )


def _unknown(path: Path, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"format gguf: {path}: {why}",
        hint="convert the model with llama.cpp's convert_hf_to_gguf.py --outtype bf16 first",
    )


def _candidates(described: Mapping[str, Any]) -> Iterator[Vocabulary]:
    model = described["model"]
    if model.get("type", "BPE") != "BPE":
        raise ValueError(f"a model of type {model.get('type')!r}, supported: 'BPE'")
    texts: dict[int, str] = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(texts, NORMAL)
    for token in described.get("added_tokens") or ():
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token.get("special") else USER_DEFINED
    size = max(texts, default=-1) + 1
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(size)]
    types = [kinds.get(i, USER_DEFINED + 1) for i in range(size)]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", ())
    ]
    encoded = [token.encode() for token in tokens]
    if not model.get("byte_fallback"):
        whole = Vocabulary("gpt2", "", encoded, types, [merge.encode() for merge in merges])
        first_names = {pre: name for name, pre in reversed(PRE_TOKENIZATIONS.items())}
        for pre, name in reversed(first_names.items()):
            if pre.is_byte_level and pre.ignore_merges == bool(model.get("ignore_merges")):
                yield replace(whole, pre=name)
        return
    unknown = model.get("unk_token")
    types = [
        BYTE if token in BYTE_PIECES else UNKNOWN if token == unknown else kind
        for token, kind in zip(tokens, types, strict=True)
    ]
    ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in reversed([*enumerate(merges)])}
    scores = [
        ranks.get(token, -1e6 if kind == NORMAL else 0.0)
        for token, kind in zip(tokens, types, strict=True)
    ]
    for prefix in (True, False):
        yield Vocabulary(
            "llama",
            "default",
            encoded,
            types,
            scores=scores,
            add_space_prefix=prefix,
            prefixes_segments=True,
        )


def _is_alike(vocabulary: Vocabulary, oracle: tokenizers.Tokenizer, path: Path) -> bool:
    """Whether a vocabulary reproduces the file's ids for all check texts."""
    try:
        built = build_tokenizer(vocabulary, path)
    except OctavoError:
        return False
    for text in CHECKED_TEXTS:
        found = built.tokenizer.encode(text, add_special_tokens=False).ids
        if found != oracle.encode(text, add_special_tokens=False).ids:
            return False
    return True
