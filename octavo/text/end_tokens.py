"""Determines a model's control tokens and end tokens, from the files and from well-known token
texts.

Files often list the eos, eot and eom ids incompletely. The texts, and the exceptions for
vocabularies in which they have other meanings, follow llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from octavo.checkpoint.ports import CONTROL, NORMAL, UNKNOWN, Vocabulary

END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "▁<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
"""Tokens that end a turn, a tool call or a document."""

INFILL_END_TEXTS = (
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
)
"""Tokens after which an infill model starts another file."""

INFILL_TEXTS = (
    *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    *("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    *("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    *("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    *("▁<PRE>", "▁<SUF>", "▁<MID>", "<PRE>", "<SUF>", "<MID>"),
    *("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    *("<|prefix|>", "<|suffix|>", "<|middle|>"),
)
"""Tokens around the parts of a fill-in-the-middle prompt."""

MEDIA_TEXTS = (
    *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<start_of_audio>", "<end_of_audio>", "<audio_soft_token>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"),
    *("<|image_start|>", "<|image_end|>", "<|image|>", "<|audio|>"),
)
"""Tokens that delimit or stand for images and audio. Models may generate them; as in transformers,
they are not shown.
"""

CONTROL_TEXTS = frozenset(
    text.encode() for text in (*END_TEXTS, *INFILL_END_TEXTS, *INFILL_TEXTS, *MEDIA_TEXTS)
)


def find_end_tokens(tokens: Mapping[str, int], named: Iterable[int]) -> tuple[int, ...]:
    """Returns the end token ids; ids specified by the files come first.

    `tokens` maps non-plain token texts to ids.
    """
    listed = tuple(named)
    token_ids = [
        *listed,
        *(tokens[text] for text in END_TEXTS + INFILL_END_TEXTS if text in tokens),
    ]
    excluded = _other_meanings(tokens) - ({"</s>"} if tokens.get("</s>") in listed else set())
    excluded_ids = {tokens.get(text) for text in excluded}
    return tuple(i for i in dict.fromkeys(token_ids) if i not in excluded_ids)


def _other_meanings(tokens: Collection[str]) -> set[str]:
    """Returns texts of END_TEXTS with a different meaning in this vocabulary."""
    texts = set()
    has_calls = "<|call|>" in tokens or "<|calls|>" in tokens
    if has_calls and ("<|return|>" in tokens or "<|flush|>" in tokens):
        texts.add("<|end|>")  # ends a message within the answer (gpt-oss, Solar Open)
    if "<end_of_turn>" in tokens or "<|tool_response>" in tokens:
        texts.add("</s>")  # an HTML tag (Gemma)
    return texts


def find_control_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Returns a GGUF vocabulary's control tokens that are recognized by text, even if the file
    assigns another type.

    A token that merges produce is plain text: Qwen2's `</s>` is an HTML tag.
    """
    tokens = {
        text.decode(): vocabulary.tokens.index(text)
        for text in CONTROL_TEXTS.intersection(vocabulary.tokens)
    }
    types = vocabulary.types
    wrong = {
        text for text, i in tokens.items() if i >= len(types) or types[i] not in (CONTROL, UNKNOWN)
    }
    if wrong:
        spelled = {merge.replace(b" ", b"").decode(errors="replace") for merge in vocabulary.merges}
        wrong &= spelled | _other_meanings(tokens)
    return {text: i for text, i in tokens.items() if text not in wrong}


def correct_token_types(vocabulary: Vocabulary) -> list[int]:
    """Returns the token types of a GGUF vocabulary, with CONTROL for known control tokens; all
    NORMAL if the file has no types.
    """
    types = list(vocabulary.types) or [NORMAL] * len(vocabulary.tokens)
    for i in find_control_tokens(vocabulary).values():
        if i < len(types) and types[i] != UNKNOWN:
            types[i] = CONTROL
    return types
