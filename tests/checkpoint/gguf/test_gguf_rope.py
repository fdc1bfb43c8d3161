"""Rope scaling of a GGUF header: read as llama.cpp reads it, whatever keys state it, and what would
change a model's numbers unread is refused by name.
"""

from __future__ import annotations

import copy
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from octavo import SamplingParams
from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.open import open_checkpoint
from octavo.models.registry import build_programs
from tests.support.llm_tools import make_llm
from tests.support.tiny_gguf import tiny_model, write_tiny_gguf

SCALING = "llama.rope.scaling"


def config_of(folder: Path, architecture: str = "llama", **keys) -> dict:
    extra = {name.replace("__", "."): value for name, value in keys.items()}
    path = folder / "m.gguf"
    write_tiny_gguf(path, architecture, tiny_model(architecture), extra=extra)
    return open_checkpoint(path).config


@pytest.mark.parametrize(
    "keys",
    [
        {f"{SCALING}.factor": 4.0},
        {f"{SCALING}.type": "linear", f"{SCALING}.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
        {f"{SCALING}.factor": 4.0, "llama.rope.scale_linear": 2.0},
        {f"{SCALING}.factor": 4.0, f"{SCALING}.finetuned": 1},
    ],
)
def test_a_factor_without_a_type_is_linear(tmp_path: Path, keys) -> None:
    config = config_of(tmp_path, **keys)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    (scaled,) = build_programs(config).values()
    (plain,) = build_programs(config | {"rope_scaling": None}).values()
    assert scaled != plain


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {f"{SCALING}.type": "none", f"{SCALING}.factor": 4.0},
        {f"{SCALING}.factor": 0.0},
        {f"{SCALING}.factor": 1.0},
        {f"{SCALING}.type": "linear"},
        {f"{SCALING}.attn_factor": 1.0},
    ],
)
def test_what_scales_nothing(tmp_path: Path, keys) -> None:
    assert config_of(tmp_path, **keys)["rope_scaling"] is None


def test_yarn_takes_llama_cpps_defaults(tmp_path: Path) -> None:
    found = config_of(tmp_path, **{f"{SCALING}.type": "yarn"})["rope_scaling"]
    assert (found["factor"], found["original_max_position_embeddings"]) == (1.0, 128)


def test_frequency_factors_are_scaled_too(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    model = tiny_model("llama")
    write_tiny_gguf(path, "llama", model, extra={f"{SCALING}.factor": 2.0})
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "f.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith("llama."):
            writer.add_key_value(name, field.contents(), field.types[0])
    writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_checkpoint(tmp_path / "f.gguf").config["rope_scaling"]
    assert found["short_factor"] == list(range(2, 18, 2))


def test_logits_are_transformers(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    for layer in model.model.layers:  # attention that depends on positions
        layer.self_attn.q_proj.weight.data *= 20
        layer.self_attn.o_proj.weight.data *= 20
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, "llama", model, extra={f"{SCALING}.factor": 4.0}, tokens=96)
    scaling = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
    config = type(model.config)(**model.config.to_dict() | {"rope_parameters": scaling})
    scaled = LlamaForCausalLM(config).eval()
    scaled.load_state_dict(model.state_dict())
    prompt = list(range(3, 63))

    def next_tokens(theirs) -> list[int]:
        with torch.no_grad():
            found: list[int] = theirs(torch.tensor([prompt])).logits[0].argmax(-1).tolist()
        return found

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    with make_llm(model_path=path, max_model_len=128, dtype="float32") as llm:
        output = llm.generate({"prompt_token_ids": prompt}, params)[0]
    ours = [
        next(token for token, entry in row.items() if entry.rank == 1)
        for row in output.prompt_logprobs[1:]
    ]
    assert [*ours, output.outputs[0].token_ids[0]] == next_tokens(scaled)
    assert next_tokens(scaled) != next_tokens(model)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{SCALING}.attn_factor", 1.5),
        ("llama.final_logit_softcapping", 30.0),
        ("llama.attention.scale", 0.5),
        ("llama.logit_scale", 0.25),
        ("llama.attention.clamp_kqv", 8.0),
    ],
)
def test_what_no_family_reads_is_refused_by_name(tmp_path: Path, key: str, value: float) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key} is {value}, expected .* for this archit"):
        config_of(tmp_path, **{key: value})
    with pytest.raises(
        UnsupportedModel, match=r"rope\.scaling.type is 'su', supported in GGUF: none"
    ):
        config_of(tmp_path, **{f"{SCALING}.type": "su"})


def test_config_json_needs_the_type_of_a_factor() -> None:
    config = tiny_model("llama").config.to_dict()
    for factor in (None, 1.0):
        build_programs(config | {"rope_parameters": None, "rope_scaling": {"factor": factor}})
    with pytest.raises(UnsupportedModel) as error:
        build_programs(config | {"rope_parameters": None, "rope_scaling": {"factor": 2.0}})
    assert str(error.value).splitlines()[0] == (
        "config.json: the rope parameters have the factor 2.0 and no rope_type"
    )
