"""Opens a draft head: EAGLE-3's or an assistant from its own checkpoint, or the MTP head of the
model's checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.api.errors import ConfigError, WeightMismatch
from octavo.checkpoint.catalogue import resolve
from octavo.checkpoint.dummy import DummyWeights
from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.ports import Checkpoint
from octavo.checkpoint.safetensors import read_integers
from octavo.checkpoint.tensor_check import check_weights, drafting_tensors
from octavo.checkpoint.weights import WeightReader, loaded_formats
from octavo.config.engine_config import EngineConfig
from octavo.executor.base import FormatOf
from octavo.executor.rank_grid import RankGrid
from octavo.models.draft_heads import MTP_FAMILIES, DraftHead, eagle3_head, mtp_head
from octavo.models.gemma4_assistant import CLUSTERS, assistant_head
from octavo.program.passes.draft_groups import PREFIX, join_groups
from octavo.program.passes.features import FEATURES, with_features
from octavo.program.passes.shard import shard
from octavo.program.program import Program, Weight
from octavo.quant.blocks import StoredWeight
from octavo.wiring.speculation.draft import check_keeps_tokens

NOT_READ = ("d2t", "t2d", CLUSTERS)
"""Beginnings of the names of tensors that are no weights of the head's Program: maps of token ids
in EAGLE-3 heads, and an assistant's clusters of tokens.
"""
KINDS = {"eagle3": "EAGLE-3 heads", "mtp": "Gemma 4 assistants"}
"""Heads that have their own checkpoint, by method."""


class Reader(Protocol):
    def load(self, weight: Weight) -> StoredWeight: ...


@dataclass(frozen=True, slots=True)
class OpenedHead:
    """A draft head and the checkpoints of its weights."""

    config: EngineConfig
    head: DraftHead
    target: Checkpoint
    own: Checkpoint
    offsets: NDArray[np.int64] | None = None
    """Offsets that are added to the head's token ids to get the model's."""

    def add_to(self, target: Program, grid: RankGrid) -> tuple[Program, Program]:
        """Returns a rank's part of the target's Program with feature outputs, and the head's, over
        the cache groups of both. A head that reads the target's KV is split like the target.
        """
        own = self.head.program
        if self.head.reads_keys:
            own = shard(own, grid.tensor_index, grid.num_tensor)
        both, drafting = join_groups(target, own, reads_keys=self.head.reads_keys)
        return with_features(both, self.head.features, PREFIX + FEATURES), drafting

    def target_formats(self, formats: FormatOf, target: Program) -> FormatOf:
        """Returns the formats of the target's weights, some of which belong to the head."""
        theirs, others = self._formats(self.own, target), set(self.head.features.weights)
        return lambda weight: theirs(weight) if weight in others else formats(weight)

    def target_reader(self, reader: Reader, target: Program) -> Reader:
        """Returns a reader of the target's weights, some of which belong to the head."""
        if not self.head.features.weights:
            return reader
        return JoinedReader(
            reader, self._reader(self.own, target), frozenset(self.head.features.weights)
        )

    def formats(self, program: Program) -> FormatOf:
        ours, theirs = self._formats(self.own, program), self._formats(self.target, program)
        shared = self.head.shared
        return lambda weight: theirs(weight) if weight.whole in shared else ours(weight)

    def reader(self, program: Program) -> Reader:
        own, target = self._reader(self.own, program), self._reader(self.target, program)
        return JoinedReader(own, target, self.head.shared)

    def _formats(self, checkpoint: Checkpoint, program: Program) -> FormatOf:
        options = self.config.model
        return loaded_formats(checkpoint, options.dtype, options.quantization, program)

    def _reader(self, checkpoint: Checkpoint, program: Program) -> Reader:
        options = self.config.model
        if options.load_format == "dummy":
            return DummyWeights(self._formats(checkpoint, program))
        return WeightReader(checkpoint, options.dtype, options.quantization, program)


@dataclass(frozen=True, slots=True)
class JoinedReader:
    """Reads some weights with a second reader."""

    first: Reader
    second: Reader
    of_second: frozenset[Weight]
    """Weights of the second reader, or the weights of which a rank has a part."""

    def load(self, weight: Weight) -> StoredWeight:
        is_second = not self.of_second.isdisjoint((weight, weight.whole))
        return (self.second if is_second else self.first).load(weight)


def open_head(config: EngineConfig, target: Checkpoint, program: Program) -> OpenedHead | None:
    """Opens the draft head and checks its tensors; returns None if the options select none."""
    method = config.scheduler.spec_method
    if method == "auto":
        method = "mtp"  # `derive` has already checked that there is a head
    if method not in ("eagle3", "mtp"):
        return None
    check_keeps_tokens(program, "the model", method)
    name = config.scheduler.spec_model
    if name is None:
        head = mtp_head(target.config, program, target.names())
        if config.model.load_format != "dummy":
            check_weights(target, head.program.weights)
        return OpenedHead(config, head, target, target)
    if config.model.load_format == "dummy":
        raise ConfigError(
            f"spec_model: got {name} with load_format dummy, which supports a single checkpoint",
            hint="remove load_format or spec_model",
        )
    own = open_checkpoint(resolve(name, progress=True))
    make_head = eagle3_head if method == "eagle3" else assistant_head
    head = make_head(own.config, program, own.names())
    read = {*head.program.weights, *head.features.weights} - head.shared
    known_names = check_weights(own, read)
    unknown_names = sorted(
        each for each in set(own.names()) - known_names if not each.startswith(NOT_READ)
    )
    if unknown_names:
        raise WeightMismatch(
            f"{own.path}: got the tensor {unknown_names[0]}, which {KINDS[method]} do not have",
            hint="config.json and the weights belong to different heads, or the head has a part"
            " that is not supported",
        )
    opened = OpenedHead(config, head, target, own)
    return replace(opened, offsets=_offsets(own, head)) if head.id_offsets else opened


def describe_unread(method: str | None, target: Checkpoint) -> str:
    """Returns a message about a draft head in the checkpoint that the options do not use; "" if
    there is none.
    """
    if method in ("mtp", "auto"):
        return ""
    unread = drafting_tensors(target.names(), target.config)
    if not unread:
        return ""
    known = target.config.get("model_type") in MTP_FAMILIES
    way = "; --spec-method mtp drafts with it" if known else ""
    return f"a layer that drafts is left out, {len(unread)} tensors such as {unread[0]}{way}"


def _offsets(own: Checkpoint, head: DraftHead) -> NDArray[np.int64]:
    stored = own.stored(head.id_offsets)
    if stored.shape != (head.program.vocab_size,):
        raise WeightMismatch(
            f"{own.path}: {stored.name} has shape {stored.shape}, expected"
            f" {(head.program.vocab_size,)}"
        )
    return read_integers(stored.file, stored.name)
