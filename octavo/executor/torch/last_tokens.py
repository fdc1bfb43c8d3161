"""Step arrays that read and store the last sampled tokens of persistent rows on the device
(`batch.LastTokens`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import LastTokens


def source_arrays(last: LastTokens | None) -> dict[str, NDArray]:
    """Returns `last_sources [T]`, -1 where the host knows the token id; empty if it knows all."""
    if last is None or not (last.sources >= 0).any():
        return {}
    return {"last_sources": last.sources.astype(np.int64)}


def target_arrays(last: LastTokens | None, samples: slice, *, spare: int) -> dict[str, NDArray]:
    """Returns `last_targets [S]` of sampled rows, with `spare` for rows without a
    persistent row.
    """
    if last is None:
        return {}
    targets = last.targets[samples].astype(np.int64)
    return {"last_targets": np.where(targets < 0, spare, targets)}
