"""Reads the logprobs of a step's sampled and scored rows into its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.engine.protocol.step import RowResult, TokenLogprobs
from octavo.executor.batch import SampleResult
from octavo.worker.model_input import ModelInput


def get_prompt_entries(model_input: ModelInput) -> Iterator[tuple[int, range]]:
    """Yields each request with prompt targets, and the range of their entries in the sampled
    rows.
    """
    first = len(model_input.sample_owners)
    for index, start, end in model_input.prompt_targets:
        yield index, range(first, first + end - start)
        first += end - start


def get_num_entries(model_input: ModelInput) -> int:
    """Returns the number of sampled and scored rows."""
    num_prompt = sum(end - start for _, start, end in model_input.prompt_targets)
    num_further = sum(len(ids) for _, ids in model_input.logprob_targets)
    return len(model_input.sample_owners) + num_prompt + num_further


def add_logprobs(
    model_input: ModelInput,
    results: Sequence[RowResult],
    kept: Sequence[int],
    samples: SampleResult,
) -> None:
    """Adds the requested logprobs of the kept samples and of prompts."""
    assert model_input.sampling is not None
    num_logprobs = model_input.sampling.records["num_logprobs"]
    logprobs: dict[int, TokenLogprobs] = {}
    for sample in kept:
        if num_logprobs[sample] >= 0:
            logprobs[sample] = _read(samples, sample, num_logprobs)
            result = results[model_input.sample_owners[sample]]
            result.logprobs = [*(result.logprobs or []), logprobs[sample]]
    first = len(model_input.sample_owners)
    for index, entries in get_prompt_entries(model_input):
        results[index].prompt_logprobs = [_read(samples, at, num_logprobs) for at in entries]
        first = entries.stop
    for sample, ids in model_input.logprob_targets:
        if sample in logprobs:
            for entry in range(first, first + len(ids)):
                _append(logprobs[sample], samples, entry)
        first += len(ids)


def _read(samples: SampleResult, entry: int, num_logprobs: NDArray[np.int32]) -> TokenLogprobs:
    """Returns the logprob and rank of an entry's token, then its top alternatives."""
    num = int(num_logprobs[entry])
    logprobs = TokenLogprobs([], [], [])
    _append(logprobs, samples, entry)
    if num > 0:
        assert samples.top_ids is not None and samples.top_logprobs is not None
        logprobs.token_ids += samples.top_ids[entry, :num].tolist()
        logprobs.logprobs += samples.top_logprobs[entry, :num].tolist()
        logprobs.ranks += range(1, num + 1)
    return logprobs


def _append(logprobs: TokenLogprobs, samples: SampleResult, entry: int) -> None:
    """Appends the logprob and rank of an entry's token."""
    assert samples.logprobs is not None and samples.ranks is not None
    logprobs.token_ids.append(int(samples.token_ids[entry]))
    logprobs.logprobs.append(float(samples.logprobs[entry]))
    logprobs.ranks.append(int(samples.ranks[entry]))
