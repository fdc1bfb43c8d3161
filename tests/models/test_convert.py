"""`convert` makes an embedding model of a decoder: transformers' last hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM
from octavo.api.errors import ConfigError, UnsupportedModel
from tests.support.tiny_encoders import save_encoder
from tests.support.tiny_models import FAMILIES, in_float64, tiny_model

REFUSED = {"mamba", "mamba2"}

IDS = np.random.default_rng(3).integers(3, 90, 33).tolist()


def start(path: Any, convert: str, **options: Any) -> LLM:
    settings = {"backend": "reference", "dtype": "float32", "skip_tokenizer_init": True}
    settings |= {"max_model_len": 64, "convert": convert} | options
    return LLM(str(path), report=lambda text: None, **settings)


def hidden_states(family: str) -> torch.Tensor:
    twin = in_float64(tiny_model(family).model)
    with torch.no_grad():
        base = getattr(twin, "model", twin.base_model)
        return base(torch.tensor(IDS)[None]).last_hidden_state[0]


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_last_hidden_state_of_each_token(family):
    if family in REFUSED:
        with pytest.raises(UnsupportedModel, match=f"{family}: embeddings"):
            start(tiny_model(family).path, "token_embed")
        return
    wanted = hidden_states(family).numpy()
    with start(tiny_model(family).path, "token_embed") as llm:
        (output,) = llm.encode([{"prompt_token_ids": IDS}])
    np.testing.assert_allclose(output.outputs.data, wanted, atol=2e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_an_embedding_is_the_normalized_last_row(backend):
    wanted = hidden_states("llama").numpy()
    with start(tiny_model("llama").path, "token_embed", backend=backend) as llm:
        (rows,) = llm.encode([{"prompt_token_ids": IDS}])
    np.testing.assert_allclose(rows.outputs.data, wanted, atol=1e-4)
    with start(tiny_model("llama").path, "embed", backend=backend) as llm:
        (output,) = llm.embed([{"prompt_token_ids": IDS}])
    last = wanted[-1] / np.linalg.norm(wanted[-1])
    np.testing.assert_allclose(output.outputs.embedding, last, atol=1e-5)


def test_what_is_no_decoder_is_refused(tmp_path):
    save_encoder(tmp_path, "bert")
    for _ in range(2):
        with pytest.raises(ConfigError, match="convert: got 'embed', but the model"):
            start(tmp_path, "embed")
        (tmp_path / "modules.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="with classifier_from_token"):
        start(tiny_model("llama").path, "embed", classifier_from_token="no,yes")
