"""Lowers causal depthwise convolutions."""

from __future__ import annotations

from typing import Any, cast

from torch.fx import Node

from octavo.derive.attention import AttentionDeriver
from octavo.derive.graph import SAME, name_of
from octavo.derive.rows import RowMap
from octavo.derive.state import LoweringState
from octavo.program.mixers import ShortConv
from octavo.program.program import Value, Weight

PADS = frozenset(("aten.pad", "aten.constant_pad_nd"))


class ConvolutionDeriver:
    """Lowers the convolutions of one graph; cache groups store their earlier rows."""

    def __init__(self, state: LoweringState, attention: AttentionDeriver) -> None:
        self._state = state
        self._attention = attention

    def lower(self, node: Node) -> bool:
        """Lowers a convolution with zeros before the rows, or the first T rows of one with zeros on
        both sides; returns False for another node.
        """
        count, convolution = self._state.num_tokens, node
        while name_of(convolution) in SAME | {"aten.slice"}:
            convolution = cast(Node, convolution.args[0])
            if convolution.op != "call_function":
                return False
        shape = self._state.graph.shape(node)
        if name_of(convolution) != "aten.conv1d" or len(shape) != 3 or shape[2] != count:
            return False
        x, weight, bias, stride, padding, dilation, groups = _arguments(convolution)
        while name_of(weight) in SAME | {"aten.squeeze", "aten.unsqueeze"}:
            weight = weight.args[0]
        name = self._state.graph.parameter(weight)
        if name is None:
            return False
        width, inner, taps = self._state.captured.shapes[name]
        (before,) = padding
        if before == 0 and isinstance(x, Node) and name_of(x) in PADS:
            before, after = cast(Any, x.args[1])
            if after or any(x.args[2:]):
                return False
            x = x.args[0]
        rows = self._state.rows.get(x)
        if (inner, groups, before, *stride, *dilation) != (
            *(1, width, taps - 1),
            *(1, 1),
        ) or not _takes_first(node):
            return False
        if not isinstance(rows, RowMap):
            raise self._state.rejected(x)
        value = self._state.emitter.value_of(rows)
        added = None if bias is None else self._state.weights.vector(bias)
        if bias is not None and added is None:
            raise self._state.rejected(node, "a convolution with a bias of another kind")
        self._emit(node, value, name, added)
        return True

    def _emit(self, node: Node, value: Value, name: str, bias: str | None) -> None:
        width, _, taps = self._state.captured.shapes[name]
        group, layer = self._attention.new_layer("conv", 1, (width, 0), taps)
        self._state.emitter.kv_write(group, layer, (value,), None)
        out = self._state.emitter.value("convolved", "tokens", width)
        self._state.emitter.append(
            ShortConv(
                x=value,
                outs=(out,),
                weight=Weight(self._state.weights.stacked(name), (width, 1, taps)),
                bias=None if bias is None else self._state.weights.whole(bias),
                group=group,
                layer=layer,
            )
        )
        self._state.set_result(node, out, 2)
        self._state.anchors.add(node)


def _arguments(convolution: Node) -> tuple[Any, ...]:
    return _with_defaults(convolution.args, (None, None, None, (1,), (0,), (1,), 1))


def _takes_first(node: Node) -> bool:
    """Whether slices, possibly nested, take the first elements of a convolution's last axis."""
    each: Any = node
    while name_of(each) != "aten.conv1d":
        if name_of(each) == "aten.slice":
            axis, start, _end, step = _slice_arguments(each)
            is_whole = start in (0, None) and step == 1
            if not is_whole or (
                axis not in (2, -1) and each.meta["val"].shape != each.args[0].meta["val"].shape
            ):
                return False
        each = each.args[0]
    return True


def _slice_arguments(node: Any) -> tuple[Any, ...]:
    return _with_defaults(node.args[1:], (0, None, None, 1))


def _with_defaults(arguments: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns an op's arguments; missing ones at the end have their defaults."""
    return (*arguments, *defaults[len(arguments) :])
