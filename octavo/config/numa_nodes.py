"""The option numa_bind_nodes."""

from __future__ import annotations

from octavo.api.errors import ConfigError


def parse_numa_nodes(text: str | None) -> list[int] | None:
    """Returns the node numbers of "0,2"; None for all nodes (None and "off")."""
    if text is None or text == "off":
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words) or len(set(words)) < len(words):
        raise ConfigError(
            f"numa_bind_nodes: got {text!r}, expected different node numbers separated by commas,"
            " or off",
            hint="e.g. 0,1",
        )
    return [int(word) for word in words]
