"""Calibration against hooks in transformers' models in float64; every run gives the same bits."""

import numpy as np
import pytest
import torch
from transformers.pytorch_utils import Conv1D

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader, packing_plan
from octavo.models.registry import build_programs
from octavo.worker.calibration import input_powers, mean_squares
from tests.support.tiny_details import WIDTHS_OF_32
from tests.support.tiny_models import TinyModel, double_precision, in_float64, tiny_model

FAMILIES = ("llama", "gemma3_text", "gpt2", "qwen2_moe", "deepseek_v3")


def program_and_load(tiny: TinyModel):
    checkpoint = open_checkpoint(tiny.path)
    return build_programs(checkpoint.config)["decoder"], WeightReader(checkpoint).load


def hooked_powers(tiny: TinyModel, token_ids: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the mean square of each plain linear's inputs by its weight's name."""
    network, powers = in_float64(tiny.model), {}
    for name, module in network.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            keep = lambda _, inputs, name=name: powers.update(
                {f"{name}.weight": inputs[0].square().flatten(0, -2).mean(0).numpy()}
            )
            module.register_forward_pre_hook(keep)
    with double_precision():
        network(torch.tensor(token_ids)[None])
    return powers


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_the_model_multiplies(family):
    """The last input is measured behind everything else that the model computes."""
    tiny = tiny_model(family)
    token_ids = np.random.default_rng(2).integers(0, tiny.config["vocab_size"], 70).astype(np.int32)
    expected, found = (
        hooked_powers(tiny, token_ids),
        mean_squares(*program_and_load(tiny), token_ids),
    )
    shared = expected.keys() & found.keys()
    assert len(shared) >= 8 and list(found)[-1] in shared | {
        "model.embed_tokens.weight",
        "transformer.wte.weight",
    }
    for name in shared:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_of_four_bits_is_measured(family):
    program, load = program_and_load(tiny_model(family, **WIDTHS_OF_32[family]))
    powers = input_powers(program, load, context_tokens=40)
    wanted = [weight for weight, bits in packing_plan(program, "int4").items() if bits == "int4"]
    assert wanted
    for weight in wanted:
        assert powers[weight.name].shape == weight.shape[-1:]
        assert (np.frexp(powers[weight.name])[0] == 0.5).all(), "powers of two"
    again = input_powers(program, load, context_tokens=40)
    assert all((powers[name] == again[name]).all() for name in powers)


def test_weights_that_are_no_numbers_count_the_same():
    program, load = program_and_load(tiny_model("llama"))

    def broken(weight):
        packed = load(weight)
        if weight.name.endswith("layers.1.mlp.up_proj.weight"):
            packed.codes.setflags(write=False)
            return type(packed).plain(np.full(packed.shape, np.nan, np.float32))
        return packed

    powers = input_powers(program, broken, context_tokens=20)
    assert (powers["model.layers.2.mlp.up_proj.weight"] == 1).all()
    assert all(np.isfinite(power).all() for power in powers.values())
