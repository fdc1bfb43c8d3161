"""What a GGUF header says of its tokenizer, and what holds if it does not say. All exact; the rules
are llama.cpp's.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from octavo.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.tiny_gguf import tiny_model, write_tiny_gguf
from tests.support.tiny_vocabularies import sentencepiece_source


def open_header(path: Path, **keys: object) -> GgufCheckpoint:
    """Opens a file with SentencePiece's pieces and the keys given, `__` standing for a dot."""
    vocabulary = sentencepiece_source(True).vocabulary
    assert vocabulary is not None
    names = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token.decode() for token in vocabulary.tokens],
        "tokenizer.ggml.token_type": [int(kind) for kind in vocabulary.types],
        "tokenizer.ggml.scores": [float(score) for score in vocabulary.scores],
    }
    named = {key.replace("__", "."): value for key, value in keys.items()}
    write_tiny_gguf(path / "m.gguf", "llama", tiny_model("llama"), extra=names | named)
    return GgufCheckpoint(path / "m.gguf")


def load(checkpoint: GgufCheckpoint) -> TextTokenizer:
    source = checkpoint.tokenizer_source()
    assert source is not None
    return load_tokenizer(source)


@pytest.mark.parametrize("eos", [None, 10**6])
def test_ids_that_are_missing_or_out_of_range_are_the_default_ones(
    tmp_path: Path, eos: int | None
) -> None:
    keys = {} if eos is None else {"tokenizer__ggml__eos_token_id": eos}
    checkpoint = open_header(tmp_path, **keys)
    source = checkpoint.tokenizer_source()
    assert source is not None
    assert source.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert source.eos_token_ids == (2,)
    assert checkpoint.config["eos_token_id"] == 2 and checkpoint.config["bos_token_id"] == 1
    assert load(checkpoint).encode("light")[0] == 1


def test_a_space_goes_behind_each_special_token(tmp_path: Path) -> None:
    tokenizer = load(open_header(tmp_path))
    words = tokenizer.encode("light rays", add_special_tokens=False)
    assert tokenizer.decode(words) == "light rays"
    ids = tokenizer.encode("<s>light rays</s>light rays", allow_special_text=True)
    assert ids == [1, 1, *words, 2, *words]
    table = tokenizer.encode("<table>", add_special_tokens=False)
    assert tokenizer.encode("<table>light rays", add_special_tokens=False) == [*table, *words]


def test_no_space_if_the_header_says_so(tmp_path: Path) -> None:
    tokenizer = load(open_header(tmp_path, tokenizer__ggml__add_space_prefix=False))
    words = tokenizer.encode("light rays", add_special_tokens=False)
    ids = tokenizer.encode("</s>light rays", allow_special_text=True, add_special_tokens=False)
    assert ids == [2, *words]
    assert tokenizer.token_text(words[0])[0] == "l" and tokenizer.decode(words) == "light rays"


def test_special_tokens_of_phi_3_take_white_space_with_them(tmp_path: Path) -> None:
    for name, strips in (("Phi-3 mini", True), ("Llama", False)):
        tokenizer = load(open_header(tmp_path, general__name=name))
        ids = tokenizer.encode("</s>\n \nlight", allow_special_text=True)
        assert (ids == tokenizer.encode("</s>light", allow_special_text=True)) == strips
        assert tokenizer.encode("<s>\nlight", allow_special_text=True) != tokenizer.encode(
            "<s>light", allow_special_text=True
        )
