"""What a checkpoint says of the row that its model pools of a text: how it is pooled, the labels of
a classifier, and the function that turns its scores into probabilities.

Nothing is guessed: `pooling` is what the loader found beside config.json. Sources:
`PretrainedConfig` and the losses of transformers, `CrossEncoder` of sentence-transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from octavo.api.errors import UnsupportedModel
from octavo.api.pooling_params import PoolingActivation
from octavo.models.hf_config import HfConfig

PoolingMode = Literal["cls", "mean", "last"]

BY_PROBLEM: dict[str, PoolingActivation] = {
    "regression": "none",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""Activations by transformers' `problem_type`."""

BY_MODULE: dict[str, PoolingActivation] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
"""Activations by the class of `torch.nn` that sentence-transformers saves."""


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
"""Jinja templates of a query and a document, by model type, for checkpoints whose own template has
no such roles. Source: the model card of Qwen3-Reranker.
"""


@dataclass(frozen=True, slots=True)
class PooledHead:
    """The head of a decoder that makes one row of each text."""

    mode: PoolingMode
    num_labels: int = 0
    """Number of a classifier's labels; 0: the row is an embedding."""
    tokens: tuple[int, ...] = ()
    """Ids of the tokens whose logits make the score: the first one's, less the second one's; ()
    where a classifier has weights of its own.
    """


def pooled_head(config: HfConfig) -> PooledHead | None:
    """Returns the head of a decoder that pools, which classifies by the last token; None for one
    that generates.
    """
    if is_classifier(config):
        return PooledHead("last", num_labels(config), score_tokens(config))
    if config.table("pooling").get("mode") is None:
        return None
    return PooledHead(pooling_mode(config))


def is_classifier(config: HfConfig) -> bool:
    return config.architecture.endswith("ForSequenceClassification") or bool(score_tokens(config))


def score_tokens(config: HfConfig) -> tuple[int, ...]:
    """Returns the ids of the tokens whose logits make a score; () where none do."""
    ids = HfConfig(config.table("pooling")).integers("score_tokens")
    for token_id in ids:
        if token_id >= config.integer("vocab_size", low=1):
            raise UnsupportedModel(
                f"config.json: vocab_size is {config.integer('vocab_size')}, the score is made of"
                f" the token {token_id}"
            )
    return ids


def pair_template_of(config: HfConfig) -> str | None:
    """Returns the template of a pair of texts for a model that answers by a token: "" where its
    family is not known to have been trained with one; None for other classifiers.
    """
    return PAIR_TEMPLATES.get(config.model_type, "") if score_tokens(config) else None


def num_labels(config: HfConfig) -> int:
    """Returns the number of labels, by `id2label` or, where the config has none, `num_labels`."""
    if score_tokens(config):
        return 1
    labels = config.table("id2label")
    return len(labels) or config.size("num_labels", 2)


def pooling_mode(config: HfConfig) -> PoolingMode:
    """Returns how the checkpoint pools; UnsupportedModel where nothing says so."""
    mode: Any = config.table("pooling").get("mode")
    if mode not in get_args(PoolingMode):
        raise UnsupportedModel(
            f"{config.model_type}: the pooling is {mode!r}, allowed are"
            f" {', '.join(get_args(PoolingMode))}",
            hint="an encoder needs modules.json and 1_Pooling/config.json as sentence-transformers"
            " saves them, or to be a ForSequenceClassification",
        )
    found: PoolingMode = mode
    return found


def labels_of(config: HfConfig, num_labels: int) -> tuple[str, ...]:
    """Returns a name for each label; one that the config does not name is called as transformers
    does.
    """
    named = config.table("id2label")
    return tuple(str(named.get(str(i), f"LABEL_{i}")) for i in range(num_labels))


def activation_of(config: HfConfig, num_labels: int) -> PoolingActivation:
    """Returns what a classifier's scores go through: what sentence-transformers saved, else what
    the problem's type asks for, else a sigmoid of a single score and the softmax of several.
    """
    saved = _saved_activation(config)
    if saved is not None:
        return saved
    problem = config.text("problem_type", "")
    if problem and problem not in BY_PROBLEM:
        raise UnsupportedModel(
            f"config.json: problem_type is {problem!r}, allowed are {', '.join(BY_PROBLEM)}"
        )
    return BY_PROBLEM.get(problem, "sigmoid" if num_labels == 1 else "softmax")


def _saved_activation(config: HfConfig) -> PoolingActivation | None:
    """Returns the activation that sentence-transformers saved with a cross-encoder; None without
    one.
    """
    for table, key in (
        ("pooling", "activation_fn"),
        ("sentence_transformers", "activation_fn"),
        ("", "sbert_ce_default_activation_function"),
    ):
        place = HfConfig(config.table(table)) if table else config
        name = place.text(key, "").rpartition(".")[2]
        if name and name not in BY_MODULE:
            raise UnsupportedModel(
                f"{key} is {name!r}, supported are {', '.join(BY_MODULE)} for a classifier"
            )
        if name:
            return BY_MODULE[name]
    return None
