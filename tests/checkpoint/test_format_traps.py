"""Traps of GPTQ, AWQ and compressed-tensors, matrix by matrix: every width, zero, version and order
against the formulas of the formats' descriptions, bit for bit; and whole families, whose quantised
matrices give the logits of the same numbers as floats.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from octavo.api.errors import SetupError, UnsupportedModel, WeightMismatch
from octavo.checkpoint.formats.awq import Awq
from octavo.checkpoint.formats.compressed_tensors import CompressedTensors
from octavo.checkpoint.formats.gptq import Gptq
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.models.registry import build_programs
from tests.support.paged_runner import PagedRunner
from tests.support.quantized_checkpoints import gptq_tensors, grid_of, packed
from tests.support.tiny_models import TinyModel, tiny_model

INPUTS, OUTPUTS = 192, 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IDS = np.random.default_rng(2).integers(0, 250, 24)


def gptq_values(
    words: NDArray, zero_words: NDArray, scales: NDArray, groups: NDArray, bits: int, less_one: int
) -> NDArray[np.float32]:
    """Returns `[out, in]` by the format's formula, number by number out of one long integer."""

    def numbers(column: NDArray, count: int) -> list[int]:
        stream = sum(int(word) % (1 << 32) << 32 * at for at, word in enumerate(column))
        return [stream >> bits * at & (1 << bits) - 1 for at in range(count)]

    codes = np.array([numbers(column, len(groups)) for column in words.T])
    zeros = np.array([numbers(row, words.shape[1]) for row in zero_words]).T + less_one
    steps = scales.T.astype(np.float32)[:, groups]
    return (codes - zeros[:, groups]).astype(np.float32) * steps


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [-1, 32, 64, 128])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(bits: int, group: int, ordered: bool, version: str, symmetric: bool) -> None:
    """Groups of 128 leave a last one of 64, which act-order may fill with any inputs."""
    draw = np.random.default_rng(bits * 1000 + group)
    size = INPUTS if group == -1 else group
    groups = np.arange(INPUTS) // size
    if ordered:
        groups = draw.permutation(groups)
    count = int(groups.max()) + 1
    less_one = int(version == "gptq")
    low, high = less_one, (1 << bits) - 1  # a stored zero of -1 does not exist
    zeros = draw.integers(low, high + less_one, (OUTPUTS, count), endpoint=True)
    if bits == 8:
        zeros = np.minimum(zeros, high)
    if symmetric:
        zeros[:] = 1 << bits - 1
    tensors = {
        "qweight": packed(draw.integers(0, high, (OUTPUTS, INPUTS), endpoint=True), bits).T,
        "qzeros": packed((zeros - less_one).T, bits),
        "scales": torch.from_numpy(draw.normal(size=(count, OUTPUTS)).astype(np.float16)),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    arrays = {name: np.ascontiguousarray(each.numpy()) for name, each in tensors.items()}
    config = {"bits": bits, "group_size": group, "sym": symmetric, "checkpoint_format": version}
    found = Gptq(config).weight("m", arrays).dequantize()
    wanted = gptq_values(
        arrays["qweight"], arrays["qzeros"], arrays["scales"], groups, bits, less_one
    )
    np.testing.assert_array_equal(found, wanted)
    assert Gptq(config).describe("m", arrays).shape == (OUTPUTS, INPUTS)


@pytest.mark.parametrize(
    ("keys", "less_one"),
    [
        ({}, 1),
        ({"format": "gptq"}, 1),
        ({"format": "gptq_v2"}, 0),
        ({"checkpoint_format": "GPTQ_V2", "format": "gptq"}, 0),
        ({"checkpoint_format": None, "format": "gptq_v2"}, 0),
    ],
)
def test_keys_that_name_the_version(keys: dict[str, Any], less_one: int) -> None:
    """Transformers 5 and GPTQModel 5 name it `format`; groups are of 128 where no key says it."""
    arrays = {
        "qweight": np.zeros((16, 8), np.int32),
        "qzeros": np.full((1, 1), 0x33333333, np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    found = Gptq({"bits": 4, "sym": False, **keys}).weight("m", arrays)
    assert found.zero_point == 3 + less_one


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": False, "sym": True}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "zero_point": True}),
        ("config.json", {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    ],
)
def test_older_places_of_the_config(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    """Files beside config.json, and a key of it."""
    own: dict[str, Any] = {"model_type": "llama"}
    draw = np.random.default_rng(0)
    arrays = awq_arrays(draw, 32)[0]
    if name != "quant_config.json":
        words = draw.integers(0, 1 << 30, (INPUTS // 8, OUTPUTS)).astype(np.int32)
        arrays = arrays | {"qweight": words}
    tensors = {f"m.{rest}": torch.from_numpy(np.array(each)) for rest, each in arrays.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    if name == "config.json":
        own["compression_config"] = config
    else:
        (tmp_path / name).write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps(own))
    found = open_checkpoint(tmp_path)
    assert found.tensor("m.weight").shape == (OUTPUTS, INPUTS)
    assert found.config.keys() == {"model_type", "quantization_config"}


def test_gptq_whose_tensors_lie_in_several_shards(tmp_path: Path) -> None:
    """A module's tensors may be parted; a fault names the files that hold them."""
    tensors = {
        "qweight": torch.zeros(12, 64, dtype=torch.int32),
        "qzeros": torch.zeros(3, 8, dtype=torch.int32),
        "scales": torch.ones(3, 64, dtype=torch.float16),
    }
    name = "model.layers.0.mlp.down_proj"
    parts = [
        {f"{name}.{rest}": tensors[rest] for rest in rests}
        for rests in (("qweight",), ("qzeros", "scales"))
    ]
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(part, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    quantized: dict[str, Any] = {"quant_method": "gptq", "bits": 4}
    for group, fits in ((32, True), (96, False)):
        quantized["group_size"] = group
        config = {"model_type": "llama", "quantization_config": quantized}
        (tmp_path / "config.json").write_text(json.dumps(config))
        stored = open_checkpoint(tmp_path).tensor
        if fits:
            assert stored(f"{name}.weight").shape == (64, 96)
            continue
        with pytest.raises(WeightMismatch) as error:
            stored(f"{name}.weight")
        files = ", ".join(str(tmp_path / file) for file in sorted(set(weight_map.values())))
        assert str(error.value).startswith(f"{files}: {name}.scales has shape (3, 64), expected")


def awq_arrays(draw: np.random.Generator, group: int) -> tuple[dict[str, NDArray], NDArray]:
    """Returns a module's tensors and its values `[out, in]`."""
    count = -(-INPUTS // group)
    codes = draw.integers(0, 15, (INPUTS, OUTPUTS), endpoint=True)
    zeros = draw.integers(0, 15, (count, OUTPUTS), endpoint=True)
    zeros[0] = 0
    scales = draw.normal(size=(count, OUTPUTS)).astype(np.float16)

    def words(rows: NDArray) -> NDArray:
        ordered = rows.reshape(len(rows), -1, 8)[..., AWQ_ORDER].reshape(len(rows), -1)
        return packed(ordered, 4).numpy()

    groups = np.arange(INPUTS) // group
    values = (codes - zeros[groups]).astype(np.float32) * scales.astype(np.float32)[groups]
    return {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}, values.T


@pytest.mark.parametrize(
    ("config", "group"),
    [
        ({"bits": 4, "group_size": 64, "version": "GEMM"}, 64),
        ({"w_bit": 4, "q_group_size": 32, "version": "gemm"}, 32),
        ({"bits": 4, "group_size": -1, "version": "exllama"}, INPUTS),
        ({"bits": 4, "format": "gemm", "backend": "auto"}, 128),
        ({"bits": 4, "group_size": 32, "version": "ipex", "backend": "autoawq"}, 32),
    ],
)
def test_awq(config: dict[str, Any], group: int) -> None:
    arrays, values = awq_arrays(np.random.default_rng(group), group)
    np.testing.assert_array_equal(Awq(config).weight("m", arrays).dequantize(), values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"version": "gemv_fast"}, "version is 'gemv_fast', supported: gemm, gemv"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', supported"),
        ({"format": 7}, "format is 7, supported: gemm"),
        ({"backend": "llm-awq"}, "backend is llm-awq, whose layout is not supported"),
        ({"w_bit": 8}, "w_bit is 8, supported: 4"),
    ],
)
def test_awq_of_other_layouts_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        Awq(config)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_tensors_with_orders(ordered: bool, symmetric: bool) -> None:
    """Files of its earlier versions; indices of -1 stand for none."""
    draw = np.random.default_rng(4)
    groups = draw.permutation(np.arange(INPUTS) // 32) if ordered else np.arange(INPUTS) // 32
    codes = draw.integers(0, 15, (OUTPUTS, INPUTS), endpoint=True)
    zeros = np.full((OUTPUTS, 6), 8) if symmetric else draw.integers(0, 15, (OUTPUTS, 6))
    scales = draw.normal(size=(OUTPUTS, 6)).astype(np.float32)
    arrays = {
        "weight_packed": packed(codes, 4).numpy(),
        "weight_scale": scales,
        "weight_shape": np.array([OUTPUTS, INPUTS]),
        "weight_g_idx": groups if ordered else np.full(INPUTS, -1, np.int32),
    }
    if not symmetric:
        arrays["weight_zero_point"] = packed(zeros.T, 4).numpy().T
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    weights |= {"symmetric": symmetric, "actorder": "group"}
    group = {"targets": ["Linear"], "weights": weights}
    reader = CompressedTensors({"format": "pack-quantized", "config_groups": {"a": group}})
    values = (codes - zeros[:, groups]).astype(np.float32) * scales[:, groups]
    np.testing.assert_array_equal(reader.weight("m", arrays).dequantize(), values)


@pytest.mark.parametrize(
    ("rest", "value", "message"),
    [
        ("weight", 8, "m.weight has values from 0 to 8, expected 4 bits: -8 to 7"),
        ("weight_zero_point", -9, "m.weight_zero_point has values from -9 to 0, expected 4 bits"),
    ],
)
def test_integers_out_of_their_range_are_refused(rest: str, value: int, message: str) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}
    reader = CompressedTensors(
        {
            "format": "int-quantized",
            "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
        }
    )
    arrays = {
        "weight": np.zeros((8, 32), np.int8),
        "weight_scale": np.ones((8, 1), np.float32),
        "weight_zero_point": np.zeros((8, 1), np.int8),
    }
    assert reader.weight("m", arrays).shape == (8, 32)
    arrays[rest][3, 0] = value
    with pytest.raises(WeightMismatch, match=message):
        reader.weight("m", arrays)


# -- families --------------------------------------------------------------------------------------

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96},
    "qwen2": {"hidden_size": 96, "intermediate_size": 96},
    "phi3": {"hidden_size": 64, "intermediate_size": 96},
    "gemma2": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32},
    "opt": {"hidden_size": 96, "ffn_dim": 128, "word_embed_proj_dim": 96},
    "gpt2": {"n_embd": 96, "n_inner": 128},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64, "intermediate_size": 96},
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
}
LINEARS = ("_proj", "fc1", "fc2", "c_attn", "c_proj", "c_fc", ".w1", ".w2", ".w3")
KEPT = ("project_in", "project_out", "norm")


def write_gptq(
    tiny: TinyModel,
    folder: Path,
    config: dict[str, Any],
    chosen: Callable[[str], dict[str, Any] | None],
) -> Path:
    """Writes a model with its linears in GPTQ's form, as `chosen` has each, and beside it one of
    the numbers that they stand for; returns the latter.
    """
    twin = folder.with_name(f"{folder.name}-twin")
    for path in (folder, twin):
        shutil.copytree(tiny.path, path, dirs_exist_ok=True)
    stored, meant = {}, {}
    for key, tensor in load_file(tiny.path / "model.safetensors").items():
        stored[key] = meant[key] = tensor
        module = key.removesuffix(".weight")
        own = chosen(module)
        is_linear = key.endswith(".weight") and any(name in module for name in LINEARS)
        if tensor.ndim != 2 or not is_linear or any(name in key for name in KEPT) or own is None:
            continue
        del stored[key]
        turned = "c_" in module  # GPT-2 keeps [in, out]
        matrix = tensor.T if turned else tensor
        grid = grid_of(
            matrix,
            own["bits"],
            symmetric=own["sym"],
            shuffled=own["desc_act"],
            seed=sum(module.replace("up_proj", "gate_proj").encode()),  # which read the same rows
        )
        grid = grid._replace(zeros=np.maximum(grid.zeros, 1))
        tensors = gptq_tensors(grid, own["bits"], less_one=True, with_index=True)
        stored |= {f"{module}.{rest}": value for rest, value in tensors.items()}
        meant[key] = (grid.values.T if turned else grid.values).contiguous()
    save_file(stored, folder / "model.safetensors")
    save_file(meant, twin / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(tiny.config | {"quantization_config": {"quant_method": "gptq", **config}})
    )
    return twin


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path: Path, family: str) -> None:
    """Fused, transposed, biased and expert matrices in 4 bits, values and outputs in 8, some left
    as they are; in any order of the inputs where the family has no experts.
    """
    tiny = tiny_model(family, **FAMILIES[family])
    has_experts = "num_local_experts" in tiny.config or "num_experts" in tiny.config
    base = {"bits": 4, "group_size": 32, "sym": False, "desc_act": not has_experts}
    dynamic = {
        r"+:.*(v_proj|o_proj|fc2|attn\.c_proj)$": {"bits": 8},
        r"-:.*layers\.1\.(mlp\.down_proj|fc1)$": {},
    }

    def chosen(module: str) -> dict[str, Any] | None:
        if module.endswith(("layers.1.mlp.down_proj", "layers.1.fc1")):
            return None
        wide = module.endswith(("v_proj", "o_proj", "fc2", "attn.c_proj"))
        return base | {"bits": 8 if wide else 4}

    twin = write_gptq(tiny, tmp_path / "made", base | {"dynamic": dynamic}, chosen)
    wanted = PagedRunner(twin).logits(IDS)
    found = PagedRunner(tmp_path / "made").logits(IDS)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * abs(wanted).max())
    native = NativeBackend(BackendOptions(num_threads=1, max_tokens=64))
    found = PagedRunner(tmp_path / "made", native).logits(IDS)
    # Of each row, since rounding may send a few to another expert.
    errors = np.sqrt(np.mean((found - wanted) ** 2, axis=1))
    assert np.median(errors) < 0.04 * abs(wanted).max()


def test_an_output_layer_may_be_quantised(tmp_path: Path) -> None:
    tiny = tiny_model("llama", hidden_size=64, intermediate_size=96, vocab_size=288)
    base = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": True}
    folder = tmp_path / "made"
    twin = write_gptq(tiny, folder, base, lambda module: base)
    tensors, meant = (load_file(path / "model.safetensors") for path in (folder, twin))
    grid = grid_of(tensors.pop("lm_head.weight"), 4, symmetric=True, shuffled=False)
    head = gptq_tensors(grid, 4, less_one=True, with_index=True)
    save_file(tensors | {f"lm_head.{k}": v for k, v in head.items()}, folder / "model.safetensors")
    save_file(meant | {"lm_head.weight": grid.values}, twin / "model.safetensors")
    wanted = PagedRunner(twin).logits(IDS)
    np.testing.assert_allclose(
        PagedRunner(folder).logits(IDS), wanted, rtol=0, atol=1e-9 * abs(wanted).max()
    )
    native = NativeBackend(BackendOptions(num_threads=1, max_tokens=64))
    found = PagedRunner(folder, native).logits(IDS)
    assert np.sqrt(np.mean((found - wanted) ** 2)) < 0.03 * abs(wanted).max()


def experts(tmp_path: Path, *, order: bool) -> tuple[Path, Path]:
    tiny = tiny_model("qwen3_moe", **FAMILIES["qwen3_moe"])
    base = {"bits": 4, "group_size": 32, "sym": False, "desc_act": order}
    twin = write_gptq(tiny, tmp_path / "made", base, lambda module: base)
    return tmp_path / "made", twin


def test_experts_with_orders_of_their_own_are_refused_by_name(tmp_path: Path) -> None:
    """Another dtype runs them, as the message says."""
    path, twin = experts(tmp_path, order=True)
    program = build_programs(open_checkpoint(path).config)["decoder"]
    name = next(weight for weight in program.weights if "experts" in weight.name)
    with pytest.raises(SetupError, match=r"\(act-order\) are not supported\nhint: use --dtype bf"):
        WeightReader(open_checkpoint(path)).load(name)
    found = WeightReader(open_checkpoint(path), dtype="float32").load(name).dequantize()
    wanted = WeightReader(open_checkpoint(twin), dtype="float32").load(name).dequantize()
    np.testing.assert_array_equal(found, wanted)
    packing = WeightReader(open_checkpoint(path), quantization="int8", program=program)
    assert packing.load(name).shape == name.shape


def test_an_expert_whose_zeros_are_all_alike(tmp_path: Path) -> None:
    """Its zeros would be a zero point; beside the others' they are zeros of groups."""
    path, _ = experts(tmp_path, order=False)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for key in tensors:
        if ".experts.1." in key and key.endswith("qzeros"):
            tensors[key] = torch.full_like(tensors[key], 0x44444444)
    save_file(tensors, file)
    checkpoint = open_checkpoint(path)
    program = build_programs(checkpoint.config)["decoder"]
    for weight in program.weights:
        if "experts" in weight.name:
            found = WeightReader(checkpoint).load(weight).dequantize()
            for expert, name in enumerate(weight.tensor_names):
                wanted = checkpoint.tensor(name).dequantize()
                np.testing.assert_array_equal(found[expert], wanted)
