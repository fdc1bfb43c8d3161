"""Pooling and scoring settings as saved by sentence-transformers.

Reads modules.json, the folder of the pooling (usually 1_Pooling) or the score (1_LogitScore), those
of Dense modules, sentence_bert_config.json and, for a cross-encoder's activation,
config_sentence_transformers.json. `octavo/models` checks which poolings are supported. Sources:
`SentenceTransformer.save`, `Pooling` and `Dense` of sentence-transformers, `ColBERT` of PyLate.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from octavo.api.errors import WeightMismatch, shown
from octavo.checkpoint.json_file import read_json, read_json_if_there, read_json_objects

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"

TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""File names of the transformer's limits; the first one is current."""

SCORES = ("LogitScore", "CausalScoreHead")
"""Modules that compute a score from the logits of one or two tokens; the second is an older name.
"""

MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}

DENSE = "Dense"
"""Module that projects embeddings."""

COLBERT = "HF_ColBERT"
"""Architecture of checkpoints of the ColBERT package: an encoder, and `linear` on each token."""

COLBERT_MARKERS = ("[unused0]", "[unused1]")
"""Tokens that the ColBERT package inserts before queries and documents."""

NEW_NAMES = {"lasttoken": "last"}
"""Values of `pooling_mode` with other names in `MODES`."""


def with_pooling(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the config with a `pooling` entry, if the folder has a modules.json.

    Its keys are `mode`, `normalize`, `do_lower_case`, `max_seq_length` if given, and `prompt` if
    there is a default prompt. A cross-encoder has `activation_fn`; one that compares token logits
    has `score_tokens`, the id of the scored token and, if any, the id whose logit is subtracted.
    Dense modules after the pooling are `dense`. A late-interaction model has the mode "tokens",
    `markers` (tokens before queries and before documents) and `skiplist` (tokens of documents that
    scores ignore). Combined or unsupported modes are described in words, such as "cls + mean" or
    "mean, then WordWeights".
    """
    settings = read_json_if_there(folder / SETTINGS)
    saved = settings.get("activation_fn")
    if saved is not None:
        config = config | {"pooling": {"activation_fn": saved}}
    if not (folder / MODULES).exists():
        return config
    modules = list(_modules(folder))
    kinds = [kind for kind, _ in modules]
    scores = [place for kind, place in modules if kind in SCORES]
    if scores:
        tokens = {"mode": "last", "score_tokens": _score_tokens(scores[0] / "config.json")}
        return config | {"pooling": config.get("pooling", {}) | tokens | _limits(folder)}
    if "Pooling" not in kinds and set(kinds[1:]) - {"Normalize"} == {DENSE}:
        return config | {"pooling": _token_pooling(modules, settings, folder) | _limits(folder)}
    if "Pooling" not in kinds:
        return config
    index = kinds.index("Pooling")
    prompt = _default_prompt(settings, folder / SETTINGS)
    mode = _mode(modules[index][1] / "config.json", has_prompt=bool(prompt))
    before = [kind for kind in kinds[:index] if kind != "Transformer"]
    behind = [kind for kind in kinds[index + 1 :] if kind not in ("Normalize", DENSE)]
    dense = [_dense(place, folder) for kind, place in modules if kind == DENSE]
    if DENSE in before or "Normalize" in kinds[index + 1 : -1]:
        behind.append(f"{DENSE} after other modules")
    pooling = {
        "mode": ", then ".join([*before, mode, *behind]),
        "normalize": "Normalize" in kinds[index + 1 :],
        **({"dense": dense} if dense else {}),
        **({"prompt": prompt} if prompt else {}),
        **_limits(folder),
    }
    return config | {"pooling": pooling}


def _token_pooling(
    modules: list[tuple[str, Path]], settings: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Returns the settings of a late-interaction model, as PyLate saves it."""
    markers = [settings.get(f"{role}_prefix") for role in ("query", "document")]
    words = settings.get("skiplist_words")
    return {
        "mode": "tokens",
        "normalize": True,
        "dense": [_dense(place, folder) for kind, place in modules if kind == DENSE],
        "markers": markers if all(isinstance(each, str) for each in markers) else [],
        "skiplist": words if isinstance(words, list) else [],
    }


def with_colbert(config: dict[str, Any], shape: tuple[int, ...] | None) -> dict[str, Any]:
    """Returns the config of a checkpoint of the ColBERT package with a `pooling` entry; other
    configs are unchanged. `shape` is that of `linear.weight`.
    """
    if config.get("architectures") != [COLBERT] or shape is None or len(shape) != 2:
        return config
    dense = {"module": "linear", "width": shape[0], "bias": False, "activation": "Identity"}
    return config | {
        "pooling": {
            "mode": "tokens",
            "normalize": True,
            "dense": [dense],
            "markers": list(COLBERT_MARKERS),
            "skiplist": list(string.punctuation),
        }
    }


def _dense(place: Path, folder: Path) -> dict[str, Any]:
    """Returns the settings of a Dense module: its module name, width, bias and activation."""
    path = place / "config.json"
    config = read_json(path)
    width, bias = config.get("out_features"), config.get("bias", True)
    if type(width) is not int or width < 1 or type(bias) is not bool:
        raise WeightMismatch(
            f"{path}: got out_features {shown(width)} and bias {shown(bias)}, expected an integer"
            " of at least 1, and true or false"
        )
    if config.get("use_residual"):
        raise WeightMismatch(f"{path}: use_residual is true, which is not supported")
    activation = str(config.get("activation_function") or "torch.nn.Tanh").rpartition(".")[2]
    module = f"{place.relative_to(folder).as_posix()}.linear"
    return {"module": module, "width": width, "bias": bias, "activation": activation}


def _default_prompt(settings: Mapping[str, Any], path: Path) -> str:
    """Returns the default prompt; "" if there is none."""
    name = settings.get("default_prompt_name")
    if name is None:
        return ""
    prompts = settings.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) and isinstance(name, str) else None
    if not isinstance(prompt, str):
        raise WeightMismatch(
            f"{path}: default_prompt_name is {shown(name)}, which is not in prompts"
        )
    return prompt


def dense_folders(config: Mapping[str, Any], folder: Path) -> list[Path]:
    """Returns the folders of the Dense modules in a config's `pooling`, a key that some models'
    files use for something else.
    """
    pooling = config.get("pooling")
    modules = pooling.get("dense", ()) if isinstance(pooling, dict) else ()
    return [folder / each["module"].removesuffix(".linear") for each in modules]


def module_folders(folder: Path) -> list[Path]:
    """Returns the folders of the modules in modules.json, except the model's own."""
    if not (folder / MODULES).exists():
        return []
    return [place for _, place in _modules(folder) if place != folder]


def _modules(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields each module's class name, without its package, and its folder."""
    path = folder / MODULES
    for module in read_json_objects(path):
        kind, place = module.get("type"), module.get("path", "")
        if not isinstance(kind, str) or not isinstance(place, str):
            raise WeightMismatch(
                f"{path}: a module requires a type and a path, got {shown(module)}"
            )
        parts = PurePosixPath(place)
        if parts.is_absolute() or ".." in parts.parts:
            raise WeightMismatch(f"{path}: the path {shown(place)} is outside the folder")
        yield kind.rpartition(".")[2], folder / parts


def _mode(path: Path, *, has_prompt: bool) -> str:
    """Returns the pooling mode, with a note if it excludes the prompt."""
    config = read_json(path)
    mode = _named_mode(config, path)
    leaves_out = has_prompt and config.get("include_prompt") is False
    return f"{mode} without the prompt" if leaves_out else mode


def _named_mode(config: Mapping[str, Any], path: Path) -> str:
    """Returns the mode in `pooling_mode`, or from the flags of older files."""
    named = config.get("pooling_mode")
    if named is not None:
        if not isinstance(named, str):
            raise WeightMismatch(f"{path}: pooling_mode: got {shown(named)}, expected a string")
        return NEW_NAMES.get(named, named)
    modes = [mode for flag, mode in MODES.items() if _flag(config, flag, path)]
    if not modes:
        raise WeightMismatch(
            f"{path}: no pooling mode is set",
            hint='for example, set "pooling_mode_mean_tokens": true',
        )
    return " + ".join(modes)


def _score_tokens(path: Path) -> list[int]:
    """Returns the ids of the tokens that a score is computed from."""
    config = read_json(path)
    ids: list[int] = []
    for name in ("true_token_id", "false_token_id"):
        token_id = config.get(name)
        if token_id is None and ids:
            break  # the score is the logit of a single token
        if type(token_id) is not int or token_id < 0:
            raise WeightMismatch(
                f"{path}: {name}: got {shown(token_id)}, expected an integer of at least 0"
            )
        ids.append(token_id)
    return ids


def _limits(folder: Path) -> dict[str, Any]:
    paths = (folder / name for name in TRANSFORMER_CONFIGS)
    path = next((path for path in paths if path.exists()), folder / TRANSFORMER_CONFIGS[0])
    config = read_json_if_there(path)
    limits: dict[str, Any] = {"do_lower_case": _flag(config, "do_lower_case", path)}
    length = config.get("max_seq_length")
    if length is None:
        return limits
    if type(length) is not int or length < 1:
        raise WeightMismatch(
            f"{path}: max_seq_length: got {shown(length)}, expected an integer of at least 1"
        )
    return limits | {"max_seq_length": length}


def _flag(config: Mapping[str, Any], name: str, path: Path) -> bool:
    """Returns a flag; by default only mean pooling is on, as in `Pooling`."""
    value = config.get(name, name == "pooling_mode_mean_tokens")
    if not isinstance(value, bool):
        raise WeightMismatch(f"{path}: {name}: got {shown(value)}, expected true or false")
    return value
