"""Tiny seeded models of every family, built with transformers and saved as Hugging Face
directories, once a test session.

`tiny_model("llama")` gives its config.json, the directory and the torch model in float32. Weights
are drawn wide enough that logits differ clearly. `in_float64` gives the same model computing in
float64 throughout, as an oracle.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import transformers

from octavo.models import registry
from tests.support.tiny_details import DETAILS
from tests.support.tiny_shapes import ENCODER_DECODERS, SHAPES

FAMILIES = tuple(SHAPES)

DISTINCT = (
    *("llama", "qwen2", "gemma3_text", "gpt2", "qwen2_moe", "gpt_oss", "deepseek_v3"),
    *("bloom", "gptj", "olmo2", "lfm2", "mamba", "mamba2"),
)
"""Families that between them have every op, cache group and way of storing weights."""


def each_family() -> list[Any]:
    """Returns all families for `pytest.mark.parametrize`; those that add nothing are slow tests."""
    return [
        family if family in DISTINCT else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
    ]


NATIVE_FAMILIES = tuple(family for family in FAMILIES if registry.FAMILIES[family].native)
"""Families that the native backend runs."""


class TinyModel(NamedTuple):
    """A tiny model: its config.json, the directory with it and model.safetensors, and the torch
    model in float32, eval mode.
    """

    config: dict[str, Any]
    path: Path
    model: Any


def tiny_model(model_type: str, *, seed: int = 0, **overrides: Any) -> TinyModel:
    """Returns a seeded model of the family; `overrides` are fields of its transformers config."""
    return _build(model_type, seed, json.dumps(overrides, sort_keys=True))


@cache
def _build(model_type: str, seed: int, overrides: str) -> TinyModel:
    options = (
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        | (SHAPES | ENCODER_DECODERS).get(model_type, {})
        | DETAILS.get(model_type, {})
        | json.loads(overrides)
    )
    config = transformers.AutoConfig.for_model(model_type, **options)
    model = _model_class(config)._from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    _draw_weights(model, seed)
    folder = session_directory()
    path = folder / f"{model_type}-{len(list(folder.iterdir()))}"
    with _quiet():
        model.save_pretrained(path)
    return TinyModel(json.loads((path / "config.json").read_text()), path, model.eval())


def in_float64(model: Any, *, attention: str = "eager") -> Any:
    """Returns the same model in float64 with an implementation of attention that transformers has.
    Run it inside `double_precision()`, for transformers casts to float32 here and there.
    """
    with double_precision():
        twin = (
            type(model)
            ._from_config(
                model.config, attn_implementation=attention, experts_implementation="eager"
            )
            .double()
            .eval()
        )
        twin.load_state_dict(model.state_dict())
    for module in twin.modules():
        if type(module).__name__ == "Lfm2MoeTopKRouter":
            module.forward = partial(_route_without_addend, module)
    return twin


def _route_without_addend(router: Any, rows: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    """Routes as LFM2 MoE's router, without the 1e-6 that it adds to the sum of a row's weights."""
    logits = torch.nn.functional.linear(rows, router.weight)
    scores = logits.sigmoid()
    ids = (scores if bias is None else scores + bias).topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if router.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return logits, weights * router.routed_scaling_factor, ids


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Gives float64 to code that asks PyTorch for float32 by name (norms, softmax, rope tables, and
    ALiBi in bfloat16).
    """
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
        mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double),
        torch.no_grad(),
    ):
        yield


def _model_class(config: Any) -> Any:
    auto = (
        transformers.AutoModelForSpeechSeq2Seq
        if hasattr(config, "num_mel_bins")
        else transformers.AutoModelForSeq2SeqLM
        if config.is_encoder_decoder
        else transformers.AutoModelForMultimodalLM
        if hasattr(config, "vision_config") or hasattr(config, "audio_config")
        else transformers.AutoModelForCausalLM
    )
    return auto._model_mapping[type(config)]


def _draw_weights(model: Any, seed: int) -> None:
    """Draws matrices at 1.2 / sqrt(inputs), norms near their neutral value, and biases that are not
    zero. What transformers computes and freezes stays.
    """
    generator = torch.Generator().manual_seed(seed)
    frozen = {name for name, tensor in model.named_parameters() if not tensor.requires_grad}
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            noise = torch.randn(tensor.shape, generator=generator)
            if name in frozen:
                continue
            if name.endswith(("_min", "_max")):  # bounds of linear layers
                tensor.copy_((1.0 + 0.2 * noise) * (-1.5 if name.endswith("_min") else 1.2))
            elif name.endswith("std_scale"):
                tensor.copy_(1.0 + 0.2 * noise)
            elif (
                ("embed" in name and "norm" not in name)
                or "shared" in name
                or "wte" in name
                or "wpe" in name
            ):
                tensor.copy_(0.5 * noise)
            elif name.endswith("A_log"):
                tensor.copy_(noise - 2)  # states that last for some tens of tokens
            elif "norm" in name or "ln_" in name or name.endswith(("scale", "_scalar")):
                tensor.add_(0.2 * noise)
            elif tensor.ndim < 2 or name.endswith("_bias"):
                tensor.copy_(0.3 * noise)
            elif "relative_attention_bias" in name:
                tensor.copy_(noise)
            else:
                tensor.copy_(1.2 * noise / min(tensor.shape[-2:]) ** 0.5)
    model.tie_weights()


def session_directory() -> Path:
    """Returns a directory that is removed when Python ends."""
    return Path(_session_directory().name)


@cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    """Makes a directory that is removed when Python ends."""
    return tempfile.TemporaryDirectory(prefix="octavo-tiny-")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    yield
