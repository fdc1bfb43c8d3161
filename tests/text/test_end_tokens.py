"""A text ends at the tokens at which llama.cpp and transformers end it, whichever file names them
and whatever type it gives them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken

from octavo import SamplingParams
from octavo.checkpoint.hf_tokenizer import tokenizer_source
from octavo.checkpoint.open import open_checkpoint
from octavo.text.end_tokens import END_TEXTS, INFILL_END_TEXTS, INFILL_TEXTS, MEDIA_TEXTS
from octavo.text.tokenizer import TextTokenizer, load_tokenizer
from tests.support.llm_tools import make_llm
from tests.support.tiny_gguf import tiny_model, write_tiny_gguf
from tests.support.tiny_vocabularies import bpe_with_specials, save_tokenizer_json

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
PLAIN = dict.fromkeys([*"abEOT<>|/s", "ab"], NORMAL)


def gguf_tokenizer(folder: Path, special: dict[str, int], **options) -> TextTokenizer:
    path = write_tiny_gguf(
        folder / "m.gguf", "llama", tiny_model("llama"), tokens=96, special=special, **options
    )
    return load_tokenizer(open_checkpoint(path).tokenizer_source())


@pytest.mark.parametrize("kind", [NORMAL, CONTROL, USER_DEFINED])
@pytest.mark.parametrize("text", END_TEXTS + INFILL_END_TEXTS)
def test_a_known_text_ends_an_answer_whatever_its_type(tmp_path, text, kind) -> None:
    tokenizer = gguf_tokenizer(tmp_path, {"<x>": CONTROL, text: kind} | PLAIN)
    assert tokenizer.eos_token_ids == (0, 1)
    assert 1 in tokenizer.special_token_ids
    assert tokenizer.encode(f"a{text}", allow_special_text=True)[-1] == 1
    assert 1 not in tokenizer.encode(f"a{text}")
    assert tokenizer.decode([2, 1]) == "a"


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED])
@pytest.mark.parametrize("text", INFILL_TEXTS + MEDIA_TEXTS)
def test_tokens_of_a_wrong_type_are_control_tokens_and_no_ends(tmp_path, text, kind) -> None:
    tokenizer = gguf_tokenizer(tmp_path, {"<x>": CONTROL, text: kind} | PLAIN)
    assert tokenizer.decode([2, 1]) == "a"
    assert tokenizer.eos_token_ids == (0,)
    assert 1 in tokenizer.special_token_ids


@pytest.mark.parametrize(
    ("others", "ends"),
    [
        (("<|end|>", "<|return|>", "<|call|>"), {"<|return|>", "<|call|>"}),
        (("<|end|>", "<|calls|>", "<|flush|>"), {"<|calls|>", "<|flush|>"}),
        (("<|end|>", "<|return|>"), {"<|end|>", "<|return|>"}),
        (("<|end|>", "<|call|>"), {"<|end|>", "<|call|>"}),
        (("</s>", "<|tool_response>", "<turn|>"), {"<|tool_response>", "<turn|>"}),
        (("</s>", "<end_of_turn>"), {"<end_of_turn>"}),
        (("</s>", "<|im_start|>"), {"</s>"}),
    ],
)
def test_texts_with_another_meaning_beside_others_end_nothing(tmp_path, others, ends) -> None:
    special = {"<x>": CONTROL} | dict.fromkeys(others, NORMAL)
    tokenizer = gguf_tokenizer(tmp_path, special | PLAIN)
    texts = list(special)
    assert {texts[i] for i in tokenizer.eos_token_ids} == {"<x>"} | ends


def test_a_piece_that_the_merges_spell_is_text(tmp_path) -> None:
    """Qwen2's vocabulary has the HTML tag `</s>` as a piece."""
    special = {"<x>": CONTROL, "</s>": NORMAL, "</s": NORMAL, "</": NORMAL, "<EOT>": NORMAL}
    merges = ["< /", "</ s", "</s >"]
    tokenizer = gguf_tokenizer(tmp_path, special | PLAIN, merges=merges)
    assert tokenizer.eos_token_ids == (0, 4)
    assert tokenizer.decode([1]) == "</s>" and 1 not in tokenizer.special_token_ids


def test_ids_of_the_header_count_if_the_vocabulary_has_them(tmp_path) -> None:
    named = {"eot": 3, "eom": 4, "fim_pad": 5, "fim_rep": 6, "fim_sep": 7}
    keys = {f"tokenizer.ggml.{kind}_token_id": i for kind, i in named.items()}
    special = {f"<{i}>": CONTROL for i in range(9)} | PLAIN
    assert gguf_tokenizer(tmp_path, special, extra=keys).eos_token_ids == (0, 3, 4, 5, 6, 7)
    keys["tokenizer.ggml.eot_token_id"] = 96
    assert gguf_tokenizer(tmp_path, special, extra=keys).eos_token_ids == (0, 4, 5, 6, 7)


def test_the_union_of_a_directorys_files(tmp_path: Path) -> None:
    path = save_tokenizer_json(tmp_path / "m", bpe_with_specials())

    def ends(config, generation_config):
        source = tokenizer_source(path, config, generation_config)
        return load_tokenizer(source).eos_token_ids

    assert ends({}, {}) == (2, 0)
    assert ends({"eos_token_id": 9}, {"eos_token_id": [7, 8]}) == (7, 8, 9, 2, 0)
    assert ends({"eos_token_id": [9, 7]}, {"eos_token_id": 7}) == (7, 9, 2, 0)
    assert ends({"eos_token_id": None}, {"eos_token_id": 0}) == (0, 2)


def test_an_end_token_that_tokenizer_json_has_as_plain_is_special(tmp_path: Path) -> None:
    tokenizer = bpe_with_specials()
    tokenizer.add_tokens([AddedToken("<|eot_id|>", special=False, normalized=False)])
    path = save_tokenizer_json(tmp_path / "m", tokenizer)
    loaded = load_tokenizer(tokenizer_source(path, {}, {}))
    end = tokenizer.token_to_id("<|eot_id|>")
    assert loaded.eos_token_ids == (2, end, 0)
    assert loaded.decode([*loaded.encode("a"), end]) == "a"
    assert end not in loaded.encode("a<|eot_id|>")
    assert loaded.encode("a<|eot_id|>", allow_special_text=True)[-1] == end


def test_a_piece_of_tokenizer_json_that_spells_an_end_is_text(tmp_path: Path) -> None:
    path = save_tokenizer_json(tmp_path / "m", bpe_with_specials())
    content = json.loads((path / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["<EOT>"] = len(vocab)
    (path / "tokenizer.json").write_text(json.dumps(content))
    assert load_tokenizer(tokenizer_source(path, {}, {})).eos_token_ids == (2, 0)


@pytest.mark.parametrize("end", [0, 1, 2], ids=["named", "wrong type", "call"])
def test_each_end_token_ends_an_answer(tmp_path: Path, end: int) -> None:
    special = {"<x>": CONTROL, "<|im_end|>": NORMAL, "<|call|>": CONTROL} | PLAIN
    path = write_tiny_gguf(
        tmp_path / "m.gguf", "llama", tiny_model("llama"), tokens=96, special=special
    )
    options = {"skip_tokenizer_init": False, "backend": "native", "max_model_len": 64}
    with make_llm(model_path=path, **options) as llm:

        def generate(**options):
            params = SamplingParams(logit_bias={end: 100.0}, max_tokens=4, **options)
            return llm.generate({"prompt_token_ids": [5, 6]}, params)[0].outputs[0]

        ended = generate()
        assert (ended.finish_reason, ended.stop_reason, ended.text) == ("stop", None, "")
        assert generate(ignore_eos=True).finish_reason == "length"
        delayed = generate(min_tokens=3)
        assert len(delayed.token_ids) >= 3 and end not in delayed.token_ids[:3]
        named = generate(ignore_eos=True, stop_token_ids=[end])
        assert (named.finish_reason, named.stop_reason) == ("stop", end)
