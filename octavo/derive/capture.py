"""Captures the forward pass of a transformers model as a graph of ATen ops.

The model is built from its config with fake tensors, so that its size does not matter. Only classes
of the installed transformers package are used. Attention and experts become one op each, through
transformers' own interfaces, which name scale, window, sinks and soft cap.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from transformers import masking_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface

from octavo.api.errors import UnsupportedModel
from octavo.derive.functional import functionalize
from octavo.derive.regions import find_activation, find_expert_gate
from octavo.derive.stored import StoredTensors
from octavo.models.hf_config import MAX_COUNT, MAX_SIZE
from octavo.program.ops import Act, ActMul

NAME = "octavo_derive"
"""Name of the implementations that are registered with transformers."""

NUM_TOKENS = 7
"""Number of tokens of the captured forward pass; a prime, so that it differs from all widths."""

IGNORED_ARGUMENTS = frozenset(
    ("dropout", "position_ids", "use_cache", "cache_position", "is_causal", "logits_to_keep")
)
"""Arguments of attention functions that do not change the result of a single forward pass."""


@dataclass(frozen=True)
class AttentionMask:
    """The keys that a query reads; the kinds are those of `program.ops.Attention`."""

    kind: str
    size: int = 0
    """Number of keys of a window or chunk."""


@dataclass(frozen=True)
class ExpertModule:
    """The function that an experts module computes, and the names of its parameters."""

    module: str
    gate: ActMul | Act | None
    """Gate or activation, between placeholders; None if it is not known."""
    is_transposed: bool
    is_concatenated: bool
    has_gate: bool
    has_bias: bool


@dataclass
class Captured:
    """The graph of a model's forward pass, and the meaning of its placeholders."""

    graph: GraphModule
    shapes: dict[str, tuple[int, ...]]
    """Shape of each parameter."""
    buffers: dict[str, torch.Tensor]
    """Values of buffers, which the model computes from its config."""
    stored: StoredTensors
    """Locations of the parameters in a checkpoint."""
    placeholders: dict[str, str]
    """Parameter or buffer of each placeholder; token ids are missing."""
    masks: list[AttentionMask]
    """Masks, by the index that attention ops have as an argument."""
    experts: list[ExpertModule]
    """Expert modules, by the index that experts ops have as an argument."""
    max_positions: int
    """Number of positions in tables of positions."""
    padding: int | None
    """Padding token, which some models leave out when they count positions."""


def reject(model_type: str, what: str, *, hint: str | None = None) -> UnsupportedModel:
    return UnsupportedModel(
        f"model type {model_type!r} is not supported, and cannot be derived from transformers:"
        f" {what}",
        hint=hint or "`octavo models` lists the supported types",
    )


@cache
def _define_ops() -> None:
    library = torch.library.Library(NAME, "DEF")
    library.define(
        "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, int mask,"
        " float softcap) -> Tensor"
    )
    library.define("experts(Tensor x, Tensor ids, Tensor weights, int index) -> Tensor")
    library.impl("attention", _attention_shape, "CompositeExplicitAutograd")
    library.impl("experts", lambda x, *_: torch.empty_like(x), "CompositeExplicitAutograd")
    _LIBRARIES.append(library)


_LIBRARIES: list[Any] = []
"""Libraries of the defined ops, kept alive because ops end with their library."""


def _attention_shape(q: Any, _k: Any, v: Any, *_: Any) -> Any:
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


class CallRecorder:
    """Records the model's calls of attention, mask and experts functions during the capture."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.masks: list[tuple[Callable[..., Any], int | None]] = []
        """Mask functions, and the windows passed to attention."""
        self.experts: list[Any] = []
        self.names: dict[Any, str] = {}
        """Name of each module, once the model is built."""

    def attend(  # noqa: PLR0917  # the arguments of an attention function
        self,
        _module: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Any = None,
        **other: Any,
    ) -> tuple[Any, None]:
        unknown = {
            name
            for name, given in other.items()
            if given is not None and not name.startswith("output_")
        } - IGNORED_ARGUMENTS
        if unknown:
            raise reject(self.model_type, f"attention takes {', '.join(sorted(unknown))}")
        if other.get("is_causal") is False:
            raise reject(self.model_type, "attention is not causal")
        mask = getattr(attention_mask, "octavo_mask", None)
        if mask is None:
            raise reject(self.model_type, "attention has a mask of its own")
        if (mask, sliding_window) not in self.masks:
            self.masks.append((mask, sliding_window))
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        index = self.masks.index((mask, sliding_window))
        inputs = (query, key, value, s_aux)
        return torch.ops.octavo_derive.attention(*inputs, scale, index, softcap or 0.0), None

    def tag(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Any] | None = None,
        **_: Any,
    ) -> Any:
        """Returns the mask with its function as an attribute. Models that compute attention
        themselves add the mask's values to the scores.
        """
        assert mask_function is not None
        one = torch.zeros(batch_size, dtype=torch.long)[:, None, None, None]
        queries, keys = torch.arange(q_length)[:, None], torch.arange(kv_length)
        seen = mask_function(one, one, queries[None, None], keys[None, None, None])
        hidden = torch.full((), torch.finfo(torch.float64).min, dtype=torch.float64)
        tagged = torch.where(torch.as_tensor(seen), 0.0, hidden)
        tagged = tagged.expand(batch_size, 1, q_length, kv_length).clone()
        tagged.octavo_mask = mask_function  # type: ignore[attr-defined]
        return tagged

    def identified_masks(self) -> list[AttentionMask]:
        masks = []
        for function, window in self.masks:
            mask = identify_mask(function)
            if mask is None:
                raise reject(self.model_type, "attention has a mask that is not known")
            if window is not None and mask != AttentionMask("window", window):
                raise reject(
                    self.model_type, f"attention has a window of {window}, its mask is {mask}"
                )
            masks.append(mask)
        return masks

    def identified_experts(self) -> list[ExpertModule]:
        return [_identify(module, self.names[module], self.model_type) for module in self.experts]

    def run_experts(self, module: Any, x: Any, ids: Any, weights: Any) -> Any:
        if getattr(module, "has_post_expert_norm", False):
            raise reject(self.model_type, "its experts have a norm")
        if module not in self.experts:
            self.experts.append(module)
        return torch.ops.octavo_derive.experts(x, ids, weights, self.experts.index(module))


def _identify(module: Any, name: str, model_type: str) -> ExpertModule:
    """Identifies the function of an experts module by its values."""
    gate: ActMul | Act | None
    if module.has_gate:
        settings = [each for each in vars(module).values() if type(each) in (int, float)]
        with double_precision():
            found = find_expert_gate(module._apply_gate, settings)
        if found is None:
            raise reject(model_type, "its experts have a gate of another kind")
        gate, is_concatenated = found
    else:
        gate, is_concatenated = find_activation(module.act_fn), module.is_concatenated
    return ExpertModule(
        name, gate, module.is_transposed, is_concatenated, module.has_gate, module.has_bias
    )


def identify_mask(function: Callable[..., Any]) -> AttentionMask | None:
    """Identifies a mask function of (batch, head, query index, key index) by its values. Returns
    None if it is not a kind of mask that attention ops support.
    """
    zero = torch.tensor(0)

    def sees(query: int, keys: torch.Tensor) -> torch.Tensor:
        queries = torch.full_like(keys, query)
        seen = function(zero, zero, queries, keys)
        return torch.as_tensor(seen).expand(keys.shape)

    far = 1 << 18
    keys = torch.arange(far + 8)
    row = sees(far, keys)
    if bool(row[far + 1 :].any()):
        full = all(bool(sees(q, keys).all()) for q in (0, 1, 5, far))
        return AttentionMask("full") if full else None
    count = int(row.sum())
    if count == far + 1:
        candidates = [AttentionMask("causal")]
    else:
        first = int(row.to(torch.int8).argmax())
        candidates = [AttentionMask("window", far + 1 - first)]
        other = sees(far - 1, keys)
        start = int(other.to(torch.int8).argmax())
        size = _chunk_size(sees, keys) if start in (first, 0) or start < first - 1 else 0
        if size:
            candidates.append(AttentionMask("chunk", size))
    for mask in candidates:
        rows = (0, 1, 2, 100, mask.size - 1, mask.size, mask.size + 1, far - 3, far)
        if all(bool((sees(q, keys) == keys_seen(mask, q, keys)).all()) for q in rows if q >= 0):
            return mask
    return None


def _chunk_size(sees: Callable[[int, torch.Tensor], torch.Tensor], keys: torch.Tensor) -> int:
    """Returns how many of the first queries read key 0."""
    low, high = 0, len(keys) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bool(sees(middle, keys[:1])[0]) else (low, middle - 1)
    return low + 1


def keys_seen(mask: AttentionMask, query: int | torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns whether a query reads each key; of a causal mask, a window or a chunk."""
    causal = keys <= query
    if mask.kind == "window":
        return causal & (keys > query - mask.size)
    if mask.kind == "chunk":
        return causal & (keys // mask.size == query // mask.size)
    return causal


def capture(config: Mapping[str, Any], num_tokens: int = NUM_TOKENS) -> Captured:
    """Captures a causal language model's forward pass over `num_tokens` tokens, without a cache.

    Raises UnsupportedModel if transformers has no class for the config, or if the model cannot be
    traced.
    """
    _define_ops()
    recorder = CallRecorder(str(config.get("model_type")))
    transformers.AttentionInterface.register(NAME, recorder.attend)
    AttentionMaskInterface.register(NAME, recorder.tag)
    ALL_EXPERTS_FUNCTIONS.register(NAME, recorder.run_experts)
    model, hf_config = build_model(config)
    text_config = hf_config.get_text_config(decoder=True)
    _check_rope(text_config)
    recorder.names = {module: name for name, module in model.named_modules()}
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())

    def forward(tensors: dict[str, Any], ids: Any) -> Any:
        arguments = {"input_ids": ids, "use_cache": False}
        return torch.func.functional_call(model, tensors, (), arguments).logits

    with one_sequence(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fakes = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in tensors.items()}
        ids = torch.zeros(1, num_tokens, dtype=torch.long)
        try:
            graph = make_fx(forward, pre_dispatch=True)(fakes, ids)
        except UnsupportedModel:
            raise
        except Exception as error:
            kind = type(error).__name__
            reason = str(error).strip().split("\n")[0]
            raise reject(hf_config.model_type, f"tracing raised {kind}: {reason}") from error
    functionalize(graph)
    nodes = [node for node in graph.graph.nodes if node.op == "placeholder"]
    return Captured(
        graph=graph,
        shapes=shapes,
        buffers={
            name: each
            for name, each in model.named_buffers()
            if name not in shapes and not each.is_meta
        },
        stored=StoredTensors(model),
        placeholders={
            node.name: tied.get(name, name) for node, name in zip(nodes, tensors, strict=False)
        },
        masks=recorder.identified_masks(),
        experts=recorder.identified_experts(),
        max_positions=getattr(text_config, "max_position_embeddings", None) or 0,
        padding=getattr(text_config, "pad_token_id", None),
    )


def _check_rope(hf_config: Any) -> None:
    """Rejects rotary embeddings whose angles depend on the length of the text."""
    parameters = getattr(hf_config, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):
        kind = each.get("rope_type") if isinstance(each, dict) else None
        if kind in ("dynamic", "longrope"):
            raise reject(hf_config.model_type, f"rope type {kind} depends on the text's length")


@contextlib.contextmanager
def one_sequence() -> Iterator[None]:
    """Tells transformers that the input is one sequence without padding; otherwise it would inspect
    the fake tensors' values.
    """
    overlay, no_padding = masking_utils.chunked_overlay, torch.zeros(1, dtype=torch.long)
    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda _ids: None),
        mock.patch.object(
            masking_utils, "chunked_overlay", lambda size, _padding: overlay(size, no_padding)
        ),
    ):
        yield


def build_model(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the causal language model of a config in float64 and eval mode, and its config.

    Parameters use no memory; buffers have their values.
    """
    hf_config = make_config(config)
    hf_config._experts_implementation = NAME
    for attention in (NAME, "eager"):  # older models support no other implementation
        hf_config._attn_implementation = attention
        try:
            with double_precision(), EmptyOnMeta():
                model = transformers.AutoModelForCausalLM.from_config(
                    hf_config, dtype=torch.float64
                )
            break
        except Exception as error:
            if attention == "eager":
                reason = f"transformers cannot build it ({error})"
                raise reject(hf_config.model_type, reason) from error
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                setattr(module, name, torch.nn.Parameter(parameter.to("meta"), False))
    model.tie_weights()
    return model.eval(), hf_config


def make_config(config: Mapping[str, Any]) -> Any:
    """Returns transformers' config of a config.json."""
    model_type = str(config.get("model_type"))
    if model_type not in transformers.CONFIG_MAPPING:
        raise reject(model_type, f"transformers {transformers.__version__} does not know it")
    _check_sizes(model_type, config)
    return transformers.CONFIG_MAPPING[model_type].from_dict(_decode_floats(dict(config)))


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Gives float64 to code that asks PyTorch for float32 or bfloat16 by name."""
    double, default = torch.Tensor.double, torch.get_default_dtype()
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(torch.Tensor, "float", double),
        mock.patch.object(torch.Tensor, "bfloat16", double),
        torch.no_grad(),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def _check_sizes(model_type: str, config: Mapping[str, Any]) -> None:
    """Rejects unrealistic sizes before the modules are created."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_sizes(model_type, value)
        if not isinstance(value, int):
            continue
        if any(part in key for part in ("layer", "expert")) and value > MAX_COUNT:
            raise reject(model_type, f"{key}: got {value}, expected at most {MAX_COUNT:,}")
        if any(part in key for part in ("size", "dim", "heads", "rank")) and value > MAX_SIZE:
            raise reject(model_type, f"{key}: got {value}, expected at most {MAX_SIZE:,}")


def get_size(config: Mapping[str, Any], name: str) -> int:
    """Returns a size by transformers' standard name, which its config class maps to the model's own
    name.

    Raises UnsupportedModel if the model has no such size, such as an image model.
    """
    value = getattr(make_config(config).get_text_config(decoder=True), name, None)
    if not isinstance(value, int):
        raise reject(str(config["model_type"]), f"its config has no {name}: not a decoder of text")
    return value


def _decode_floats(item: Any) -> Any:
    """Returns a config with numbers that JSON cannot represent, such as infinity, decoded."""
    if isinstance(item, dict):
        if set(item) == {"__float__"}:
            return float(item["__float__"])
        return {key: _decode_floats(each) for key, each in item.items()}
    return [_decode_floats(each) for each in item] if isinstance(item, list) else item


class EmptyOnMeta(TorchFunctionMode):
    """Allocates no memory for uninitialized tensors, such as new parameters."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
