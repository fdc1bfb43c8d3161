"""Builds a Program op by op, so that a model family reads like its formula.

Owns the names of Values (after the module that makes them) and the link from a module's name to its
checkpoint tensors (`<module>.weight`, `<module>.bias`). Knows nothing of any family.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from octavo.program.ops import (
    Act,
    Activation,
    ActMul,
    Add,
    AlibiBias,
    Attention,
    Combine,
    Embedding,
    GatherRows,
    GroupedLinear,
    KvWrite,
    LayerNorm,
    Linear,
    MaskKind,
    MlaAttention,
    Mul,
    PoolRows,
    RmsNorm,
    Rope,
    RopeTable,
    Route,
    Scale,
    SoftCap,
    T5Bias,
)
from octavo.program.program import Axis, CacheGroup, Op, Program, Value, Weight


class Builder:
    """Appends an op with each method call and returns the Value it makes. Widths are in columns,
    names are those of modules.
    """

    def __init__(self, name: str, groups: tuple[CacheGroup, ...] = (), vocab_size: int = 0) -> None:
        self._name = name
        self._groups = groups
        self._vocab_size = vocab_size
        self._inputs: dict[str, Value] = {}
        self._ops: list[Op] = []
        self._used: Counter[str] = Counter()

    def finish(self, **outputs: Value) -> Program:
        """Returns the Program, checked."""
        program = Program(
            self._name,
            dict(self._inputs),
            outputs,
            tuple(self._ops),
            self._groups,
            self._vocab_size,
        )
        program.check()
        return program

    def token_ids(self) -> Value:
        """Adds the input "token_ids"."""
        value = Value(self._fresh("token_ids"), "tokens", 1, "int")
        self._inputs["token_ids"] = value
        return value

    def hidden(self, width: int) -> Value:
        """Adds the input "hidden"."""
        value = self._value("hidden", "tokens", width)
        self._inputs["hidden"] = value
        return value

    # -- rows in, rows out -------------------------------------------------------------------------

    def embedding(
        self, ids: Value, name: str, num_rows: int, width: int, *, scale: float = 1.0
    ) -> Value:
        out = self._value(name, ids.axis, width)
        self._ops.append(Embedding(out, Weight(f"{name}.weight", (num_rows, width)), ids, scale))
        return out

    def position_embedding(
        self, name: str, num_rows: int, width: int, *, offset: int = 0, axis: int = 0
    ) -> Value:
        out = self._value(name, "tokens", width)
        table = Weight(f"{name}.weight", (num_rows, width))
        self._ops.append(Embedding(out, table, by_position=True, offset=offset, axis=axis))
        return out

    def rms_norm(
        self, x: Value, name: str, eps: float, *, weight_offset: float = 0.0, group_width: int = 0
    ) -> Value:
        out = self._like(name, x)
        weight = Weight(f"{name}.weight", (group_width or x.width,))
        self._ops.append(RmsNorm(x, out, weight, eps, weight_offset, group_width))
        return out

    def layer_norm(
        self,
        x: Value,
        name: str,
        eps: float,
        *,
        bias: bool = True,
        has_weight: bool = True,
        weight_offset: float = 0.0,
    ) -> Value:
        """Norms rows; without `has_weight` the weight is 1 and the checkpoint has no tensor."""
        out = self._like(name, x)
        weight = Weight(f"{name}.weight", (x.width,), fill=None if has_weight else 1.0)
        added = Weight(f"{name}.bias", (x.width,)) if bias else None
        self._ops.append(LayerNorm(x, out, weight, added, eps, weight_offset))
        return out

    def linear(self, x: Value, name: str, width: int, *, bias: bool = False) -> Value:
        """Multiplies with `name.weight [width, in]`, and adds `name.bias` with `bias`."""
        return self.linear_of(
            x,
            Weight(f"{name}.weight", (width, x.width)),
            Weight(f"{name}.bias", (width,)) if bias else None,
            name=name,
        )

    def linear_of(
        self, x: Value, weight: Weight, bias: Weight | None = None, *, name: str
    ) -> Value:
        """Multiplies with a weight whose tensors are not kept as `[out, in]` under the module's own
        name.
        """
        out = self._value(name, x.axis, weight.shape[0])
        self._ops.append(Linear(x, (out,), (weight,), () if bias is None else (bias,)))
        return out

    def add(self, a: Value, b: Value) -> Value:
        out = self._like("sum", a)
        self._ops.append(Add(a, b, out))
        return out

    def mul(self, a: Value, b: Value) -> Value:
        out = self._like("product", a)
        self._ops.append(Mul(a, b, out))
        return out

    def scale(self, x: Value, factor: float) -> Value:
        """Multiplies with the factor; returns x itself where that is 1."""
        if factor == 1.0:
            return x
        out = self._like("scaled", x)
        self._ops.append(Scale(x, out, factor))
        return out

    def softcap(self, x: Value, cap: float | None) -> Value:
        """Caps softly; returns x itself where there is no cap."""
        if cap is None:
            return x
        out = self._like("capped", x)
        self._ops.append(SoftCap(x, out, cap))
        return out

    def act(self, x: Value, activation: Activation) -> Value:
        out = self._like(activation, x)
        self._ops.append(Act(x, out, activation))
        return out

    def act_mul(
        self,
        gate: Value,
        up: Value,
        activation: Activation,
        *,
        clamp: float | None = None,
        alpha: float = 1.0,
        up_offset: float = 0.0,
    ) -> Value:
        out = self._like("gated", up)
        self._ops.append(
            ActMul(
                gate=gate,
                up=up,
                out=out,
                activation=activation,
                clamp=clamp,
                alpha=alpha,
                up_offset=up_offset,
            )
        )
        return out

    # -- attention and its cache -------------------------------------------------------------------

    def rope(
        self,
        x: Value,
        num_heads: int,
        table: RopeTable,
        *,
        rotary_start: int = 0,
        style: Literal["half", "interleaved"] = "half",
    ) -> Value:
        """Rotates as many columns of each head as the table has frequencies for, twice."""
        out = self._like("rotated", x)
        self._ops.append(
            Rope(
                x=x,
                out=out,
                num_heads=num_heads,
                head_width=x.width // num_heads,
                rotary_dim=2 * len(table.inv_freq),
                rotary_start=rotary_start,
                table=table,
                style=style,
            )
        )
        return out

    def kv_write(self, group: str, layer: int, k_parts: tuple[Value, ...], v: Value | None) -> None:
        self._ops.append(KvWrite(k_parts, v, group, layer))

    def attention(
        self,
        q: Value,
        group: str,
        layer: int,
        *,
        num_heads: int,
        scale: float,
        mask: MaskKind = "causal",
        softcap: float | None = None,
        sinks: Weight | None = None,
        bias: T5Bias | AlibiBias | None = None,
    ) -> Value:
        """Attends to the keys of a layer; the window, where the mask has one, is the group's."""
        kv = next(entry for entry in self._groups if entry.name == group)
        out = self._value("attention", q.axis, num_heads * kv.v_width)
        window = kv.window if mask == "window" else None
        self._ops.append(
            Attention(
                q=q,
                out=out,
                group=group,
                layer=layer,
                num_heads=num_heads,
                scale=scale,
                mask=mask,
                window=window,
                softcap=softcap,
                sinks=sinks,
                bias=bias,
            )
        )
        return out

    def mla_attention(
        self,
        q_nope: Value,
        q_rope: Value,
        kv_b: Weight,
        *,
        group: str,
        layer: int,
        num_heads: int,
        scale: float,
        form: Literal["absorbed", "expanded"] = "absorbed",
    ) -> Value:
        kv = next(entry for entry in self._groups if entry.name == group)
        nope, rope = q_nope.width // num_heads, q_rope.width // num_heads
        v_width = kv_b.shape[0] // num_heads - nope
        out = self._value("attention", q_nope.axis, num_heads * v_width)
        latent = kv.k_width - rope
        op = MlaAttention(
            q_nope=q_nope,
            q_rope=q_rope,
            out=out,
            kv_b=kv_b,
            group=group,
            layer=layer,
            num_heads=num_heads,
            nope_width=nope,
            rope_width=rope,
            latent_width=latent,
            v_width=v_width,
            scale=scale,
            form=form,
        )
        self._ops.append(op)
        return out

    # -- experts -----------------------------------------------------------------------------------

    def route(
        self,
        x: Value,
        logits: Value,
        top_k: int,
        *,
        score: Literal["softmax", "sigmoid", "softmax_top_k"] = "softmax",
        bias: Weight | None = None,
        num_groups: int = 1,
        top_groups: int = 1,
        normalize: bool = False,
        scale: float = 1.0,
    ) -> tuple[Value, Value, Value]:
        """Returns rows, ids and weights of the chosen experts."""
        outs = (
            self._value("expert_rows", "expert_rows", x.width),
            Value(self._fresh("expert_ids"), x.axis, top_k, "int"),
            self._value("expert_weights", x.axis, top_k),
        )
        self._ops.append(
            Route(
                x=x,
                logits=logits,
                outs=outs,
                num_experts=logits.width,
                top_k=top_k,
                score=score,
                bias=bias,
                num_groups=num_groups,
                top_groups=top_groups,
                normalize=normalize,
                scale=scale,
            )
        )
        return outs

    def grouped_linear(
        self, x: Value, ids: Value, weight: Weight, bias: Weight | None = None
    ) -> Value:
        out = self._value("grouped", "expert_rows", weight.shape[1])
        self._ops.append(GroupedLinear(x, ids, out, weight, bias))
        return out

    def combine(self, x: Value, weights: Value) -> Value:
        out = self._value("combined", weights.axis, x.width)
        self._ops.append(Combine(x, weights, out))
        return out

    # -- rows chosen -------------------------------------------------------------------------------

    def gather_rows(self, x: Value) -> Value:
        out = self._value("sampled", "samples", x.width)
        self._ops.append(GatherRows(x, out))
        return out

    def pool_rows(self, x: Value, mode: Literal["last", "cls", "mean"]) -> Value:
        """Makes one row of each request's rows."""
        out = self._value("pooled", "requests", x.width)
        self._ops.append(PoolRows(x, out, mode))
        return out

    # -- names -------------------------------------------------------------------------------------

    def _value(self, name: str, axis: Axis, width: int) -> Value:
        return Value(self._fresh(name), axis, width)

    def _like(self, name: str, x: Value) -> Value:
        return self._value(name, x.axis, x.width)

    def _fresh(self, name: str) -> str:
        """Returns the name, with a number from its second use on."""
        self._used[name] += 1
        count = self._used[name]
        return name if count == 1 else f"{name}#{count}"
