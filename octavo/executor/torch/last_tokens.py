"""The arrays by which a step reads and keeps the last tokens of its permanent rows on the device
(`batch.LastTokens`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.executor.batch import LastTokens


def source_arrays(last: LastTokens | None) -> dict[str, NDArray]:
    """Returns `last_sources [T]`, -1 where the host knows the token id; nothing where it
    knows all.
    """
    if last is None or not (last.sources >= 0).any():
        return {}
    return {"last_sources": last.sources.astype(np.int64)}


def target_arrays(last: LastTokens | None, samples: slice, *, spare: int) -> dict[str, NDArray]:
    """Returns `last_targets [S]` of some sampled rows, with the row `spare` for those that belong
    to no permanent row.
    """
    if last is None:
        return {}
    targets = last.targets[samples].astype(np.int64)
    return {"last_targets": np.where(targets < 0, spare, targets)}
