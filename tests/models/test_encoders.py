"""Encoders give the rows of their transformers models, pooled in every way, and classify alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from octavo.api.errors import UnsupportedModel
from octavo.executor.base import BackendOptions
from octavo.executor.native.backend import NativeBackend
from octavo.executor.native.extension import supported_levels
from octavo.models.registry import build_programs
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_encoders import ENCODERS, encoder, encoder_config, in_float64
from tests.support.tiny_models import double_precision

LENGTHS = (1, 300, 17, 40)


def requests() -> list[NDArray[np.int64]]:
    """Returns token ids of several lengths, none of them a padding id, which has no position."""
    generator = np.random.default_rng(3)
    return [generator.integers(3, 130, length) for length in LENGTHS]


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Saves a model as its checkpoint, with the pooling that the loader would read."""

    def save(model: Any, pooling: str | None = None) -> Path:
        model.save_pretrained(tmp_path)
        path = tmp_path / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps(config | ({"pooling": {"mode": pooling}} if pooling else {})))
        return tmp_path

    return save


def run(path: Path, **how: Any) -> NDArray[np.float64]:
    """Returns what the encoder pools, of all requests in one step."""
    runner = PagedRunner(path, **how)
    spans = [(runner.add(ids), 0, len(ids)) for ids in requests()]
    return runner.step(spans, "encoder")["pooled"]


def pooled(rows: NDArray[np.float64], mode: str) -> NDArray[np.float64]:
    return {"cls": rows[0], "last": rows[-1], "mean": rows.mean(axis=0)}[mode]


def wanted(family: str, mode: str) -> NDArray[np.float64]:
    twin = in_float64(encoder(family))
    with double_precision():
        rows = [twin(torch.tensor(ids)[None]).last_hidden_state[0].numpy() for ids in requests()]
    return np.array([pooled(each, mode) for each in rows])


def close(got: NDArray[Any], expected: NDArray[Any], share: float) -> None:
    np.testing.assert_allclose(got, expected, atol=share * abs(expected).max(), rtol=0)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("mode", ["cls", "mean", "last"])
@pytest.mark.parametrize("family", ENCODERS)
def test_reference_rows_are_those_of_transformers(saved: Any, family: str, mode: str) -> None:
    close(run(saved(encoder(family), mode)), wanted(family, mode), 1e-9)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("level", supported_levels())
@pytest.mark.parametrize("family", ENCODERS)
def test_native_rows_are_those_of_transformers(saved: Any, family: str, level: str) -> None:
    backend = NativeBackend(BackendOptions(num_threads=1), level=level)
    close(run(saved(encoder(family), "mean"), backend=backend), wanted(family, "mean"), 3e-5)


@pytest.mark.parametrize("family", ENCODERS)
def test_torch_rows_are_those_of_transformers(saved: Any, family: str) -> None:
    close(
        run(saved(encoder(family), "mean"), backend=backend_named("torch")),
        wanted(family, "mean"),
        3e-5,
    )


@pytest.mark.parametrize("mode", ["cls", "mean", "last"])
def test_a_request_alone_is_bitwise_as_in_company(saved: Any, mode: str) -> None:
    path = saved(encoder("bert"), mode)
    together = run(path, backend=backend_named("native"))
    runner = PagedRunner(path, backend_named("native"))
    for ids, row in zip(requests(), together, strict=True):
        alone = runner.step([(runner.add(ids), 0, len(ids))], "encoder")["pooled"]
        np.testing.assert_array_equal(alone[0], row)


@pytest.mark.parametrize("family", [name for name in ENCODERS if name != "nomic_bert"])
def test_classifiers_score_as_transformers(saved: Any, family: str) -> None:
    model = encoder(family, classifies=True)
    with torch.no_grad():
        expected = [model(torch.tensor(ids)[None]).logits[0].numpy() for ids in requests()]
    got = run(saved(model), backend=backend_named("native"))
    close(got, np.array(expected), 3e-5)


@pytest.mark.parametrize("pooling", ["bos", "mean"])
def test_eurobert_classifies_by_its_pooling(saved: Any, pooling: str) -> None:
    model = encoder("eurobert", classifies=True)
    pooled_late = model.classifier_pooling
    model.config.classifier_pooling = model.classifier_pooling = pooling
    try:
        with torch.no_grad():
            expected = [model(torch.tensor(ids)[None]).logits[0].numpy() for ids in requests()]
        close(run(saved(model), backend=backend_named("native")), np.array(expected), 3e-5)
    finally:
        model.config.classifier_pooling = model.classifier_pooling = pooled_late


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
@pytest.mark.parametrize("activation", ["tanh", "gelu"])
def test_deberta_v2_convolves_as_transformers(
    saved: Any, monkeypatch: Any, backend: str, activation: str
) -> None:
    options = {"conv_kernel_size": 3, "conv_act": activation}
    monkeypatch.setitem(ENCODERS, "deberta-v2", ENCODERS["deberta-v2"] | options)
    encoder.cache_clear()
    try:
        expected, path = wanted("deberta-v2", "mean"), saved(encoder("deberta-v2"), "mean")
        assert json.loads((path / "config.json").read_text())["conv_kernel_size"] == 3
        share = 1e-9 if backend == "reference" else 3e-5
        close(run(path, backend=backend_named(backend)), expected, share)
    finally:
        encoder.cache_clear()


@pytest.mark.parametrize("classifies", [False, True])
def test_gte_of_its_own_release_is_that_of_transformers(saved: Any, classifies: bool) -> None:
    """The released config has a scaling of RoPE that transformers has converted to others."""
    factor, base, head = 8.0, 20_000.0, 18
    model = encoder("gte", classifies=classifies)
    rope = {"rope_type": "linear", "rope_theta": base * factor, "factor": factor ** (2 / head)}
    config = type(model.config)(**model.config.to_dict() | {"rope_parameters": rope})
    twin = type(model)._from_config(config, attn_implementation="eager").eval()
    twin.load_state_dict(model.state_dict())
    twin = in_float64(twin)
    with double_precision(), torch.no_grad():
        outputs = [twin(torch.tensor(ids)[None]) for ids in requests()]
    expected = [
        (one.logits if classifies else one.last_hidden_state.mean(dim=1))[0] for one in outputs
    ]
    path = saved(model, "mean") / "config.json"
    released = json.loads(path.read_text()) | {
        "model_type": "new",
        "architectures": [f"New{'ForSequenceClassification' if classifies else 'Model'}"],
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "pack_qkv": True,
        "rope_parameters": None,
        "rope_scaling": {"factor": factor, "type": "ntk"},
        "rope_theta": base,
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }
    path.write_text(json.dumps(released))
    close(run(path.parent), np.array(expected), 1e-9)


@pytest.mark.parametrize("family", ["mpnet", "bert", "electra"])
@pytest.mark.parametrize("names_head", [True, False])
def test_tensors_may_have_the_prefix_of_another_class(
    saved: Any, family: str, names_head: bool
) -> None:
    """all-mpnet-base-v2 names MPNetForMaskedLM, and its tensors have no prefix."""
    model = encoder(family)
    path = saved(model, "mean") / "config.json"
    named = f"{type(model).__name__.removesuffix('Model')}ForMaskedLM" if names_head else None
    path.write_text(
        json.dumps(json.loads(path.read_text()) | ({"architectures": [named]} if named else {}))
    )
    if not names_head:
        tensors = load_file(path.parent / "model.safetensors")
        save_file(
            {f"{family}.{name}": each for name, each in tensors.items()},
            path.parent / "model.safetensors",
        )
    close(run(path.parent), wanted(family, "mean"), 1e-9)


@pytest.mark.parametrize("family", ENCODERS)
def test_tokens_are_classified_as_in_transformers(saved: Any, family: str) -> None:
    model = in_float64(encoder(family, classifies=True, head="Token"))
    with double_precision():
        expected = [model(torch.tensor(ids)[None]).logits[0].numpy() for ids in requests()]
    got = run(saved(encoder(family, classifies=True, head="Token")))
    close(got, np.concatenate(expected), 1e-9)


def test_reference_reads_segments_as_transformers(saved: Any) -> None:
    model = encoder("bert", classifies=True)
    runner = PagedRunner(saved(model))
    spans, expected = [], []
    twin = in_float64(model)
    for ids in requests():
        start = len(ids) // 3
        request = runner.add(ids)
        request.second_start = start
        spans.append((request, 0, len(ids)))
        types = torch.tensor(np.arange(len(ids)) >= start).long()[None]
        with double_precision(), torch.no_grad():
            expected.append(twin(torch.tensor(ids)[None], token_type_ids=types).logits[0].numpy())
    close(runner.step(spans, "encoder")["pooled"], np.array(expected), 1e-9)


def test_a_pooling_is_never_guessed() -> None:
    config = encoder_config("bert") | {"pooling": None}
    with pytest.raises(UnsupportedModel, match=r"pooling mode is None, expected cls, mean, last"):
        build_programs(config)
