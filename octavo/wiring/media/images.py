"""Builds the image reader of the frontend and the vision tower of the worker.

Both are configured by the checkpoint's config.json and preprocessor_config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from octavo.api.errors import ConfigError, UnsupportedModel
from octavo.checkpoint.json_file import read_json
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.config.engine_config import EngineConfig
from octavo.media.image_tokens import ImageTokens, VideoTokens
from octavo.media.limits import ImageLimits
from octavo.media.reader import PillowReader
from octavo.media.rules import ImageRules, image_rules, rules_file, video_rules_file
from octavo.media.video import VideoReader, video_rules
from octavo.models.registry import build_programs, image_layout
from octavo.models.vision import ImageLayout
from octavo.text.ports import PrefixPrompt, Tokenizer
from octavo.worker.media.image_tower import ImageTower
from octavo.worker.media.patches import PixelScale
from octavo.worker.media.tower import TowerPrograms


def make_image_reader(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer | None, limits: ImageLimits
) -> PillowReader | None:
    """Builds the reader of images in prompts; None if the model reads no images."""
    layout = image_layout(checkpoint.config)
    if layout is None or (tokenizer is None and (layout.line_end or layout.tile_texts)):
        return None
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

    def before(index: int, second: float) -> list[int]:
        if begin is None:
            return []
        text = f"<{second:.1f} seconds>"
        if video.uses_clock:
            minutes, seconds = divmod(int(second), 60)
            text = f"{' ' if index else ''}{minutes:02d}:{seconds:02d} "
        return [*tokenizer.encode(text, add_special_tokens=False), begin]

    tokens = VideoTokens(
        token_id=video.token_id,
        before=before,
        after=[] if end is None else [end],
        positions_per_second=video.positions_per_second,
    )
    file = video_rules_file(_folder(checkpoint))
    given = (
        _processor_config(checkpoint).get("video_processor") if file is None else read_json(file)
    )
    own = video_rules(
        given or {},
        rules,
        group=layout.num_frames,
        is_total=begin is not None and not video.uses_clock,
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
    if video.uses_clock:
        return {token: token}
    begin, end = tokenizer.token_text(video.begin), tokenizer.token_text(video.end)
    return {f"{begin}{token}{end}": token}


def make_image_tower(
    config: EngineConfig, checkpoint: Checkpoint, layout: ImageLayout, parts: TowerPrograms
) -> ImageTower:
    rules = _rules(config, checkpoint, layout)
    return ImageTower(layout, PixelScale(rules.factor, rules.mean, rules.std), parts)


def count_patches(config: EngineConfig, checkpoint: ModelHeader, layout: ImageLayout) -> int:
    """Returns the rows of the vision tower for the largest image."""
    rules = _rules(config, checkpoint, layout)
    max_pixels = rules.max_pixels if rules.side is None else rules.side**2
    return max_pixels // layout.patch_size**2 + layout.has_class_row


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
        default_tokens=layout.default_tokens,
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
        row_id=layout.row_id,
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
