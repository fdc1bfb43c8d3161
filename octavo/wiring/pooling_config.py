"""Options that turn a decoder into a model of embeddings (`convert`), or into a classifier whose
score is the difference of two tokens' logits (`classifier_from_token`).

sentence-transformers stores the same in modules.json, which the loader reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.api.errors import ConfigError
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.config.model_options import ModelOptions
from octavo.models.hf_config import HfConfig
from octavo.models.pooling import is_classifier, is_token_classifier
from octavo.models.registry import FAMILIES
from octavo.wiring.tokenizer_files import find_tokenizer

POOLING: Mapping[str, Mapping[str, Any]] = {
    "embed": {"mode": "last", "normalize": True},
    "token_embed": {"mode": "tokens"},
}
"""Pooling of each value of `convert`, as in the loader's config."""


def set_pooling(options: ModelOptions, header: ModelHeader) -> None:
    """Sets the pooling of the options in the header's config; raises ConfigError if the model does
    not support it.
    """
    if options.convert is not None:
        _convert(options.convert, options, header)
    if options.classifier_from_token is not None:
        _set_score_tokens(options.classifier_from_token, options, header)


def _convert(task: str, options: ModelOptions, header: ModelHeader) -> None:
    if options.classifier_from_token is not None:
        raise ConfigError(
            f"convert: got {task!r} with classifier_from_token, expected one of them",
            hint="remove convert",
        )
    family = FAMILIES.get(str(header.config.get("model_type")))
    is_encoder = family is not None and family.kind == "encoder"
    hf = HfConfig(header.config)
    pools = isinstance(header.config.get("pooling"), dict)
    if is_encoder or pools or is_classifier(hf) or is_token_classifier(hf):
        raise ConfigError(
            f"convert: got {task!r}, but the model does not generate text; expected a decoder",
            hint="remove convert",
        )
    header.config["pooling"] = dict(POOLING[task])


def _set_score_tokens(given: str, options: ModelOptions, header: ModelHeader) -> None:
    """Sets the tokens of the option; raises ConfigError if the vocabulary lacks them."""
    texts = given.split(",")
    if len(texts) > 2 or not all(texts):
        raise _refused(options, "one token, or two with a comma between them, as no,yes")
    if HfConfig(header.config).architecture.endswith("ForSequenceClassification"):
        raise _refused(options, "not set for this model, which is a classifier")
    if not isinstance(header, Checkpoint):
        raise _refused(options, "not set for a config.json without a tokenizer")
    from octavo.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(find_tokenizer(options, header))
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in reversed(texts)]
    for text, token_ids in zip(reversed(texts), ids, strict=True):
        if len(token_ids) != 1:
            raise _refused(options, f"single tokens: {text!r} is {len(token_ids)} of this model's")
    tokens = [token_id for token_ids in ids for token_id in token_ids]
    header.config["pooling"] = {"mode": "last", "score_tokens": tokens}


def _refused(options: ModelOptions, allowed: str) -> ConfigError:
    given_value = options.classifier_from_token
    return ConfigError(f"classifier_from_token: got {given_value!r}, expected {allowed}")
