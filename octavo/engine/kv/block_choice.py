"""Interface of extensions that choose which stored blocks of its prefix a request loads.

Without one, a request loads all of them (`prefix_loader.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.engine.kv.hashed_blocks import PrefixFinder
from octavo.engine.kv.kv_connector import BlockChoiceSpec, KVConnector
from octavo.engine.protocol.kv_messages import BlockKey
from octavo.utils.extensions import load_classes


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A prompt as far as a choice depends on it."""

    token_ids: Sequence[int]
    first_position: int
    block_size: int


class BlockChoice(Protocol):
    """The choices of requests that wait for stored blocks, or have them."""

    def left_out(self, request_id: str) -> frozenset[bytes]:
        """Returns the digests of the blocks that a request skips."""
        ...

    def prepare(self, request_id: str, keys: Sequence[BlockKey], prompt: PromptPart) -> bool:
        """Continues a request's choice; returns whether the request must wait for it."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends an unfinished choice of a request that has ended."""
        ...


def make_block_choice(
    spec: BlockChoiceSpec | None, finder: PrefixFinder, connector: KVConnector, *, num_groups: int
) -> BlockChoice | None:
    """Makes the choice that the spec asks for; None if requests load all blocks."""
    if spec is None:
        return None
    (kind,) = load_classes("block_choice")
    choice: BlockChoice = kind(finder, connector, spec, num_groups=num_groups)
    return choice
