"""Reads the tokenizer of a Hugging Face directory: tokenizer.json, tokenizer.model or tekken.json,
special tokens, end ids, chat template.

`text/tokenizer.py` builds the tokenizer from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.json_file import read_json_if_there
from octavo.checkpoint.placeholder import refuse_placeholder
from octavo.checkpoint.ports import CONTROL, UNUSED, USER_DEFINED, TokenizerSource, Vocabulary
from octavo.checkpoint.tekken import FILE as TEKKEN_FILE
from octavo.checkpoint.tekken import read_tekken, tekken_settings

JSON_FILE = "tokenizer.json"
BPE = 2
"""Number that stands for byte-pair encoding in the trainer's model types."""
MODEL_TYPES = {1: "unigram", BPE: "bpe", 3: "word", 4: "char"}
CHATGLM_TOKENS = (
    *("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
"""Tokens that ChatGLM's code adds after the pieces, in this order."""
CHATGLM_PREFIX = ("[gMASK]", "sop")
"""Tokens that ChatGLM's code prepends to every text."""
MAX_PIECES = 1 << 21
AddedTokens = Mapping[int, tuple[str, bool]]
"""Added tokens by id: the text, and whether it is special."""
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


def tokenizer_source(
    path: Path, config: dict[str, Any], generation_config: dict[str, Any]
) -> TokenizerSource | None:
    """Returns a directory's tokenizer: tokenizer.json if it exists, else tokenizer.model, else
    tekken.json; None if it has none of them.
    """
    file, pieces, ranks = (path / name for name in (JSON_FILE, "tokenizer.model", TEKKEN_FILE))
    found = next((each for each in (file, pieces, ranks) if each.exists()), None)
    if found is None:
        return None
    refuse_placeholder(found)
    settings = read_json_if_there(path / "special_tokens_map.json") | read_json_if_there(
        path / "tokenizer_config.json"
    )
    if found == ranks:
        settings = tekken_settings() | settings
    special = {
        name: _text(settings[name], name, path)
        for name in SPECIAL_NAMES
        if settings.get(name) is not None
    }
    templates = _chat_templates(path, settings)
    default = templates.pop("default", None) or next(iter(templates.values()), None)
    return TokenizerSource(
        origin=path,
        json=file if found == file else None,
        vocabulary=_read_vocabulary(found, config, settings),
        special_tokens=_further_tokens(settings) | special,
        eos_token_ids=tuple(
            dict.fromkeys(
                [
                    *_ids(generation_config.get("eos_token_id")),
                    *_ids(config.get("eos_token_id")),
                ]
            )
        ),
        add_bos_token=settings.get("add_bos_token"),
        has_type_ids="token_type_ids" in settings.get("model_input_names", ("token_type_ids",)),
        chat_template=default,
        named_templates=templates,
    )


def _read_vocabulary(
    file: Path, config: Mapping[str, Any], settings: Mapping[str, Any]
) -> Vocabulary | None:
    """Returns the vocabulary of a tokenizer's file; None for tokenizer.json, read later."""
    if file.name == JSON_FILE:
        return None
    return read_tekken(file) if file.name == TEKKEN_FILE else _vocabulary(file, config, settings)


def _vocabulary(pieces: Path, config: Mapping[str, Any], settings: Mapping[str, Any]) -> Vocabulary:
    """Returns the vocabulary of tokenizer.model, with tokens added by other files."""
    if config.get("model_type") == "chatglm":
        vocabulary = read_vocabulary(pieces, chatglm_tokens)
        return replace(vocabulary, prefix=CHATGLM_PREFIX)
    named = read_json_if_there(pieces.with_name("added_tokens.json"))
    added = {token_id: (text, True) for text, token_id in named.items()}
    described = settings.get("added_tokens_decoder") or {}
    try:
        added |= {
            int(token_id): (token["content"], bool(token.get("special", True)))
            for token_id, token in described.items()
        }
        if not all(isinstance(i, int) and isinstance(text, str) for i, (text, _) in added.items()):
            raise ValueError("ids are integers, contents are texts")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise WeightMismatch(
            f"{pieces.parent}: the added tokens of added_tokens.json and tokenizer_config.json"
            f" cannot be read: {error}"
        ) from error
    return read_vocabulary(pieces, lambda _: added)


def _chat_templates(path: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Returns the chat templates by name; the main one is "default".

    In order of precedence: chat_template.jinja, chat_template.json, tokenizer_config.json (may hold
    several). Files in additional_chat_templates are named by their stems.
    """
    template = read_json_if_there(path / "chat_template.json").get(
        "chat_template", settings.get("chat_template")
    )
    if template is not None and not isinstance(template, str | list | dict):
        raise _not_a_template(path, "chat_template", template)
    templates = _named(template)
    file = path / "chat_template.jinja"
    if file.exists():
        templates = {"default": _read_text(file)}
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read_text(file)
    for name, text in templates.items():
        if not isinstance(text, str):
            which = "" if name == "default" else f"{name!r} of "
            raise _not_a_template(path, f"{which}chat_template", text)
    return templates


def _not_a_template(path: Path, name: str, value: Any) -> WeightMismatch:
    return WeightMismatch(
        f"{path}: {name} is a {type(value).__name__}, expected a string or a list of named"
        " templates"
    )


def _named(template: Any) -> dict[str, Any]:
    """Returns the value of `chat_template` as templates by name."""
    if template is None:
        return {}
    if isinstance(template, dict):
        return {str(name): text for name, text in template.items()}
    if not isinstance(template, list):
        return {"default": template}
    return {
        str(entry.get("name")): entry.get("template")
        for entry in template
        if isinstance(entry, dict)
    }


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WeightMismatch(f"{file}: cannot be read: {error}") from error


def _further_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Returns model-specific tokens for templates: `eot_token`, `image_token`, and those in
    `extra_special_tokens`.
    """
    extra = settings.get("extra_special_tokens")
    named = settings | (extra if isinstance(extra, dict) else {})
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in named.items()
        if name.endswith("_token")
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _text(token: Any, name: str, path: Path) -> str:
    """Returns a token's text: a string, or the `content` of an object."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise WeightMismatch(
            f"{path}: {name} is {token!r}, expected a string or an object with a string `content`"
        )
    return text


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def read_vocabulary(path: Path, added_behind: Callable[[int], AddedTokens]) -> Vocabulary:
    """Returns the pieces of the file, followed by the tokens that `added_behind` returns for the
    number of pieces.

    Raises UnsupportedModel for model types other than BPE, WeightMismatch for a damaged file.

    Llama 2, Mistral, Gemma and ChatGLM are published with this file, some without any other
    tokenizer file. The file is a protobuf message; sentencepiece, which parses it, is imported
    lazily.
    """
    from google.protobuf.message import DecodeError
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    message = ModelProto()
    try:
        message.ParseFromString(path.read_bytes())
        pieces = [(one.piece.encode(), one.score, one.type) for one in message.pieces]
    except AttributeError as error:  # protobuf gives bytes for a text that is not UTF-8
        raise WeightMismatch(
            f"{path}: a piece is not UTF-8", hint="download the file again"
        ) from error
    except (OSError, DecodeError) as error:
        raise WeightMismatch(
            f"{path}: not a readable SentencePiece model: {error}",
            hint="download the file again",
        ) from error
    kind = message.trainer_spec.model_type
    if kind != BPE:
        raise UnsupportedModel(
            f"{path}: got a SentencePiece model of type {MODEL_TYPES.get(kind, kind)!r}, expected"
            " 'bpe'",
            hint="save the tokenizer with transformers, which writes tokenizer.json",
        )
    # Both change texts: the character table, and the removal of double spaces (the default).
    normalizer = message.normalizer_spec
    if normalizer.precompiled_charsmap or normalizer.remove_extra_whitespaces:
        raise UnsupportedModel(
            f"{path}: SentencePiece models that normalize text are not supported",
            hint="save the tokenizer with transformers, which writes tokenizer.json",
        )
    pieces += _added_pieces(path, len(pieces), added_behind(len(pieces)))
    return Vocabulary(
        model="llama",
        pre="default",
        tokens=[text for text, _, _ in pieces],
        types=[kind for _, _, kind in pieces],
        scores=[score for _, score, _ in pieces],
        add_space_prefix=normalizer.add_dummy_prefix,
    )


def chatglm_tokens(num_pieces: int) -> AddedTokens:
    """Returns the tokens that ChatGLM's code adds after `num_pieces` pieces."""
    return {num_pieces + i: (text, True) for i, text in enumerate(CHATGLM_TOKENS)}


def _added_pieces(path: Path, first: int, added: AddedTokens) -> list[tuple[bytes, float, int]]:
    """Returns the added tokens after the pieces, with an unused piece for each id between them."""
    behind = {token_id: token for token_id, token in added.items() if token_id >= first}
    end = max(behind, default=first - 1) + 1
    if end > MAX_PIECES:
        raise WeightMismatch(
            f"{path}: an added token has id {end - 1}, expected an id below {MAX_PIECES}"
        )
    pieces = []
    for token_id in range(first, end):
        text, is_special = behind.get(token_id, (f"<unused of id {token_id}>", None))
        kind = UNUSED if is_special is None else CONTROL if is_special else USER_DEFINED
        pieces.append((text.encode(), 0.0, kind))
    return pieces
