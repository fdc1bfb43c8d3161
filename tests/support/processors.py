"""Logits processors that tests name by `tests.support.processors:FUNCTION`."""

import threading
import time

import numpy as np

released = threading.Event()
"""Lets `waits` return."""

PACE_S = 0.02
"""Time that `paces` takes for each token, in seconds."""


def favours_last(token_ids, logits):
    """Makes the last token of the text likelier, and every third id a little."""
    logits[token_ids[-1]] += 2.0
    logits[::3] += 0.5


def only_even(token_ids, logits):
    return np.where(np.arange(len(logits)) % 2 == 0, logits, -np.inf)


def raises(token_ids, logits):
    raise ValueError(f"it does not like {len(token_ids)} tokens")


def returns_short(token_ids, logits):
    return logits[:-1]


def returns_nan(token_ids, logits):
    logits[5] = np.nan


def bans_all(token_ids, logits):
    logits[:] = -np.inf


def paces(token_ids, logits):
    """Changes nothing, but takes its time, so that a request lasts however fast the machine is."""
    time.sleep(PACE_S)


def crawls(token_ids, logits):
    """Takes ten times as long as `paces`."""
    time.sleep(10 * PACE_S)


def waits(token_ids, logits):
    released.wait(30)
    return logits


NUMBER = 3
