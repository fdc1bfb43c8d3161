"""Vocabularies of tekken.json give the ids of merging by rank, and chats with audio use them."""

from __future__ import annotations

import base64
import json
import shutil
from itertools import pairwise

import pytest
import regex

from octavo import LLM, SamplingParams
from octavo.api.errors import OctavoError
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.tekken import PATTERN
from octavo.text.vocabulary import build_tokenizer
from tests.support.tiny_audio import hearing_model, sound

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AUDIO]", "[BEGIN_AUDIO]")
WORDS = ("th", "he", "in", "er", "the", " t", " the", "ing", "th ", "er,", "é", " w", "wh", "  ")
NUM_SPECIAL = 16


def pieces() -> list[bytes]:
    return [*(bytes([byte]) for byte in range(256)), *(word.encode() for word in WORDS)]


def content(**changed: object) -> dict[str, object]:
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(SPECIAL)]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode()}
        for rank, piece in enumerate(pieces())
    ]
    config = {"pattern": PATTERN, "version": "v7", "default_num_special_tokens": NUM_SPECIAL}
    config["default_vocab_size"] = NUM_SPECIAL + len(vocab) - 1  # the last piece is left out
    return {"config": config, "vocab": vocab, "special_tokens": special, **changed}


def merged_by_rank(text: str) -> list[int]:
    """Returns the ids of the published algorithm (tiktoken's)."""
    ranks = {piece: rank for rank, piece in enumerate(pieces()[:-1])}
    ids = []
    for word in regex.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while True:
            joined = [a + b for a, b in pairwise(parts)]
            known = [(ranks[one], at) for at, one in enumerate(joined) if one in ranks]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [joined[at]]
        ids += [NUM_SPECIAL + ranks[part] for part in parts]
    return ids


@pytest.fixture
def folder(tmp_path):
    source = hearing_model("voxtral").path
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["audio_token_id"] = SPECIAL.index("[AUDIO]")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tekken.json").write_text(json.dumps(content()))
    return tmp_path


@pytest.mark.parametrize(
    "text", ["the other thing,  in there", "théâtre\r\n whether  ", "ther 1234 the", "日本 ing"]
)
def test_ids_are_those_of_merging_by_rank(folder, text):
    source = open_checkpoint(folder).tokenizer_source()
    assert source is not None and source.vocabulary is not None
    tokenizer = build_tokenizer(source.vocabulary, folder).tokenizer
    assert tokenizer.encode(text, add_special_tokens=False).ids == merged_by_rank(text)


def test_chats_use_the_template_of_the_format(folder):
    parts = [{"type": "audio", "audio": sound(0)}, {"type": "text", "text": "the thing"}]
    with LLM(str(folder), max_model_len=256, threads=1, dtype="float32") as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        (output,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    num_rows = 24 // 4
    wanted = [1, 3, 6, *[5] * num_rows, *merged_by_rank("the thing"), 4]
    assert output.prompt_token_ids == wanted


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"special_tokens": None}, "got version 'v7' of the format, supported: those with"),
        ({"vocab": [{"rank": 0}]}, "cannot be read: KeyError"),
        ({"config": {}}, "cannot be read: KeyError"),
    ],
)
def test_other_files_are_refused(folder, changed, said):
    (folder / "tekken.json").write_text(json.dumps(content(**changed)))
    with pytest.raises(OctavoError, match=said):
        open_checkpoint(folder).tokenizer_source()
