"""Interface of extensions that choose which stored blocks of its prompt's prefix a request loads.

Without an extension, a request loads all of them (`prefix_loader.py`).
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
    """The part of a prompt that a choice depends on."""

    token_ids: Sequence[int]
    first_position: int
    block_size: int


class BlockChoice(Protocol):
    """Choices for requests that wait for stored blocks or use them."""

    def left_out(self, request_id: str) -> frozenset[bytes]:
        """Returns the digests of the blocks that a request skips."""
        ...

    def advance(self, request_id: str, keys: Sequence[BlockKey], prompt: PromptPart) -> bool:
        """Starts or continues the choice for a request; returns whether the request must wait for
        it.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Cancels the unfinished choice of a request that has ended."""
        ...


def make_block_choice(
    spec: BlockChoiceSpec | None, finder: PrefixFinder, connector: KVConnector, *, num_groups: int
) -> BlockChoice | None:
    """Builds the extension's BlockChoice. Returns None if `spec` is None: requests then load all
    blocks.
    """
    if spec is None:
        return None
    (kind,) = load_classes("block_choice")
    choice: BlockChoice = kind(finder, connector, spec, num_groups=num_groups)
    return choice
