"""Encoders and decoders against transformers in float64: the logits of one pass, whole and in
chunks. Tolerance as in test_families.py.
"""

import numpy as np
import pytest
import torch

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.models.registry import build_programs
from tests.models.test_families import TOLERANCE
from tests.models.test_t5 import DECODER_IDS, ENCODER_IDS, logits
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_models import double_precision, in_float64, tiny_model

torch.set_num_threads(1)

CASES = {
    "t5": ("t5", {}),
    "mt5": ("mt5", {}),
    "bart": ("bart", {}),
    "bart-scaled-relu": ("bart", {"scale_embedding": True, "activation_function": "relu"}),
    "mbart": ("mbart", {}),
    "marian": ("marian", {}),
    "m2m_100": ("m2m_100", {}),
}


def computed_table(tiny):
    """Returns the table of positions that no checkpoint has; None where the family reads it."""
    weights = build_programs(tiny.config)["decoder"].weights
    (table,) = [weight for weight in weights if weight.name == "sinusoids"] or [None]
    return table and WeightReader(open_checkpoint(tiny.path)).load(table).codes


def oracle(tiny):
    """Returns transformers' logits; its table of positions is that of float32."""
    model = in_float64(tiny.model)
    table = computed_table(tiny)
    with double_precision():
        for module in model.modules():
            if table is not None and "SinusoidalPositionalEmbedding" in type(module).__name__:
                name = "weight" if hasattr(module, "weight") else "weights"
                values = torch.tensor(table).double()
                setattr(module, name, torch.nn.Parameter(values) if name == "weight" else values)
        ids = [torch.tensor(each)[None] for each in (ENCODER_IDS, DECODER_IDS)]
        return model(ids[0], decoder_input_ids=ids[1], use_cache=False).logits[0].numpy()


@pytest.mark.parametrize("backend", ["reference", "torch", "native"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, backend):
    family, overrides = CASES[case]
    tiny = tiny_model(family, **overrides)
    wanted = oracle(tiny)
    runner = PagedRunner(tiny.path, backend_named(backend))
    found = logits(runner, 40)
    tolerance = TOLERANCE.get(backend, 3e-5) * abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance)
    if backend != "torch":  # whose products depend on their number of rows
        np.testing.assert_array_equal(logits(runner, 7), found)


@pytest.mark.parametrize("family", ["marian", "m2m_100"])
def test_computed_positions_are_those_of_transformers(family):
    """The first row of M2M-100's is the padding's, which nothing reads."""
    tiny = tiny_model(family)
    fresh = type(tiny.model)(tiny.model.config).model.encoder.embed_positions
    table = computed_table(tiny)
    wanted = (fresh.weight if family == "marian" else fresh.weights).detach().numpy()
    np.testing.assert_allclose(table[1:], wanted[1 : len(table)], rtol=0, atol=5e-5)
