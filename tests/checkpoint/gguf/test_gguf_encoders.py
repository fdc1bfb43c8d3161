"""GGUF files of encoders, and of T5's encoders and decoders, give what the safetensors give that
llama.cpp's converter read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from octavo import LLM
from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.open import open_checkpoint
from octavo.utils.progress import quiet
from tests.models.test_t5 import logits
from tests.support.gguf_conversion import convert
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_encoders import (
    encoder,
    header_words,
    save_encoder,
    save_modules,
    save_word_tokenizer,
)
from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.tiny_other_shapes import SHAPE


class Case(NamedTuple):
    """An encoder, what the converter reads besides its config, and how it pools."""

    family: str
    architecture: str
    written: dict[str, Any] = {}  # noqa: RUF012
    mode: str = "mean"


NOMIC = {
    "n_positions": 8192,
    "max_trained_positions": 2048,
    "activation_function": "swiglu",
    "causal": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
}
"""Keys of the published config.json, which the converter checks."""

CASES = (
    Case("bert", "bert"),
    Case("bert", "bert", mode="cls"),
    Case("bert", "bert", mode="last"),
    Case("distilbert", "bert"),
    Case("roberta", "bert"),
    Case("xlm-roberta", "bert", mode="cls"),
    Case("nomic_bert", "nomic-bert", NOMIC),
    Case("modernbert", "modern-bert", mode="cls"),
)
LAYERS = {"num_layers": 3, "num_decoder_layers": 2}
"""Fewer layers of the decoder, whose names the converter knows by the encoder's number."""
T5_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", LAYERS),
    "t5-gated": ("t5", LAYERS | {"feed_forward_proj": "gated-gelu"}),
    "mt5": ("mt5", {}),
}


def ids_of(length: int) -> NDArray[np.int64]:
    return np.random.default_rng(length).integers(3, 130, length)


def pooled(path: Path) -> NDArray[np.float64]:
    runner = PagedRunner(path)
    spans = [(runner.add(ids_of(length)), 0, length) for length in (1, 40, 17)]
    return runner.step(spans, "encoder")["pooled"]


def close(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    np.testing.assert_allclose(found, wanted, atol=2e-6 * abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.mode}")
def test_pooled_rows_are_the_models(case: Case, tmp_path: Path) -> None:
    source = tmp_path / "source"
    encoder(case.family).save_pretrained(source)
    save_modules(source, case.mode, SHAPE["hidden_size"])
    path = convert(source, tmp_path, **case.written)
    found = open_checkpoint(path)
    assert found.architecture == case.architecture
    assert found.config["pooling"] == {"mode": case.mode, "normalize": True}
    close(pooled(path), pooled(source))


def test_texts_embed_as_the_models(tmp_path: Path) -> None:
    """The header's words and its pooling, from the text to the embedding."""
    source = save_encoder(tmp_path / "source", "bert")
    save_word_tokenizer(source)
    words = header_words(source)
    others = SHAPE["vocab_size"] - len(words)

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list([*words, *(f"[PAD{i}]" for i in range(others))])
        writer.add_token_types([3 if word[0] == "[" else 1 for word in words] + [5] * others)
        writer.add_bos_token_id(words.index("[CLS]"))
        writer.add_sep_token_id(words.index("[SEP]"))

    texts = ["ab c", "Where is it? x", ""]
    rows = []
    for path in (source, convert(source, tmp_path, add_vocabulary=add)):
        with LLM(str(path), report=quiet, threads=1) as llm:
            outputs = llm.embed(texts, use_tqdm=False)
            rows.append(np.array([output.outputs.embedding for output in outputs]))
            assert [len(output.prompt_token_ids) for output in outputs] == [5, 13, 2]
    close(rows[1], rows[0])


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "modernbert"])
def test_classifiers_score_as_the_model(family: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    encoder(family, classifies=True).save_pretrained(source)
    close(pooled(convert(source, tmp_path)), pooled(source))


def test_a_classifier_whose_pooler_the_converter_drops_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    encoder("bert", classifies=True).save_pretrained(source)
    with pytest.raises(UnsupportedModel, match=r"cls\.output\.\w+ is unknown in the family bert"):
        open_checkpoint(convert(source, tmp_path))


def test_a_pooling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    encoder("bert").save_pretrained(source)
    path = convert(source, tmp_path)
    assert "pooling" not in open_checkpoint(path).config
    with pytest.raises(UnsupportedModel, match="the pooling mode is None"):
        pooled(path)


def with_own_head(tiny: TinyModel, folder: Path, case: str) -> Path:
    """Saves a model with an output layer of its own, as T5 1.1 and mT5 are published; T5 1.0 ties
    its own, whose rows are scaled.
    """
    folder.mkdir()
    tensors, config = load_file(tiny.path / "model.safetensors"), dict(tiny.config)
    if case != "t5":
        draw = np.random.default_rng(7)
        head = draw.standard_normal(tensors["shared.weight"].shape).astype(np.float32)
        tensors["lm_head.weight"] = head
        config |= {"tie_word_embeddings": False, "scale_decoder_outputs": False}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", T5_CASES)
def test_t5_gives_the_models_logits(case: str, tmp_path: Path) -> None:
    family, overrides = T5_CASES[case]
    source = with_own_head(tiny_model(family, **overrides), tmp_path / "source", case)
    written = json.loads((source / "config.json").read_text())
    path = convert(source, tmp_path)
    found = open_checkpoint(path).config
    assert found["decoder_start_token_id"] == written["decoder_start_token_id"]
    assert found["is_encoder_decoder"]
    close(logits(PagedRunner(path)), logits(PagedRunner(source)))
