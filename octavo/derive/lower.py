"""Lowers a captured forward pass to a Program.

Matmuls, embeddings, attention and experts are found by name. Other nodes are lowered if the region
between them and earlier lowered nodes computes the same as an op, which is determined by probing
(`regions.py`). Raises UnsupportedModel if any node remains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from octavo.derive.attention import AttentionDeriver
from octavo.derive.capture import AttentionMask, Captured
from octavo.derive.convolution import ConvolutionDeriver
from octavo.derive.emitter import Emitter, GraphMatmul, remove_unread, sample_rows
from octavo.derive.graph import MOVES, SAME, TracedGraph, call, name_of
from octavo.derive.moe import ExpertDeriver
from octavo.derive.positions import find_rows
from octavo.derive.probe import Prober
from octavo.derive.rows import RowMap, rows_of
from octavo.derive.state import LoweringState
from octavo.derive.weights import Matrix, Weights
from octavo.program.ops import Embedding
from octavo.program.program import Program, Value


class ProgramLowering:
    """Turns the nodes of one graph into ops.

    `own_masks` are the masks of the attention that the model computes itself, in order; None: all
    causal.
    """

    def __init__(
        self,
        captured: Captured,
        config: Mapping[str, Any],
        own_masks: Sequence[AttentionMask] | None = None,
    ) -> None:
        graph = TracedGraph(captured)
        model_type = str(config["model_type"])
        weights = Weights(captured, graph, model_type)
        assert graph.ids is not None
        self._token_ids = graph.ids
        num_tokens = graph.shape(graph.ids)[1]
        emitter = Emitter(model_type, weights, num_tokens)
        self._state = LoweringState(captured, graph, weights, emitter, config, num_tokens)
        self._state.anchors.add(graph.ids)
        self._graph = graph
        self._weights = weights
        self._emitter = emitter
        self._rows = self._state.rows
        self._prober = Prober(self._state)
        self._experts = ExpertDeriver(self._state)
        self._partial: dict[Node, Any] = {}
        """Element numbers of tensors that are only partly written so far."""
        self._attention = AttentionDeriver(self._state, own_masks)
        self._convolutions = ConvolutionDeriver(self._state, self._attention)
        self._ids = Value("token_ids", "tokens", 1, "int")

    @property
    def has_own_attention(self) -> bool:
        """Whether the model computes attention without transformers' interface."""
        return self._attention.num_own > 0

    def program(self) -> Program:
        for node in self._graph.nodes:
            if node in self._graph.dynamic:
                self._lower(node)
        logits = self._rows.get(self._graph.output)
        if not isinstance(logits, RowMap):
            raise self._state.rejected(self._graph.output)
        ops, out = sample_rows(self._emitter.ops, self._emitter.value_of(logits))
        program = Program(
            "decoder",
            {"token_ids": self._ids},
            {"logits": out},
            tuple(remove_unread(ops, out)),
            self._attention.groups(),
            logits.shape[-1],
        )
        program.check()
        return program

    def _lower(self, node: Node) -> None:
        name = name_of(node)
        if name in SAME:
            source = node.args[0]
            if isinstance(source, Node) and source in self._rows:
                self._rows[node] = self._rows[source]
            return
        if name in ("aten.slice", "aten.conv1d") and self._convolutions.lower(node):
            return
        if name in MOVES and self._move(node):
            rows = self._rows[node]
            if isinstance(rows, RowMap) and not self._emitter.can_read(rows):
                self._state.moved[node] = rows
                self._prober.probe(node)
            return
        named: dict[str, Callable[[Node], None]] = {
            "aten.linear": self._linear,
            "aten.addmm": self._addmm,
            "aten.mm": self._matmul,
            "aten.bmm": self._matmul,
            "aten.matmul": self._matmul,
            "aten.embedding": self._embedding,
            "octavo_derive.attention": self._attention.lower,
            "octavo_derive.experts": self._experts.lower,
        }
        if name in named:
            named[name](node)
            if node not in self._rows:
                self._state.dead.add(node)
        else:
            self._prober.probe(node)

    def _move(self, node: Node) -> bool:
        """Lowers a node that only moves elements to a row map; returns whether that was
        possible.
        """
        inputs = [each for each in node.all_input_nodes if each in self._graph.dynamic]
        others = [each for each in node.all_input_nodes if each not in self._graph.dynamic]
        if not all(each in self._rows or each in self._partial for each in inputs) or not all(
            each in self._graph.values for each in others
        ):
            return False
        numbers = {
            each: self._partial[each] if each in self._partial else _numbers(self._rows[each])
            for each in inputs
        }
        numbers |= {each: _no_numbers(self._graph.values[each]) for each in others}
        moved = call(node, {**self._graph.values, **numbers})
        if isinstance(moved, list | tuple):
            parts = [rows_of(part, self._state.num_tokens) for part in moved]
            if any(part is None for part in parts):
                return False
            self._rows[node] = parts
            return True
        rows = rows_of(moved, self._state.num_tokens)
        if rows is None:
            if name_of(node) in ("aten.slice_scatter", "aten.select_scatter"):
                self._partial[node] = moved
            return False
        self._rows[node] = rows
        return True

    def _linear(self, node: Node) -> None:
        x, weight, *bias = node.args
        self._emit_linear(node, x, self._weights.matrix(weight), bias[0] if bias else None)

    def _addmm(self, node: Node) -> None:
        bias, x, weight = node.args[:3]
        self._emit_linear(node, x, self._weights.matrix(weight, swapped=True), bias)

    def _matmul(self, node: Node) -> None:
        x, weight = node.args[:2]
        if weight in self._graph.dynamic and self._attention.lower_product(node):
            return
        self._emit_linear(node, x, self._weights.matrix(weight, swapped=True), None)

    def _emit_linear(self, node: Node, x: Any, matrix: Matrix | None, bias: Any) -> None:
        rows = self._rows.get(x)
        added = self._weights.vector(bias)
        if matrix is None or not isinstance(rows, RowMap) or (bias is not None and added is None):
            return
        parts = self._emitter.whole_values(rows)
        if len(parts) > 1:
            self._state.anchor(node, self._emitter.product_of_parts(parts, matrix, added))
            return
        value = self._emitter.value_of(rows)
        if rows.shape[-1] != value.width or value.width != matrix.inputs:
            raise self._state.rejected(node, "a matmul over a part of a row")
        out = self._emitter.product(GraphMatmul(value, matrix, added))
        self._state.anchor(node, out)

    def _embedding(self, node: Node) -> None:
        table, ids = self._weights.vector(node.args[0]), node.args[1]
        if table is None or not isinstance(ids, Node):
            return
        weight = self._weights.whole(table)
        name = weight.name.removesuffix(".weight")
        out = self._emitter.value(name, "tokens", weight.shape[1])
        source = ids
        while source is not self._token_ids and name_of(source) in SAME | MOVES:
            source = source.all_input_nodes[0]
        if source is self._token_ids:
            self._emitter.append(Embedding(out, weight, self._ids))
        else:
            found = find_rows(self._graph, ids)
            if found is None:
                raise self._state.rejected(node, "an embedding of something other than positions")
            if found.is_constant:
                row = replace(weight, shape=(1, out.width), source_rows=weight.shape[0])
                weight = replace(row, row_start=found.first)
            offset = 0 if found.is_constant else found.first
            self._emitter.append(
                Embedding(
                    out, weight, by_position=True, offset=offset, others_first=found.is_constant
                )
            )
        self._state.anchor(node, out)


def _numbers(rows: Any) -> Any:
    return [each.numbers() for each in rows] if isinstance(rows, list) else rows.numbers()


def _no_numbers(value: Any) -> Any:
    """Returns -1 for each element of a constant: no element of any row."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.full(value.shape, -1)
    return value
