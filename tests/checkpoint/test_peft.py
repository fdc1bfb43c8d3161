"""Adapters that are refused: each by name, with what was wrong with it."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from octavo.errors import SetupError
from tests.support.peft_adapters import read_adapter, save_adapter
from tests.support.tiny_models import tiny_model

A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = A.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    return save_adapter(
        tiny_model("llama"), folder, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]
    )


@pytest.fixture
def adapter(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "adapter")


def change_config(path, **values):
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(path, change):
    file = path / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which is not"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters is"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is"),
        ({"some_new_thing": True}, "some_new_thing is True"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', supported is LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"r": 0}, "r is 0, allowed are whole numbers from 1 to 64"),
        ({"r": 65}, "r is 65, allowed are whole numbers from 1 to 64"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] is 0"),
        ({"rank_pattern": {"(": 4}}, "cannot be read"),
        ({"rank_pattern": [1]}, "rank_pattern is no object"),
        ({"use_dora": True}, "has no magnitude beside use_dora"),
        ({"use_dora": "yes"}, "use_dora is 'yes', expected true or false"),
        ({"bias": "some"}, "bias is 'some', allowed are none, all, lora_only"),
        ({"r": 5}, "gives it the rank 5"),
    ],
)
def test_a_config_is_refused_by_the_key(adapter, values, message):
    change_config(adapter, **values)
    with pytest.raises(SetupError, match=message):
        read_adapter(tiny_model("llama").path, adapter)


def rename(old, new):
    def change(tensors):
        tensors[new] = tensors.pop(old)

    return change


def put(name, array):
    return lambda tensors: tensors.__setitem__(name, array)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(A), "q_proj has lora_B without its other half"),
        (lambda tensors: tensors.clear(), "no tensor of the adapter changes a module"),
        (rename(A, A.replace("q_proj", "q_prod")), "has lora_A without its other half"),
        (put(A, np.zeros((4, 65), np.float32)), "A of .*q_proj has shape .4, 65., .*wants .4, 64."),
        (put(B, np.zeros((63, 4), np.float32)), "B of .*q_proj has shape"),
        (put(A, np.full((4, 64), np.nan, np.float32)), "holds numbers that are not finite"),
        (put(B, np.full((64, 4), np.inf, np.float32)), "holds numbers that are not finite"),
        (put(A, np.zeros((4, 64), np.int8)), "int8|I8"),
        (put(A, np.zeros(4, np.float32)), "gives it the rank 4"),
        (put("base_model.model.lm_head.weight", np.zeros((2, 2), np.float32)), "no part of a LoRA"),
        (put("some.prompt_embeddings", np.zeros((2, 2), np.float32)), "no part of a LoRA"),
        (
            put("base_model.model.score.modules_to_save.weight", np.zeros((2, 2), np.float32)),
            "no part of a LoRA",
        ),
        (
            put("base_model.model.model.layers.0.self_attn.q_proj.bias", np.zeros(64, np.float32)),
            "a bias of .*q_proj, which has none",
        ),
    ],
)
def test_tensors_are_refused_by_name(adapter, change, message):
    change_tensors(adapter, change)
    with pytest.raises(SetupError, match=message):
        read_adapter(tiny_model("llama").path, adapter)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    path = save_adapter(tiny_model("gpt2"), tmp_path)
    with pytest.raises(SetupError, match=r"this model has no linear h\.0\.attn\.c_attn"):
        read_adapter(tiny_model("llama").path, path)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(SetupError, match=r"no adapter: it should hold adapter_config\.json"):
        read_adapter(tiny_model("llama").path, tmp_path)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.97])
def test_a_truncated_file_is_refused(adapter, file, share):
    data = (adapter / file).read_bytes()
    (adapter / file).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(SetupError):
        read_adapter(tiny_model("llama").path, adapter)


def test_the_digest_is_that_of_the_content(adapter, sound):
    """Two copies have one digest; another number, or another scale, makes another one."""
    path = tiny_model("llama").path
    first = read_adapter(path, sound).digest
    assert read_adapter(path, adapter).digest == first
    change_config(adapter, lora_dropout=0.5)
    assert read_adapter(path, adapter).digest == first
    change_config(adapter, lora_alpha=9)
    scaled = read_adapter(path, adapter).digest

    def nudge(tensors):
        tensors[A] = tensors[A] * np.float32(1.0001)

    change_config(adapter, lora_alpha=8)
    change_tensors(adapter, nudge)
    assert len({first, scaled, read_adapter(path, adapter).digest}) == 3
