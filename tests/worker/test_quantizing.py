"""`octavo quantize` on tiny models: what is written is what was meant, factors change nothing but
rounding, an interrupted run comes to the same files, and what cannot be done is refused first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file, save_file

from octavo.api.errors import ConfigError, SetupError, UnsupportedModel, WeightMismatch
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.checkpoint.writing.destination import HfDirectory
from octavo.cli.quantize import make_recipe
from octavo.models.registry import build_programs
from octavo.quant.making.recipe import Recipe
from octavo.tools.quantize import Quantized, quantize_checkpoint
from octavo.worker.quantizing.calibration_run import CalibrationRun
from octavo.worker.quantizing.targets import added_values
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_gguf import tiny_model as tiny_for_gguf
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import TinyModel, tiny_model

pytestmark = pytest.mark.sampled(one_in=2)

SIZES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "intermediate_size": 96},
    "phi3": {"hidden_size": 64, "intermediate_size": 96},
    "gemma3_text": {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32},
    "qwen2": {"hidden_size": 96, "intermediate_size": 96},
    "bloom": {"hidden_size": 96},
    "qwen2_moe": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
GGUF_SAYS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None, "num_hidden_layers": 2, "vocab_size": 264},
    "mixtral": {"sliding_window": None},
    "qwen2_moe": {"mlp_only_layers": []},
}
"""Settings of what the architectures of GGUF can say."""
TEXTS = np.random.default_rng(5).integers(0, 250, (4, 48)).astype(np.int32)
NONE: dict[str, Any] = {
    "method": "rtn",
    "output_format": "compressed-tensors",
    "bits": None,
    "group": 32,
    "scheme": None,
    "sym": False,
    "desc_act": False,
    "damp_percent": 1.0,
    "keep_sensitive": False,
}


def recipe(**options: Any) -> Recipe:
    return make_recipe(**(NONE | options))


def tiny(family: str) -> TinyModel:
    return tiny_model(family, **SIZES[family])


def quantize(
    path: Path, output: Path, chosen: Recipe, texts: np.ndarray | None = TEXTS
) -> Quantized:
    return quantize_checkpoint(open_checkpoint(path), chosen, output, texts, lambda text: None)


def distance(path: Path, other: Path) -> float:
    """Returns the relative distance of two models' logits over a text."""
    ids = np.random.default_rng(9).integers(0, 250, 32)
    first, second = (PagedRunner(each).logits(ids) for each in (path, other))
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


def last_hidden(path: Path) -> np.ndarray:
    """Returns what the last layer makes of the calibration texts, `[T, hidden]`."""
    checkpoint = open_checkpoint(path)
    program = build_programs(checkpoint.config)["decoder"]
    run = CalibrationRun(program, WeightReader(checkpoint).load, TEXTS)
    while run.op is not None and run.op.outputs != (program.outputs["logits"],):
        run.advance()
    assert run.op is not None
    return run.rows(run.op.inputs[0])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen2_moe", "bloom", "lfm2", "mamba"])
def test_the_run_computes_what_the_reference_computes(family: str) -> None:
    """Logits of several texts at once, with few layers' keys, are within 1e-4 of the largest."""
    checkpoint = open_checkpoint(tiny_model(family).path)
    program = build_programs(checkpoint.config)["decoder"]
    run = CalibrationRun(program, WeightReader(checkpoint).load, TEXTS)
    states = 0
    while run.op is not None and run.op.outputs != (program.outputs["logits"],):
        run.advance()
        states += run.state() is not None
    before_head = run.rows(run.op.x)[-48:]  # type: ignore[union-attr]
    load = WeightReader(checkpoint).load
    head = load(run.op.weights[0]).dequantize()  # type: ignore[union-attr]
    found = before_head @ head.T
    wanted = PagedRunner(checkpoint.path).logits(TEXTS[-1])
    if family not in ("gemma3_text", "bloom"):  # whose logits are changed behind the product
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * abs(wanted).max())
    assert states > 2


RECIPES: dict[str, dict[str, Any]] = {
    "rtn": {},
    "gptq": {"method": "gptq", "output_format": "gptq"},
    "gptq-order": {"method": "gptq", "output_format": "gptq", "desc_act": True},
    "gptq-3-bits": {"method": "gptq", "output_format": "gptq", "bits": 3, "sym": True},
    "awq": {"method": "awq", "output_format": "awq"},
    "packed": {"method": "gptq"},
    "packed-sym": {"method": "gptq", "sym": True},
    "gptaq": {"method": "gptq", "desc_act": True, "gptaq": True, "output_format": "gptq"},
    "smoothquant": {"method": "smoothquant", "scheme": "w8a8"},
    "mixed": {"method": "gptq", "output_format": "gptq", "keep_sensitive": True},
    "mixed-packed": {"method": "awq", "keep_sensitive": True},
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_read_is_what_was_meant(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix of the written model has the numbers of the rounded one."""
    meant: dict[str, np.ndarray] = {}
    write = HfDirectory.write_matrix

    def spy(self: HfDirectory, plan: Any, matrix: Any) -> None:
        meant[plan.name] = matrix.values()
        write(self, plan, matrix)

    monkeypatch.setattr(HfDirectory, "write_matrix", spy)
    chosen = recipe(**RECIPES[name])
    texts = TEXTS if chosen.needs_calibration else None
    made = quantize(tiny("llama").path, tmp_path / "out", chosen, texts)
    checkpoint = open_checkpoint(tmp_path / "out")
    assert made.num_matrices == len(meant) == 7 * tiny("llama").config["num_hidden_layers"]
    for tensor, values in meant.items():
        found = checkpoint.tensor(tensor).dequantize()
        np.testing.assert_allclose(found, values, rtol=0, atol=1e-6 * abs(values).max())
    assert made.left == ("lm_head",) and not made.fell_back
    bound = 0.08 if name == "smoothquant" else 1.2 if "3" in name else 0.7
    assert distance(tmp_path / "out", tiny("llama").path) < bound
    wide = {key for key in meant if checkpoint.tensor(key).bits == 8}
    assert bool(wide) == ("mixed" in name or name == "smoothquant")


@pytest.mark.parametrize("family", ["llama", "bloom", "gemma3_text"])
def test_products_that_are_added_to_the_residual_stream_are_known(family: str) -> None:
    """A norm behind the products, as Gemma 3 has, leaves none."""
    program = build_programs(tiny(family).config)["decoder"]
    found = {name.rpartition(".")[2] for name in added_values(program)}
    wanted = {"llama": {"o_proj", "down_proj"}, "bloom": {"dense", "dense_4h_to_h"}}
    assert found == wanted.get(family, set())
    makers = {value.name: index for index, op in enumerate(program.ops) for value in op.outputs}
    assert all(makers[own] > makers[added.name] for own, added in added_values(program).items())


def test_later_matrices_make_up_for_earlier_ones(tmp_path: Path) -> None:
    """Less of the error reaches the end of the calibration texts."""
    path = tiny("llama").path
    wanted = last_hidden(path)
    errors = []
    for gptaq in (True, False):
        made = tmp_path / str(gptaq)
        chosen = recipe(method="gptq", output_format="gptq", bits=3, desc_act=True, gptaq=gptaq)
        quantize(path, made, chosen)
        errors.append(float(np.square(last_hidden(made) - wanted).sum()))
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("family", ["llama", "phi3", "gemma3_text", "qwen2", "bloom"])
def test_factors_change_nothing_but_rounding(tmp_path: Path, family: str) -> None:
    """With 8 bits, AWQ's factors leave the model what it is: norms, values and gated products take
    them back.
    """
    path = tiny(family).path
    quantize(path, tmp_path / "out", recipe(method="awq", bits=8))
    assert distance(tmp_path / "out", path) < 0.05
    before, after = (load_file(each / "model.safetensors") for each in (path, tmp_path / "out"))
    norms = [key for key in before if "norm" in key and key in after and key.endswith("weight")]
    assert any((before[key] != after[key]).any() for key in norms)


def test_experts_without_tokens_are_rounded_to_nearest_and_listed(tmp_path: Path) -> None:
    few = TEXTS[:1, :16]
    made = quantize(tiny("qwen2_moe").path, tmp_path / "few", recipe(method="gptq"), few)
    assert made.fell_back and all(".experts." in name for name in made.fell_back)
    assert any(name.endswith("mlp.gate") for name in made.left)
    many = quantize(tiny("qwen2_moe").path, tmp_path / "many", recipe(method="gptq"))
    assert len(many.fell_back) < len(made.fell_back)
    assert distance(tmp_path / "many", tiny("qwen2_moe").path) < 1.0


@pytest.mark.parametrize("name", ["gptq", "gptaq", "awq", "smoothquant", "rtn"])
def test_an_interrupted_run_goes_on(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are those of an undisturbed run, and none has its final name before its end."""
    chosen = recipe(**RECIPES[name])
    texts = TEXTS if chosen.needs_calibration else None
    path = tiny("llama").path
    quantize(path, tmp_path / "whole", chosen, texts)
    write, counts = HfDirectory.write_matrix, [0]

    def interrupted(self: HfDirectory, plan: Any, matrix: Any) -> None:
        counts[0] += 1
        if counts[0] in (6, 11, 16):
            raise KeyboardInterrupt
        write(self, plan, matrix)

    monkeypatch.setattr(HfDirectory, "write_matrix", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            quantize(path, tmp_path / "cut", chosen, texts)
        assert not (tmp_path / "cut").exists()
    with pytest.raises(ConfigError, match="interrupted run with other values of options"):
        quantize(path, tmp_path / "cut", recipe(**RECIPES[name], damp_percent=2.0), texts)
    quantize(path, tmp_path / "cut", chosen, texts)
    assert counts[0] < 2 * 7 * tiny("llama").config["num_hidden_layers"]
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "cut" / file.name).read_bytes() == file.read_bytes(), file.name
    assert not (tmp_path / "cut.partial").exists()


def test_a_full_disk_is_met_before_anything_is_computed(small_disk: Path) -> None:
    with pytest.raises(ConfigError, match="no room for"):
        quantize(tiny("llama").path, small_disk / "out", recipe(), None)
    assert not list(small_disk.iterdir())


def test_an_output_that_exists_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="exists"):
        quantize(tiny("llama").path, tmp_path, recipe(), None)


def test_groups_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="group: 80 does not divide the 64 inputs of") as error:
        quantize(tiny("llama").path, tmp_path / "out", recipe(group=80), None)
    assert "--group 32 or 16 divides all" in str(error.value)
    with pytest.raises(UnsupportedModel, match=r"none of the .* matrices can be stored"):
        quantize(tiny_model("gpt2").path, tmp_path / "out", recipe(group=24), None)
    assert not list(tmp_path.iterdir())


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tiny("llama").path
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(WeightMismatch, match=f"{name} holds NaN"):
        quantize(tmp_path, tmp_path / "out", recipe(), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "magic"}, "method: got 'magic', expected rtn"),
        ({"output_format": "zip"}, "format: got 'zip'"),
        ({"scheme": "w3a3"}, "scheme: got 'w3a3'"),
        ({"bits": 5}, "bits: got 5, expected 4, 8 with format compressed-tensors"),
        ({"bits": 4, "scheme": "w8a8"}, "bits: got 4, but scheme w8a8 has 8"),
        ({"group": 0}, "group: got 0"),
        ({"group": 8}, "group: got 8"),
        ({"desc_act": True}, "desc-act: requires method gptq"),
        (
            {"desc_act": True, "method": "gptq", "output_format": "awq"},
            "desc-act: awq does not store",
        ),
        (
            {"desc_act": True, "method": "gptq"},
            "desc-act: compressed-tensors does not store the order",
        ),
        ({"scheme": "w8a8", "output_format": "gptq"}, "scheme w8a8: gptq does not store"),
        ({"method": "smoothquant"}, "smoothquant requires 8-bit weights"),
        ({"damp_percent": 0.0}, "damp-percent: got 0.0"),
        ({"method": "awq", "gptaq": True}, "gptaq: requires method gptq"),
        ({"keep_sensitive": True, "output_format": "awq"}, "keep-sensitive: awq"),
    ],
)
def test_knobs_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "rtn"},
        {"method": "gptq"},
        {"method": "awq"},
        {"method": "gptq", "bits": 8},
        {"method": "rtn", "sym": True},
        {"method": "gptq", "keep_sensitive": True},
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_gguf_files(tmp_path: Path, architecture: str, options: dict[str, Any]) -> None:
    """A GGUF file becomes another one, whose tensors stand in llama.cpp's order of rows."""
    source = write_tiny_gguf(
        tmp_path / "source.gguf", architecture, tiny_for_gguf(architecture), extra={}
    )
    chosen = recipe(output_format="gguf", **options)
    texts = TEXTS[:, :48] % 40 if chosen.needs_calibration else None
    made = quantize(source, tmp_path / "out", chosen, texts)
    found = open_checkpoint(tmp_path / "out")
    before = open_checkpoint(source)
    assert found.config == before.config | {"dtype": found.config["dtype"]}
    assert set(found.names()) == set(before.names()) and made.num_matrices > 6
    ids = np.random.default_rng(9).integers(0, 40, 24)
    first, second = (PagedRunner(each.path).logits(ids) for each in (found, before))
    bound = 0.1 if options.get("bits") == 8 else 0.7
    assert np.linalg.norm(first - second) < bound * np.linalg.norm(second)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "qwen2_moe", "mixtral"]
)
def test_gguf_of_safetensors(tmp_path: Path, family: str) -> None:
    """The header says the same model, at 8 bits its logits are close, at 4 near."""
    sizes = SIZES.get(family, {"hidden_size": 64, "intermediate_size": 96})
    source = tiny_model(family, **(sizes | GGUF_SAYS.get(family, {}))).path
    ids = np.random.default_rng(9).integers(0, 250, 32)
    wanted = PagedRunner(source).logits(ids)
    for bits, bound in ((8, 0.1), (4, 0.7)):
        chosen = recipe(output_format="gguf", bits=bits)
        made = quantize(source, tmp_path / str(bits), chosen, None)
        assert made.num_matrices >= 14
        file = tmp_path / str(bits) / "model.gguf"
        assert len(GGUFReader(file).tensors) > made.num_matrices / 8
        found = PagedRunner(tmp_path / str(bits)).logits(ids)
        assert np.linalg.norm(found - wanted) < bound * np.linalg.norm(wanted)


def test_gguf_of_safetensors_is_calibrated(tmp_path: Path) -> None:
    source = tiny("llama").path
    chosen = recipe(output_format="gguf", method="gptq")
    made = quantize(source, tmp_path / "out", chosen)
    assert made.num_matrices >= 14 and distance(tmp_path / "out", source) < 0.6


def test_gguf_cannot_say_every_model(tmp_path: Path) -> None:
    """llama.cpp's architecture of Mixtral has no windows."""
    source = tiny_model("mixtral", sliding_window=24).path
    with pytest.raises(UnsupportedModel, match="does not describe all parts"):
        quantize(source, tmp_path / "out", recipe(output_format="gguf"), None)


def test_gguf_of_a_family_without_an_architecture(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="has no supported GGUF architecture"):
        quantize(tiny_model("opt").path, tmp_path / "out", recipe(output_format="gguf"), None)
    assert not (tmp_path / "out").exists()


def test_config_says_what_was_done(tmp_path: Path) -> None:
    quantize(tiny("llama").path, tmp_path / "out", recipe(**RECIPES["mixed"]))
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "gptq" and config["bits"] == 4 and not config["sym"]
    assert any(key.startswith("+:") and row["bits"] == 8 for key, row in config["dynamic"].items())
    assert "-:^lm_head$" in config["dynamic"]
    with pytest.raises(SetupError, match="exists"):
        quantize(tiny("llama").path, tmp_path / "out", recipe(), None)
