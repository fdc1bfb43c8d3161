"""What a projector type of llama.cpp's mmproj files is described by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.checkpoint.gguf.gguf_family import Config, Header, Restored, RowOrder

FindToken = Callable[[str, int], int]
"""Returns the id of the token with a text, or a default if the vocabulary has none."""


@dataclass(frozen=True, slots=True)
class TowerFile:
    """The headers of a tower's file and of its language model."""

    header: Header
    """Header of the tower, under the prefix "clip"."""
    text: Header
    config: Config
    """Config of the language model."""
    find_token: FindToken

    def vision(self, key: str) -> int:
        return self.header.count(f"vision.{key}")

    @property
    def eps(self) -> float:
        return float(self.header.number("vision.attention.layer_norm_epsilon", 1e-6))

    @property
    def activation(self) -> str:
        if self.header.get("use_gelu"):
            return "gelu"
        return "silu" if self.header.get("use_silu") else "quick_gelu"

    def sizes(self) -> Config:
        """Returns the keys of vision_config that most families share."""
        return {
            "hidden_size": self.vision("embedding_length"),
            "intermediate_size": self.vision("feed_forward_length"),
            "num_hidden_layers": self.vision("block_count"),
            "num_attention_heads": self.vision("attention.head_count"),
            "image_size": self.vision("image_size"),
            "patch_size": self.vision("patch_size"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Projector:
    """The mapping of a projector type.

    `tensors` and `layer_tensors` map the stems of names in the file ("patch_embd" of
    "v.patch_embd.weight", "ln1" of "v.blk.N.ln1.weight") to those in safetensors. `joined` are
    tensors that the converter split into several of a layer, one after the other. `restored` maps
    safetensors names or stems to inverses of conversions.
    """

    families: Mapping[str, str]
    """model_type of the model with images, by that of its language model."""
    config: Callable[[TowerFile], Config]
    processor: Callable[[TowerFile], Config]
    """Returns the contents of preprocessor_config.json, without means and deviations."""
    tensors: Mapping[str, str]
    layer_tensors: Mapping[str, str]
    layer_prefix: str
    audio_layer_tensors: Mapping[str, str] = field(default_factory=dict)
    """Stems of an audio tower's layers; its other stems, with "a.", are in `tensors`."""
    audio_layer_prefix: str = ""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole_names: frozenset[str] = frozenset()
    """Stems whose safetensors names end without ".weight"."""
    row_orders: Mapping[str, RowOrder] = field(default_factory=dict)
    restored: Mapping[str, Restored] = field(default_factory=dict)
    has_text_type: bool = False
    """Whether the family's config names the language model's model_type."""
    has_frames: bool = False
    """Whether the patch embedding is split by its two frames."""
    unread: frozenset[str] = frozenset()
    """Tensors that repeat rows of the language model."""
