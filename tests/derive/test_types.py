"""Types without a module here, of every kind that can be derived, with the configs of
benchmarks/derive_types.py.
"""

import importlib.util
from pathlib import Path

import pytest

from octavo.api.errors import UnsupportedModel
from octavo.derive.derive import derive, lower
from octavo.derive.verify import compare, tolerance

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "derive_types.py"
SPEC = importlib.util.spec_from_file_location("derive_types", SCRIPT)
derive_types = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(derive_types)

EXACT = (
    *("youtu", "minicpm3", "codegen", "gpt_neox_japanese", "mvp", "ctrl", "xglm", "big_bird"),
    *(
        "data2vec-text",
        "pegasus",
        "granitemoeshared",
        "aria_text",
        "minimax_m3_vl_text",
        "got_ocr2",
        "cohere_compass_text",
    ),
    *("roc_bert", "hrm_text", "gpt_neo", "lfm3"),
)
"""Latent attention, attention of their own, tables of sines, segments, positions behind padding,
parts of an encoder-decoder, stored experts, gates, a text model within one of images, several
embeddings side by side, layers that run several times, windows of their own, a gate for each head,
and a config with the key `pooling`.
"""

REJECTED = {
    "doge": "a mask of its own",
    "falcon_mamba": "aten.matmul",
    "kimi_linear": "are put together",
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("model_type", EXACT)
def test_a_type_without_a_module_gives_the_logits_of_transformers(model_type):
    config = derive_types.tiny_config(model_type)
    program = derive(config, lambda _line: None)
    assert compare(program, config) <= tolerance(program)


@pytest.mark.parametrize("model_type", REJECTED)
def test_types_that_programs_cannot_express_are_rejected(model_type):
    with pytest.raises(UnsupportedModel, match=REJECTED[model_type]):
        lower(derive_types.tiny_config(model_type))
