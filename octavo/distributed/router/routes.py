"""The routes that a router forwards, and how it chooses a server for each.

A path that is not in the table must be requested from the server itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto


class Way(Enum):
    """How the server of a request is selected."""

    PLACED = auto()
    """Chosen by the policy: the request asks for work."""
    ANY = auto()
    """Any server that is well: all answer alike."""
    HOME = auto()
    """The server where the sender's files and batches are."""
    KEPT = auto()
    """The server that has the stored thing which the path names."""


@dataclass(frozen=True, slots=True)
class PassedRoute:
    """A forwarded route."""

    methods: frozenset[str]
    pattern: re.Pattern[str]
    way: Way


def _row(methods: str, pattern: str, way: Way) -> PassedRoute:
    return PassedRoute(frozenset(methods.split()), re.compile(pattern), way)


TABLE = (
    _row(
        "POST",
        r"/v1/(chat/completions|completions|embeddings|messages(/count_tokens)?|responses|rerank"
        r"|score|classify)",
        Way.PLACED,
    ),
    _row("POST", r"(/cohere)?/v2/chat|/api/(chat|generate|embed|embeddings)", Way.PLACED),
    _row("POST", r"(/v1)?/(tokenize|detokenize|apply-template)", Way.ANY),
    _row("GET", r"/v1/models(/.+)?|/v1/capabilities|(/v1)?/tokenizer_info", Way.ANY),
    _row("GET", r"/api/(version|tags|ps)|/version", Way.ANY),
    _row("POST", r"/api/show", Way.ANY),
    _row("GET POST DELETE", r"/v1/(files|batches)(/.*)?", Way.HOME),
    _row("GET POST DELETE", r"/v1/responses/[^/]+(/[a-z_]+)?", Way.KEPT),
)


def get_way(method: str, path: str) -> Way | None:
    """Returns how the server of a request is selected; None if the path is not forwarded, for
    example because it contains "..".
    """
    if not {".", ".."}.isdisjoint(path.split("/")):
        return None
    for row in TABLE:
        if method in row.methods and row.pattern.fullmatch(path):
            return row.way
    return None
