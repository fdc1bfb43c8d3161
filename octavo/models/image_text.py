"""Models made of a vision transformer, a projector and the decoder of another family: LLaVA,
Mistral 3 and models like them.

`FAMILIES` says what is special about each; the decoder is that of the text_config's model_type.
Liu et al. 2023 (LLaVA).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import HfConfig
from octavo.models.registry import get_module
from octavo.models.vision import (
    NEWLINE,
    ImageLayout,
    TileTexts,
    refuse_unread_vision,
    vision_config,
    with_image_rows,
)
from octavo.models.vit import Vit
from octavo.program.builder import Builder
from octavo.program.ops import Embedding
from octavo.program.program import Program, Value, Weight

PROJECTOR = "multi_modal_projector"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTextFamily:
    """Defaults of a family's config.json, and its parts."""

    text: str
    """Default model_type of text_config."""
    vision: str
    """Default model_type of vision_config."""
    projector: Callable[[Builder, Value, HfConfig], Value]
    """Appends the projector to a cell's row."""
    layout: Callable[[HfConfig, Vit], ImageLayout]
    finish: Callable[[Builder, Value, HfConfig], Value] | None = None
    """Appends ops to the rows of patches."""
    feature_layer: int | None = None
    """Default of vision_feature_layer; None: the last layer with the final norm."""
    prefix: str = "vision_tower."
    text_values: tuple[tuple[str, object], ...] = ()
    """Values that replace those of the decoder's config."""


def build(config: HfConfig) -> dict[str, Program]:
    family, vit = FAMILIES[config.model_type], _vit(config)
    config.without_effect("vision_config", "image_token_id", "image_token_index")
    config.without_effect("image_seq_length", "image_seq_len", "ignore_index", "is_composition")
    layout = family.layout(config, vit)
    layer = family.feature_layer
    if layer is not None:
        layer = _feature_layer(config, layer)
    finish = family.finish
    tower = vit.build(layer, None if finish is None else lambda b, x: finish(b, x, config))
    b = Builder("projector")
    rows = b.input_rows(vit.shape.hidden_size * layout.cell**2)
    projector = b.finish(rows=b.gather_rows(family.projector(b, rows, config)))
    vit.vision.without_effect("image_size")
    refuse_unread_vision(vit.vision)
    text = build_text(config.with_values(**dict(family.text_values)), family.text)
    programs = {"vision": tower, "projector": projector}
    if layout.resize == "padded_tiles":
        programs[NEWLINE] = _newline(config.size("hidden_size"))
    decoder = with_image_rows(text["decoder"], sees_ahead=layout.prefix is not None)
    return {"decoder": decoder, **programs}


def image_layout(config: HfConfig) -> ImageLayout:
    return FAMILIES[config.model_type].layout(config, _vit(config))


def _newline(hidden_size: int) -> Program:
    """Returns the Program of the row that ends a line of an image."""
    b = Builder(NEWLINE)
    table = Weight("image_newline", (1, hidden_size), ("image_newline",))
    out = b.value("image_newline", "tokens", hidden_size)
    b.append(Embedding(out, table, b.token_ids()))
    return b.finish(rows=b.gather_rows(out))


def _vit(config: HfConfig) -> Vit:
    family = FAMILIES[config.model_type]
    return Vit.read(vision_config(config), family.vision, family.prefix)


def build_text(config: HfConfig, default: str) -> dict[str, Program]:
    """Builds the decoder by the family of its own model_type; `default` is the one of a config that
    does not say.
    """
    model_type = config.text("text_model_type", default)
    module = get_module(model_type)
    programs: dict[str, Program] = module.build(config.with_values(model_type=model_type))
    if set(programs) != {"decoder"}:
        raise UnsupportedModel(
            f"config.json: model_type in text_config is {model_type!r}, expected a decoder"
        )
    return programs


def _feature_layer(config: HfConfig, default: int) -> int:
    layer = config.values.get("vision_feature_layer")
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int)):
        raise UnsupportedModel(
            f"config.json: vision_feature_layer is {layer!r}, expected one negative integer"
        )
    return default if layer is None else layer


# -- projectors ------------------------------------------------------------------------------------


def _two_layers(b: Builder, x: Value, config: HfConfig) -> Value:
    """Appends LLaVA's projector: two linear layers with an activation between them."""
    bias, width = config.flag("multimodal_projector_bias", True), config.size("hidden_size")
    inner = b.linear(x, f"{PROJECTOR}.linear_1", width, bias=bias)
    active = b.act(inner, config.activation("projector_hidden_act", "gelu"))
    return b.linear(active, f"{PROJECTOR}.linear_2", width, bias=bias)


def _append_mistral3_projector(b: Builder, x: Value, config: HfConfig) -> Value:
    """Appends Mistral 3's projector: the merger of a cell's patches, then LLaVA's, without biases
    by default.
    """
    width = vision_config(config).size("hidden_size", 1024)
    merged = b.linear(x, f"{PROJECTOR}.patch_merger.merging_layer", width)
    bias = config.flag("multimodal_projector_bias", False)
    return _two_layers(b, merged, config.with_values(multimodal_projector_bias=bias))


def _projector_norm(b: Builder, x: Value, config: HfConfig) -> Value:
    return b.rms_norm(x, f"{PROJECTOR}.norm", config.number("rms_norm_eps", 1e-6))


def _append_idefics3_projector(b: Builder, x: Value, config: HfConfig) -> Value:
    """Appends Idefics 3's projector: one linear layer over a cell's patches."""
    name = "model.connector.modality_projection.proj"
    return b.linear(x, name, config.size("hidden_size"))


def _append_internvl_projector(b: Builder, x: Value, config: HfConfig) -> Value:
    """Appends InternVL's projector: a layer norm over a cell's patches, then LLaVA's."""
    return _two_layers(b, b.layer_norm(x, f"{PROJECTOR}.layer_norm", 1e-5), config)


def _one_layer(b: Builder, x: Value, config: HfConfig) -> Value:
    """Appends PaliGemma's projector."""
    width = config.size("hidden_size")
    config.refuse_unless("projection_dim", width)
    config.without_effect("projection_dim", "num_image_tokens")
    return b.linear(x, f"{PROJECTOR}.linear", width, bias=True)


# -- layouts ---------------------------------------------------------------------------------------


def _token_id(config: HfConfig, default: int) -> int:
    """Reads the id of the token of an image's rows, which has two names."""
    named = "image_token_index" if config.values.get("image_token_index") else "image_token_id"
    return config.integer(named, default)


def _mistral3_layout(config: HfConfig, vit: Vit) -> ImageLayout:
    return _lines(vit, _token_id(config, 10), config.size("spatial_merge_size", 2))


def _llava_layout(config: HfConfig, vit: Vit) -> ImageLayout:
    _check_selection(config, vit, "default")
    token_id = _token_id(config, 32_000)
    return _lines(vit, token_id, 1) if vit.has_grid_positions else _square(vit, token_id, 1)


def _check_selection(config: HfConfig, vit: Vit, default: str) -> None:
    """Raises UnsupportedModel unless the rows of all patches are selected, and no class row."""
    selected = config.text("vision_feature_select_strategy", default)
    expected = "default" if vit.has_class_row else "full"
    if selected != expected:
        raise UnsupportedModel(
            f"config.json: vision_feature_select_strategy is {selected!r}, expected {expected!r}"
            " for this tower"
        )


def _llava_next_layout(config: HfConfig, vit: Vit) -> ImageLayout:
    _check_selection(config, vit, "default")
    config.refuse_unless("use_image_newline_parameter", True)
    config.without_effect("use_image_newline_parameter")
    return _padded_tiles(config, _square(vit, _token_id(config, 32_000), 1), NEXT_GRIDS)


def _onevision_layout(config: HfConfig, vit: Vit) -> ImageLayout:
    _check_selection(config, vit, "full")
    config.refuse_unless("use_image_newline_parameter", True)
    config.without_effect("use_image_newline_parameter", "video_token_index", "video_token_id")
    ratio = config.text("vision_aspect_ratio", "anyres_max_9")
    if not re.fullmatch(r"anyres_max_[1-9]\d{0,2}", ratio):
        raise UnsupportedModel(
            f"config.json: vision_aspect_ratio is {ratio!r}, expected anyres_max_ and a number"
        )
    layout = _square(vit, _token_id(config, 151_646), 1)
    grids = [(rows, columns) for rows in range(1, 7) for columns in range(1, 7)]
    layout = _padded_tiles(config, layout, grids)
    return replace(layout, max_tiles=int(ratio.rpartition("_")[2]), tiles_alone=True)


def _padded_tiles(
    config: HfConfig, layout: ImageLayout, grids: Sequence[tuple[int, int]]
) -> ImageLayout:
    """Returns the layout of tiles that are packed without their padding; `grids` are the default
    rows and columns.
    """
    assert layout.side is not None, "tiles have a side"
    side = layout.side
    given = config.values.get("image_grid_pinpoints")
    if given is None:
        given = [[rows * side, columns * side] for rows, columns in grids]
    is_list = isinstance(given, list) and given and len(given) <= MAX_RESOLUTIONS
    if not is_list or not all(_is_resolution(size, side) for size in given):
        raise UnsupportedModel(
            f"config.json: image_grid_pinpoints is {given!r:.60}, expected a list of heights and"
            f" widths, multiples of {side} pixels"
        )
    resolutions = tuple((height, width) for height, width in given)
    return replace(layout, resize="padded_tiles", resolutions=resolutions)


def _is_resolution(size: object, side: int) -> bool:
    return (
        isinstance(size, list)
        and len(size) == 2
        and all(isinstance(one, int) and one % side == 0 and 0 < one <= 1 << 16 for one in size)
    )


def _idefics3_layout(config: HfConfig, vit: Vit) -> ImageLayout:
    vit.vision.without_effect("max_image_size", "size", "use_base_siglip")
    config.without_effect("perceiver_config", "neftune_noise_alpha", "pixel_shuffle_factor")
    config.without_effect("_pad_token_id")
    layout = _square(vit, _token_id(config, 128_257), config.size("scale_factor", 2))
    return replace(layout, resize="tiles", tile_texts=IDEFICS3_TEXTS)


def _internvl_layout(config: HfConfig, vit: Vit) -> ImageLayout:
    config.refuse_unless("vision_feature_layer", -1)
    config.refuse_unless("vision_feature_select_strategy", "default")
    config.without_effect("vision_feature_layer", "vision_feature_select_strategy")
    ratio, token_id = config.positive("downsample_ratio", 0.5), _token_id(config, 151_667)
    layout = _square(vit, token_id, round(1 / ratio))
    return replace(layout, resize="best_tiles", written=("<img>", token_id, "</img>"))


def _paligemma_layout(config: HfConfig, vit: Vit) -> ImageLayout:
    config.without_effect("hidden_act", "_vocab_size")  # gemma reads hidden_act itself
    layout = _square(vit, _token_id(config, 256_000), 1)
    return replace(layout, is_whole=True, prefix=("<bos>", "\n"))


def _lines(vit: Vit, token_id: int, cell: int) -> ImageLayout:
    """Returns Pixtral's layout, in which a text token ends each line."""
    return ImageLayout(
        patch_size=vit.patch_size,
        cell=cell,
        token_id=token_id,
        has_grid_positions=True,
        resize="longest_edge",
        line_end="[IMG_BREAK]",
        image_end="[IMG_END]",
        splits_columns=True,
    )


def _square(vit: Vit, token_id: int, cell: int) -> ImageLayout:
    """Returns the layout of images of a fixed size."""
    side = vit.image_size
    num_patches = side // vit.patch_size  # pixels beyond the last patch are not read
    if cell < 1 or num_patches < 1 or num_patches % cell:
        raise UnsupportedModel(
            f"config.json: image_size is {side}, expected a multiple of {cell} patches of"
            f" {vit.patch_size} pixels"
        )
    return ImageLayout(
        patch_size=vit.patch_size,
        cell=cell,
        token_id=token_id,
        side=side,
        resize="crop" if vit.has_class_row else "square",
        has_class_row=vit.has_class_row,
    )


MAX_RESOLUTIONS = 1000
"""Upper bound of the resolutions of tiles."""
NEXT_GRIDS = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
IDEFICS3_TEXTS = TileTexts(
    tile="<fake_token_around_image><row_{row}_col_{column}>",
    row_end="\n",
    entire="<fake_token_around_image><global-img>",
    after_tiles="\n",
    end="<fake_token_around_image>",
)
IDEFICS3 = ImageTextFamily(
    text="llama",
    vision="idefics3_vision",
    projector=_append_idefics3_projector,
    layout=_idefics3_layout,
    prefix="model.vision_model.",
)
FAMILIES: dict[str, ImageTextFamily] = {
    "idefics3": IDEFICS3,
    "internvl": ImageTextFamily(
        text="qwen2",
        vision="internvl_vision",
        projector=_append_internvl_projector,
        layout=_internvl_layout,
    ),
    "llava": ImageTextFamily(
        text="llama",
        vision="clip_vision_model",
        projector=_two_layers,
        layout=_llava_layout,
        feature_layer=-2,
    ),
    "llava_next": ImageTextFamily(
        text="llama",
        vision="clip_vision_model",
        projector=_two_layers,
        layout=_llava_next_layout,
        feature_layer=-2,
    ),
    "llava_onevision": ImageTextFamily(
        text="qwen2",
        vision="siglip_vision_model",
        projector=_two_layers,
        layout=_onevision_layout,
        feature_layer=-1,
    ),
    "mistral3": ImageTextFamily(
        text="mistral",
        vision="pixtral",
        projector=_append_mistral3_projector,
        layout=_mistral3_layout,
        finish=_projector_norm,
        feature_layer=-1,
    ),
    "paligemma": ImageTextFamily(
        text="gemma",
        vision="siglip_vision_model",
        projector=_one_layer,
        layout=_paligemma_layout,
        text_values=(("use_bidirectional_attention", None),),
    ),
    "smolvlm": replace(IDEFICS3, vision="smolvlm_vision"),
}
"""Families by model_type."""
