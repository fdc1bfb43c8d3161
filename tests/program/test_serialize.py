"""Stored Programs are the same Programs; damaged files are rejected."""

import json

import pytest

from octavo.api.errors import UnsupportedModel
from octavo.models.registry import build_programs
from octavo.program.serialize import from_json, to_json
from tests.support.tiny_models import each_family, tiny_model


@pytest.mark.parametrize("family", each_family())
def test_programs_survive_a_round_trip(family):
    programs = build_programs(tiny_model(family).config)
    data = json.loads(json.dumps(to_json(programs)))
    assert from_json(data, "x.json") == programs


@pytest.mark.parametrize(
    "change",
    [
        {"format": 99},
        {"pool": []},
        {"pool": [["Popen", {"args": ["true"]}]]},
        {"pool": [["Linear", {"no_such_field": 1}]]},
        {"programs": {"decoder": {"at": 10**9}}},
    ],
)
def test_a_damaged_file_is_rejected(change):
    data = to_json(build_programs(tiny_model("llama").config)) | change
    with pytest.raises(UnsupportedModel, match=r"x\.json: not a Program of format 1"):
        from_json(data, "x.json")
