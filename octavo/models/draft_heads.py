"""Draft heads: one extra layer that predicts further tokens from a model's hidden states.

A head's row i combines token i with feature row i - 1, which the model
(`program/passes/features.py`) or, while drafting, the head itself has written. The output of the
head's layer is its own feature row. Sources: Li et al. 2025 (EAGLE-3); DeepSeek-AI 2024, section
2.2 (multi-token prediction).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from octavo.api.errors import UnsupportedModel
from octavo.models.config_keys import refuse_unread
from octavo.models.decoder import DecoderShape, LayerCache, PredictionLayer, rms_norm
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_mlp
from octavo.models.rope import rope_parameters
from octavo.models.self_attention import SelfAttention
from octavo.program.build_mixers import earlier_rows
from octavo.program.builder import Builder
from octavo.program.ops import Embedding, Linear
from octavo.program.passes.features import FEATURES, PREVIOUS, Features, feature_group
from octavo.program.passes.stages import layer_inputs
from octavo.program.program import CacheGroup, Op, Program, Value, Weight

MTP_FAMILIES: Mapping[str, str] = {
    "deepseek_v3": "num_nextn_predict_layers",
    "glm4_moe": "num_nextn_predict_layers",
    "qwen3_5": "mtp_num_hidden_layers",
    "qwen3_5_moe": "mtp_num_hidden_layers",
    "qwen3_5_moe_text": "mtp_num_hidden_layers",
    "qwen3_5_text": "mtp_num_hidden_layers",
    "qwen3_next": "",
}
"""Families that define `prediction_layer`, and the config key with the number of layers; "": no
key, the checkpoint's tensors decide.
"""
KV = "full"
"""Name of an EAGLE-3 head's KV group."""


@dataclass(frozen=True, slots=True)
class DraftHead:
    """A draft head for one model."""

    program: Program
    """Program "draft", with the feature group and a separate KV group."""
    features: Features
    """Hidden states that the model has to write for the head."""
    shared: frozenset[Weight] = frozenset()
    """Weights of `program` that are shared with the model."""
    module: str = ""
    """Prefix of the names of its tensors in the model's checkpoint."""
    id_offsets: str = ""
    """Tensor of offsets that map the head's token ids to the model's; "" if they are the same."""
    reads_keys: bool = False
    """Whether it has no KV, and its attention reads the model's."""


def get_embedding(program: Program) -> Embedding:
    """Returns the token embedding op of a model."""
    found = (op for op in program.ops if isinstance(op, Embedding) and op.ids is not None)
    return next(found)


# -- multi-token prediction ------------------------------------------------------------------------


def mtp_head(config: Mapping[str, Any], target: Program, names: Collection[str]) -> DraftHead:
    """Builds the MTP head of a checkpoint; `names` are its tensors."""
    hf = HfConfig(config)
    key = MTP_FAMILIES.get(hf.model_type, "num_nextn_predict_layers")
    num_heads = hf.integer(key, 0) if key else 1
    if hf.model_type not in MTP_FAMILIES or num_heads < 1:
        raise UnsupportedModel(
            f"spec_method: mtp requires a multi-token prediction layer; {hf.model_type} with"
            f" {key} {num_heads} has none that is supported",
            hint=f"it is supported for {', '.join(MTP_FAMILIES)}; with Gemma 4, set spec_model to"
            " the model's assistant; else use --spec-method suffix",
        )
    layer: PredictionLayer = import_module(f"octavo.models.{hf.model_type}").prediction_layer(hf)
    shape, name = layer.shape, layer.module
    make_norm = layer.norm or rms_norm(shape.norm_eps)
    table = get_embedding(target)
    head = HeadBuilder((layer.group,), shape.hidden_size, shape.vocab_size)
    b = head.builder
    own_table = f"{name}.{layer.embedding}"
    shares_table = f"{own_table}.weight" not in names
    module = table.table.name.removesuffix(".weight") if shares_table else own_table
    embedded = b.embedding(b.token_ids(), module, *table.table.shape, scale=table.scale)
    rows = make_norm(b, embedded, f"{name}.{layer.embedding_norm}")
    before = make_norm(b, head.previous(embedded), f"{name}.{layer.hidden_norm}")
    x = project_both(b, (rows, before), f"{name}.{layer.projection}", shape.hidden_size)
    normed = make_norm(b, x, f"{layer.layer}.input_layernorm")
    x = b.add(x, layer.attention(b, normed, layer.number))
    normed = make_norm(b, x, f"{layer.layer}.post_attention_layernorm")
    x = b.add(x, layer.mlp(b, normed, layer.number))
    if layer.returns_normed:
        x = make_norm(b, x, f"{name}.{layer.final_norm}")
        end = b.gather_rows(x)
    else:
        end = make_norm(b, b.gather_rows(x), f"{name}.{layer.final_norm}")
    own_matrix = f"{name}.{layer.head}"
    shares_matrix = f"{own_matrix}.weight" not in names
    matrix = (
        _get_output_matrix(target)
        if shares_matrix
        else Weight(f"{own_matrix}.weight", (shape.vocab_size, shape.hidden_size))
    )
    logits = b.linear_from(end, matrix, name="logits")
    program = head.finish(x, logits, {layer.number: 0})
    shared = {table.table: shares_table, matrix: shares_matrix}
    return DraftHead(
        program,
        Features(),
        frozenset(weight for weight, is_shared in shared.items() if is_shared),
        module=f"{name}.",
    )


def _get_output_matrix(target: Program) -> Weight:
    logits = target.outputs["logits"]
    made: dict[Value, Op] = {out: op for op in target.ops for out in op.outputs}
    op = made[logits]
    while not isinstance(op, Linear):
        op = made[op.inputs[0]]
    return op.weights_[0]


# -- EAGLE-3 ---------------------------------------------------------------------------------------


def eagle3_head(config: Mapping[str, Any], target: Program, names: Collection[str]) -> DraftHead:
    """Builds an EAGLE-3 head from its own checkpoint; `names` are its tensors."""
    hf = HfConfig(config)
    _check_eagle3(hf)
    shape = replace(DecoderShape.read(hf), num_layers=1)
    table = get_embedding(target)
    if (shape.vocab_size, shape.hidden_size) != (target.vocab_size, table.out.width):
        raise UnsupportedModel(
            f"spec_model: the head has vocab_size {shape.vocab_size:,} and hidden_size"
            f" {shape.hidden_size}, the model has {target.vocab_size:,} and {table.out.width}",
            hint="use a head trained for this model",
        )
    layers = _aux_layers(hf, target)
    features = Features(layers, _split_matrix("fc", shape.hidden_size, len(layers)))
    num_ids = hf.integer("draft_vocab_size", shape.vocab_size, low=1)
    group = CacheGroup(KV, "full", 1, shape.num_kv_heads, shape.head_dim, shape.head_dim)
    head = HeadBuilder((group,), shape.hidden_size, num_ids)
    b, eps = head.builder, shape.norm_eps
    is_shared = "embed_tokens.weight" not in names
    module = table.table.name.removesuffix(".weight") if is_shared else "embed_tokens"
    embedded = b.embedding(b.token_ids(), module, *table.table.shape, scale=table.scale)
    before = head.previous(embedded)
    x = b.add(before, _attention(b, hf, shape, (embedded, before)))
    normed = b.rms_norm(x, "midlayer.post_attention_layernorm", eps)
    width, activation = hf.size("intermediate_size"), hf.activation("hidden_act", "silu")
    x = b.add(x, gated_mlp(b, normed, "midlayer.mlp", width, activation))
    end = b.rms_norm(b.gather_rows(x), "norm", eps)
    logits = b.linear_from(
        end, Weight("lm_head.weight", (num_ids, shape.hidden_size)), name="lm_head"
    )
    refuse_unread(config, hf.values.asked)
    return DraftHead(
        head.finish(x, logits, {}),
        features,
        frozenset({table.table} if is_shared else ()),
        id_offsets="d2t" if "d2t" in names else "",
    )


def _check_eagle3(config: HfConfig) -> None:
    """Rejects anything but a one-layer EAGLE-3 head."""
    if "eagle3" not in config.architecture.lower():
        raise UnsupportedModel(
            f"spec_model: got a checkpoint of {config.architecture or config.model_type}, expected"
            " an EAGLE-3 head such as LlamaForCausalLMEagle3",
            hint="to draft with a whole model, use --spec-method draft_model",
        )
    config.refuse_unless("num_hidden_layers", 1)
    config.refuse_unless("norm_before_residual", False)
    config.refuse_unless("target_hidden_size", config.size("hidden_size"))
    config.refuse_unless("tie_word_embeddings", False)
    config.refuse_unless("attention_bias", False)
    config.refuse_unless("mlp_bias", False)
    config.without_effect("num_hidden_layers", "max_window_layers", "use_sliding_window")


def _aux_layers(config: HfConfig, target: Program) -> tuple[int, ...]:
    """Returns the layers whose inputs the head reads: from the config, or one near the start,
    middle and end.
    """
    named = HfConfig(config.table("eagle_config")).integers("eagle_aux_hidden_state_layer_ids")
    if len(set(named)) < len(named):
        raise UnsupportedModel(
            f"config.json: eagle_aux_hidden_state_layer_ids is {list(named)}, expected distinct"
            f" numbers"
        )
    if named:
        return named
    num_layers = len(layer_inputs(target)) + 1
    return (2, num_layers // 2, num_layers - 3)


def _attention(
    b: Builder, config: HfConfig, shape: DecoderShape, inputs: tuple[Value, Value]
) -> Value:
    """Appends the attention over concatenated tokens and features, each normed."""
    embedded, before = inputs
    rows = b.rms_norm(embedded, "midlayer.input_layernorm", shape.norm_eps)
    normed = b.rms_norm(before, "midlayer.hidden_norm", shape.norm_eps)

    def project(b: Builder, x: Value, module: str) -> tuple[Value, Value, Value]:
        q, k, v = (
            project_both(b, (x, normed), f"{module}.{part}", width)
            for part, width in zip(("q_proj", "k_proj", "v_proj"), shape.qkv_widths, strict=True)
        )
        return q, k, v

    attend = SelfAttention(
        shape=shape,
        caches=[LayerCache(KV, 0, "causal")],
        ropes=[rope_parameters(config).table(shape.head_dim)],
        scale=shape.head_dim**-0.5,
        project=project,
    )
    return attend.of_module(b, rows, "midlayer.self_attn", 0)


# -- common to all -------------------------------------------------------------------------------


class HeadBuilder:
    """Builds a draft head's Program; the part common to all heads."""

    def __init__(self, groups: tuple[CacheGroup, ...], width: int, vocab_size: int) -> None:
        """`groups` are those of the head's attention; `width` is the size of a feature row."""
        self._width = width
        self.builder = Builder("draft", (feature_group(width), *groups), vocab_size)

    def previous(self, own: Value) -> Value:
        """Appends reading the previous token's features."""
        taps = Weight("features.taps", (self._width, 1, len(PREVIOUS)), fill=PREVIOUS)
        return earlier_rows(self.builder, own, taps, FEATURES, 0)

    def finish(self, row: Value, logits: Value, numbers: Mapping[int, int]) -> Program:
        """Returns the Program, which writes `row` to the features.

        `numbers` maps layer numbers in tensor names to indices in the KV group, if they differ.
        """
        self.builder.kv_write(FEATURES, 0, (row,), None)
        program = self.builder.finish(logits=logits)
        found = replace(program, ops=tuple(_renumber(op, numbers) for op in program.ops))
        found.check()
        return found


def _renumber(op: Op, numbers: Mapping[int, int]) -> Op:
    number = numbers.get(getattr(op, "layer", -1))
    if number is None or getattr(op, "group", FEATURES) == FEATURES:
        return op
    changes: dict[str, Any] = {"layer": number}
    return replace(op, **changes)


def project_both(b: Builder, inputs: tuple[Value, Value], module: str, width: int) -> Value:
    """Appends a matmul with two concatenated inputs."""
    parts = _split_matrix(module, inputs[0].width, len(inputs), width)
    first, second = (
        b.linear_from(x, part, name=module) for x, part in zip(inputs, parts, strict=True)
    )
    return b.add(first, second)


def _split_matrix(
    module: str, inputs: int, count: int, width: int | None = None
) -> tuple[Weight, ...]:
    """Splits a module's matrix by input into `count` weights."""
    whole = Weight(f"{module}.weight", (width or inputs, count * inputs))
    return tuple(whole.part(inputs=(run * inputs, (run + 1) * inputs)) for run in range(count))
