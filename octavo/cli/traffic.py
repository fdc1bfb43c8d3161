"""What a benchmark of a server asks for, and when: the requests of a trace, scaled, or synthetic
ones.

A trace is JSON lines: timestamp (ms), input_length, output_length, and optionally hash_ids, names
of its prompt's blocks of 512 tokens: prompts that begin with the same names begin with the same
tokens. Source of the form: Mooncake's published traces. Knows no server.
"""

from __future__ import annotations

import array
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError

TRACE_BLOCK = 512
KV_BLOCK = 16
"""Tokens that a prefix cache shares at least."""
NUM_IDS = 256
"""Prompts are of ids below it: every vocabulary has so many."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `name` says where it stands, for messages; `block_ids` name `block_tokens`
    tokens each, from the beginning on.
    """

    name: str
    at_s: float
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = TRACE_BLOCK


def parse_scale(text: str) -> Fraction:
    """ "1/32" or "0.5"."""
    try:
        scale = Fraction(text)
    except (ValueError, ZeroDivisionError):
        scale = Fraction(0)
    if scale <= 0:
        raise ConfigError(f"scale: got {text!r}, allowed is a number above 0 such as 1/32 or 0.5")
    return scale


def read_trace(
    path: Path, *, scale: Fraction = Fraction(1), num_requests: int | None = None
) -> list[Ask]:
    """The first requests in the order of their times, which begin at 0. ConfigError names the line
    that is wrong.
    """
    asks: list[Ask] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if len(asks) == num_requests:
                    break
                if line.strip():
                    asks.append(_ask(f"{path}, line {number}", line, scale))
    except OSError as error:
        raise ConfigError(f"trace: cannot read {path}: {error.strerror}") from error
    if not asks:
        raise ConfigError(f"trace: {path} holds no requests")
    first_s = min(ask.at_s for ask in asks)
    return sorted((replace(ask, at_s=ask.at_s - first_s) for ask in asks), key=lambda ask: ask.at_s)


def synthetic(*, num_requests: int, input_len: int, output_len: int) -> list[Ask]:
    """All at once, with nothing in common."""
    return [
        Ask(f"request {number}", 0.0, input_len, output_len)
        for number in range(1, num_requests + 1)
    ]


def at_rate(asks: Sequence[Ask], rate: float, seed: int) -> list[Ask]:
    """In their order, at the moments of a Poisson process of so many requests per second; math.inf:
    all at once.
    """
    draw, now, timed = random.Random(seed), 0.0, []
    for ask in asks:
        timed.append(replace(ask, at_s=now))
        now += 0.0 if math.isinf(rate) else draw.expovariate(rate)
    return timed


def prompt_of(ask: Ask, seed: int) -> list[int]:
    """Its token ids: of a named block always the same, of an unnamed prompt its own."""
    if not ask.block_ids:
        return _draw(f"{seed}/{ask.name}", ask.input_len)
    tokens = [
        token
        for block_id in ask.block_ids
        for token in _draw(f"{seed}/block {block_id}", ask.block_tokens)
    ]
    return tokens[: ask.input_len]


def shared_share(asks: Sequence[Ask]) -> float:
    """Of all prompts' tokens, those that an earlier prompt begins with: what a prefix cache without
    limits would find.
    """
    seen: set[int] = set()
    shared = 0
    for ask in asks:
        leading = next(
            (index for index, block_id in enumerate(ask.block_ids) if block_id not in seen),
            len(ask.block_ids),
        )
        shared += min(ask.input_len, leading * ask.block_tokens)
        seen.update(ask.block_ids)
    return shared / sum(ask.input_len for ask in asks)


def _draw(name: str, count: int) -> list[int]:
    return list(array.array("B", random.Random(name).randbytes(count)))


def _ask(name: str, line: bytes, scale: Fraction) -> Ask:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(
            f"{name}: got {_short(row)}, allowed is an object with timestamp, input_length and"
            " output_length"
        )
    input_length = _number(name, row, "input_length", 1, whole=True)
    output_length = _number(name, row, "output_length", 1, whole=True)
    ask = Ask(
        name,
        _number(name, row, "timestamp", 0) / 1000,
        math.ceil(input_length * scale),
        math.ceil(output_length * scale),
    )
    ids = row.get("hash_ids")
    return (
        ask
        if ids is None
        else replace(
            ask, block_ids=_block_ids(name, ids, input_length), block_tokens=_block_tokens(scale)
        )
    )


def _number(name: str, row: dict[str, Any], field: str, low: int, *, whole: bool = False) -> Any:
    kind = "a whole number" if whole else "a number"
    if field not in row:
        raise ConfigError(f"{name}: {field} is missing, needed is {kind} of at least {low}")
    value = row[field]
    if type(value) not in ((int,) if whole else (int, float)) or value < low:
        raise ConfigError(
            f"{name}: {field}: got {_short(value)}, allowed is {kind} of at least {low}"
        )
    return value


def _block_ids(name: str, ids: Any, input_length: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or any(type(one) is not int for one in ids):
        raise ConfigError(
            f"{name}: hash_ids: got {_short(ids)}, allowed is a list of whole numbers"
        )
    needed = -(-input_length // TRACE_BLOCK)
    if len(ids) != needed:
        raise ConfigError(
            f"{name}: hash_ids: got {len(ids)}, needed are {needed} blocks of {TRACE_BLOCK} for"
            f" input_length {input_length}"
        )
    return tuple(ids)


def _block_tokens(scale: Fraction) -> int:
    tokens = TRACE_BLOCK * scale
    if tokens % KV_BLOCK:
        near = next(_multiples(tokens))
        raise ConfigError(
            f"scale: got {scale}, which makes blocks of {TRACE_BLOCK} tokens {float(tokens):g},"
            f" allowed are multiples of {KV_BLOCK}",
            hint=f"{near} would do",
        )
    return int(tokens)


def _multiples(tokens: Fraction) -> Iterator[Fraction]:
    """Scales whose blocks are right, the nearest first."""
    yield Fraction(max(1, round(tokens / KV_BLOCK)) * KV_BLOCK, TRACE_BLOCK)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
