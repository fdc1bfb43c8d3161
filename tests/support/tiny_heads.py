"""Tiny seeded draft heads beside tiny models, and what each of them guesses by its formula: in
float64, over the whole text, with transformers' layers where it has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from transformers import Gemma4TextConfig

from tests.support.tiny_details import DETAILS
from tests.support.tiny_models import TinyModel, double_precision, in_float64, tiny_model

Tensor = torch.Tensor


@dataclass(frozen=True)
class TinyHead:
    """A model's directory, the options that draft for it, and the formula of the guesses."""

    path: Path
    options: dict[str, Any]
    guess: Callable[[Sequence[int], int], list[int]]
    """Guesses a number of tokens that follow a text whose last token the model has not computed."""


def chained(
    features: Tensor, head: Callable[[list[int], Tensor], tuple[Tensor, int]]
) -> Callable[[Sequence[int], int], list[int]]:
    """Returns how a head guesses: each guess becomes a token, and the head's row its features."""

    def guess(token_ids: Sequence[int], count: int) -> list[int]:
        ids, rows = list(token_ids), features[: len(token_ids) - 1]
        found: list[int] = []
        for _ in range(count):
            before = torch.cat([torch.zeros_like(features[:1]), rows])
            row, token_id = head(ids, before)
            rows = torch.cat([rows, row[None]])
            ids.append(token_id)
            found.append(token_id)
        return found

    return guess


def _rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _causal(length: int) -> Tensor:
    return torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)


# -- EAGLE-3 ---------------------------------------------------------------------------------------

NUM_LAYERS = 7
AUX_LAYERS = (2, 3, 4)
NUM_IDS = 200


def eagle3(folder: Path, *, own_table: bool = True, seed: int = 0, **config: Any) -> Path:
    """Writes a head for the tiny llama of seven layers."""
    target = tiny_model("llama", num_hidden_layers=NUM_LAYERS).config
    width, vocab_size = target["hidden_size"], target["vocab_size"]
    inner, heads, dim = 80, 4, 16
    dice = np.random.default_rng(seed)

    def matrix(rows: int, inputs: int) -> np.ndarray:
        return (dice.standard_normal((rows, inputs)) * 1.2 / np.sqrt(inputs)).astype(np.float32)

    ids = np.sort(dice.choice(vocab_size, NUM_IDS, replace=False)).astype(np.int64)
    tensors = {
        "fc.weight": matrix(width, 3 * width),
        "midlayer.self_attn.q_proj.weight": matrix(heads * dim, 2 * width),
        "midlayer.self_attn.k_proj.weight": matrix(2 * dim, 2 * width),
        "midlayer.self_attn.v_proj.weight": matrix(2 * dim, 2 * width),
        "midlayer.self_attn.o_proj.weight": matrix(width, heads * dim),
        "midlayer.mlp.gate_proj.weight": matrix(inner, width),
        "midlayer.mlp.up_proj.weight": matrix(inner, width),
        "midlayer.mlp.down_proj.weight": matrix(width, inner),
        "lm_head.weight": matrix(NUM_IDS, width),
        "d2t": ids - np.arange(NUM_IDS),
        "t2d": np.isin(np.arange(vocab_size), ids),
    }
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm"):
        tensors[f"{name}.weight"] = (1 + 0.1 * dice.standard_normal(width)).astype(np.float32)
    for name in ("midlayer.post_attention_layernorm", "norm"):
        tensors[f"{name}.weight"] = (1 + 0.1 * dice.standard_normal(width)).astype(np.float32)
    if own_table:
        tensors["embed_tokens.weight"] = matrix(vocab_size, width)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    head_config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "draft_vocab_size": NUM_IDS,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(head_config | config))
    return folder


def tiny_eagle3(folder: Path, *, own_table: bool = True) -> TinyHead:
    """Makes a head and its formula over the tiny llama's own hidden states."""
    target = tiny_model("llama", num_hidden_layers=NUM_LAYERS)
    path = eagle3(folder, own_table=own_table)
    options = {"spec_method": "eagle3", "spec_model": str(path)}

    loaded = load_file(path / "model.safetensors")

    def guess(token_ids: Sequence[int], count: int) -> list[int]:
        with double_precision():
            states = _hidden_states(target, token_ids)
            weights = {name: one.double() for name, one in loaded.items()}
            aux = torch.cat([states[layer] for layer in AUX_LAYERS], -1)
            features = aux @ weights["fc.weight"].T
            table = weights.get("embed_tokens.weight")
            if table is None:
                table = target.model.state_dict()["model.embed_tokens.weight"].double()
            return chained(features, lambda ids, before: _eagle3(weights, table, ids, before))(
                token_ids, count
            )

    return TinyHead(target.path, options, guess)


def _eagle3(
    weights: dict[str, Tensor], table: Tensor, ids: list[int], before: Tensor
) -> tuple[Tensor, int]:
    """Returns the head's last row of features and its likeliest token."""
    embedded, num = table[ids], len(ids)
    rows = torch.cat(
        [
            _rms_norm(embedded, weights["midlayer.input_layernorm.weight"]),
            _rms_norm(before, weights["midlayer.hidden_norm.weight"]),
        ],
        -1,
    )
    q, k, v = (
        (rows @ weights[f"midlayer.self_attn.{part}_proj.weight"].T).view(num, -1, 16)
        for part in "qkv"
    )
    angles = torch.arange(num)[:, None] * 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)

    def turned(x: Tensor) -> Tensor:
        low, high = x[..., :8], x[..., 8:]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    q, k = turned(q), turned(k).repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 4 + _causal(num)
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(2, 1))
    x = before + out.reshape(num, -1) @ weights["midlayer.self_attn.o_proj.weight"].T
    normed = _rms_norm(x, weights["midlayer.post_attention_layernorm.weight"])
    gate, up, down = (
        weights[f"midlayer.mlp.{part}_proj.weight"].T for part in ("gate", "up", "down")
    )
    x = x + (torch.nn.functional.silu(normed @ gate) * (normed @ up)) @ down
    logits = weights["lm_head.weight"] @ _rms_norm(x[-1], weights["norm.weight"])
    drawn = int(logits.argmax())
    return x[-1], drawn + int(weights["d2t"][drawn])


# -- multi-token prediction ------------------------------------------------------------------------


@dataclass(frozen=True)
class MtpNames:
    """Names of the tensors of a multi-token-prediction layer beside those of a family's layer."""

    module: str
    layer: str
    norms: tuple[str, str, str]
    """Norms of the embedding, of the hidden state and of the layer's output."""
    projection: str
    head: str
    offset: float = 0.0
    """What the family adds to the weights of its norms."""
    returns_normed: bool = False


BEHIND_LAST = MtpNames(
    "model.layers.2",
    "model.layers.2",
    ("enorm", "hnorm", "shared_head.norm"),
    "eh_proj",
    "shared_head.head",
)
QWEN = MtpNames(
    "mtp",
    "mtp.layers.0",
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
    "fc",
    "lm_head",
    offset=1.0,
    returns_normed=True,
)


def tiny_mtp(folder: Path, family: str, *, copies: bool = True, seed: int = 0) -> TinyHead:
    """Makes a model of two layers whose third one predicts: transformers' own layer, behind the
    products that join it; with `copies` it has a table and an output layer of its own.
    """
    names = QWEN if family.startswith("qwen") else BEHIND_LAST
    kinds = {"layer_types": ["linear_attention"] + ["full_attention"] * 2} if names is QWEN else {}
    whole = tiny_model(family, num_hidden_layers=3, **kinds)
    tensors = {
        name.replace("model.layers.2.", f"{names.layer}."): tensor
        for name, tensor in load_file(whole.path / "model.safetensors").items()
    }
    width = whole.config["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    name = names.module

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    for norm in names.norms:
        tensors[f"{name}.{norm}.weight"] = 1 - names.offset + 0.1 * noise(width)
    tensors[f"{name}.{names.projection}.weight"] = noise(width, 2 * width) / width**0.5
    if copies:
        tensors[f"{name}.embed_tokens.weight"] = noise(whole.config["vocab_size"], width)
        tensors[f"{name}.{names.head}.weight"] = noise(whole.config["vocab_size"], width)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: one.contiguous().numpy() for key, one in tensors.items()},
        folder / "model.safetensors",
    )
    changes: dict[str, Any] = {"num_hidden_layers": 2}
    if names is BEHIND_LAST:
        changes["num_nextn_predict_layers"] = 1
    else:
        changes["layer_types"] = kinds["layer_types"][:2]
    if family.startswith("qwen3_5"):
        changes["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(whole.config | changes))

    def guess(token_ids: Sequence[int], count: int) -> list[int]:
        model = in_float64(whole.model)
        with double_precision():
            weights = {key: one.double() for key, one in tensors.items()}
            hidden = _hidden_states(whole, token_ids)[2]
            norm = weights["model.norm.weight"] + names.offset
            features = _rms_norm(hidden, norm, _eps(whole))
            return chained(
                features, lambda ids, before: _mtp(model, names, weights, _eps(whole), ids, before)
            )(token_ids, count)

    return TinyHead(folder, {"spec_method": "mtp"}, guess)


def _mtp(
    model: Any,
    names: MtpNames,
    weights: dict[str, Tensor],
    eps: float,
    ids: list[int],
    before: Tensor,
) -> tuple[Tensor, int]:
    """Returns the layer's last row and its likeliest token."""
    name = names.module
    table = weights.get(f"{name}.embed_tokens.weight", weights["model.embed_tokens.weight"])
    matrix = weights.get(f"{name}.{names.head}.weight")
    if matrix is None:
        matrix = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    of_embedding, of_hidden, of_output = (
        weights[f"{name}.{norm}.weight"] + names.offset for norm in names.norms
    )
    both = torch.cat(
        [_rms_norm(table[ids], of_embedding, eps), _rms_norm(before, of_hidden, eps)], -1
    )
    x = (both @ weights[f"{name}.{names.projection}.weight"].T)[None]
    places = torch.arange(len(ids))[None]
    out = model.model.layers[2](
        x,
        attention_mask=_causal(len(ids))[None, None],
        position_ids=places,
        position_embeddings=model.model.rotary_emb(x, places),
    )
    row = (out[0] if isinstance(out, tuple) else out)[0, -1]
    normed = _rms_norm(row, of_output, eps)
    return normed if names.returns_normed else row, int((matrix @ normed).argmax())


def _eps(tiny: TinyModel) -> float:
    return float(tiny.config["rms_norm_eps"])


def _hidden_states(tiny: TinyModel, token_ids: Sequence[int]) -> list[Tensor]:
    """Returns what enters each layer `[T, W]`."""
    model = in_float64(tiny.model)
    found = model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
    return [one[0] for one in found]


# -- Gemma 4's assistant ---------------------------------------------------------------------------

WINDOW = DETAILS["gemma4_text"]["sliding_window"]


def tiny_assistant(*, has_clusters: bool = False, **fields: Any) -> TinyHead:
    """Makes a drafter that reads the keys of the tiny gemma4_text with these fields, and its
    formula: transformers' own classes. The window moves on with each guess, the position does not.
    """
    target = tiny_model("gemma4_text", **fields)
    with _all_layers_reuse_keys():
        drafter = _tiny_drafter(target, has_clusters=has_clusters)
    if has_clusters:  # all of them are chosen, in another order than the tokens
        order = drafter.model.masked_embedding.token_ordering
        order.copy_(torch.arange(len(order)).flip(0))

    def guess(token_ids: Sequence[int], count: int) -> list[int]:
        last = len(token_ids) - 1
        with _all_layers_reuse_keys():
            model, assistant = in_float64(target.model), in_float64(drafter.model)
        with double_precision():
            computed = model(
                torch.tensor([list(token_ids[:last])]),
                output_hidden_states=True,
                return_shared_kv_states=True,
                use_cache=False,
            )
            row, found = computed.hidden_states[-1][:, -1:], [token_ids[-1]]
            for num_drafted in range(count):
                first = max(0, last + num_drafted + 1 - WINDOW)
                keys = dict(computed.shared_kv_states)
                keys["sliding_attention"] = tuple(
                    part[:, :, first:] for part in keys["sliding_attention"]
                )
                embedded = model.get_input_embeddings()(torch.tensor([found[-1:]]))
                made = assistant(
                    inputs_embeds=torch.cat([embedded, row], -1),
                    position_ids=torch.tensor([[last]]),
                    shared_kv_states=keys,
                )
                row = made.last_hidden_state
                found.append(int(made.logits[0, -1].argmax()))
            return found[1:]

    return TinyHead(target.path, {"spec_method": "mtp", "spec_model": str(drafter.path)}, guess)


@contextmanager
def _all_layers_reuse_keys() -> Iterator[None]:
    """Lets transformers 5.23 build assistants: it rejects configs without a layer that has keys."""
    modes = Gemma4TextConfig.kv_sharing_modes

    def reuse(config: Gemma4TextConfig) -> list[str | None]:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        found: list[str | None] = modes.fget(config)
        return found

    with mock.patch.object(Gemma4TextConfig, "kv_sharing_modes", property(reuse)):
        yield


def _tiny_drafter(target: TinyModel, *, has_clusters: bool) -> TinyModel:
    return tiny_model(
        "gemma4_assistant",
        backbone_hidden_size=target.config["hidden_size"],
        use_ordered_embeddings=has_clusters,
        num_centroids=20,
        centroid_intermediate_top_k=20,
        text_config={
            **DETAILS["gemma4_text"],
            "vocab_size": target.config["vocab_size"],
            "use_double_wide_mlp": False,
            "model_type": "gemma4_text",
            "hidden_size": 40,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_attention_heads": 4,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
        },
    )
