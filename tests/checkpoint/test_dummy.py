"""Random weights in place of files: the same on every backend, in the shapes and formats that the
options ask for.
"""

import json

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.api.errors import UnsupportedModel
from octavo.checkpoint.dummy import FORMATS, DummyWeights
from octavo.checkpoint.open import ConfigFile
from octavo.checkpoint.weights import loaded_formats
from octavo.executor.base import BackendOptions
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from octavo.program.program import Weight
from tests.support.llm_tools import make_llm, prompts_of
from tests.support.paged_runner import PagedRunner
from tests.support.tiny_models import tiny_model


@pytest.fixture
def config(tmp_path):
    """The path of a lone config.json."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_model("llama", hidden_size=64, intermediate_size=96).config))
    return path


@pytest.mark.parametrize("stored", FORMATS)
def test_matrices_keep_a_values_size_in_every_format(stored):
    weight = Weight("model.layers.3.mlp.up_proj.weight", (130, 96))
    made, again = (DummyWeights(lambda weight: stored).load(weight) for _ in range(2))
    numbers = made.dequantize()
    assert numbers.shape == (130, 96) and np.array_equal(numbers, again.dequantize())
    reach = (3 / 96) ** 0.5
    assert reach * 0.95 < abs(numbers).max() <= reach * 1.01 and abs(numbers.mean()) < reach / 20
    assert not (numbers[:-1] == numbers[1:]).all(axis=1).any(), "rows differ"
    other = DummyWeights(lambda weight: stored).load(Weight("another", (130, 96))).dequantize()
    assert not np.array_equal(numbers, other)


def test_experts_and_vectors():
    load = DummyWeights(lambda weight: "Q4_1").load
    assert load(Weight("experts", (3, 20, 64))).dequantize().shape == (3, 20, 64)
    vector = load(Weight("norm", (50,))).dequantize()
    assert (vector > 0.85).all() and (vector < 1.15).all()


def test_what_it_does_not_draw_is_refused_by_name():
    with pytest.raises(
        UnsupportedModel, match=r"dummy supports weights stored as F32, .*; w is Q6_K"
    ):
        DummyWeights(lambda weight: "Q6_K").load(Weight("w", (4, 256)))


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
def test_torch_computes_what_the_reference_does(config, quantization):
    header = ConfigFile(config)
    program = build_programs(header.config)["decoder"]
    load = DummyWeights(loaded_formats(header, "float32", quantization, program)).load
    ids = np.random.default_rng(0).integers(3, 300, 20)
    path = tiny_model("llama", hidden_size=64, intermediate_size=96).path
    wanted = PagedRunner(path, load=load).logits(ids)
    found = PagedRunner(path, TorchBackend(BackendOptions(num_threads=1)), load=load).logits(ids)
    bound = 0.1 if quantization == "fp8" else 3e-5
    assert (
        wanted.std() > 0.1 and np.sqrt(np.mean((found - wanted) ** 2)) < bound * abs(wanted).max()
    )


def test_an_engine_from_a_config_alone(config):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    made = []
    for path in (config, config.parent):
        with make_llm(model_path=path, load_format="dummy", backend="reference") as llm:
            (output,) = llm.generate(prompts_of(9), params, use_tqdm=False)
            made.append(output.outputs[0].token_ids)
    assert made[0] == made[1] and len(made[0]) == 6
