"""Pre-tokenizations of BPE vocabularies by `tokenizer.ggml.pre` name.

The tokenizer normalizes a text, splits it by each expression in turn, and merges bytes within the
pieces. GGUF stores only a name for the first two steps; the table has every name that llama.cpp
knows. Sources: `llama-vocab.cpp` and `unicode.cpp` of llama.cpp (names, expressions, defaults), and
the models' tokenizer.json (normalizers, and expressions that llama.cpp approximates because
`std::regex` lacks Unicode categories).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from octavo.api.errors import UnsupportedModel

logger = logging.getLogger(__name__)

SPACE = "\u2581"
"""Character that SentencePiece uses for a space."""


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """How a text is prepared before merging bytes."""

    expressions: tuple[str, ...]
    """Regular expressions in Oniguruma syntax. Each match is a piece, as is the text between
    matches; later expressions apply to the pieces of earlier ones."""
    normalizer: Callable[[], Normalizer] | None = None
    ignore_merges: bool = False
    """Whether a piece that is itself a token is used without merging."""
    adds_bos: bool = False
    """Default for adding a BOS token if the header does not specify it."""
    space: str | None = None
    """Character for spaces in a vocabulary of UTF-8 text with byte tokens such as <0x0A>; None for
    a byte-level vocabulary."""
    starts_words: bool = False
    """Whether each `space` starts a new piece, and each line begins with a `space`."""
    joins_newlines: bool = False
    """Whether a run of newlines that is a token stays one token regardless of merges."""
    drops_spaces: bool = False
    """Whether whitespace separates pieces and is not encoded."""

    @property
    def is_byte_level(self) -> bool:
        return self.space is None and not self.drops_spaces


ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}"
_QWEN2 = rf"{ENDINGS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_BLANKS}"
_MARKED_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
)
_DEEPSEEK_V3 = rf"{_MARKED_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_THREE_DIGITS_FROM_THE_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"


def _make_cased_pattern(letters: str, ending: str) -> str:
    """Returns GPT-4o's word pattern: capitals before lower case, with an ending such as 's.

    `letters` extends each letter class, e.g. with an intersection.
    """
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{letters}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}"


_CASED_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CASED_WORDS = _make_cased_pattern("", f"{ENDINGS}?")
_GPT_4O = rf"{_CASED_WORDS}|\p{{N}}{{1,3}}|{_CASED_SYMBOLS}|{_BLANKS}"
_NOT_HAN = _make_cased_pattern(r"&&[^\p{Han}]", f"{ENDINGS}?")
_KIMI = rf"\p{{Han}}+|{_NOT_HAN}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_BLANKS}"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    "\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    "\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Cased letters of an older Unicode version, from DeepSeek-LLM's tokenizer.json."""
_ASIAN_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_LINES = r"[^\n]+|\n+"

_OF_GPT2 = PreTokenization((_GPT2,))
_DIGITS_ALONE = PreTokenization((r"\p{N}", _GPT2))
_OF_LLAMA3 = PreTokenization((_LLAMA3,), ignore_merges=True, adds_bos=True)
_OF_GLM4 = PreTokenization((_LLAMA3,), ignore_merges=True)
_OF_DBRX = PreTokenization((_LLAMA3,))
_OF_QWEN2 = PreTokenization((_QWEN2,))
_OF_DEEPSEEK_V3 = PreTokenization((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_V3))
_OF_BLOOM = PreTokenization((_BLOOM,))
_OF_GPT_4O = PreTokenization((_GPT_4O,))
_OF_BAILING = PreTokenization(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|"
        r"\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_OF_TINY_AYA = PreTokenization((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O))
_OF_GEMMA4 = PreTokenization((_LINES,), adds_bos=True, space=SPACE, joins_newlines=True)


def _compose(pre: PreTokenization) -> PreTokenization:
    """Adds NFC normalization."""
    return replace(pre, normalizer=normalizers.NFC)


PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "default": PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": PreTokenization((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "gigachat"),
            *("a.x-4.0", "mellum", "exaone4", "jais", "trillion", "granite-docling"),
            *("roberta-bpe", "jina-v1-en", "jina-v2-code"),
        ),
        _OF_GPT2,
    ),
    **dict.fromkeys(("mpt", "olmo", "modern-bert"), _compose(_OF_GPT2)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
        _DIGITS_ALONE,
    ),
    "command-r": _compose(_DIGITS_ALONE),
    **dict.fromkeys(
        (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
            *("lfm2", "jina-v5-nano"),
        ),
        _OF_LLAMA3,
    ),
    **dict.fromkeys(("glm4", "glm5"), _OF_GLM4),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _OF_DBRX),
    **dict.fromkeys(("qwen2", "f2llmv2"), _compose(_OF_QWEN2)),
    **dict.fromkeys(
        (
            *("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "megrez", "kormo"),
            "grok-2",
        ),
        _OF_QWEN2,
    ),
    "qwen35": _compose(
        PreTokenization(
            (
                rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|"
                rf" ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
            )
        )
    ),
    "ufakzeka": PreTokenization((rf"{_WORD}|\p{{N}}|{_SYMBOLS}|{_BLANKS}",)),
    "laguna": PreTokenization((_LINES, _QWEN2)),
    "jais-2": PreTokenization(
        (
            rf"{ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|\s*[\r\n]+|"
            + "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))
            + r"|\s{1,2}(?!\S)|\s",
        )
    ),
    "minicpm5": PreTokenization(
        (r"\p{N}{1,3}", rf"{ENDINGS}|{_WORD}|\p{{N}}+|{_SYMBOLS}|{_BLANKS}"), ignore_merges=True
    ),
    "seed-coder": PreTokenization(
        (rf"{ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
    ),
    "exaone-moe": PreTokenization(
        (
            rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _OF_BAILING),
    "deepseek-llm": PreTokenization(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _EAST_ASIAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenization(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _OF_DEEPSEEK_V3),
    "spark2_5": PreTokenization(
        (
            r"\p{N}{1,3}",
            _HAN_AND_KANA,
            rf"{_MARKED_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "afmoe": PreTokenization((_THREE_DIGITS_FROM_THE_RIGHT, _ASIAN_SCRIPTS, _DEEPSEEK_V3)),
    **dict.fromkeys(("poro-chat", "bloom", "gpt3-finnish"), _OF_BLOOM),
    "viking": PreTokenization((_BLOOM, r"\p{N}")),
    "tekken": PreTokenization(
        (rf"{_make_cased_pattern('', '')}|\p{{N}}|{_CASED_SYMBOLS}|{_BLANKS}",),
        ignore_merges=True,
        adds_bos=True,
    ),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _OF_GPT_4O),
    "granite-embed-multi-97m": replace(_OF_GPT_4O, ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _OF_TINY_AYA),
    "youtu": PreTokenization(
        (
            "[\uac00-\ud7a3\u3131-\u318e]+|"
            "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
            f"|[\u3105-\u312f]+|{_HAN_AND_KANA}",
            rf"{_CASED_WORDS}|\p{{N}}|{_CASED_SYMBOLS}|{_BLANKS}",
        ),
        ignore_merges=True,
    ),
    "kimi-k2": PreTokenization((_KIMI,)),
    "superbpe": PreTokenization((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": PreTokenization(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        adds_bos=True,
    ),
    **dict.fromkeys(("gemma4", "granite-embed-multi-311m"), _OF_GEMMA4),
    "sarvam-moe": replace(_OF_GEMMA4, adds_bos=False, joins_newlines=False),
    "mmbert": replace(_OF_GEMMA4, adds_bos=False, starts_words=True),
    "whitespace": PreTokenization((), drops_spaces=True),
}


def find_pre_tokenization(name: str, origin: Path, *, strict: bool = False) -> PreTokenization:
    """Returns the pre-tokenization of a name.

    For an unknown or missing name, returns the default with a warning, or raises UnsupportedModel
    if `strict`.
    """
    pre_tokenization = PRE_TOKENIZATIONS.get(name)
    if pre_tokenization is not None:
        return pre_tokenization
    message = (
        f"{origin}: unknown pre-tokenizer {name!r} (tokenizer.ggml.pre)"
        if name
        else f"{origin}: the header has no pre-tokenizer (tokenizer.ggml.pre)"
    )
    if strict:
        from difflib import get_close_matches  # importing it takes 5 ms

        raise UnsupportedModel(
            f"{message}; {len(PRE_TOKENIZATIONS)} names are supported"
            + "".join(
                f", the closest is {close!r}"
                for close in get_close_matches(name, PRE_TOKENIZATIONS, 1)
            ),
            hint="remove --strict-files to use 'default', or set a tokenizer with --tokenizer",
        )
    logger.warning(
        "%s: using the 'default' pre-tokenizer; THE OUTPUT QUALITY MAY BE DEGRADED. Convert the"
        " model again with a current llama.cpp, or set its tokenizer with --tokenizer.",
        message,
    )
    return PRE_TOKENIZATIONS["default"]


def build_pre_tokenizer(pre: PreTokenization) -> PreTokenizer:
    """Makes the pre-tokenizer; the two most common have a faster built-in equivalent."""
    if pre.expressions == (_GPT2,):
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre.expressions == _DIGITS_ALONE.expressions:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    steps: list[PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.expressions
    ]
    if pre.drops_spaces:
        steps.append(pre_tokenizers.WhitespaceSplit())
    if pre.starts_words:
        steps.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="always"))
    if pre.is_byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)
