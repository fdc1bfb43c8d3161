"""Models made of Whisper's encoder, a projector and the decoder of another family: Qwen2-Audio and
Voxtral.

`FAMILIES` says what is special about each; the decoder is that of the text_config's model_type. Chu
et al. 2024 (Qwen2-Audio); Liu et al. 2025 (Voxtral).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.api.errors import UnsupportedModel
from octavo.models.audio import AUDIO, PROJECTED, AudioLayout, audio_config
from octavo.models.config_keys import refuse_unread
from octavo.models.hf_config import HfConfig
from octavo.models.image_text import build_text
from octavo.models.speech_encoder import EPS, append_layer, convolve
from octavo.models.vision import VisionShape, finish_vision, with_image_rows
from octavo.program.builder import Builder
from octavo.program.program import Program, Value

PROJECTOR = "multi_modal_projector"


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioTextFamily:
    """Defaults of a family's config.json, and its parts."""

    text: str
    """Default model_type of text_config."""
    token_id: int | None
    """Default of the token of an audio's rows; None: required."""
    rows_per_token: int | None
    """Rows of the encoder per token; None: as many as intermediate_size has columns for."""
    projector: Callable[[Builder, HfConfig], Value]
    """Appends the projector to input rows of the encoder."""
    is_padded: bool
    """Whether audio is padded with silence to whole windows, of which it may have several."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The family's own names of keys in audio_config, by Whisper's."""


def build(config: HfConfig) -> dict[str, Program]:
    family = FAMILIES[config.model_type]
    config.without_effect("audio_config", "ignore_index")
    layout, sound = audio_layout(config), audio_config(config).renamed(**family.keys)
    encoder = _encoder(sound, layout, has_norm=family.is_padded)
    b = Builder(PROJECTED)
    rows = family.projector(b, config)
    projector = b.finish(rows=rows if rows.axis == "requests" else b.gather_rows(rows))
    sound.without_effect("num_mel_bins", "max_source_positions", *family.keys.values())
    sound.without_effect("scale_embedding", "layerdrop", "encoder_layerdrop", "num_hidden_layers")
    refuse_unread({"model_type": "audio_config", **sound.values}, sound.values.asked)
    text = build_text(config, family.text)
    return {"decoder": with_image_rows(text["decoder"]), AUDIO: encoder, PROJECTED: projector}


def audio_layout(config: HfConfig) -> AudioLayout:
    family = FAMILIES[config.model_type]
    sound = audio_config(config)
    named = "audio_token_index" if config.values.get("audio_token_index") else "audio_token_id"
    return AudioLayout(
        token_id=config.integer(named, family.token_id),
        num_bands=sound.size("num_mel_bins", 128),
        window_rows=sound.integer("max_source_positions", 1500, low=1),
        rows_per_token=family.rows_per_token or _count_stacked(sound),
        is_padded=family.is_padded,
    )


def _count_stacked(sound: HfConfig) -> int:
    """Returns the rows that form a token side by side (Voxtral)."""
    width, columns = sound.size("hidden_size", 1280), sound.size("intermediate_size", 5120)
    if columns % width:
        raise UnsupportedModel(
            f"config.json: intermediate_size in audio_config is {columns}, expected a multiple of"
            f" hidden_size {width}"
        )
    return columns // width


def _encoder(sound: HfConfig, layout: AudioLayout, *, has_norm: bool) -> Program:
    """Returns the encoder; without `has_norm` the projector applies its last norm."""
    sound.refuse_unless("scale_embedding", False)
    shape = VisionShape(
        hidden_size=sound.size("d_model", 1280),
        num_layers=sound.count("encoder_layers", 32),
        num_heads=sound.size("encoder_attention_heads", 20),
    )
    shape.check()
    sound.refuse_unless("head_dim", shape.head_dim)
    sound.refuse_unless("num_key_value_heads", shape.num_heads)
    width = sound.size("encoder_ffn_dim", 5120)
    activation = sound.activation("activation_function", "gelu")
    b, module = Builder(AUDIO, shape.groups(AUDIO)), "audio_tower"
    x = convolve(b, module, layout.num_bands, shape.hidden_size)
    name = f"{module}.embed_positions"
    x = b.add(x, b.position_embedding(name, layout.window_rows, shape.hidden_size))
    for i in range(shape.num_layers):
        x = append_layer(
            b, x, module, shape, i, group=AUDIO, mlp_width=width, activation=activation
        )
    return finish_vision(b, b.layer_norm(x, f"{module}.layer_norm", EPS) if has_norm else x)


def _append_mean(b: Builder, config: HfConfig) -> Value:
    """Appends Qwen2-Audio's projector: the mean of two rows, the encoder's last norm and a linear
    layer.
    """
    width = audio_config(config).size("d_model", 1280)
    x = b.pool_rows(b.input_rows(width), "mean")
    x = b.layer_norm(x, "audio_tower.layer_norm", EPS)
    return b.linear(x, f"{PROJECTOR}.linear", config.size("hidden_size"), bias=True)


def _append_two_layers(b: Builder, config: HfConfig) -> Value:
    """Appends Voxtral's projector: two linear layers over the rows of a token side by side."""
    width = audio_config(config).size("intermediate_size", 5120)
    hidden_size = config.size("hidden_size")
    inner = b.linear(b.input_rows(width), f"{PROJECTOR}.linear_1", hidden_size)
    active = b.act(inner, config.activation("projector_hidden_act", "gelu"))
    return b.linear(active, f"{PROJECTOR}.linear_2", hidden_size)


FAMILIES: dict[str, AudioTextFamily] = {
    "qwen2_audio": AudioTextFamily(
        text="qwen2",
        token_id=151_646,
        rows_per_token=2,
        projector=_append_mean,
        is_padded=False,
    ),
    "voxtral": AudioTextFamily(
        text="llama",
        token_id=None,
        rows_per_token=None,
        projector=_append_two_layers,
        is_padded=True,
        keys={
            "d_model": "hidden_size",
            "encoder_layers": "num_hidden_layers",
            "encoder_attention_heads": "num_attention_heads",
            "encoder_ffn_dim": "intermediate_size",
        },
    ),
}
"""Families by model_type."""
