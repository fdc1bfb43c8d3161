"""A model's audio tower: encodes an audio's features as rows of the decoder.

Each window is computed separately, so its rows depend only on its features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octavo.engine.protocol.step import MediaContent
from octavo.models.audio import AUDIO, PROJECTED, AudioLayout
from octavo.worker.media.patches import Patches, Rows, tower_batch
from octavo.worker.media.tower import TowerPrograms


@dataclass(frozen=True, slots=True)
class AudioTower:
    """The Programs of an audio tower, and the layout of its audio."""

    layout: AudioLayout
    parts: TowerPrograms

    def encode(self, content: MediaContent) -> Rows:
        """Returns the decoder's rows of a window, `[num_tokens, W]`."""
        rows = np.frombuffer(content.data, "<f4").reshape(content.height, content.width)
        size, count = self.layout.rows_per_token, len(rows)
        at = np.arange(count)
        patches = Patches(rows, at[None].astype(np.int32), np.array([0, count], np.int32), at)
        encoded = self.parts.run(AUDIO, tower_batch(patches, self.parts.programs[AUDIO].groups))
        num_tokens = count // size
        groups = encoded[: num_tokens * size].reshape(num_tokens, size, -1)
        return self.parts.project(PROJECTED, groups)
