"""Checkpoints of newer transformers, with a layer's experts in two, hold the same weights."""

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.tensor_check import check_tensors
from octavo.checkpoint.weights import WeightReader
from octavo.models.registry import build_programs
from tests.support.tiny_models import tiny_model

FAMILIES = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "phimoe", "deepseek_v2", "glm4_moe")


def saved_newer(family, folder):
    """Saves a tiny model under the names that its module has in memory."""
    tiny = tiny_model(family)
    tiny.model.save_pretrained(folder, save_original_format=False)
    shutil.copy(tiny.path / "config.json", folder / "config.json")
    return tiny.path


@pytest.mark.parametrize("family", FAMILIES)
def test_newer_names_are_the_same_weights(family, tmp_path):
    older = open_checkpoint(saved_newer(family, tmp_path))
    newer = open_checkpoint(tmp_path)
    assert any(name.endswith("experts.gate_up_proj") for name in newer.names())
    programs = build_programs(newer.config)
    check_tensors(newer, programs.values())
    found, wanted = WeightReader(newer), WeightReader(older)
    for weight in programs["decoder"].weights:
        np.testing.assert_array_equal(
            found.load(weight).dequantize(), wanted.load(weight).dequantize(), weight.name
        )


def rewritten(folder, suffix, change):
    """Saves the checkpoint with tensors whose names end so in another form."""
    file = folder / "model.safetensors"
    tensors = {
        name: change(tensor).clone() if name.endswith(suffix) else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file)


def test_experts_that_the_config_has_not_are_refused(tmp_path):
    saved_newer("qwen3_moe", tmp_path)
    rewritten(tmp_path, "mlp.gate.weight", lambda gate: gate[:6])
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_experts": 6}
    with pytest.raises(WeightMismatch, match="holds 7 experts, expected 6"):
        check_tensors(open_checkpoint(tmp_path), build_programs(config).values())


def test_a_tensor_of_other_form_holds_no_expert(tmp_path):
    saved_newer("qwen3_moe", tmp_path)
    name = "model.layers.1.mlp.experts.0.gate_proj.weight"
    assert open_checkpoint(tmp_path).stored(name).num_stacked == 7
    rewritten(tmp_path, "1.mlp.experts.gate_up_proj", lambda experts: experts[0])
    with pytest.raises(WeightMismatch, match=f"{name} is missing"):
        open_checkpoint(tmp_path).stored(name)
