"""Where no `spec_method` is named, or auto, tokens are guessed in the ways that the model and the
options allow; nothing is refused that was not asked for by name, and no bit of an answer changes.
"""

from __future__ import annotations

import pytest

from octavo import SamplingParams
from octavo.config.engine_config import EngineConfig
from octavo.wiring.model import open_model
from octavo.worker.draft_model import DraftModel
from tests.support.llm_tools import core_of, fingerprint, make_llm, prompts_of
from tests.support.proposers import draft_counts, verified_at_any_cost
from tests.support.tiny_heads import tiny_mtp
from tests.support.tiny_models import tiny_model

PROMPTS = prompts_of(20, 33)
BASE = {"max_tokens": 60, "ignore_eos": True, "logprobs": 1}
PARAMS = [
    SamplingParams(temperature=0, **BASE),
    SamplingParams(temperature=0.3, seed=1, allowed_token_ids=[5, 6], **BASE),
]
"""One answer that a head guesses, and one that repeats itself."""


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    return tiny_mtp(tmp_path_factory.mktemp("head"), "deepseek_v3")


def method_of(path, **options):
    config = EngineConfig.from_options(
        **{"model": str(path), "backend": "native", "spec_method": "auto"} | options
    )
    return open_model(config).config.scheduler.spec_method


def test_the_head_is_used_where_there_is_one(head):
    assert method_of(head.path) == "auto"
    assert method_of(tiny_model("llama").path) == "suffix"
    # The config names a head whose tensors are not there.
    bare = tiny_model("deepseek_v3", num_nextn_predict_layers=1)
    assert method_of(bare.path) == "suffix"


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({"tensor_parallel_size": 2, "backend": "torch"}, "auto"),
        ({"kv_cache": False, "enable_prefix_caching": False}, "suffix"),
        ({"pipeline_parallel_size": 2}, None),
    ],
)
def test_what_options_stand_against_is_left_out(head, options, method):
    assert method_of(head.path, **options) == method


@pytest.mark.parametrize(
    ("options", "method"),
    [
        ({}, "grammar"),
        ({"backend": "reference"}, "grammar"),
        ({"backend": "torch"}, None),
        ({"backend": "torch", "batch_invariant": True}, None),
        ({"backend": "torch", "batch_invariant": True, "async_scheduling": "off"}, "grammar"),
        ({"pipeline_parallel_size": 2}, None),
        ({"pipeline_parallel_size": 2, "spec_method": "none"}, "none"),
        ({"spec_method": "none"}, "none"),
        ({"backend": "torch", "async_scheduling": "on", "spec_method": "none"}, "none"),
    ],
)
def test_what_forms_force_is_guessed_where_that_changes_no_bit(options, method):
    assert method_of(tiny_model("llama").path, **{"spec_method": None} | options) == method


def test_both_kinds_of_guesses_change_no_bit(head, monkeypatch):
    """The head is asked, lookups find what repeats, and answers are those without guesses."""
    asked: list[int] = []
    follow = DraftModel.follow

    def noting(self, scheduled, results):
        asked.extend(row.propose for row in scheduled if row.propose)
        follow(self, scheduled, results)

    monkeypatch.setattr(DraftModel, "follow", noting)
    options = {"model_path": head.path, "backend": "native"}
    with make_llm(**options) as llm:
        plain = llm.generate(PROMPTS, PARAMS)
    with verified_at_any_cost(), make_llm(**options, spec_method="auto") as llm:
        # Which steps hold guesses depends on what steps took: in one run none may hold.
        for _ in range(5):
            found = llm.generate(PROMPTS, PARAMS)
            num_drafted, num_accepted = draft_counts(llm)
            assert core_of(llm).scheduler.stats().num_used_blocks == 0
            assert list(map(fingerprint, found)) == list(map(fingerprint, plain))
            if num_accepted:
                break
    assert asked and 0 < num_accepted <= num_drafted
