"""Builds the image reader of the frontend and the vision tower of the worker.

Both are configured by the checkpoint's config.json and preprocessor_config.json. A model split over
several ranks supports text only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from octavo.api.errors import ConfigError, UnsupportedModel
from octavo.checkpoint.dummy import DummyWeights
from octavo.checkpoint.json_file import read_json
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.config.engine_config import EngineConfig
from octavo.config.paths import expand_path, path_exists
from octavo.executor.base import Backend, BackendOptions, Footprint
from octavo.executor.kv import BLOCK_SIZE
from octavo.media.image_tokens import ImageTokens, VideoTokens
from octavo.media.limits import ImageLimits
from octavo.media.reader import PillowReader
from octavo.media.rules import ImageRules, image_rules, rules_file, video_rules_file
from octavo.media.video import VideoReader, video_rules
from octavo.models.registry import build_programs, image_layout
from octavo.models.vision import NEWLINE, TOWER, ImageLayout
from octavo.program.program import Program
from octavo.text.ports import ImageReader, PrefixPrompt, Tokenizer
from octavo.wiring.speculation.draft import add_footprints
from octavo.worker.media.image_tower import ImageTower
from octavo.worker.media.patches import PixelScale


def get_image_layout(config: EngineConfig, checkpoint: ModelHeader) -> ImageLayout | None:
    """Returns the layout of images as rows of the model; None if the model reads no images with
    this config.
    """
    if config.backend.num_stage_ranks > 1:
        return None
    return image_layout(checkpoint.config)


def make_image_reader(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer | None
) -> ImageReader | None:
    """Builds the reader of images in prompts; None if the model reads no images."""
    layout = get_image_layout(config, checkpoint)
    if layout is None or (tokenizer is None and (layout.line_end or layout.tile_texts)):
        return None
    media = config.media
    folder = None if media.media_dir is None else expand_path(media.media_dir)
    if folder is not None and not (path_exists(folder) and folder.is_dir()):
        raise ConfigError(
            f"media_dir: {folder} is not a directory",
            hint="create the directory, or omit media_dir",
        )
    limits = ImageLimits(
        media.max_images,
        media.max_image_bytes,
        media.max_image_pixels,
        folder,
        media.allow_media_urls,
    )
    rules = _rules(config, checkpoint, layout)
    _check_fits(config, layout, rules)
    return PillowReader(
        rules,
        limits,
        _tokens(layout, tokenizer),
        _replacements(layout, tokenizer) | _video_replacements(layout, tokenizer),
        _video_reader(config, checkpoint, layout, limits, rules, tokenizer=tokenizer),
        _prefix(config, checkpoint, layout),
    )


def _video_reader(
    config: EngineConfig,
    checkpoint: Checkpoint,
    layout: ImageLayout,
    limits: ImageLimits,
    rules: ImageRules,
    *,
    tokenizer: Tokenizer | None,
) -> VideoReader | None:
    """Builds the reader of videos in prompts; None if the model reads none."""
    video, media = layout.video, config.media
    if video is None or tokenizer is None:
        return None
    begin, end = video.begin, video.end

    def before(second: float) -> list[int]:
        if begin is None:
            return []
        text = f"<{second:.1f} seconds>"
        return [*tokenizer.encode(text, add_special_tokens=False), begin]

    tokens = VideoTokens(
        token_id=video.token_id,
        before=before,
        after=[] if end is None else [end],
        positions_per_second=video.positions_per_second,
    )
    file = video_rules_file(_folder(checkpoint))
    own = video_rules(
        {} if file is None else read_json(file),
        rules,
        group=layout.num_frames,
        is_total=begin is not None,
        max_frames=media.max_video_frames,
    )
    own_limits = replace(
        limits, max_images=media.max_videos, max_bytes=media.max_video_bytes, noun="video"
    )
    return VideoReader(own, own_limits, tokens)


def _video_replacements(layout: ImageLayout, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Returns the replacement of a video's placeholder, whose groups have their own tokens around
    them.
    """
    video = layout.video
    if tokenizer is None or video is None or video.begin is None or video.end is None:
        return {}
    token = tokenizer.token_text(video.token_id)
    begin, end = tokenizer.token_text(video.begin), tokenizer.token_text(video.end)
    return {f"{begin}{token}{end}": token}


def load_tower(
    config: EngineConfig,
    checkpoint: Checkpoint,
    options: BackendOptions,
    make_backend: Callable[[BackendOptions], Backend],
) -> ImageTower | None:
    """Loads the vision tower with its own backend; None if the model has none."""
    layout = get_image_layout(config, checkpoint)
    if layout is None:
        return None
    whole = build_programs(checkpoint.config)
    programs = {name: whole[name] for name in (*TOWER, NEWLINE) if name in whole}
    rules = _rules(config, checkpoint, layout)
    backend = make_backend(_tower_options(options, layout, rules))
    is_dummy = config.model.load_format == "dummy"
    prepared = {}
    for name, program in programs.items():
        formats = loaded_formats(checkpoint, config.model.dtype, None, program)
        backend.check(program, formats)
        weights = (
            DummyWeights(formats) if is_dummy else WeightReader(checkpoint, config.model.dtype)
        )
        prepared[name] = backend.prepare_program(program, weights.load)
    scale = PixelScale(rules.factor, rules.mean, rules.std)
    return ImageTower(layout, scale, programs, prepared, backend)


def with_tower(
    config: EngineConfig,
    header: ModelHeader,
    footprint: Footprint,
    options: BackendOptions,
    make_backend: Callable[[BackendOptions], Backend],
) -> Footprint:
    """Adds the memory of the vision tower, sized for the largest image."""
    layout = get_image_layout(config, header)
    if layout is None:
        return footprint
    own = _tower_options(options, layout, _rules(config, header, layout))
    backend, num_blocks = make_backend(own), -(-own.max_tokens // BLOCK_SIZE)
    for program in tower_programs(header):
        formats = loaded_formats(header, config.model.dtype, None, program)
        needed = backend.footprint(program, formats)
        kv_bytes = num_blocks * sum(layout.block_bytes for layout in needed.kv_layouts)
        needed = replace(needed, step_bytes=needed.step_bytes + kv_bytes)
        footprint = add_footprints(footprint, needed, program.name)
    return footprint


def _tower_options(
    options: BackendOptions, layout: ImageLayout, rules: ImageRules
) -> BackendOptions:
    """Returns the options of the tower's backend, sized for the largest image."""
    max_pixels = rules.max_pixels if rules.side is None else rules.side**2
    num_patches = max_pixels // layout.patch_size**2 + layout.has_class_row
    return replace(
        options,
        kv_cache_dtype="auto",
        max_tokens=num_patches,
        max_requests=num_patches,
        max_context=num_patches,
        hooks=(),
        offload=None,
        batch_invariant=False,
    )


def _folder(checkpoint: ModelHeader) -> Path:
    return checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent


def _rules(config: EngineConfig, checkpoint: ModelHeader, layout: ImageLayout) -> ImageRules:
    return image_rules(
        _processor_config(checkpoint),
        side=layout.side,
        multiple=layout.multiple,
        max_tokens=config.media.max_image_tokens,
        resize=layout.resize,
        resolutions=layout.resolutions,
    )


def _processor_config(checkpoint: ModelHeader) -> dict[str, Any]:
    """Returns the contents of preprocessor_config.json; {} without the file. A GGUF tower's header
    contains them.
    """
    file = rules_file(_folder(checkpoint))
    own: dict[str, Any] | None = checkpoint.config.get("image_processor")
    if own is not None:
        return own
    return {} if file is None else read_json(file)


def _prefix(
    config: EngineConfig, checkpoint: ModelHeader, layout: ImageLayout
) -> PrefixPrompt | None:
    if layout.prefix is None:
        return None
    groups = build_programs(checkpoint.config)["decoder"].groups
    windows = [group.window for group in groups if group.window is not None]
    room = config.scheduler.max_num_batched_tokens - config.scheduler.max_num_seqs
    return PrefixPrompt(*layout.prefix, max_tokens=min([room, *windows]))


def _tokens(layout: ImageLayout, tokenizer: Tokenizer | None) -> ImageTokens:
    def get_id(text: str | None) -> int | None:
        """Returns the id of a special token."""
        if text is None or tokenizer is None:
            return None
        token_ids = tokenizer.encode(text, allow_special_text=True, add_special_tokens=False)
        if len(token_ids) != 1:
            raise UnsupportedModel(f"tokenizer.json: has no token {text!r}, which images need")
        return token_ids[0]

    return ImageTokens(
        token_id=layout.token_id,
        multiple=layout.multiple,
        is_whole=layout.is_whole,
        line_end=get_id(layout.line_end),
        image_end=get_id(layout.image_end),
        has_newline=layout.resize == "padded_tiles",
        max_tiles=layout.max_tiles,
        tiles_alone=layout.tiles_alone,
        tile_tokens=_tile_tokens(layout, tokenizer),
    )


def _tile_tokens(
    layout: ImageLayout, tokenizer: Tokenizer | None
) -> Callable[[int, int], list[int]] | None:
    texts = layout.tile_texts
    if texts is None or tokenizer is None:
        return None
    view = tokenizer.token_text(layout.token_id)

    @cache
    def encode(rows: int, columns: int) -> list[int]:
        text = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                text += texts.tile.format(row=row, column=column) + view
            text += texts.row_end
        text += texts.after_tiles if rows else ""
        text += texts.entire + view + texts.end
        return tokenizer.encode(text, allow_special_text=True, add_special_tokens=False)

    return encode


def _check_fits(config: EngineConfig, layout: ImageLayout, rules: ImageRules) -> None:
    """Raises ConfigError if a step is too small for an image that must be computed at once."""
    if not layout.is_whole or rules.side is None:
        return
    rows, columns = layout.get_grid(rules.side, rules.side)
    scheduler, needed = config.scheduler, rows * columns + config.scheduler.max_num_seqs
    if scheduler.max_num_batched_tokens < needed:
        raise ConfigError(
            f"max_num_batched_tokens: got {scheduler.max_num_batched_tokens:,}, expected at least"
            f" {needed:,}: one step computes the {rows * columns:,} tokens of an image and one"
            f" token for each of {scheduler.max_num_seqs:,} requests",
            hint=f"set max_num_batched_tokens to {needed}, or lower max_num_seqs",
        )


def _replacements(layout: ImageLayout, tokenizer: Tokenizer | None) -> dict[str, str]:
    if tokenizer is None:
        return {}
    named_by = layout.token_id if layout.named_by is None else layout.named_by
    written = layout.written or (layout.token_id,)
    texts = [
        token_text if isinstance(token_text, str) else tokenizer.token_text(token_text)
        for token_text in written
    ]
    return {tokenizer.token_text(named_by): "".join(texts)}


def tower_programs(checkpoint: ModelHeader) -> list[Program]:
    """Returns the Programs of the vision tower; [] if the model has none."""
    if image_layout(checkpoint.config) is None:
        return []
    programs = build_programs(checkpoint.config)
    return [programs[name] for name in (*TOWER, NEWLINE) if name in programs]
