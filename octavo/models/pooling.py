"""Pooling settings of a checkpoint: pooling mode, labels, and the activation of a classifier's
scores.

Uses only settings from the checkpoint (`pooling`). Sources: `PretrainedConfig` and losses of
transformers, `CrossEncoder` of sentence-transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from octavo.api.errors import UnsupportedModel
from octavo.api.pooling_params import PoolingActivation
from octavo.models.hf_config import HfConfig

RowPooling = Literal["cls", "mean", "last"]
"""Poolings of a text to a row."""

PoolingMode = Literal["cls", "mean", "last", "tokens"]
"""Poolings; "tokens" keeps a row for each token, for late interaction."""


BY_PROBLEM: dict[str, PoolingActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""Activation by transformers' `problem_type`."""

BY_MODULE: dict[str, PoolingActivation] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
"""Activation by `torch.nn` class, as saved by sentence-transformers."""


PAIR_TEMPLATES = {
    "qwen3": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query"
        ' and the Instruct provided. Note that the answer can only be "yes" or'
        ' "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web search query, retrieve'
        " relevant passages that answer the query\n<Query>: {{ messages[0].content }}\n<Document>:"
        " {{ messages[1].content }}<|im_end|>\n<|im_start|>assistant\n"
        "{{ '<think>\\n\\n</think>\\n\\n' }}"
    ),
}
"""Jinja templates of a query and a document, by model type, for checkpoints without such a
template. Source: the model card of Qwen3-Reranker."""


@dataclass(frozen=True, slots=True)
class PooledHead:
    """The head of a pooling decoder."""

    mode: PoolingMode
    num_labels: int = 0
    """Number of labels of a classifier; 0: embedding."""
    tokens: tuple[int, ...] = ()
    """Tokens whose logits form the score: the first minus the second; () for a classifier with
    weights."""


def pooled_head(config: HfConfig) -> PooledHead | None:
    """Returns the head of a pooling decoder (classifiers use the last token); None if it
    generates.
    """
    if is_classifier(config):
        return PooledHead("last", num_labels(config), score_tokens(config))
    if config.table("pooling").get("mode") is None:
        return None
    mode = pooling_mode(config)
    if config.table("pooling").get("dense"):
        raise UnsupportedModel(
            f"{config.model_type}: Dense modules are supported after encoders, not decoders"
        )
    return PooledHead(mode)


def is_classifier(config: HfConfig) -> bool:
    return config.architecture.endswith("ForSequenceClassification") or bool(score_tokens(config))


def is_token_classifier(config: HfConfig) -> bool:
    return config.architecture.endswith("ForTokenClassification")


def score_tokens(config: HfConfig) -> tuple[int, ...]:
    ids = HfConfig(config.table("pooling")).integers("score_tokens")
    for token_id in ids:
        if token_id >= config.integer("vocab_size", low=1):
            raise UnsupportedModel(
                f"config.json: vocab_size is {config.integer('vocab_size')}, but the score uses"
                f" token id {token_id}"
            )
    return ids


def get_pair_template(config: HfConfig) -> str | None:
    """Returns the pair template of a token-scoring reranker: "" if its family has no known one;
    None for other models.
    """
    return PAIR_TEMPLATES.get(config.model_type, "") if score_tokens(config) else None


def num_labels(config: HfConfig) -> int:
    """Returns the number of labels, from `id2label` or `num_labels`."""
    if score_tokens(config):
        return 1
    labels = config.table("id2label")
    return len(labels) or config.size("num_labels", 2)


def pooling_mode(config: HfConfig) -> PoolingMode:
    """Returns the pooling mode; raises UnsupportedModel if the checkpoint does not specify it."""
    mode: Any = config.table("pooling").get("mode")
    if mode not in get_args(PoolingMode):
        raise UnsupportedModel(
            f"{config.model_type}: the pooling mode is {mode!r}, expected"
            f" {', '.join(get_args(PoolingMode))}",
            hint="add modules.json and 1_Pooling/config.json as sentence-transformers saves them,"
            " or use a ForSequenceClassification model",
        )
    found: PoolingMode = mode
    return found


def get_labels(config: HfConfig, num_labels: int) -> tuple[str, ...]:
    """Returns the label names; missing names are generated as in transformers."""
    named = config.table("id2label")
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(num_labels))


def get_activation(config: HfConfig, num_labels: int) -> PoolingActivation:
    """Returns the activation of a classifier's scores: from sentence-transformers, from the problem
    type, or sigmoid for one score and softmax for several.
    """
    saved = _saved_activation(config)
    if saved is not None:
        return saved
    problem = config.text("problem_type", "")
    if problem and problem not in BY_PROBLEM:
        raise UnsupportedModel(
            f"config.json: problem_type is {problem!r}, expected {', '.join(BY_PROBLEM)}"
        )
    return BY_PROBLEM.get(problem, "sigmoid" if num_labels == 1 else "softmax")


def _saved_activation(config: HfConfig) -> PoolingActivation | None:
    """Returns the activation that sentence-transformers saved with a cross-encoder; None if there
    is none.
    """
    for table, key in (
        ("pooling", "activation_fn"),
        ("sentence_transformers", "activation_fn"),
        ("", "sbert_ce_default_activation_function"),
    ):
        section = HfConfig(config.table(table)) if table else config
        name = section.text(key, "").rpartition(".")[2]
        if name and name not in BY_MODULE:
            raise UnsupportedModel(
                f"{key} is {name!r}, supported: {', '.join(BY_MODULE)} for a classifier"
            )
        if name:
            return BY_MODULE[name]
    return None
