"""A model is the same however its checkpoint was saved: with a config of transformers 4 or 5, in
shards, in bf16, under the older or the newer names, with an output layer that repeats the
embeddings.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.api.errors import SetupError
from octavo.checkpoint.open import open_checkpoint, open_header
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader
from octavo.models.registry import FAMILIES, build_programs
from tests.support.every_family import (
    EVERY_FAMILY,
    OLDER,
    WITHOUT_ORACLE,
    copy_modules,
    each_family_of_all,
    tiny_of,
)
from tests.support.tiny_models import each_family, tiny_model

ONLY_NEWER = (
    *("qwen3_5_text", "nemotron_h", "internlm3", "ministral3", "nomic_bert", "minimax_m2"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "gemma4", "gemma4_text", "gemma4_unified"),
    *("glm4_moe_lite", "lfm2_moe", "kimi_linear", "eurobert", "gte", "jina_embeddings_v3"),
)
"""Families that transformers 4 does not know."""

SPLIT_ANEW = ("gte", "jina_embeddings_v3", "nomic_bert", "kimi_linear")
"""Families whose stacked products are apart in transformers' modules, or the other way round, which
no file has.
"""

HEADS = {"gpt_neox": "embed_out.weight"}
"""Output layers that are not called lm_head."""


def weights_of(folder):
    """Returns a checkpoint's Program and its weights, once everything is checked."""
    checkpoint = open_checkpoint(folder)
    programs = build_programs(checkpoint.config, every_key=True)
    check_tensors(checkpoint, programs.values())
    reader = WeightReader(checkpoint)
    read = {
        weight.name: reader.load(weight).dequantize()
        for program in programs.values()
        for weight in program.weights
    }
    return programs, read


def assert_same(folder, wanted, *, family):
    programs, read = weights_of(folder)
    assert programs == wanted[0], family
    assert read.keys() == wanted[1].keys()
    for name, values in wanted[1].items():
        np.testing.assert_array_equal(read[name], values, name)


@pytest.mark.parametrize("family", OLDER)
def test_a_config_of_transformers_4_means_the_same(family, tmp_path):
    newer = tiny_of(family).path
    (tmp_path / "config.json").write_text(json.dumps(OLDER[family]))
    copy_modules(newer, tmp_path)
    found, wanted = (
        build_programs(open_header(folder).config, every_key=True) for folder in (tmp_path, newer)
    )
    assert found == wanted


def test_every_other_family_has_a_config_of_transformers_4():
    assert set(EVERY_FAMILY) - set(OLDER) == set(ONLY_NEWER)
    assert set(FAMILIES) - set(EVERY_FAMILY) == set(WITHOUT_ORACLE)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("family", each_family_of_all())
def test_shards_hold_the_same_weights(family, newer, tmp_path):
    """The shards are of 40 kB; the newer names are those of a module in memory."""
    tiny = tiny_of(family)
    if family in SPLIT_ANEW:
        newer = False
    tiny.model.save_pretrained(tmp_path, max_shard_size="40KB", save_original_format=not newer)
    copy_modules(tiny.path, tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same(tmp_path, weights_of(tiny.path), family=family)


@pytest.mark.parametrize("family", each_family_of_all())
def test_bf16_is_what_torch_rounds_to(family, tmp_path):
    tiny = tiny_of(family)
    rounded = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(tiny.path / "model.safetensors").items()
    }
    older = OLDER.get(family, tiny.config)
    for name, config, tensors in (
        ("bf16", older, rounded),
        ("fp32", tiny.config, {name: tensor.float() for name, tensor in rounded.items()}),
    ):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        copy_modules(tiny.path, tmp_path / name)
    assert_same(tmp_path / "bf16", weights_of(tmp_path / "fp32"), family=family)


@pytest.mark.parametrize("family", each_family())
def test_a_head_beside_tied_embeddings_is_not_read_and_one_that_lacks_is_named(family, tmp_path):
    tiny = tiny_model(family)
    tensors = load_file(tiny.path / "model.safetensors")
    head = HEADS.get(family, "lm_head.weight")
    programs, read = weights_of(tiny.path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    if head in read:
        del tensors[head]
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(SetupError, match=f"{head} is missing"):
            weights_of(tmp_path)
    else:
        width = programs["decoder"].outputs["logits"].width
        save_file(tensors | {head: torch.ones(width, 8)}, tmp_path / "model.safetensors")
        assert_same(tmp_path, (programs, read), family=family)
