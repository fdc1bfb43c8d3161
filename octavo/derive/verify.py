"""Checks a derived Program against transformers: the same logits from the same weights.

The check uses a smaller model of the same config with random float64 weights: few layers but one of
each kind, a short window and a small vocabulary. The reference backend computes it in one step and
in chunks; both results must equal transformers' with eager attention.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from octavo.checkpoint.open import open_checkpoint
from octavo.checkpoint.weights import WeightReader
from octavo.derive.capture import double_precision, get_size, make_config, reject
from octavo.derive.stored import StoredTensors
from octavo.executor.base import LoadWeight
from octavo.executor.kv import BLOCK_SIZE
from octavo.executor.reference.backend import ReferenceBackend
from octavo.program.ops import Attention
from octavo.program.program import Op, PowerGrowth, Program, Sinusoids
from octavo.worker.calibration import make_prompt_batch

NUM_TOKENS = 48
"""Number of tokens; more than the window and the chunk of attention below."""

WINDOW = 20
"""Window and chunk of the smaller model."""

MAX_VOCABULARY = 512

TOLERANCE = 1e-9
"""Maximum difference of logits, relative to the largest logit, in float64."""

TABLE_TOLERANCE = 1e-7
"""The same for Programs with tables of sines or powers, which are in fp32."""

CLAMPED_SPREAD = 4.0
"""Factor on the weights of values that are clamped, so that many of them are."""

WINDOW_KEYS = ("window", "attention_chunk", "local_attention")
"""Substrings of the config keys of windows and chunks."""

TEXT_KEYS = ("text_config", "decoder")
"""Names of the text model's config within a composite config."""

DECODER_LAYERS = ("decoder_layers", "num_decoder_layers")
"""Names of the number of decoder layers in configs that also describe an encoder."""


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config of the text model within a composite config, else the config itself."""
    parts = (config.get(key) for key in TEXT_KEYS)
    return next((each for each in parts if isinstance(each, dict) and "model_type" in each), config)


def num_layers(config: Mapping[str, Any]) -> int:
    """Returns the number of a decoder's layers."""
    given = (config.get(name) for name in DECODER_LAYERS)
    found = next((each for each in given if isinstance(each, int)), None)
    return get_size(config, "num_hidden_layers") if found is None else found


def shrink(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Returns the config with `count` layers and fewer tokens; widths stay."""
    small, names = shorten_windows(config), make_config(config).attribute_map
    for key in TEXT_KEYS:
        if isinstance(config.get(key), dict) and "model_type" in config[key]:
            return small | {key: shrink(config[key], count)}
    vocabulary, layers = (names.get(key, key) for key in ("vocab_size", "num_hidden_layers"))
    layers = next((name for name in DECODER_LAYERS if name in config), layers)
    total = num_layers(config)
    small[vocabulary] = min(get_size(config, "vocab_size"), MAX_VOCABULARY)
    small[layers] = count
    for key, value in config.items():
        if isinstance(value, list) and len(value) == total:
            small[key] = value[:count]
        if key.endswith("token_id") and isinstance(value, int):
            small[key] = min(value, 2)
    return small


def shorten_windows(config: Mapping[str, Any], longest: int = WINDOW) -> dict[str, Any]:
    """Returns the config with windows and chunks of at most `longest` tokens."""
    short = dict(config)
    for key, value in config.items():
        if isinstance(value, dict):
            short[key] = shorten_windows(value, longest)
        elif type(value) is int and any(part in str(key) for part in WINDOW_KEYS):
            short[key] = min(value, longest)
    return short


def windows(config: Mapping[str, Any]) -> Iterator[int]:
    """Yields the sizes of a config's windows and chunks."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from windows(value)
        elif type(value) is int and any(part in str(key) for part in WINDOW_KEYS):
            yield value


def layer_kinds(program: Program) -> list[tuple[Any, ...]]:
    """Returns a key for the kind of each layer: its ops in order, without the layer's number."""
    layers: dict[int, list[Any]] = {}
    for op in program.ops:
        for weight in op.weights:
            found = re.search(r"\.(\d+)\.", weight.name)
            if found:
                layers.setdefault(int(found[1]), []).append(_kind(op))
                break
    return [tuple(layers[index]) for index in sorted(layers)]


def _kind(op: Op) -> tuple[Any, ...]:
    weights = tuple(re.sub(r"\.\d+\.", ".N.", each.name) for each in op.weights)
    widths = tuple(each.width for each in (*op.inputs, *op.outputs))
    return op.kind, weights, widths


def num_layers_with_each_kind(program: Program, config: Mapping[str, Any]) -> int:
    """Returns how many of the first layers include one of each kind: with other ops, or with other
    values in the config's lists.
    """
    kinds: list[Any] = layer_kinds(program)
    lists = [each for each in _text_part(config).values() if isinstance(each, list)]
    lists = [each for each in lists if len(each) == len(kinds)]
    kinds = [(kind, repr([each[i] for each in lists])) for i, kind in enumerate(kinds)]
    masks = [op.mask for op in program.ops if isinstance(op, Attention)]
    needed = {
        next(i for i, each in enumerate(kinds) if each == kind) for kind in dict.fromkeys(kinds)
    } | {masks.index(mask) for mask in dict.fromkeys(masks)}
    return max(needed, default=0) + 1


def compare(program: Program, config: Mapping[str, Any]) -> float:
    """Returns the largest difference between a Program's logits and transformers', relative to the
    largest logit; the Program must belong to the config.
    """
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="octavo-derive-") as folder:
        path = Path(folder)
        model = _random_model(config)
        _enlarge(model, _clamped_tensors(program))
        model.save_pretrained(path)
        size = get_size(config, "vocab_size")
        tokens = np.random.default_rng(0).integers(3, size, NUM_TOKENS).tolist()
        with double_precision():
            expected = _in_float64(model)(torch.tensor([tokens]), use_cache=False)
        logits = expected.logits[0].numpy()
        checkpoint = open_checkpoint(path)
        read = {name for weight in program.weights for name in weight.tensor_names}
        _check_unread(model, tokens, expected.logits, {*checkpoint.names()} - read)
        load = WeightReader(checkpoint).load
        return max(
            float(np.abs(got - logits).max() / np.abs(logits).max())
            for got in (run_in_chunks(program, load, tokens, chunk) for chunk in (NUM_TOKENS, 7))
        )


def verify(program: Program, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModel unless a Program of the config gives the same results as
    transformers.
    """
    difference = compare(program, config)
    if not difference <= tolerance(program):
        raise reject(
            str(config["model_type"]),
            f"the Program's logits differ from transformers' by {difference:.1e}",
        )


def tolerance(program: Program) -> float:
    """Returns the maximum difference of logits that rounding may cause."""
    tables = Sinusoids | PowerGrowth
    has_table = any(isinstance(weight.fill, tables) for weight in program.weights)
    return TABLE_TOLERANCE if has_table else TOLERANCE


def _check_unread(model: Any, tokens: Sequence[int], logits: Any, unread: set[str]) -> None:
    """Raises UnsupportedModel if the logits depend on unread tensors: fills these with NaN and
    computes the logits again. Tensors of a vision tower, for example, do not change them.
    """
    if not unread:
        return
    twin = _in_float64(model)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    parameters = StoredTensors(model).parameters_in(unread) - {*tied}
    state = twin.state_dict()
    for name in parameters:
        if state[name].is_floating_point():
            state[name].fill_(float("nan"))
    with double_precision():
        again = twin(torch.tensor([tokens]), use_cache=False).logits
    if not torch.equal(again, logits):
        names = ", ".join(sorted(unread)[:3])
        raise reject(model.config.model_type, f"its Program does not read {names}")


def _random_model(config: Mapping[str, Any]) -> Any:
    hf_config = make_config(config)
    model = transformers.AutoModelForCausalLM.from_config(
        hf_config, attn_implementation="eager", experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                spread = 0.2 if tensor.dim() < 2 else 2.0 / tensor.shape[-1] ** 0.5
                center = 1.0 if name.endswith("norm.weight") else 0.0
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread + center)
    return model.eval()


def _clamped_tensors(program: Program) -> set[str]:
    """Returns the checkpoint's tensors that values with a clamp are computed from."""
    makers = {out: op for op in program.ops for out in op.outputs}
    clamped = [op for op in program.ops if getattr(op, "clamp", None) is not None]
    linears = [makers[value] for op in clamped for value in op.inputs if value in makers]
    return {name for op in linears for weight in op.weights for name in weight.tensor_names}


def _enlarge(model: Any, tensors: set[str]) -> None:
    """Multiplies the parameters in some tensors by `CLAMPED_SPREAD`."""
    if not tensors:
        return
    state = model.state_dict()
    with torch.no_grad():
        for name in StoredTensors(model).parameters_in(tensors):
            state[name].mul_(CLAMPED_SPREAD)


def _in_float64(model: Any) -> Any:
    """Returns the same model in float64. Run it inside `double_precision()`, because transformers
    casts to float32 in places.
    """
    with double_precision():
        twin = (
            type(model)
            ._from_config(model.config, attn_implementation="eager", experts_implementation="eager")
            .double()
            .eval()
        )
        twin.load_state_dict(model.state_dict())
    return twin


def run_in_chunks(
    program: Program, load: LoadWeight, tokens: Sequence[int], chunk: int
) -> NDArray[Any]:
    """Returns the logits `[T, V]` of every token from the reference backend, computing `chunk`
    tokens per step with a paged KV cache.
    """
    backend = ReferenceBackend()
    runnable = backend.prepare_program(program, load)
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    kv = backend.allocate(runnable.kv_layouts, [num_blocks] * len(program.groups))
    ids = np.array(tokens, np.int32)
    steps = [
        make_prompt_batch(ids[: start + chunk], len(program.groups), num_axes=1, start=start)
        for start in range(0, len(tokens), chunk)
    ]
    return np.concatenate([runnable.run(step, kv).arrays["logits"] for step in steps])
