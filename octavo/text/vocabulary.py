"""Builds a `tokenizers` object from a GGUF vocabulary, so that its ids are those of the tokenizer
the vocabulary came from.

Four kinds: byte-level BPE ("gpt2"), whose text is first cut as `pre` names, SentencePiece's BPE by
scores ("llama"), its unigram model ("t5"), and WordPiece ("bert"). Sources: the models' own
tokenizer.json files (cuts, normalisers), llama.cpp's `llama-vocab.cpp` (the meaning of each `pre`),
sentencepiece's `bpe_model.cc` (merge the neighbours whose concatenation has the highest score,
leftmost first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.checkpoint_ports import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Vocabulary
from octavo.end_tokens import correct_token_types
from octavo.errors import UnsupportedModel, WeightMismatch

SPACE = "\u2581"
"""Character that SentencePiece writes for a space."""

CONTINUES, UNKNOWN_WORD = "##", "[UNK]"
"""Prefix of a piece within a word, and the token of words that are unknown, in BERT's files."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenization:
    """Preparation of a text by a byte-level tokenizer: normalised, then cut by each expression in
    turn.
    """

    expressions: tuple[str, ...]
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    """Whether a word that is a token is taken whole."""
    adds_bos: bool = False
    """Whether the bos token goes first, where the header does not say."""


_DIGITS_ALONE = _PreTokenization((r"\p{N}", _GPT2))
_LLAMA3 = _PreTokenization((_WORDS % "{1,3}",), ignore_merges=True, adds_bos=True)
_QWEN2 = _PreTokenization((_WORDS % "",), normalizer=normalizers.NFC)

PRE_TOKENIZATIONS: dict[str, _PreTokenization] = {
    "default": _PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenization((_GPT2,)),
    "smollm": _DIGITS_ALONE,
    "starcoder": _DIGITS_ALONE,
    "refact": _DIGITS_ALONE,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _PreTokenization((_WORDS % "",)),
    "deepseek-coder": _PreTokenization(
        (
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
            r"\p{N}",
        )
    ),
    "deepseek-v3": _PreTokenization(
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)
    ),
    "roberta-bpe": _PreTokenization((_GPT2,)),
    "modern-bert": _PreTokenization((_GPT2,), normalizer=normalizers.NFC),
}
"""Pre-tokenizations by the name that `tokenizer.ggml.pre` has for them."""


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """A tokenizer, and what it leaves to its user: whether a space is put before a text
    (SentencePiece's dummy prefix), and whether the bos token goes first where the header does not
    say.
    """

    tokenizer: Tokenizer
    space_prefix: bool
    adds_bos: bool | None
    """None leaves it to the tokenizer's own post-processor."""


def build_tokenizer(vocabulary: Vocabulary, origin: Path) -> BuiltTokenizer:
    """Builds a tokenizer. UnsupportedModel names a kind or a `pre` that is not known,
    WeightMismatch a vocabulary that contradicts itself.
    """
    builders = {
        "gpt2": _byte_level,
        "llama": _sentencepiece,
        "t5": _unigram,
        "bert": _wordpiece,
    }
    build = builders.get(vocabulary.model)
    if build is None:
        raise UnsupportedModel(
            f"{origin}: tokenizer model {vocabulary.model!r}, supported in GGUF are"
            f" {', '.join(builders)}"
        )
    try:
        tokens = _decode(vocabulary.tokens)
        vocabulary = replace(vocabulary, types=correct_token_types(vocabulary))
        built = build(vocabulary, tokens, origin)
    except (UnsupportedModel, MemoryError):
        raise
    except Exception as error:  # the builder raises bare Exceptions
        raise WeightMismatch(f"{origin}: damaged vocabulary: {error}") from error
    _add_tokens(built.tokenizer, vocabulary, tokens)
    return _with_affixes(built, vocabulary)


def _with_affixes(built: BuiltTokenizer, vocabulary: Vocabulary) -> BuiltTokenizer:
    """Lets the tokenizer put special tokens before and behind every text, and two between texts of
    a pair, of which only BERT's second has segments of its own.
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


def _byte_level(vocabulary: Vocabulary, tokens: list[str], origin: Path) -> BuiltTokenizer:
    pre = PRE_TOKENIZATIONS.get(vocabulary.pre)
    if pre is None:
        raise UnsupportedModel(
            f"{origin}: pre-tokenizer {vocabulary.pre!r}, supported are"
            f" {', '.join(PRE_TOKENIZATIONS)}"
        )
    tokenizer = Tokenizer(
        models.BPE(_ids(tokens), _pairs(vocabulary.merges), ignore_merges=pre.ignore_merges)
    )
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer()
    tokenizer.pre_tokenizer = _cuts(pre)
    tokenizer.decoder = decoders.ByteLevel()
    return BuiltTokenizer(tokenizer, space_prefix=False, adds_bos=pre.adds_bos)


def _pairs(merges: Sequence[bytes]) -> list[tuple[str, str]]:
    """Splits each merge, "left right", into its sides; ValueError where one is anything else."""
    sides = b"\0".join(merges).replace(b" ", b"\0").decode().split("\0") if merges else []
    if len(sides) != 2 * len(merges):
        raise ValueError("a merge is not two pieces with a space between them")
    return list(zip(sides[::2], sides[1::2], strict=True))


def _cuts(pre: _PreTokenization) -> PreTokenizer:
    """Makes the pre-tokenizer; the two commonest have a built-in form that is faster and cuts
    alike.
    """
    if pre.expressions == (_GPT2,):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre is _DIGITS_ALONE:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    cuts: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions
    ]
    return pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _sentencepiece(vocabulary: Vocabulary, tokens: list[str], origin: Path) -> BuiltTokenizer:
    if len(vocabulary.scores) != len(tokens):
        raise WeightMismatch(f"{origin}: {len(vocabulary.scores)} scores for {len(tokens)} tokens")
    unknown = next(
        (token for token, kind in zip(tokens, vocabulary.types, strict=True) if kind == UNKNOWN),
        None,
    )
    model = models.BPE(
        _ids(tokens),
        _merges_by_score(vocabulary, tokens),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return BuiltTokenizer(tokenizer, space_prefix=vocabulary.add_space_prefix, adds_bos=True)


def _unigram(vocabulary: Vocabulary, tokens: list[str], origin: Path) -> BuiltTokenizer:
    if len(vocabulary.scores) != len(tokens):
        raise WeightMismatch(f"{origin}: {len(vocabulary.scores)} scores for {len(tokens)} tokens")
    unknown = next((i for i, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None)
    pieces = list(zip(tokens, map(float, vocabulary.scores), strict=True))
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=unknown, byte_fallback=False))
    if vocabulary.charsmap:
        tokenizer.normalizer = normalizers.Precompiled(vocabulary.charsmap)
    scheme = "always" if vocabulary.add_space_prefix else "never"
    cuts: list[PreTokenizer] = [pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)]
    if vocabulary.removes_spaces:
        cuts.insert(0, pre_tokenizers.WhitespaceSplit())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    tokenizer.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    return BuiltTokenizer(tokenizer, space_prefix=False, adds_bos=False)


def _wordpiece(vocabulary: Vocabulary, tokens: list[str], origin: Path) -> BuiltTokenizer:
    """Builds BERT's tokenizer, of texts in lower case as llama.cpp has them. A header's words begin
    with a space; what begins with none goes on with a word.
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
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return BuiltTokenizer(tokenizer, space_prefix=False, adds_bos=None)


def _merges_by_score(vocabulary: Vocabulary, tokens: list[str]) -> list[tuple[str, str]]:
    """Returns every way to put a normal piece together from two others, best score first.

    SentencePiece merges any neighbours whose concatenation is a piece, the piece of the highest
    score first; all ways to the same piece stand side by side here, so the order of the merges is
    that of the scores.
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
    """Adds control tokens as special ones, and user-defined ones to be cut out of every text, as
    SentencePiece does.
    """
    others = [
        (token, kind)
        for token, kind in zip(tokens, vocabulary.types, strict=False)
        if kind != NORMAL and token
    ]
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in others
        if kind in (CONTROL, UNKNOWN)
    ]
    defined = [
        AddedToken(token, special=False, normalized=False)
        for token, kind in others
        if kind == USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(defined)


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def _decode(texts: Sequence[bytes]) -> list[str]:
    """Decodes all texts in one go, which is several times faster; one by one where a text holds the
    separator itself.
    """
    decoded = b"\0".join(texts).decode().split("\0")
    return decoded if len(decoded) == len(texts) else [text.decode() for text in texts]
