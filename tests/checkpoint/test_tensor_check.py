"""A tensor that is missing, misshapen or left over is named before a weight is read."""

import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.tensor_check import check_tensors
from octavo.models.registry import build_programs
from tests.support.tiny_encoders import ENCODERS, encoder
from tests.support.tiny_models import FAMILIES, tiny_model

NORM = "model.norm.weight"


def check(path):
    checkpoint = open_checkpoint(path)
    check_tensors(checkpoint, build_programs(checkpoint.config, every_key=True).values())


def changed(tmp_path, change, family="llama", **overrides):
    """Returns a copy of a tiny model with tensors changed by a function."""
    folder = tmp_path / family
    shutil.copytree(tiny_model(family, **overrides).path, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_as_transformers_saves_it_is_read_whole(family):
    check(tiny_model(family).path)


@pytest.mark.parametrize(
    ("family", "classifies"),
    [
        *((family, False) for family in ENCODERS),
        *((family, True) for family in ENCODERS if family != "nomic_bert"),
    ],
)
def test_encoders_are_read_whole_but_for_other_heads(family, classifies, tmp_path):
    encoder(family, classifies).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config if classifies else config | {"pooling": {"mode": "mean"}}))
    check(tmp_path)


def test_a_head_of_masked_words_is_left_out(tmp_path):
    config = encoder("modernbert").config
    transformers.AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pooling": {"mode": "mean"}}))
    check(tmp_path)


def test_a_missing_tensor_is_named(tmp_path):
    path = changed(tmp_path, lambda tensors: tensors.pop(NORM))
    with pytest.raises(WeightMismatch, match=r"the tensor model\.norm\.weight is missing"):
        check(path)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", NORM), ("gpt2", "transformer.h.0.attn.c_attn.weight")],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path, family, name):
    right = open_checkpoint(tiny_model(family).path).stored(name)

    def widen(tensors):
        tensors[right.name] = torch.cat([tensors[right.name], tensors[right.name][:1]])

    got, expected = ((right.shape[0] + more, *right.shape[1:]) for more in (1, 0))
    said = f"model.safetensors: {right.name} has shape {got}, expected {expected}"
    with pytest.raises(WeightMismatch, match=re.escape(said)):
        check(changed(tmp_path, widen, family))


def test_a_tensor_that_nothing_reads_is_named(tmp_path):
    def add_bias(tensors):
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(72)

    with pytest.raises(WeightMismatch, match=r"the tensors model\.layers\.0\.self_attn\.q_proj\.b"):
        check(changed(tmp_path, add_bias))


def test_a_bias_of_the_output_layer_counts(tmp_path):
    path = changed(tmp_path, lambda tensors: tensors.update({"lm_head.bias": torch.ones(320)}))
    with pytest.raises(WeightMismatch, match=r"lm_head\.bias, which a llama model"):
        check(path)


def test_scales_that_the_config_turns_off_are_left_out():
    check(tiny_model("gemma3n_text", altup_correct_scale=False).path)


def test_buffers_tied_heads_and_drafting_layers_are_left_out(tmp_path):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.99.enorm.weight"] = torch.ones(4)

    check(changed(tmp_path, add, tie_word_embeddings=True))


def test_an_output_layer_that_is_not_tied_must_be_there(tmp_path):
    path = changed(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(WeightMismatch, match=r"the tensor lm_head\.weight is missing"):
        check(path)
