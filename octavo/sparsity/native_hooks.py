"""Sparsity in the native backend: skipped zeros, neuron records, KV spill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.api.errors import BackendUnavailable
from octavo.executor.kv import KvLayout
from octavo.executor.native.formats import TileFormat
from octavo.executor.native.native_hooks import NativeHooks
from octavo.executor.native.stages import sort_token_ops_first
from octavo.program.ops import Attention, Linear
from octavo.program.program import Op, Program, Weight
from octavo.sparsity.kv_spill import (
    KvOffDevice,
    check_spill,
    next_chosen,
    num_kept,
    spill_to_file,
    spilled_layers,
)
from octavo.sparsity.neuron_records import NeuronCacheOptions, NeuronRecords
from octavo.sparsity.neurons import (
    check_neurons,
    neuron_layers,
    predicts_neurons,
    split_neurons,
)
from octavo.sparsity.passes.skip_zeros import skip_zeros


@dataclass(frozen=True, slots=True)
class NativeSparsity(NativeHooks):
    skips_zeros: bool = False
    """Whether to skip weights of feed-forward matmuls whose inputs are zero after a relu."""
    neurons: NeuronCacheOptions | None = None
    """Neuron cache over the file of streamed weights; None: all records are in memory."""
    spill: KvOffDevice | None = None
    """Location of spilled KV blocks; None: all KV is in memory."""

    def keeps_rows(self, program: Program) -> bool:
        """Returns whether neurons are read record by record; the last layer then computes the rows
        of all tokens.
        """
        return self.neurons is not None or predicts_neurons(program)

    def optimize(self, program: Program) -> Program:
        if self.skips_zeros:
            program = skip_zeros(program)
        return split_neurons(program) if self.keeps_rows(program) else program

    def check(self, program: Program, formats: Mapping[Weight, TileFormat], device: Any) -> None:
        check_neurons(program, formats)
        if self.skips_zeros:
            _check_skipping(program, formats, device)
        if self.spill is not None:
            check_spill(self.spill)

    def records(self, program: Program) -> NeuronRecords | None:
        layers = neuron_layers(sort_token_ops_first(program))
        return NeuronRecords(layers, self.neurons) if layers else None

    def layouts(self, program: Program, layouts: Sequence[KvLayout]) -> Sequence[KvLayout]:
        if self.spill is None:
            return layouts
        spilled = spilled_layers(program)
        return [replace(each, in_file=spilled.get(each.group.name, ())) for each in layouts]

    def allocated(
        self, memory: Any, layouts: Sequence[KvLayout], num_blocks: Sequence[int]
    ) -> None:
        for group, layout in enumerate(layouts):
            if layout.in_file:
                assert self.spill is not None, "it says which layers may be in a file"
                kept = num_kept(
                    self.spill.memory_bytes,
                    [each.resident_bytes for each in layouts],
                    num_blocks,
                    record_bytes=layout.record_bytes,
                    num_layers=len(layout.in_file),
                )
                spill_to_file(
                    memory, group, layout, self.spill, num_blocks=num_blocks[group], num_kept=kept
                )

    def next_attentions(self, ops: Sequence[Op]) -> Mapping[int, Attention]:
        return next_chosen(ops) if self.spill is not None and self.spill.prefetches else {}


def _check_skipping(program: Program, formats: Mapping[Weight, TileFormat], device: Any) -> None:
    """Raises an error for matmuls that cannot skip zeros in their weight layout."""
    for op in program.ops:
        if not isinstance(op, Linear) or not op.skips_zeros:
            continue
        for weight in op.weights_:
            code = formats[weight].code
            if not device.skips_zeros(code):
                allowed = [
                    code for code in ("i8", "bf16", "fp16", "fp32") if device.skips_zeros(code)
                ]
                raise BackendUnavailable(
                    f"ffn_sparsity: exact requires weights stored as {', '.join(allowed)} with"
                    f" cpu_level {device.level}, got {code} for {weight.name}",
                    hint="set quantization to int8, or remove ffn_sparsity",
                )
