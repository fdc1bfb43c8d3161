"""Adapters that are refused: each by name, with what was wrong with it."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy

from octavo.api.errors import SetupError
from octavo.checkpoint.peft import get_bare_name, read_peft
from tests.support.peft_adapters import peft_scales, read_adapter, save_adapter
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
        ({"arrow_config": {"top_k": 2}}, "arrow_config is"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', supported: LORA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"r": 0}, "r is 0, expected integers from 1 to 64"),
        ({"r": 65}, "r is 65, expected integers from 1 to 64"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\['q_proj'\] is 0"),
        ({"rank_pattern": {"(": 4}}, "cannot be read"),
        ({"rank_pattern": [1]}, "rank_pattern: got .1., expected an object"),
        (
            {"use_dora": True},
            "has no magnitude vector, but adapter_config.json sets use_dora to True",
        ),
        ({"use_dora": "yes"}, "use_dora is 'yes', expected true or false"),
        ({"bias": "some"}, "bias is 'some', expected none, all, lora_only"),
        ({"r": 5}, "sets rank 5"),
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
        (lambda tensors: tensors.pop(A), "q_proj has lora_B, but no lora_A"),
        (lambda tensors: tensors.clear(), "the adapter has no tensors for modules"),
        (rename(A, A.replace("q_proj", "q_prod")), "has lora_A, but no lora_B"),
        (
            put(A, np.zeros((4, 65), np.float32)),
            "A of .*q_proj has shape .4, 65., .*expected .4, 64.",
        ),
        (put(B, np.zeros((63, 4), np.float32)), "B of .*q_proj has shape"),
        (put(A, np.full((4, 64), np.nan, np.float32)), "contains NaN or infinite values"),
        (put(B, np.full((64, 4), np.inf, np.float32)), "contains NaN or infinite values"),
        (put(A, np.zeros((4, 64), np.int8)), "int8|I8"),
        (put(A, np.zeros(4, np.float32)), "sets rank 4"),
        (
            put("base_model.model.lm_head.weight", np.zeros((2, 2), np.float32)),
            "not part of a supported LoRA",
        ),
        (
            put("some.prompt_embeddings", np.zeros((2, 2), np.float32)),
            "not part of a supported LoRA",
        ),
        (
            put("base_model.model.score.modules_to_save.weight", np.zeros((2, 2), np.float32)),
            "not part of a supported LoRA",
        ),
        (
            put("base_model.model.model.layers.0.self_attn.q_proj.bias", np.zeros(64, np.float32)),
            "a bias for .*q_proj, this model has none",
        ),
    ],
)
def test_tensors_are_refused_by_name(adapter, change, message):
    change_tensors(adapter, change)
    with pytest.raises(SetupError, match=message):
        read_adapter(tiny_model("llama").path, adapter)


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        "model.layers.0.self_attn.q_proj",
        "^model.layers.0.self_attn.q_proj",
        "^layers.0.self_attn.q_proj",
        r"model\.layers\.\d+\.mlp\.(gate|up)_proj",
        "layers.1.self_attn.o_proj|v_proj",
        "proj",
    ],
)
def test_patterns_match_the_modules_that_they_match_in_peft(pattern, tmp_path):
    """Patterns are matched with a module's full name, and begin where a part of it begins."""
    tiny = tiny_model("llama")
    path = save_adapter(tiny, tmp_path, r=4, lora_alpha=8, alpha_pattern={pattern: 40})
    wanted = {get_bare_name(name): scale for name, scale in peft_scales(tiny, path).items()}
    found = read_peft(path, max_rank=4, max_bytes=1 << 24).updates
    assert {name: update.scale for name, update in found.items()} == wanted


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "base_model.model."])
def test_modules_are_known_by_every_prefix(adapter, prefix):
    """Files of text models within others, and of models without a head, name them otherwise."""
    wanted = read_adapter(tiny_model("llama").path, adapter)
    change_tensors(
        adapter,
        lambda tensors: [
            tensors.__setitem__(name.replace("base_model.model.model.", prefix), tensors.pop(name))
            for name in list(tensors)
        ],
    )
    assert read_adapter(tiny_model("llama").path, adapter).updates.keys() == wanted.updates.keys()


def test_tensors_that_overlap_are_refused(adapter):
    """Each tensor has bytes of its own, so that a small file cannot stand for a large adapter."""
    file = adapter / "adapter_model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[B]["data_offsets"] = header[B.replace("layers.0", "layers.1")]["data_offsets"]
    text = json.dumps(header).encode().ljust(length)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    read_adapter(tiny_model("llama").path, adapter)  # a hole is no overlap
    header["more"] = header[B]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    header["more again"] = header[B]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(SetupError, match="its tensors overlap"):
        read_adapter(tiny_model("llama").path, adapter)


def test_numbers_that_a_precision_does_not_hold_are_refused(adapter):
    """The largest numbers of float32 are infinite in bfloat16."""
    change_tensors(adapter, put(A, np.full((4, 64), 3.4e38, np.float32)))
    path = tiny_model("llama").path
    assert read_adapter(path, adapter, dtype="int8").updates
    with pytest.raises(SetupError, match=r"too large for bfloat16"):
        read_adapter(path, adapter, dtype="bfloat16")


def test_a_gain_that_is_not_finite_is_refused(tmp_path):
    path = save_adapter(tiny_model("llama"), tmp_path, r=2, use_dora=True)
    magnitude = A.replace("lora_A.weight", "lora_magnitude_vector")
    change_tensors(path, put(magnitude, np.full(64, 3.4e38, np.float32)))
    with pytest.raises(SetupError, match="a DoRA magnitude"):
        read_adapter(tiny_model("llama").path, path)


def test_an_adapter_of_another_model_is_refused(tmp_path):
    path = save_adapter(tiny_model("gpt2"), tmp_path)
    with pytest.raises(SetupError, match=r"this model has no linear layer h\.0\.attn\.c_attn"):
        read_adapter(tiny_model("llama").path, path)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(SetupError, match=r"not an adapter: expected adapter_config\.json"):
        read_adapter(tiny_model("llama").path, tmp_path)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.97])
def test_a_truncated_file_is_refused(adapter, file, share):
    data = (adapter / file).read_bytes()
    (adapter / file).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(SetupError):
        read_adapter(tiny_model("llama").path, adapter)


def test_the_digest_is_that_of_the_content(adapter, sound):
    """Two copies have one digest; another number, another scale, or another precision that it is
    kept in, makes another one.
    """
    path = tiny_model("llama").path
    first = read_adapter(path, sound).digest
    assert read_adapter(path, adapter).digest == first
    change_config(adapter, lora_dropout=0.5)
    assert read_adapter(path, adapter).digest == first
    change_config(adapter, lora_alpha=9)
    scaled = read_adapter(path, adapter).digest

    def nudge(tensors):
        tensors[A] = tensors[A] * np.float32(1.0001)

    kept = {read_adapter(path, adapter, dtype=dtype).digest for dtype in ("bfloat16", "int8")}
    assert len(kept | {scaled}) == 3
    change_config(adapter, lora_alpha=8)
    change_tensors(adapter, nudge)
    assert len({first, scaled, read_adapter(path, adapter).digest}) == 3
