"""The option `classifier_from_token`: turns a decoder into a classifier whose score is the
difference of two tokens' logits.

sentence-transformers stores the same in modules.json, which the loader reads.
"""

from __future__ import annotations

from octavo.api.errors import ConfigError
from octavo.checkpoint.ports import Checkpoint, ModelHeader
from octavo.config.model_options import ModelOptions
from octavo.models.hf_config import HfConfig
from octavo.wiring.tokenizer_files import find_tokenizer


def set_score_tokens(options: ModelOptions, header: ModelHeader) -> None:
    """Sets the tokens of the option in the header's config; raises ConfigError if the vocabulary
    lacks them.
    """
    if options.classifier_from_token is None:
        return
    texts = options.classifier_from_token.split(",")
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
