"""T5's encoder and decoder Programs against transformers in float64. Tolerance as in
test_families.py.
"""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.executor.base import BackendOptions
from octavo.executor.reference.attention import t5_buckets
from octavo.executor.reference.backend import ReferenceBackend
from octavo.executor.torch.backend import TorchBackend
from octavo.models.registry import build_programs
from octavo.program.ops import T5Bias
from octavo.program.program import Weight
from tests.models.test_families import TOLERANCE
from tests.support.paged_runner import PagedRunner, Request, backend_named
from tests.support.tiny_models import double_precision, in_float64, tiny_model

torch.set_num_threads(1)

ENCODER_IDS = np.random.default_rng(2).integers(3, 250, 150)
DECODER_IDS = np.random.default_rng(3).integers(3, 250, 40)


def oracle(model, encoder_ids=ENCODER_IDS, decoder_ids=DECODER_IDS):
    with double_precision():
        return (
            model(
                torch.tensor(encoder_ids)[None], decoder_input_ids=torch.tensor(decoder_ids)[None]
            )
            .logits[0]
            .numpy()
        )


def start(runner, encoder_ids=ENCODER_IDS, decoder_ids=DECODER_IDS):
    """Returns a request whose encoder half has run."""
    request = runner.add(decoder_ids, context=max(len(encoder_ids), len(decoder_ids)))
    runner.step(
        [(Request(encoder_ids, request.blocks, request.written), 0, len(encoder_ids))],
        program="encoder",
    )
    return request


def logits(runner, chunk=40, encoder_ids=ENCODER_IDS, decoder_ids=DECODER_IDS):
    request = start(runner, encoder_ids, decoder_ids)
    return np.concatenate(
        [runner.step([(request, i, min(i + chunk, 40))])["logits"] for i in range(0, 40, chunk)]
    )


@pytest.mark.parametrize("kind", [ReferenceBackend, TorchBackend])
def test_an_encoders_rows_are_its_tokens(kind):
    """A step of the encoder has buffers like any other Program's."""
    encoder = build_programs(tiny_model("t5").config)["encoder"]
    axes = {value.axis for op in encoder.ops for value in op.outputs}
    assert axes == {"tokens", "requests"}
    found = kind(BackendOptions(max_tokens=64)).footprint(encoder, lambda weight: "F32")
    widest = max(value.width for op in encoder.ops for value in op.outputs)
    assert found.step_bytes >= 64 * 4 * widest


def test_its_groups_say_how_long_they_live():
    """Only the encoder's own step reads its keys; the cross keys stay as many as it has written."""
    groups = build_programs(tiny_model("t5").config)["decoder"].groups
    assert [(group.name, group.kv_kind) for group in groups] == [
        ("encoder", "step"),
        ("decoder", "growing"),
        ("cross", "fixed"),
    ]


BACKENDS = pytest.mark.parametrize("backend", ["reference", "torch"])


@BACKENDS
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"feed_forward_proj": "gelu"},
        {"relative_attention_num_buckets": 20, "num_decoder_layers": 1},
    ],
)
def test_version_1_0(overrides, backend):
    tiny = tiny_model("t5", **overrides)
    wanted = oracle(in_float64(tiny.model))
    for chunk in (40, 7):
        found = logits(PagedRunner(tiny.path, backend_named(backend)), chunk)
        np.testing.assert_allclose(
            found, wanted, rtol=0, atol=TOLERANCE[backend] * abs(wanted).max()
        )


@BACKENDS
@pytest.mark.parametrize("old_keys", [True, False])
def test_version_1_1_has_its_own_unscaled_head(tmp_path, old_keys, backend):
    tiny = tiny_model("t5", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    head = torch.randn(250, 48, generator=torch.Generator().manual_seed(5))
    model = in_float64(tiny.model)
    model.lm_head.weight = torch.nn.Parameter(head.double())
    save_file(
        {
            **{
                name: t for name, t in tiny.model.state_dict().items() if "embed_tokens" not in name
            },
            "lm_head.weight": head,
        },
        tmp_path / "model.safetensors",
    )
    config = (
        {name: value for name, value in tiny.config.items() if name != "scale_decoder_outputs"}
        if old_keys
        else tiny.config
    )
    (tmp_path / "config.json").write_text(
        json.dumps(config | ({"tie_word_embeddings": False} if old_keys else {}))
    )
    wanted = oracle(model)
    found = logits(PagedRunner(tmp_path, backend_named(backend)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE[backend] * abs(wanted).max())


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_decoder_is_bitwise_the_whole(chunk):
    path = tiny_model("t5").path
    np.testing.assert_array_equal(logits(PagedRunner(path), chunk), logits(PagedRunner(path)))


def test_requests_of_different_lengths_in_one_batch_are_bitwise_alone():
    path = tiny_model("t5").path
    runner = PagedRunner(path, padding=3)
    pairs = [(ENCODER_IDS[:n], DECODER_IDS[:m]) for n, m in ((90, 3), (1, 20), (33, 17))]
    alone = []
    for encoder_ids, decoder_ids in pairs:
        alone.append(
            runner.step([(start(runner, encoder_ids, decoder_ids), 0, len(decoder_ids))])["logits"]
        )
    requests = [runner.add(d, context=90) for _, d in pairs]
    encoders = [
        (Request(e, request.blocks, request.written), 0, len(e))
        for (e, _), request in zip(pairs, requests, strict=True)
    ]
    runner.step(encoders, program="encoder")
    batched = runner.step(
        [(request, 0, len(d)) for (_, d), request in zip(pairs, requests, strict=True)]
    )["logits"]
    np.testing.assert_array_equal(batched, np.concatenate(alone))


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (20, 50), (64, 200)])
def test_buckets_are_those_of_transformers_in_float32(bidirectional, num_buckets, max_distance):
    """Buckets are those of transformers in float32, T5's precision: the logarithm's rounding moves
    no bucket's edge.
    """
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-2000, 2000)
    wanted = T5Attention._relative_position_bucket(
        torch.tensor(distance), bidirectional, num_buckets, max_distance
    ).numpy()
    bias = T5Bias(Weight("table", (num_buckets, 1)), num_buckets, max_distance, bidirectional)
    np.testing.assert_array_equal(t5_buckets(distance, bias), wanted)
