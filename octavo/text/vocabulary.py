"""Builds a `tokenizers` object from a GGUF vocabulary; it returns the same ids as the original
tokenizer.

Four kinds: BPE with merges ("gpt2", "gemma4", "whitespace") with a named pre-tokenization
(`pre_tokenization.py`), SentencePiece BPE by scores ("llama"), its unigram model ("t5"), and
WordPiece ("bert"). Sources: llama.cpp's `llama-vocab.cpp`, sentencepiece's `bpe_model.cc` (merge
the neighbours whose concatenation has the highest score, leftmost first).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.decoders import Decoder
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.api.errors import UnsupportedModel, WeightMismatch
from octavo.checkpoint.ports import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary
from octavo.text.end_tokens import correct_token_types
from octavo.text.pre_tokenization import (
    SPACE,
    build_pre_tokenizer,
    find_pre_tokenization,
)

CONTINUES, UNKNOWN_WORD = "##", "[UNK]"
"""Prefix of continuation pieces and the unknown token in BERT's files."""


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """A tokenizer, and the steps that its user must add: a space before each text (SentencePiece's
    dummy prefix), and a BOS token if the header does not specify it.
    """

    tokenizer: Tokenizer
    space_prefix: bool
    adds_bos: bool | None
    """None leaves it to the tokenizer's post-processor."""


def build_tokenizer(
    vocabulary: Vocabulary, origin: Path, *, strict: bool = False
) -> BuiltTokenizer:
    """Builds a tokenizer.

    Raises UnsupportedModel for an unknown kind and WeightMismatch for an inconsistent vocabulary.
    For an unknown `pre`, uses the default with a warning, or raises UnsupportedModel if `strict`.
    """
    by_merges = partial(_by_merges, strict=strict)
    builders: dict[str, Callable[[Vocabulary, list[str], Path], BuiltTokenizer]] = {
        "gpt2": by_merges,
        "gemma4": by_merges,
        "whitespace": by_merges,
        "llama": _sentencepiece,
        "t5": _unigram,
        "bert": _wordpiece,
    }
    build = builders.get(vocabulary.model)
    if build is None:
        raise UnsupportedModel(
            f"{origin}: got the tokenizer model {vocabulary.model!r}, supported in GGUF:"
            f" {', '.join(builders)}"
        )
    if 0 < len(vocabulary.types) < len(vocabulary.tokens):
        raise WeightMismatch(
            f"{origin}: got {len(vocabulary.types)} token types for {len(vocabulary.tokens)} tokens"
        )
    try:
        tokens = _decode(vocabulary.tokens)
        vocabulary = replace(vocabulary, types=correct_token_types(vocabulary))
        built = build(vocabulary, tokens, origin)
    except (UnsupportedModel, WeightMismatch, MemoryError):
        raise
    except Exception as error:  # the package raises plain Exceptions
        raise WeightMismatch(f"{origin}: damaged vocabulary: {error}") from error
    _add_tokens(built.tokenizer, vocabulary, tokens)
    return _with_affixes(built, vocabulary)


def _with_affixes(built: BuiltTokenizer, vocabulary: Vocabulary) -> BuiltTokenizer:
    """Makes the tokenizer add special tokens around texts and between the texts of a pair; only
    BERT's second text has its own segment.
    """
    prefix, suffix = vocabulary.prefix, vocabulary.suffix
    if not prefix and not suffix:
        return built
    second = ":1" if vocabulary.model == "bert" else ""
    middle = [*suffix] if second else [*suffix, *suffix]
    pair = [*prefix, "$A", *middle, f"$B{second}", *(f"{token}{second}" for token in suffix)]
    built.tokenizer.post_processor = processors.TemplateProcessing(
        single=[*prefix, "$A", *suffix],
        pair=pair if suffix else None,
        special_tokens=[(each, built.tokenizer.token_to_id(each)) for each in {*prefix, *suffix}],
    )
    return replace(built, adds_bos=None) if prefix else built


def _by_merges(
    vocabulary: Vocabulary, tokens: list[str], origin: Path, *, strict: bool
) -> BuiltTokenizer:
    if not vocabulary.merges:
        raise WeightMismatch(
            f"{origin}: the key tokenizer.ggml.merges is missing; the tokenizer model"
            f" {vocabulary.model!r} requires it",
            hint="convert the model again, or set its tokenizer with --tokenizer",
        )
    name = "gemma4" if vocabulary.model == "gemma4" else vocabulary.pre
    pre = find_pre_tokenization(name, origin, strict=strict)
    model = partial(
        models.BPE, _ids(tokens), _pairs(vocabulary.merges), ignore_merges=pre.ignore_merges
    )
    if pre.is_byte_level:
        tokenizer = Tokenizer(model())
        tokenizer.decoder = decoders.ByteLevel()
    else:
        unknown = _unknown_token(vocabulary, tokens)
        tokenizer = Tokenizer(model(unk_token=unknown, fuse_unk=True, byte_fallback=True))
        tokenizer.decoder = _space_decoder()
    if pre.joins_newlines:
        runs = [token for token in tokens if token and not token.strip("\n")]
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in runs])
    if pre.space is not None:
        tokenizer.normalizer = normalizers.Replace(" ", pre.space)
    elif pre.drops_spaces and vocabulary.lowercase:
        tokenizer.normalizer = normalizers.Lowercase()
    elif pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer()
    tokenizer.pre_tokenizer = build_pre_tokenizer(pre)
    return BuiltTokenizer(tokenizer, space_prefix=False, adds_bos=pre.adds_bos)


def _unknown_token(vocabulary: Vocabulary, tokens: list[str]) -> str | None:
    """Returns the unknown token; None if there is none."""
    kinds = zip(tokens, vocabulary.types, strict=False)
    return next((token for token, kind in kinds if kind == UNKNOWN), None)


def _space_decoder(*, strips_first: bool = False) -> Decoder:
    """Returns a decoder for space characters and byte tokens."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips_first else steps)


def _pairs(merges: Sequence[bytes]) -> list[tuple[str, str]]:
    """Splits each merge "left right"; raises ValueError if one is malformed."""
    sides = b"\0".join(merges).replace(b" ", b"\0").decode().split("\0") if merges else []
    if len(sides) != 2 * len(merges):
        raise ValueError("a merge is not two pieces with a space between them")
    return list(zip(sides[::2], sides[1::2], strict=True))


def _sentencepiece(vocabulary: Vocabulary, tokens: list[str], origin: Path) -> BuiltTokenizer:
    if len(vocabulary.scores) != len(tokens):
        raise WeightMismatch(
            f"{origin}: got {len(vocabulary.scores)} scores for {len(tokens)} tokens"
        )
    model = models.BPE(
        _ids(tokens),
        _merges_by_score(vocabulary, tokens),
        unk_token=_unknown_token(vocabulary, tokens),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    # The package normalizes each text between two added tokens separately.
    prefixes = vocabulary.add_space_prefix and vocabulary.prefixes_segments
    if prefixes:
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
    tokenizer.decoder = _space_decoder(strips_first=prefixes)
    space_prefix = vocabulary.add_space_prefix and not prefixes
    return BuiltTokenizer(tokenizer, space_prefix=space_prefix, adds_bos=True)


def _unigram(vocabulary: Vocabulary, tokens: list[str], origin: Path) -> BuiltTokenizer:
    if len(vocabulary.scores) != len(tokens):
        raise WeightMismatch(
            f"{origin}: got {len(vocabulary.scores)} scores for {len(tokens)} tokens"
        )
    unknown = next((i for i, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None)
    pieces = list(zip(tokens, map(float, vocabulary.scores), strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=False))
    if vocabulary.charsmap:
        tokenizer.normalizer = normalizers.Precompiled(vocabulary.charsmap)
    scheme = "always" if vocabulary.add_space_prefix else "never"
    cuts: list[PreTokenizer] = [pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)]
    if vocabulary.removes_spaces:
        cuts.insert(0, pre_tokenizers.WhitespaceSplit())
    cuts += _split_inert_tokens(vocabulary, tokens)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return BuiltTokenizer(tokenizer, space_prefix=False, adds_bos=False)


def _split_inert_tokens(vocabulary: Vocabulary, tokens: list[str]) -> list[PreTokenizer]:
    """Returns steps that split control token text, which a unigram model would otherwise match as a
    vocabulary piece.
    """
    kinds = dict(zip(tokens, vocabulary.types, strict=False))
    endings: dict[str, list[str]] = {}
    for token, kind in kinds.items():
        if kind in (NORMAL, USER_DEFINED, UNUSED) or len(token) < 2:
            continue
        cuts = (n for n in range(len(token) - 1, 1, -1) if kinds.get(token[:n]) == NORMAL)
        cut = next(cuts, 1)
        endings.setdefault(token[:cut], []).append(re.escape(token[cut:]))
    return [
        pre_tokenizers.Split(Regex(f"(?<={re.escape(start)})(?={'|'.join(rest)})"), "isolated")
        for start, rest in endings.items()
    ]


def _wordpiece(vocabulary: Vocabulary, tokens: list[str], origin: Path) -> BuiltTokenizer:
    """Builds BERT's tokenizer.

    By default lower-cases and strips accents, like llama.cpp. Words in the header start with a
    space; others are continuations.
    """
    words = [
        token
        if kind in (CONTROL, UNKNOWN)
        else token.removeprefix(SPACE)
        if token.startswith(SPACE)
        else f"{CONTINUES}{token}"
        for token, kind in zip(tokens, vocabulary.types, strict=True)
    ]
    if UNKNOWN_WORD not in words:
        raise WeightMismatch(f"{origin}: the vocabulary has no token {UNKNOWN_WORD}")
    tokenizer = Tokenizer(models.WordPiece(_ids(words), unk_token=UNKNOWN_WORD))
    lowercase = vocabulary.lowercase is not False
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lowercase, strip_accents=vocabulary.strips_accents
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return BuiltTokenizer(tokenizer, space_prefix=False, adds_bos=None)


def _merges_by_score(vocabulary: Vocabulary, tokens: list[str]) -> list[tuple[str, str]]:
    """Returns every merge that produces a normal piece, best score first.

    SentencePiece merges any neighbours whose concatenation is a piece, highest score first; all
    merges of one piece are adjacent here, so merge order is score order.
    """
    pieces = {
        token: score
        for token, score, kind in zip(tokens, vocabulary.scores, vocabulary.types, strict=True)
        if kind == NORMAL
    }
    ordered = sorted(pieces, key=pieces.__getitem__, reverse=True)
    return [
        (piece[:cut], piece[cut:])
        for piece in ordered
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary, tokens: list[str]) -> None:
    """Adds control tokens as special tokens, and user-defined ones to be split off from every text,
    like SentencePiece.
    """
    sides = vocabulary.stripped_sides

    def added(*kinds: int, special: bool) -> list[AddedToken]:
        return [
            AddedToken(
                token,
                special=special,
                normalized=False,
                lstrip=sides.get(text) == "left",
                rstrip=sides.get(text) == "right",
            )
            for token, text, kind in zip(tokens, vocabulary.tokens, vocabulary.types, strict=False)
            if kind in kinds and token
        ]

    tokenizer.add_special_tokens(added(CONTROL, UNKNOWN, special=True))
    tokenizer.add_tokens(added(USER_DEFINED, special=False))


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _decode(texts: Sequence[bytes]) -> list[str]:
    """Decodes all texts at once, which is several times faster; one by one if a text contains the
    separator.
    """
    decoded = b"\0".join(texts).decode().split("\0")
    return decoded if len(decoded) == len(texts) else [text.decode() for text in texts]
