"""GPTQ and AWQ checkpoints: lossless as packed weights, whole models against transformers with the
same numbers, the codes themselves on native, and bad input.

Logits on the reference within 1e-9 of the largest, on torch within 3e-5; native rounds rows to 8
bits, within 3% in the mean.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.api.errors import OctavoError, SetupError, UnsupportedModel, WeightMismatch
from octavo.checkpoint.open import ConfigFile, open_checkpoint
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import CONFIGS, gptq, write_quantized
from tests.support.tiny_models import double_precision, in_float64, tiny_model

torch.set_num_threads(1)

SIZES = {"intermediate_size": 96, "num_key_value_heads": 2}
IDS = np.random.default_rng(1).integers(0, 250, 60)
DOWN = "model.layers.0.mlp.down_proj"


def native(**options: int) -> NativeBackend:
    return NativeBackend(BackendOptions(num_threads=1, **options))


@pytest.mark.parametrize("name", CONFIGS)
def test_lossless(tmp_path: Path, name: str) -> None:
    meant = write_quantized(tiny_model("llama", **SIZES), tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names()) == set(meant)
    for key, tensor in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(key).dequantize(), tensor.float().numpy())
    bits = 8 if "8" in name else 4
    assert checkpoint.tensor(f"{DOWN}.weight").bits == bits


@pytest.mark.parametrize("name", ["gptq-3", "gptq-4", "gptq-8-zeros", "awq"])
def test_models_equal_transformers(tmp_path: Path, name: str) -> None:
    tiny = tiny_model("llama", **SIZES)
    meant = write_quantized(tiny, tmp_path / "quantized", name)
    save_file(meant, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    twin = in_float64(
        type(tiny.model).from_pretrained(tmp_path, attn_implementation="eager").float()
    )
    with double_precision():
        wanted = twin(torch.tensor(IDS)[None]).logits[0].numpy()
    found = PagedRunner(tmp_path / "quantized").logits(IDS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * abs(wanted).max())
    on_torch = TorchBackend(BackendOptions(num_threads=1))
    found = PagedRunner(tmp_path / "quantized", on_torch).logits(IDS, 17)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * abs(wanted).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_native_runs_the_codes(tmp_path: Path, name: str) -> None:
    """Rows few and many, in any order of the inputs, give the same bits; all are near the truth."""
    write_quantized(tiny_model("llama", **SIZES), tmp_path, name)
    wanted = PagedRunner(tmp_path).logits(IDS)
    found = PagedRunner(tmp_path, native()).logits(IDS)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.03 * abs(wanted).max()
    np.testing.assert_array_equal(PagedRunner(tmp_path, native()).logits(IDS, 3), found)


@pytest.mark.parametrize("name", CONFIGS)
def test_headers_say_how_matrices_are_stored(tmp_path: Path, name: str) -> None:
    """The footprint is the memory that the backends take."""
    write_quantized(tiny_model("llama", **SIZES), tmp_path, name)
    checkpoint = open_checkpoint(tmp_path)
    program = build_programs(checkpoint.config)["decoder"]
    format_of = loaded_formats(checkpoint, "auto", None, program)
    for backend in (native(max_tokens=64), TorchBackend(BackendOptions(num_threads=1))):
        prepared = backend.prepare_program(program, WeightReader(checkpoint).load)
        footprint = backend.footprint(program, format_of)
        assert sum(footprint.weight_bytes.values()) == prepared.weight_bytes
    planned = ConfigFile(tmp_path / "config.json").get_format(f"{DOWN}.weight")
    assert planned.partition(":")[2] == str(32) and planned[1] in "48"


def test_zeros_are_of_their_version(tmp_path: Path) -> None:
    """The first version adds 1, even to the highest zero; the second does not."""
    tiny = tiny_model("llama", **SIZES)
    write_quantized(tiny, tmp_path, "gptq-4-zeros")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{DOWN}.qzeros"][:] = -1  # fifteens
    save_file(tensors, tmp_path / "model.safetensors")
    for version, zero in (("gptq", 16), ("gptq_v2", 15)):
        config = tiny.config | {"quantization_config": gptq(sym=False, checkpoint_format=version)}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert open_checkpoint(tmp_path).tensor(f"{DOWN}.weight").zero_point == zero


def test_modules_with_numbers_of_their_own(tmp_path: Path) -> None:
    """`dynamic` gives some modules other bits, and leaves some as they are."""
    tiny = tiny_model("llama", **SIZES)
    four = write_quantized(tiny, tmp_path / "4", "gptq-4")
    eight = write_quantized(tiny, tmp_path / "8", "gptq-8")
    mixed = load_file(tmp_path / "4" / "model.safetensors")
    of_eight = load_file(tmp_path / "8" / "model.safetensors")
    mixed |= {key: value for key, value in of_eight.items() if key.startswith(f"{DOWN}.")}
    plain = "model.layers.1.mlp.up_proj"
    mixed = {key: value for key, value in mixed.items() if not key.startswith(f"{plain}.")}
    mixed[f"{plain}.weight"] = four[f"{plain}.weight"]
    shutil.copytree(tmp_path / "4", tmp_path / "mixed")
    save_file(mixed, tmp_path / "mixed" / "model.safetensors")
    dynamic = {r"+:.*layers\.0\.mlp\.down_proj": {"bits": 8}, r"-:.*layers\.1\.mlp\.up": {}}
    config = tiny.config | {"quantization_config": gptq(dynamic=dynamic)}
    (tmp_path / "mixed" / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path / "mixed")
    for key, tensor in (four | {f"{DOWN}.weight": eight[f"{DOWN}.weight"]}).items():
        np.testing.assert_array_equal(checkpoint.tensor(key).dequantize(), tensor.float().numpy())


def test_a_model_answers(tmp_path: Path) -> None:
    """It does as it is, and with dtype and quantization, which turn codes into what they name."""
    write_quantized(tiny_model("llama", **SIZES), tmp_path, "gptq-4-order")
    for options in ({}, {"dtype": "float32"}, {"quantization": "int8"}):
        with LLM(
            str(tmp_path),
            backend="native",
            skip_tokenizer_init=True,
            report=lambda text: None,
            max_model_len=128,
            **options,
        ) as llm:
            params = SamplingParams(max_tokens=16)
            (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
            assert len(output.outputs[0].token_ids) == 16


REFUSED = [
    ({"quant_method": "aqlm"}, "quant_method is 'aqlm', supported: 'awq', .*'gptq'"),
    (gptq(5), "bits is 5, supported: 2, 3, 4, 8"),
    (gptq(group_size=0), "group_size is 0, expected -1 or an integer of at least 1"),
    (gptq(checkpoint_format="marlin"), "checkpoint_format is 'marlin', supported: gptq"),
    (gptq(dynamic={"+:(": {}}), "dynamic holds .*not a valid regular expression"),
    (gptq(dynamic=[1]), r"dynamic is \[1\], expected an object"),
    (gptq(dynamic={"+:x": 3}), "dynamic gives 3"),
    (CONFIGS["awq"] | {"bits": 8}, "bits is 8, supported: 4"),
    (CONFIGS["awq"] | {"version": "marlin"}, "version is 'marlin', supported: gemm"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_is_not_supported_is_named(tmp_path: Path, config: object, message: str) -> None:
    tiny = tiny_model("llama")
    (tmp_path / "config.json").write_text(json.dumps(tiny.config | {"quantization_config": config}))
    with pytest.raises(UnsupportedModel, match=f"config.json: quantization_config: .*{message}"):
        ConfigFile(tmp_path / "config.json")


DAMAGED = [
    ("gptq-4", "qzeros", None, f"{DOWN}: qzeros is missing, found only g_idx, qweight, scales"),
    ("gptq-4", "scales", torch.ones(2, 64), r"scales has shape \(2, 64\), expected \(3, 64\)"),
    ("gptq-4", "qzeros", torch.ones(3, 7, dtype=torch.int32), r"expected \(3, 8\): 4 bits"),
    ("gptq-4", "qweight", torch.ones(12, dtype=torch.int32), r"expected \[in \* 4 / 32, out\]"),
    ("gptq-4", "g_idx", torch.full((96,), 3), "contains the groups 3 to 3, expected 0 to 2"),
    ("gptq-4", "g_idx", torch.zeros(96), "groups of different sizes, expected 32 inputs"),
    ("awq", "qzeros", torch.ones(2, 8, dtype=torch.int32), r"qzeros has shape \(2, 8\), expected"),
    ("awq", "scales", None, "scales is missing, found only qweight, qzeros"),
    ("awq-gemv", "scales", torch.ones(64, 3), r"scales has shape \(64, 3\), expected"),
]


@pytest.mark.parametrize(("name", "rest", "value", "message"), DAMAGED)
def test_tensors_that_do_not_fit(
    tmp_path: Path, name: str, rest: str, value: torch.Tensor | None, message: str
) -> None:
    """A model is refused before any weight is packed, by the tensor's name."""
    write_quantized(tiny_model("llama", **SIZES), tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"{DOWN}.{rest}"]
    tensors |= {} if value is None else {f"{DOWN}.{rest}": value.to(torch.int32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=message):
        LLM(str(tmp_path), skip_tokenizer_init=True, report=lambda text: None)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_model_loads_or_is_refused(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice(sorted(CONFIGS))
    write_quantized(tiny_model("llama", **SIZES), tmp_path, name)
    tensors = load_file(tmp_path / "model.safetensors")
    key = draw.choice([key for key in tensors if "_proj" in key])
    damaged = draw.choice(("drop", "cut", "type", "numbers"))
    if damaged == "drop":
        del tensors[key]
    elif damaged == "cut":
        axis = draw.randrange(tensors[key].ndim)
        tensors[key] = tensors[key].narrow(axis, 0, tensors[key].shape[axis] // 2).contiguous()
    elif damaged == "type":
        tensors[key] = tensors[key].to(draw.choice((torch.int8, torch.float64, torch.float32)))
    else:
        tensors[key] = torch.full_like(tensors[key], draw.choice((-1, 0, 1 << 14)))
    save_file(tensors, tmp_path / "model.safetensors")
    try:
        with LLM(str(tmp_path), skip_tokenizer_init=True, report=lambda text: None) as llm:
            llm.generate([{"prompt_token_ids": [5, 6]}], use_tqdm=False)
    except SetupError:
        return
    except OctavoError as error:
        assert damaged == "numbers", error
