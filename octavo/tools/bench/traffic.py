"""Creates the requests of a serving benchmark and their times: from a scaled trace, or synthetic.

A trace is JSON lines in the format of Mooncake's published traces: timestamp (ms), input_length,
output_length, and optionally hash_ids, the ids of the prompt's blocks of 512 tokens. Prompts with
the same leading ids share these tokens.
"""

from __future__ import annotations

import array
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from octavo.api.errors import ConfigError

TRACE_BLOCK = 512
"""Number of tokens of a trace's block."""
KV_BLOCK = 16
"""Number of tokens of a KV block, the granularity of the prefix cache."""
MAX_LENGTH = 1 << 24
"""Maximum number of tokens of a prompt or an output."""
MAX_TIMESTAMP_MS = 1e15
BURSTINESS = (0.01, 100.0)
"""Allowed range of the gamma distribution's shape."""


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    name: str
    """Source for error messages, such as a line of a trace."""
    at_s: float
    """Time at which it is sent, in seconds after the first one."""
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()
    """Ids of the prompt's blocks; () if it shares no blocks."""
    block_tokens: int = TRACE_BLOCK
    """Number of tokens of each block, after scaling."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Inclusive range of lengths."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        """Samples a length, log-uniformly."""
        drawn = math.exp(source.uniform(math.log(self.low), math.log(self.high + 1)))
        return min(self.high, max(self.low, int(drawn)))


def parse_lengths(name: str, text: str) -> Lengths:
    """Parses a length such as "128" or a range such as "64-2048"; `name` is for the error
    message.
    """
    low, dash, high = text.partition("-")
    if low.isdecimal() and (high.isdecimal() or not dash):
        lengths = Lengths(int(low), int(high or low))
        if 1 <= lengths.low <= lengths.high:
            return lengths
    raise ConfigError(
        f"{name}: got {text!r}, expected a number of tokens of at least 1 such as 128, or a range"
        " such as 64-2048"
    )


def parse_scale(text: str) -> Fraction:
    """Parses a positive fraction such as "1/32" or "0.5"."""
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        scale = Fraction(0)
    if scale <= 0:
        raise ConfigError(f"scale: got {text!r}, expected a number above 0 such as 1/32 or 0.5")
    return scale


def read_trace(
    path: Path, *, scale: Fraction = Fraction(1), num_requests: int | None = None
) -> list[TrafficRequest]:
    """Returns a trace's first requests, sorted by time, starting at 0.

    Raises ConfigError with the line number of an invalid line.
    """
    requests: list[TrafficRequest] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if len(requests) == num_requests:
                    break
                if line.strip():
                    requests.append(_parse_request(f"{path}, line {number}", line, scale))
    except OSError as error:
        raise ConfigError(f"trace: cannot read {path}: {error.strerror}") from error
    if not requests:
        raise ConfigError(f"trace: {path} holds no requests")
    first_s = min(request.at_s for request in requests)
    timed = [replace(request, at_s=request.at_s - first_s) for request in requests]
    return sorted(timed, key=lambda request: request.at_s)


def spread_arrivals(requests: Sequence[TrafficRequest]) -> list[TrafficRequest]:
    """Spreads requests with equal timestamps evenly until the next timestamp.

    Mooncake's traces have a resolution of three seconds; unmodified, ten requests would arrive at
    once at any speed.
    """
    moments = sorted({request.at_s for request in requests})
    gaps = [later - moment for moment, later in pairwise(moments)]
    lasting = dict(zip(moments, [*gaps, *gaps[-1:]], strict=False))
    sizes = Counter(request.at_s for request in requests)
    num_seen: Counter[float] = Counter()
    apart = []
    for request in requests:
        moment = request.at_s
        share = num_seen[moment] / sizes[moment]
        num_seen[moment] += 1
        apart.append(replace(request, at_s=moment + share * lasting.get(moment, 0.0)))
    return apart


def make_synthetic(*, num_requests: int, input_len: int, output_len: int) -> list[TrafficRequest]:
    """Returns requests that are all sent at once and have no common prefixes."""
    inputs = Lengths(input_len, input_len)
    outputs = Lengths(output_len, output_len)
    return make_mixed(num_requests, inputs, outputs, seed=0)


def make_mixed(
    num_requests: int, inputs: Lengths, outputs: Lengths, *, seed: int
) -> list[TrafficRequest]:
    """Returns requests of random lengths that are all sent at once and have no common prefixes."""
    source = random.Random(f"{seed}/lengths")
    return [
        TrafficRequest(f"request {number}", 0.0, inputs.draw(source), outputs.draw(source))
        for number in range(1, num_requests + 1)
    ]


def schedule_at_rate(
    requests: Sequence[TrafficRequest], rate: float, seed: int, burstiness: float = 1.0
) -> list[TrafficRequest]:
    """Schedules the requests at `rate` per second on average; math.inf: all at once.

    Gaps follow a gamma distribution of shape `burstiness`: 1 is a Poisson process, lower values are
    burstier, higher values more regular.
    """
    draw = random.Random(seed)
    now = 0.0
    timed = []
    for request in requests:
        timed.append(replace(request, at_s=now))
        if not math.isinf(rate):
            now += draw.gammavariate(burstiness, 1 / (rate * burstiness))
    return timed


def make_prompt(request: TrafficRequest, seed: int) -> list[int]:
    """Returns random token ids below 256, which every vocabulary has.

    Equal block ids give equal tokens; a prompt without block ids has its own tokens.
    """
    if not request.block_ids:
        return _random_tokens(f"{seed}/{request.name}", request.input_len)
    tokens = [
        token
        for block_id in request.block_ids
        for token in _random_tokens(f"{seed}/block {block_id}", request.block_tokens)
    ]
    return tokens[: request.input_len]


def shared_share(requests: Sequence[TrafficRequest]) -> float:
    """Returns the fraction of prompt tokens that an unlimited prefix cache would find."""
    seen: set[int] = set()
    shared = 0
    for request in requests:
        leading = next(
            (index for index, block_id in enumerate(request.block_ids) if block_id not in seen),
            len(request.block_ids),
        )
        shared += min(request.input_len, leading * request.block_tokens)
        seen.update(request.block_ids)
    return shared / sum(request.input_len for request in requests)


def _random_tokens(name: str, count: int) -> list[int]:
    return list(array.array("B", random.Random(name).randbytes(count)))


def _parse_request(name: str, line: bytes, scale: Fraction) -> TrafficRequest:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(
            f"{name}: got {_short(row)}, expected an object with timestamp, input_length and"
            " output_length"
        )
    input_length = _number(name, row, "input_length", 1, MAX_LENGTH / scale, whole=True)
    output_length = _number(name, row, "output_length", 1, MAX_LENGTH / scale, whole=True)
    request = TrafficRequest(
        name,
        _number(name, row, "timestamp", 0, MAX_TIMESTAMP_MS) / 1000,
        math.ceil(input_length * scale),
        math.ceil(output_length * scale),
    )
    if (ids := row.get("hash_ids")) is None:
        return request
    block_ids = _block_ids(name, ids, input_length)
    return replace(request, block_ids=block_ids, block_tokens=_block_tokens(scale))


def _number(
    name: str,
    row: dict[str, Any],
    field: str,
    low: int,
    maximum: float | Fraction,
    *,
    whole: bool = False,
) -> Any:
    kind = "an integer" if whole else "a number"
    if field not in row:
        raise ConfigError(f"{name}: {field} is missing, expected {kind} of at least {low}")
    value = row[field]
    if type(value) not in ((int,) if whole else (int, float)) or value < low:
        raise ConfigError(
            f"{name}: {field}: got {_short(value)}, expected {kind} of at least {low}"
        )
    if value > maximum:
        raise ConfigError(f"{name}: {field}: got {value}, expected at most {int(maximum):,}")
    return value


def _block_ids(name: str, ids: Any, input_length: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or any(type(one) is not int for one in ids):
        raise ConfigError(f"{name}: hash_ids: got {_short(ids)}, expected a list of integers")
    needed = -(-input_length // TRACE_BLOCK)
    if len(ids) != needed:
        raise ConfigError(
            f"{name}: hash_ids: got {len(ids)}, expected {needed} blocks of {TRACE_BLOCK} for"
            f" input_length {input_length}"
        )
    return tuple(ids)


def _block_tokens(scale: Fraction) -> int:
    tokens = TRACE_BLOCK * scale
    if tokens % KV_BLOCK:
        nearest = Fraction(max(1, round(tokens / KV_BLOCK)) * KV_BLOCK, TRACE_BLOCK)
        raise ConfigError(
            f"scale: got {scale}, which scales blocks of {TRACE_BLOCK} tokens to {float(tokens):g},"
            f" expected a multiple of {KV_BLOCK}",
            hint=f"use --scale {nearest}",
        )
    return int(tokens)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
