"""ChatGLM2 and 3, which transformers lacks: the same weights under GLM-4's names are the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.api.errors import UnsupportedModel
from octavo.models.hf_config import model_info
from octavo.models.registry import build_programs
from tests.support.chatglm import chatglm_config, save_as_chatglm
from tests.support.paged_runner import PagedRunner, backend_named
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_logits_are_those_of_glm(tmp_path, backend):
    glm = tiny_model("glm")
    save_as_chatglm(glm, tmp_path)
    ids = np.random.default_rng(2).integers(0, glm.config["vocab_size"], 90)
    wanted = PagedRunner(glm.path, backend_named(backend)).logits(ids)
    found = PagedRunner(tmp_path, backend_named(backend)).logits(ids)
    np.testing.assert_array_equal(found, wanted)


def test_its_context_and_vocabulary_have_names_of_their_own():
    info = model_info(chatglm_config(tiny_model("glm").config))
    assert (info.max_context_tokens, info.vocab_size) == (2048, 266)


def test_the_first_chatglm_is_refused_by_name():
    first = {"model_type": "chatglm", "position_encoding_2d": True, "inner_hidden_size": 16384}
    with pytest.raises(UnsupportedModel, match="ChatGLM-6B"):
        build_programs(first)
