"""Compares a checkpoint's tensors with the tensors that its Programs read, using only headers.

Missing, misshapen and unexpected tensors raise errors before any weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from octavo.api.errors import WeightMismatch
from octavo.checkpoint.ports import Checkpoint, StoredTensor
from octavo.program.program import Program, Weight

LEFT_OUT = re.compile(
    "|".join(
        (
            r"(^|\.)(position_ids|token_type_ids)$",
            r"(^|\.)(inv_freq|masked_bias|attn_mask|num_batches_tracked)$",
            r"\.(attn|attention|self_attention)\.bias$",
            r"(^|\.)(lm_head|output_layer|embed_out|proj_out)\.weight$",
            r"(^|\.)(lm_head|cls|predictions|vocab_\w+|qa_outputs|pooler)\.",
            r"^(model\.)?(encoder|decoder)\.(embed_tokens\.weight|embed_positions\.weights?|version)$",
            r"(^|\.)(mtp|vision_tower|vision_model|visual|multi_modal_projector|connector|audio_tower"
            r"|embed_vision|embed_audio|vision_embedder)\.",
            r"\.([qkv]_scale|kv_scale|prob_scale|[kv]_zero_point|activation_scale)$",
            r"\.(input|output)_(scale|global_scale|zero_point|g_idx)$",
            r"\.altup\.correct_output_scale$",
            r"(^|\.)image_newline$",
            r"^(decoder\.(bias|weight)|head\.(dense|norm)\.(bias|weight))$",
        )
    )
)
"""Names of tensors that may exist but are not read: buffers that are computed here, tied output
layers, heads of other tasks, towers for images and sound, drafting heads, activation scales (rows
are scaled dynamically), Gemma 3n's tensors that its config disables.
"""

HEAD_BIAS = re.compile(r"(^|\.)(lm_head|output_layer|embed_out|proj_out)\.bias$")
"""Names of the bias of an output layer; it is read if a Program has logits."""

DECODER_LAYER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:model\.)?layers\.(\d+)\.")
"""Names of tensors of a decoder's layers, not of a tower's."""

KEYS = re.compile(r"\.self_attn\.([kv]_proj|[kv]_norm)\.")
"""Names of tensors for a layer's keys and values."""

SHOWN = 3


def check_tensors(checkpoint: Checkpoint, programs: Iterable[Program]) -> None:
    """Raises WeightMismatch if a tensor that a Program reads is missing or has another shape, or if
    an unexpected tensor would change the results.
    """
    read: set[str] = set()
    has_logits = False
    for program in programs:
        read |= check_weights(checkpoint, program.weights)
        has_logits |= "logits" in program.outputs
    names = checkpoint.names()
    biases = {name for name in names if has_logits and HEAD_BIAS.search(name)} - read
    unread = sorted({*find_unread_tensors(names, read, checkpoint.config), *biases})
    if unread:
        more = f" and {len(unread) - SHOWN} more" if len(unread) > SHOWN else ""
        raise WeightMismatch(
            f"{checkpoint.path}: got the tensors {', '.join(unread[:SHOWN])}{more}, which a"
            f" {checkpoint.config.get('model_type')} model with this config.json does not have",
            hint="config.json and the weights belong to different models, or the model has a part"
            " that is not supported",
        )


def check_weights(checkpoint: Checkpoint, weights: Iterable[Weight]) -> set[str]:
    """Returns the stored names of the weights' tensors; raises WeightMismatch if one is missing or
    has another shape.
    """
    return {
        name
        for weight in weights
        if weight.fill is None
        for part in weight.stored_parts
        for name in _check_names(checkpoint, part)
    }


def find_unread_tensors(
    names: Iterable[str], read: set[str], config: dict[str, object]
) -> Iterator[str]:
    """Yields the tensors that were not read and may have an effect."""
    num_layers = config.get("num_hidden_layers")
    for name in names:
        if name in read or LEFT_OUT.search(name):
            continue
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if layer and _reads_others_keys(config, int(layer[1])) and KEYS.search(name):
            continue
        # Layers after the last one are draft heads (DeepSeek's multi-token prediction).
        if layer and isinstance(num_layers, int) and int(layer[1]) >= num_layers:
            continue
        yield name


def drafting_tensors(names: Iterable[str], config: dict[str, object]) -> list[str]:
    """Returns the tensors of layers after a model's last one, which draft tokens."""
    num_layers = config.get("num_hidden_layers")
    if not isinstance(num_layers, int):
        return []
    matches = ((name, DECODER_LAYER.match(name)) for name in names)
    return [
        name
        for name, layer in matches
        if name.startswith("mtp.") or (layer and int(layer[1]) >= num_layers)
    ]


def _reads_others_keys(config: dict[str, object], layer: int) -> bool:
    """Returns whether a layer reuses the keys of an earlier one, so that its own keys have no
    effect.
    """
    num_layers, num_shared = config.get("num_hidden_layers"), config.get("num_kv_shared_layers")
    if not isinstance(num_layers, int) or not isinstance(num_shared, int):
        return False
    return layer >= num_layers - num_shared


def _check_names(checkpoint: Checkpoint, weight: Weight) -> Iterator[str]:
    """Yields the stored names of a weight's tensors; raises WeightMismatch for an
    unexpected shape.
    """
    for name in weight.tensor_names:
        stored = checkpoint.stored(name)
        allowed_shapes = _shapes(weight, turned=is_turned(checkpoint, stored, weight))
        if stored.shape not in allowed_shapes:
            raise WeightMismatch(
                f"{stored.file}: {stored.name} has shape {stored.shape}, expected"
                f" {' or '.join(map(str, allowed_shapes))}",
                hint="config.json and the weights belong to different models, or the file is"
                " damaged",
            )
        if stored.num_stacked not in (0, len(weight.tensor_names)):
            raise WeightMismatch(
                f"{stored.file}: {stored.name} holds {stored.num_stacked} experts, expected"
                f" {len(weight.tensor_names)}"
            )
        yield stored.name


def is_turned(checkpoint: Checkpoint, stored: StoredTensor, weight: Weight) -> bool:
    """Returns whether a weight's tensor is stored with its last two axes swapped.

    Stacked experts are so in published checkpoints of some families, but not in those that newer
    transformers saves; their shape decides.
    """
    if not weight.transposed or checkpoint.output_major or stored.is_quantized:
        return False
    rows, inputs = weight.tensor_rows, weight.whole.shape[-1]
    return len(stored.shape) < 3 or rows == inputs or stored.shape[-2:] != (rows, inputs)


def _shapes(weight: Weight, *, turned: bool) -> list[tuple[int, ...]]:
    """Returns the shapes that a weight's tensors may have in the checkpoint."""
    shape = list(weight.whole.shape)
    shape[weight.row_axis] = weight.tensor_rows
    if weight.kernel:
        return [(*shape[:-1], *weight.kernel)]
    stacked = len(weight.tensor_names) > 1
    shapes = [shape[1:]] if stacked else [shape]
    if not stacked and weight.sources and shape[0] == 1:
        shapes.append(shape[1:])
    return [
        (*one[:-2], one[-1], one[-2]) if turned and len(one) > 1 else tuple(one) for one in shapes
    ]
