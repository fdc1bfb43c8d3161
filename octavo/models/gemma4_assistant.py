"""Gemma 4's assistant: a drafter of a few layers without keys and values of its own. Its queries
read the last layers of the model that write KV, of the same layer type.

A row reads the token's embedding in the model and the model's hidden state of the token before, or
its own output while drafting. Sources: Gemma team 2026; `Gemma4AssistantForCausalLM` in
transformers. Not read: `masked_embedding`, which limits the logits to the tokens of the likeliest
clusters; logits are computed for all tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from octavo.api.errors import UnsupportedModel
from octavo.models.config_keys import refuse_unread
from octavo.models.decoder import DecoderShape, LayerCache
from octavo.models.draft_heads import DraftHead, HeadBuilder, get_embedding, project_both
from octavo.models.gemma4_text import Gemma4Layers, layer_windows
from octavo.models.hf_config import HfConfig
from octavo.program.ops import MaskKind
from octavo.program.passes.features import Features
from octavo.program.program import Program

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
EXPECTED = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
"""Values of keys that all assistants share."""
CLUSTERS = "masked_embedding."
"""Prefix of the names of tensors that are not read."""


def assistant_head(config: Mapping[str, Any], target: Program, names: Collection[str]) -> DraftHead:
    """Builds the drafter from its own checkpoint; `names` are its tensors."""
    outer = HfConfig(config)
    if outer.model_type not in MODEL_TYPES:
        raise UnsupportedModel(
            f"spec_model: got a checkpoint of {outer.model_type}, expected with spec_method mtp"
            f" one of {', '.join(MODEL_TYPES)}",
            hint="to draft with a whole model, use --spec-method draft_model",
        )
    given = config.get("text_config")
    text = HfConfig({"model_type": "gemma4_text", **(given if isinstance(given, dict) else {})})
    shape = DecoderShape.read(text, num_kv_heads=4, head_dim=256, tied=True)
    for name, value in EXPECTED.items():
        text.refuse_unless(name, value)
    text = text.with_values(
        num_kv_shared_layers=shape.num_layers,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=None,
    )
    width, table = outer.size("backbone_hidden_size", 1536), get_embedding(target)
    if (shape.vocab_size, width) != (target.vocab_size, table.out.width) or (
        shape.hidden_size == width
    ):
        raise UnsupportedModel(
            f"spec_model: the assistant has vocab_size {shape.vocab_size:,} and hidden_size"
            f" {shape.hidden_size} for a model of {width}, the model has {target.vocab_size:,} and"
            f" {table.out.width}",
            hint="use the assistant of this model",
        )
    windows = layer_windows(text, shape)
    layers = Gemma4Layers.read(text, shape, windows, _find_caches(target, windows))
    for own, cache in zip(layers.attention.shapes, layers.attention.caches, strict=True):
        group = target.group(cache.group)
        if group.k_width != own.head_dim or shape.num_heads % group.num_kv_heads:
            raise UnsupportedModel(
                f"spec_model: the assistant has {shape.num_heads} heads of {own.head_dim} columns,"
                f" the model's keys of group {cache.group} have {group.num_kv_heads} of"
                f" {group.k_width}",
                hint="use the assistant of this model",
            )
    head = HeadBuilder(target.groups, width, shape.vocab_size)
    b = head.builder
    module = table.table.name.removesuffix(".weight")
    embedded = b.embedding(b.token_ids(), module, *table.table.shape, scale=table.scale)
    both = (embedded, head.previous(embedded))
    x = project_both(b, both, "pre_projection", shape.hidden_size)
    for i in range(shape.num_layers):
        x = layers(b, x, None, i)
    x = b.rms_norm(x, "model.norm", shape.norm_eps)
    matrix = "lm_head" if "lm_head.weight" in names else "model.embed_tokens"
    logits = b.linear(b.gather_rows(x), matrix, shape.vocab_size)
    row = b.linear(x, "post_projection", width)
    text.without_effect("final_logit_softcapping", "use_cache")
    refuse_unread(text.values, text.values.asked)
    return DraftHead(
        head.finish(row, logits, {}),
        Features(),
        frozenset({table.table}),
        reads_keys=True,
    )


def _find_caches(target: Program, windows: Sequence[int | None]) -> list[LayerCache]:
    """Returns the model's last KV of each layer's type."""
    caches = []
    for window in windows:
        name = "full" if window is None else "window"
        found = [group for group in target.groups if group.name == name]
        if not found or found[0].window != window:
            raise UnsupportedModel(
                f"spec_model: the assistant has a layer with window {window}, the model has none",
                hint="use the assistant of this model",
            )
        mask: MaskKind = "causal" if window is None else "window"
        caches.append(LayerCache(name, found[0].num_layers - 1, mask))
    return caches
