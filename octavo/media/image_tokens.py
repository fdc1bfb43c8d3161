"""Tokens that represent an image's views in a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from octavo.engine.protocol.packed_image import pack_rows
from octavo.engine.protocol.step import MediaContent, MediaItem
from octavo.text.ports import DecodedMedia


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoTokens:
    """Placeholder tokens of a model's videos, one group of frames after the other."""

    token_id: int
    """Token of each cell."""
    before: Callable[[int, float], list[int]]
    """Returns the tokens before a group, by its index and its time in seconds."""
    after: list[int]
    """Tokens after a group; []: groups follow each other, and have different positions in time."""
    positions_per_second: int | None
    """Positions in time per second; None: one per group."""

    def get_interval(self, group_seconds: float) -> float:
        """Returns the positions between two groups."""
        per_second = self.positions_per_second
        return 1.0 if per_second is None else per_second * group_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """Placeholder tokens of a model's images. A view is represented by one token per cell of
    `multiple` x `multiple` pixels, row by row.
    """

    token_id: int
    """Placeholder token of an image or view."""
    multiple: int
    row_id: int | None = None
    """Token of each cell; None: `token_id`."""
    is_whole: bool = False
    """Whether a view's tokens attend to one another."""
    line_end: int | None = None
    """Text token after each line of cells; None: lines follow each other."""
    image_end: int | None = None
    """Text token that replaces the last `line_end`."""
    has_newline: bool = False
    """Whether a row of the tower ends each line of the tiles, which are packed without padding, or
    the entire image if there are no tiles."""
    max_tiles: int | None = None
    """Most tiles whose rows are not scaled down."""
    tiles_alone: bool = False
    """Whether only the image of a prompt with one image is divided into tiles."""
    tile_tokens: Callable[[int, int], list[int]] | None = None
    """Returns the tokens of an image in rows and columns of tiles, with `token_id` once per view;
    None: views follow each other.
    """

    @property
    def cell_id(self) -> int:
        return self.token_id if self.row_id is None else self.row_id

    def decode(self, views: Sequence[MediaContent], tiles: tuple[int, int]) -> DecodedMedia:
        """Returns an image's views with their tokens; `tiles` are the rows and columns that the
        image was divided into, (0, 0) if it was not.
        """
        if self.tile_tokens is None:
            template = [self.token_id] * len(views)
        else:
            template = self.tile_tokens(*tiles)
        image = DecodedMedia([], [], list(views))
        left = iter(views)
        for token_id in template:
            if token_id == self.token_id:
                self.add_view(image, next(left))
            else:
                image.token_ids.append(token_id)
        return image

    def decode_video(
        self,
        video: VideoTokens,
        groups: Sequence[MediaContent],
        seconds: Sequence[float],
        group_seconds: float,
    ) -> DecodedMedia:
        """Returns a video's groups of frames with their tokens; `seconds` are their times and
        `group_seconds` the time from one to the next.
        """
        decoded = DecodedMedia([], [], list(groups), kind="video")
        for index, (view, second) in enumerate(zip(groups, seconds, strict=True)):
            tokens = self if self.row_id is not None else replace(self, token_id=video.token_id)
            decoded.token_ids.extend(video.before(index, second))
            tokens.add_view(decoded, view)
            decoded.token_ids.extend(video.after)
            if not video.after:
                time = int(index * video.get_interval(group_seconds))
                item = structs.replace(decoded.media[-1], time=time, joins=index > 0)
                decoded.media[-1] = item
        return decoded

    def add_view(self, image: DecodedMedia, view: MediaContent) -> None:
        """Appends a view's tokens."""
        if self.has_newline:
            count = self._count_packed(view)
            first_row, grid = len(image.token_ids), (1, count)
            image.media.append(MediaItem(view.digest, first_row, count, grid, self.is_whole))
            image.token_ids.extend([self.cell_id] * count)
            return
        rows, columns = view.height // self.multiple, view.width // self.multiple
        token_ids = [self.cell_id] * columns
        if self.line_end is not None:
            token_ids.append(self.line_end)
        token_ids *= rows
        image.media.append(
            MediaItem(
                view.digest,
                len(image.token_ids),
                len(token_ids),
                (rows, columns),
                self.is_whole,
                0 if self.line_end is None else columns + 1,
            )
        )
        if self.image_end is not None:
            token_ids[-1] = self.image_end
        image.token_ids.extend(token_ids)

    def _count_packed(self, view: MediaContent) -> int:
        side = view.width // self.multiple
        if view.tiles == (0, 0):
            return side * side + 1
        return side * side + pack_rows(side, view.tiles, view.source, self.max_tiles).num_rows
