"""Parses and formats numbers with units, such as "2GiB", "500MB" and "8k"."""

from __future__ import annotations

import re

from octavo.api.errors import ConfigError

MAX_SIZE = 1 << 60
"""Maximum number of bytes or count."""
_BYTES = {"": 1, "B": 1} | {
    prefix + suffix: (1000 if suffix == "B" else 1024) ** power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix in ("", "B", "iB")
}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|ms|s|m|h)", re.ASCII)
_SECONDS_ALONE = re.compile(r"[+-]?\d+(?:\.\d+)?", re.ASCII)
_COUNTS = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}


def parse_bytes(text: str, *, name: str) -> int:
    """Parses a size in bytes: "2GiB" (1024s), "2GB" (1000s), "2G" (1024s) or "2147483648"."""
    return _parse(
        text, _BYTES, name=name, allowed="a number of bytes such as 2147483648, 2GiB or 500MB"
    )


def parse_count(text: str, *, name: str) -> int:
    """Parses a count: 8k is 8,000 and 8K is 8,192, as in vLLM."""
    return _parse(
        text, _COUNTS, name=name, allowed="an integer such as 8192, 8k (8,000) or 8K (8,192)"
    )


def parse_rate(text: str, *, name: str) -> float:
    """Parses a rate with a decimal prefix: 50G is 50,000,000,000."""
    powers = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4, "P": 5}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)\s*", text)
    if not match or float(match[1]) == 0:
        raise ConfigError(f"{name}: got {text!r}, expected a number above 0 such as 50G or 1.5T")
    return float(match[1]) * 1000.0 ** powers[match[2]]


def parse_duration_s(name: str, text: str) -> float:
    """Parses a positive duration such as "2s" or "80ms"; returns seconds."""
    text = text.replace(" ", "")
    seconds = None if _SECONDS_ALONE.fullmatch(text) else read_seconds(text)
    if not seconds or seconds < 0:
        raise ConfigError(f"{name}: got {text!r}, expected a time above 0 such as 2s or 80ms")
    return seconds


def read_seconds(text: str) -> float | None:
    """Parses seconds, or a duration in Go's notation ("5m", "1h30m", "-1s"); returns None for other
    texts.
    """
    if _SECONDS_ALONE.fullmatch(text):
        return float(text)
    sign, parts = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    found = _TIME.findall(parts)
    if not found or "".join(number + unit for number, unit in found) != parts:
        return None
    return sign * sum(float(number) * _SECONDS[unit] for number, unit in found)


def format_bytes(count: float) -> str:
    """Formats a size for people, as "2.0 GiB"."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def format_size(count: int) -> str:
    """Formats a size exactly, in the notation of options: "2GiB", "20MiB" or "1000B"."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count and count % (1 << shift) == 0:
            return f"{count >> shift}{unit}"
    return f"{count}B" if count else "0"


def _parse(text: str, units: dict[str, int], *, name: str, allowed: str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2] not in units:
        raise ConfigError(f"{name}: got {text!r}, expected {allowed}")
    count = float(match[1]) * units[match[2]]
    if count > MAX_SIZE:
        raise ConfigError(f"{name}: got {_short(text)}, expected at most {MAX_SIZE:,}")
    return int(count)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
