"""fp8 checkpoints: lossless as packed weights, whole models against transformers with the same
weights, and what is refused by name.

Logits on the reference within 1e-9 of the largest; on torch within 3e-5 where rows stay floats,
else, where rows are quantised too, within 6% in the mean.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.api.errors import OctavoError, UnsupportedModel, WeightMismatch
from octavo.checkpoint.open import ConfigFile, open_checkpoint
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from octavo.program.ops import Linear
from tests.support.fp8_checkpoints import BY_BLOCK, SCHEMES, in_fp8
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import double_precision, in_float64, tiny_model

torch.set_num_threads(1)

SIZES = {
    "llama": {"intermediate_size": 96},
    "deepseek_v3": {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96},
}
IDS = np.random.default_rng(1).integers(0, 250, 60)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_lossless(tmp_path: Path, scheme: str) -> None:
    """Packing is lossless for odd sizes too, whose last blocks are cut off."""
    meant = in_fp8(tiny_model("llama"), tmp_path, scheme)
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in meant.items():
        np.testing.assert_array_equal(checkpoint.tensor(name).dequantize(), tensor.float().numpy())
    packed = checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
    assert (packed.code, packed.bits) == ("e4m3", 8)
    wanted = {"weights only": "none"} | dict.fromkeys(BY_BLOCK, "per_group")
    assert packed.activation == wanted.get(scheme, "per_token")


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_models_equal_transformers(tmp_path: Path, family: str, scheme: str) -> None:
    tiny = tiny_model(family, **SIZES[family])
    meant = in_fp8(tiny, tmp_path / "fp8", scheme)
    save_file(meant, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    twin = in_float64(
        type(tiny.model)
        .from_pretrained(tmp_path, attn_implementation="eager", experts_implementation="eager")
        .float()
    )
    with double_precision():
        wanted = twin(torch.tensor(IDS)[None]).logits[0].numpy()
    found = PagedRunner(tmp_path / "fp8").logits(IDS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * abs(wanted).max())
    found = PagedRunner(tmp_path / "fp8", TorchBackend(BackendOptions(num_threads=1))).logits(
        IDS, 17
    )
    if scheme in ("weights only", *BY_BLOCK):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-5 * abs(wanted).max())
    else:
        assert 1e-4 < np.sqrt(np.mean((found - wanted) ** 2)) / abs(wanted).max() < 0.06


def test_headers_say_how_matrices_are_stored(tmp_path: Path) -> None:
    """The footprint from the files, or from config.json alone, is the memory that the torch backend
    takes.
    """
    for scheme, name in (("channel", "F8_E4M3"), ("blocks", "F8_E4M3:16")):
        folder = tmp_path / scheme
        in_fp8(tiny_model("llama", tie_word_embeddings=False), folder, scheme)
        checkpoint = open_checkpoint(folder)
        program = build_programs(checkpoint.config)["decoder"]
        backend = TorchBackend(BackendOptions(num_threads=1, max_tokens=64))
        prepared = backend.prepare_program(program, WeightReader(checkpoint).load)
        for header in (checkpoint, ConfigFile(folder / "config.json")):
            format_of = loaded_formats(header, "auto", None, program)
            matrices = {
                format_of(weight)
                for op in program.ops
                if isinstance(op, Linear)
                for weight in op.weights_
            }
            assert matrices == {name, "F32"}
            found = backend.footprint(program, format_of)
            assert sum(found.weight_bytes.values()) == prepared.weight_bytes and found.code in (
                "e4m3",
                "fp32",
            )


@pytest.mark.parametrize("family", SIZES)
@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - {"blocks"}))
def test_native_runs_the_codes(tmp_path: Path, family: str, scheme: str) -> None:
    """Rows are rounded to bf16, which moves logits by 1% in the mean; chunks change no bit, and
    weights take the bytes that headers tell.
    """
    in_fp8(tiny_model(family, **SIZES[family]), tmp_path, scheme)
    wanted = PagedRunner(tmp_path).logits(IDS)
    backend = NativeBackend(BackendOptions(num_threads=1, max_tokens=64))
    runner = PagedRunner(tmp_path, backend)
    found = runner.logits(IDS)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.01 * abs(wanted).max()
    np.testing.assert_array_equal(PagedRunner(tmp_path, backend).logits(IDS, 17), found)
    checkpoint = open_checkpoint(tmp_path)
    program = build_programs(checkpoint.config)["decoder"]
    sizes = backend.footprint(program, loaded_formats(checkpoint, "auto", None, program))
    prepared = backend.prepare_program(program, WeightReader(checkpoint).load)
    assert sum(sizes.weight_bytes.values()) == prepared.weight_bytes
    down = next(w for w in sizes.weight_bytes if w.name.endswith("down_proj.weight"))
    assert sizes.weight_bytes[down] < 1.2 * down.shape[0] * -(-down.shape[1] // 32) * 32


def test_native_refuses_codes_that_are_no_number(tmp_path: Path) -> None:
    in_fp8(tiny_model("llama"), tmp_path, "channel")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=r"holds e4m3 codes that are NaN"):
        PagedRunner(tmp_path, NativeBackend(BackendOptions(num_threads=1)))


def test_native_takes_small_blocks_converted(tmp_path: Path) -> None:
    """The native backend refuses blocks of 16 by name, and takes them converted, within 2% in the
    mean.
    """
    in_fp8(tiny_model("llama"), tmp_path, "blocks")
    message = r"is stored as F8_E4M3:16, expected groups of .*\nhint: --dtype bfloat16"
    with pytest.raises(UnsupportedModel, match=message):
        PagedRunner(tmp_path, NativeBackend(BackendOptions(num_threads=1)))
    with pytest.raises(UnsupportedModel, match=message):
        LLM(str(tmp_path), backend="native", skip_tokenizer_init=True, report=lambda text: None)
    wanted = PagedRunner(tmp_path).logits(IDS)
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}):
        program = build_programs(open_checkpoint(tmp_path).config)["decoder"]
        load = WeightReader(open_checkpoint(tmp_path), **options, program=program).load
        found = PagedRunner(
            tmp_path, NativeBackend(BackendOptions(num_threads=1)), load=load
        ).logits(IDS)
        assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.02 * abs(wanted).max()


def config_of(**changes: object) -> dict[str, object]:
    return {"quant_method": "fp8", **changes}


def groups_of(**weights: object) -> dict[str, object]:
    group = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


REFUSED = [
    (3, "quant_method is 3"),
    (config_of(fmt="e5m2"), "fmt is 'e5m2', supported: 'e4m3'"),
    (
        config_of(weight_block_size=[128]),
        r"weight_block_size is \[128\], expected two integers",
    ),
    (
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        "format is 'marlin-24', supported: pack-quantized",
    ),
    (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        "config_groups is missing",
    ),
    (groups_of(num_bits=5), "supported compressed-tensors floats have 8 or 4 bits"),
    (groups_of(strategy="group"), "strategy is 'group'"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_other_quantisations_are_refused_by_name(
    tmp_path: Path, config: object, message: str
) -> None:
    tiny = tiny_model("llama")
    (tmp_path / "config.json").write_text(json.dumps(tiny.config | {"quantization_config": config}))
    with pytest.raises(UnsupportedModel, match=f"config.json: quantization_config: .*{message}"):
        ConfigFile(tmp_path / "config.json")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(tmp_path)


DAMAGED = [
    (
        "blocks",
        {"_scale_inv": torch.ones(2, 3)},
        r"scales of shape \(2, 3\), expected \(2, 4\): one for each block of 32 x 16",
    ),
    (
        "channel",
        {"_scale": torch.ones(7, 2)},
        r"scales of shape \(7, 2\) for a matrix \(64, 64\), and config.json has no",
    ),
    ("channel", {"_scale": None}, "is stored as F8_E4M3, but has no scales"),
]


@pytest.mark.parametrize(("scheme", "changes", "message"), DAMAGED)
def test_scales_that_do_not_fit(
    tmp_path: Path, scheme: str, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    in_fp8(tiny_model("llama"), tmp_path, scheme)
    name, tensors = (
        "model.layers.0.self_attn.q_proj.weight",
        load_file(tmp_path / "model.safetensors"),
    )
    for suffix, value in changes.items():
        del tensors[name + suffix]
        tensors |= {} if value is None else {name + suffix: value}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=message):
        open_checkpoint(tmp_path).tensor(name)


def test_fp8_that_the_config_does_not_explain(tmp_path: Path) -> None:
    tiny = tiny_model("llama")
    in_fp8(tiny, tmp_path, "channel")
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    with pytest.raises(
        WeightMismatch, match=r"is stored as F8_E4M3, but config\.json has no quantization_config"
    ):
        open_checkpoint(tmp_path).tensor("model.layers.0.self_attn.q_proj.weight")


def test_packing_to_fp8_is_refused_on_native() -> None:
    with pytest.raises(
        OctavoError,
        match=(
            r"quantization: fp8 requires the torch or reference backend, got 'native'\nhint: use"
            r" int8"
        ),
    ):
        LLM(
            str(tiny_model("llama").path),
            quantization="fp8",
            backend="native",
            skip_tokenizer_init=True,
        )
