"""A key that config.json leaves out, or that is null there, stands for what transformers takes it
for: the Programs are those of the config that transformers completes.

Configs are those of the tiny models; a key without which either refuses the config is left.
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
import transformers
from huggingface_hub.errors import StrictDataclassError

from octavo.api.errors import UnsupportedModel
from octavo.models.registry import build_programs
from tests.support.dump_older_configs import MISTRAL
from tests.support.tiny_details import DETAILS
from tests.support.tiny_other_shapes import ENCODERS, SHAPE
from tests.support.tiny_shapes import ENCODER_DECODERS, SHAPES

SIZES = {
    **SHAPES,
    **ENCODER_DECODERS,
    "mistral": MISTRAL,
    **{family: SHAPE | own for family, own in ENCODERS.items()},
}
KEPT = ("model_type", "architectures", "pooling")
REFUSED = (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError)
"""Errors with which transformers refuses a config."""


def completed(config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns a config with all that transformers adds to it; None where it refuses it."""
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[config["model_type"]]
    given = {name: value for name, value in config.items() if name not in KEPT}
    try:
        made = kind.from_dict(deepcopy(given))
    except REFUSED:
        return None
    found: dict[str, Any] = json.loads(json.dumps(made.to_dict()))
    return found | {name: config[name] for name in KEPT}


def built(config: dict[str, Any]) -> str | None:
    """Returns a description of all Programs of a config; None where it is refused."""
    try:
        return repr(build_programs(config, every_key=True))
    except UnsupportedModel:
        return None


def whole_config(family: str) -> dict[str, Any]:
    options = SIZES[family] | DETAILS.get(family, {})
    kept = {"model_type": family, "architectures": ["Model"], "pooling": {}}
    if family in ENCODERS:
        kept["pooling"] = {"mode": "mean"}
    config = completed(options | kept)
    assert config is not None, "transformers refuses the options"
    return config


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("family", SIZES)
def test_left_out_keys_have_transformers_defaults(family: str) -> None:
    whole = whole_config(family)
    assert built(whole) is not None
    num_compared = 0
    for name in whole.keys() - set(KEPT):
        without = {key: value for key, value in whole.items() if key != name}
        for config in (without, without | {name: None}):
            found, theirs = built(config), completed(config)
            wanted = None if theirs is None else built(theirs)
            if found is None or wanted is None:
                continue
            num_compared += 1
            assert found == wanted, f"{name}: {config.get(name, 'missing')}"
    assert num_compared > 20
