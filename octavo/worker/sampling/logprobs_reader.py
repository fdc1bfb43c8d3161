"""Reads the logprobs of a step's sampled rows out of their arrays, as results carry them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import TokenLogprobs
from octavo.executor.batch import SampleResult


class LogprobsReader:
    """Reads rows of a SampleResult as lists."""

    def __init__(self, num_logprobs: NDArray[np.int32], samples: SampleResult) -> None:
        self._num_logprobs = num_logprobs
        self._samples = samples

    def has(self, entry: int) -> bool:
        """Returns whether an entry wants logprobs."""
        return int(self._num_logprobs[entry]) >= 0

    def read(self, entry: int) -> TokenLogprobs:
        """Returns an entry's own logprob and rank, then its top alternatives."""
        samples, num = self._samples, int(self._num_logprobs[entry])
        assert samples.logprobs is not None and samples.ranks is not None
        found = TokenLogprobs(
            [int(samples.token_ids[entry])],
            [float(samples.logprobs[entry])],
            [int(samples.ranks[entry])],
        )
        if num > 0:
            assert samples.top_ids is not None and samples.top_logprobs is not None
            found.token_ids += samples.top_ids[entry, :num].tolist()
            found.logprobs += samples.top_logprobs[entry, :num].tolist()
            found.ranks += range(1, num + 1)
        return found

    def add(self, found: TokenLogprobs, entry: int) -> None:
        """Adds an entry's own logprob and rank to those of the draw at the same place."""
        samples = self._samples
        assert samples.logprobs is not None and samples.ranks is not None
        found.token_ids.append(int(samples.token_ids[entry]))
        found.logprobs.append(float(samples.logprobs[entry]))
        found.ranks.append(int(samples.ranks[entry]))
