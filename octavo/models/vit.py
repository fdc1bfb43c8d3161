"""Vision transformers over an image's patches: CLIP, SigLIP, Pixtral and towers like them.

`STYLES` says how the towers of a `model_type` in vision_config differ; `build_vit` builds all of
them. Dosovitskiy et al. 2021; Radford et al. 2021 (CLIP); Zhai et al. 2023 (SigLIP); Agrawal et
al. 2024 (Pixtral).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.mlps import gated_mlp
from octavo.models.vision import (
    IMAGE,
    VisionShape,
    attend,
    finish_vision,
    get_axial_theta,
    patches,
    quick_gelu,
)
from octavo.program.builder import Builder
from octavo.program.ops import Embedding, RopeTable
from octavo.program.program import Program, Value, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class VitStyle:
    """Module names of a tower, the parts that it has, and the defaults of its config."""

    patches: str = "embeddings.patch_embedding"
    patch_bias: bool = True
    class_row: str | None = None
    """Vector of the class row before the patches; None: the tower has no such row."""
    positions: str | None = "embeddings.position_embedding.weight"
    """Table of learned positions; None: RoPE by row and column."""
    first_norm: str | None = None
    layers: str = "encoder.layers"
    norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    eps: float | None = None
    """Epsilon of RMS norms; None: layer norms, with layer_norm_eps."""
    qk_norms: bool = False
    """Whether queries and keys have RMS norms over all heads."""
    attention: str = "self_attn"
    out: str = "out_proj"
    mlp: str = "mlp"
    is_gated: bool = False
    bias: bool = True
    out_bias: bool = True
    scales: tuple[str, str] | None = None
    """Vectors that multiply the output of attention and MLP."""
    has_row_axis: bool = False
    """Whether the class row and the positions are stored with a first axis of 1."""
    last_norm: str | None = "post_layernorm"
    sizes: tuple[int, int, int, int]
    """Default hidden size, intermediate size, number of layers and number of heads."""
    image_size: int = 224
    patch_size: int = 16
    activation: str = "gelu_pytorch_tanh"
    default_eps: float = 1e-6


SIGLIP = VitStyle(sizes=(768, 3072, 12, 12))
IDEFICS3 = VitStyle(sizes=(1152, 3072, 12, 16), patch_size=32)
STYLES: dict[str, VitStyle] = {
    "clip_vision_model": VitStyle(
        patch_bias=False,
        class_row="embeddings.class_embedding",
        first_norm="pre_layrnorm",
        sizes=(768, 3072, 12, 12),
        patch_size=32,
        activation="quick_gelu",
        default_eps=1e-5,
    ),
    "idefics3": IDEFICS3,
    "idefics3_vision": IDEFICS3,
    "internvl_vision": VitStyle(
        patches="embeddings.patch_embeddings.projection",
        class_row="embeddings.cls_token",
        positions="embeddings.position_embeddings",
        layers="encoder.layer",
        norms=("layernorm_before", "layernorm_after"),
        attention="attention",
        out="projection_layer",
        bias=False,
        scales=("lambda_1", "lambda_2"),
        has_row_axis=True,
        last_norm="layernorm",
        sizes=(1024, 4096, 24, 16),
        image_size=448,
        patch_size=14,
        activation="gelu",
    ),
    "pixtral": VitStyle(
        patches="patch_conv",
        patch_bias=False,
        positions=None,
        first_norm="ln_pre",
        layers="transformer.layers",
        norms=("attention_norm", "ffn_norm"),
        eps=1e-5,
        attention="attention",
        out="o_proj",
        mlp="feed_forward",
        is_gated=True,
        bias=False,
        out_bias=False,
        last_norm=None,
        sizes=(1024, 4096, 24, 16),
        image_size=1024,
        activation="gelu",
    ),
    "siglip_vision_model": SIGLIP,
    "smolvlm_vision": IDEFICS3,
}
"""Towers by model_type of vision_config."""


@dataclass(frozen=True, slots=True)
class Vit:
    """A tower that a config describes. `prefix` is that of its tensors, with the last dot."""

    vision: HfConfig
    style: VitStyle
    shape: VisionShape
    prefix: str

    @staticmethod
    def read(vision: HfConfig, model_type: str, prefix: str) -> Vit:
        """Reads a vision_config; `model_type` is the default of its own."""
        named = vision.text("model_type", model_type)
        if named not in STYLES:
            raise UnsupportedModel(
                f"config.json: model_type in vision_config is {named!r}, supported:"
                f" {', '.join(STYLES)}"
            )
        style = STYLES[named]
        if named == "internvl_vision":
            style = _with_options(style, vision)
        hidden_size, _, num_layers, num_heads = style.sizes
        shape = VisionShape(
            hidden_size=vision.size("hidden_size", hidden_size),
            num_layers=vision.count("num_hidden_layers", num_layers),
            num_heads=vision.size("num_attention_heads", num_heads),
        )
        shape.check()
        vision.refuse_unless("head_dim", shape.head_dim)
        vision.without_effect("head_dim", "projection_dim", "vision_use_head", "is_composition")
        vision.without_effect("num_image_tokens", "num_positions", "projector_hidden_act")
        return Vit(vision, style, shape, prefix)

    @property
    def patch_size(self) -> int:
        return _side(self.vision, "patch_size", self.style.patch_size)

    @property
    def image_size(self) -> int:
        return _side(self.vision, "image_size", self.style.image_size)

    @property
    def has_class_row(self) -> bool:
        return self.style.class_row is not None

    @property
    def has_grid_positions(self) -> bool:
        return self.style.positions is None

    def build(self, feature_layer: int | None, finish: Finish | None = None) -> Program:
        """Builds the Program "vision". Its rows are the output of a layer, counted from the last
        one at -1, or with None the last layer's with the final norm. `finish` appends further ops.
        """
        b = Builder("vision", self.shape.groups(IMAGE))
        builder = _Builder(self, b, None if self.style.scales is None else b.token_ids())
        num_layers = self.shape.num_layers
        count = num_layers if feature_layer is None else num_layers + 1 + feature_layer
        if feature_layer is not None and not (feature_layer < 0 < count):
            raise UnsupportedModel(
                f"config.json: vision_feature_layer is {feature_layer}, expected -{num_layers} to"
                f" -1"
            )
        x = builder.embed()
        for i in range(count):
            x = builder.layer(x, i)
        if feature_layer is None and self.style.last_norm is not None:
            x = builder.norm(x, self.style.last_norm)
        return finish_vision(builder.b, x if finish is None else finish(builder.b, x))


def _with_options(style: VitStyle, vision: HfConfig) -> VitStyle:
    """Returns InternVL's style with the options of its config."""
    vision.refuse_unless("use_absolute_position_embeddings", True)
    vision.refuse_unless("norm_type", "layer_norm", "rms_norm")
    vision.without_effect("layer_scale_init_value", "use_mask_token", "projection_dropout")
    vision.without_effect("use_absolute_position_embeddings", "norm_type")
    eps = vision.number("layer_norm_eps", style.default_eps)
    return replace(
        style,
        bias=vision.flag("attention_bias", False),
        qk_norms=vision.flag("use_qk_norm", False),
        eps=eps if vision.text("norm_type", "layer_norm") == "rms_norm" else None,
        last_norm=None if vision.flag("use_mean_pooling", True) else style.last_norm,
    )


Finish = Callable[[Builder, Value], Value]


def _side(vision: HfConfig, name: str, default: int) -> int:
    """Reads a side in pixels, given as a number or as the two equal sides of a square."""
    sides = set(vision.integers(name)) or {default}
    if len(sides) > 1 or min(sides) < 1:
        raise UnsupportedModel(f"config.json: {name} is {sorted(sides)}, expected a square")
    return sides.pop()


@dataclass(frozen=True, slots=True)
class _Builder:
    """Appends the parts of a tower."""

    vit: Vit
    b: Builder
    zeros: Value | None = None
    """Token ids, which are all 0, if the layers read vectors by them."""

    def embed(self) -> Value:
        """Appends the embedding of patches and their positions."""
        b, vit, style = self.b, self.vit, self.vit.style
        width, side = vit.shape.hidden_size, vit.patch_size
        kernel = (vit.vision.size("num_channels", 3), side, side)
        name = f"{vit.prefix}{style.patches}"
        x = patches(b, name, width, kernel, bias=style.patch_bias)
        num_positions = (vit.image_size // side) ** 2
        if style.class_row is not None:
            x = self._with_class_row(x, f"{vit.prefix}{style.class_row}", num_positions)
            num_positions += 1
        if style.positions is not None:
            table = self._table(f"{vit.prefix}{style.positions}", (num_positions, width))
            x = b.add(x, b.embed_positions(table))
        return x if style.first_norm is None else self.norm(x, style.first_norm)

    def _with_class_row(self, x: Value, name: str, num_patches: int) -> Value:
        """Replaces the row at position 0, which has no pixels, by the class vector."""
        b = self.b
        if self.vit.style.patch_bias:
            mask = Weight("patch_rows", (num_patches, 1), fill=1.0)
            x = b.mul(x, self._by_position(mask, first_row=1))
        table = self._table(name, (1, x.width))
        return b.add(x, self._by_position(table, first_row=0))

    def _table(self, name: str, shape: tuple[int, int]) -> Weight:
        if self.vit.style.has_row_axis:
            return Weight(name, shape, stored_as="row")
        return Weight(name, shape, (name,) if shape[0] == 1 else ())

    def _scale(self, x: Value, layer: str, index: int) -> Value:
        """Multiplies rows by the vector of a sublayer, if the tower has them."""
        if self.vit.style.scales is None:
            return x
        name = f"{self.vit.prefix}{layer}.{self.vit.style.scales[index]}"
        factors = self.b.value(name, "tokens", x.width)
        table = Weight(name, (1, x.width), (name,))
        self.b.append(Embedding(factors, table, self.zeros))
        return self.b.mul(x, factors)

    def _by_position(self, table: Weight, *, first_row: int) -> Value:
        """Appends a table's rows, which begin at a position; other positions have zeros."""
        out = self.b.value(table.name, "tokens", table.shape[1])
        self.b.append(Embedding(out, table, by_position=True, first_row=first_row))
        return out

    def layer(self, x: Value, i: int) -> Value:
        vit, style = self.vit, self.vit.style
        layer, width = f"{style.layers}.{i}", vit.shape.hidden_size
        attention = f"{vit.prefix}{layer}.{style.attention}"
        normed = self.norm(x, f"{layer}.{style.norms[0]}")
        q, k, v = (
            self.b.linear(normed, f"{attention}.{part}_proj", width, bias=style.bias)
            for part in "qkv"
        )
        if style.qk_norms:
            eps = 1e-6
            q, k = (
                self.b.rms_norm(part, f"{attention}.{name}_norm", eps)
                for part, name in ((q, "q"), (k, "k"))
            )
        if style.positions is None:
            rope = _axial_rope(vit)
            q, k = (self.b.rope(part, vit.shape.num_heads, rope) for part in (q, k))
        attended = attend(self.b, (q, k, v), vit.shape, i)
        out = self.b.linear(attended, f"{attention}.{style.out}", width, bias=style.out_bias)
        x = self.b.add(x, self._scale(out, layer, 0))
        inner = self._mlp(self.norm(x, f"{layer}.{style.norms[1]}"), layer)
        return self.b.add(x, self._scale(inner, layer, 1))

    def _mlp(self, x: Value, layer: str) -> Value:
        b, vision, style = self.b, self.vit.vision, self.vit.style
        width = vision.size("intermediate_size", style.sizes[1])
        name = f"{self.vit.prefix}{layer}.{style.mlp}"
        if style.is_gated:
            activation = vision.activation("hidden_act", style.activation)
            return gated_mlp(b, x, name, width, activation, bias=style.bias)
        inner = b.linear(x, f"{name}.fc1", width, bias=True)
        if vision.text("hidden_act", style.activation) == "quick_gelu":
            active = quick_gelu(b, inner)
        else:
            active = b.act(inner, vision.activation("hidden_act", style.activation))
        return b.linear(active, f"{name}.fc2", x.width, bias=True)

    def norm(self, x: Value, name: str) -> Value:
        style, last = self.vit.style, self.vit.style.last_norm
        is_layer_norm = style.eps is None or name == last
        name = f"{self.vit.prefix}{name}"
        if not is_layer_norm and style.eps is not None:
            return self.b.rms_norm(x, name, style.eps)
        eps = self.vit.vision.number("layer_norm_eps", style.default_eps)
        return self.b.layer_norm(x, name, eps)


def _axial_rope(vit: Vit) -> RopeTable:
    """Returns Pixtral's RoPE table: even frequencies rotate by row, odd ones by column."""
    theta, dim = get_axial_theta(vit.vision), vit.shape.head_dim
    frequencies = [theta ** -(i / dim) for i in range(0, dim, 2)]
    rows, columns = frequencies[0::2], frequencies[1::2]
    return RopeTable((*rows, *columns), axes=(0,) * len(rows) + (1,) * len(columns))
