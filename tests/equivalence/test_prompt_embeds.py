"""Prompt embeddings: an embedding of a token gives what the token gives, whatever the family; other
rows give what transformers gives for `inputs_embeds`.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.api.errors import ConfigError, InvalidRequest, UnsupportedModel
from tests.support.tiny_models import FAMILIES, in_float64, tiny_model

IDS = np.random.default_rng(7).integers(3, 90, 21).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, ignore_eos=True)
REFUSED = {"gemma3n_text", "gemma4_text"}
"""Families with a second embedding of each token."""


def start(family: str, **options: Any) -> LLM:
    settings = {
        "backend": "reference",
        "dtype": "float32",
        "max_model_len": 128,
        "skip_tokenizer_init": True,
    }
    settings |= {"enable_prompt_embeds": True} | options
    return LLM(str(tiny_model(family).path), report=lambda text: None, **settings)


def embeds_of(family: str, ids: list[int]) -> torch.Tensor:
    """Returns what transformers takes as `inputs_embeds` for these tokens."""
    return tiny_model(family).model.get_input_embeddings()(torch.tensor(ids)).detach()


def logprobs(output: Any) -> list[list[float]]:
    return [[one.logprob for one in step.values()] for step in output.outputs[0].logprobs]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_embedding_of_a_token_is_the_token(family):
    if family in REFUSED:
        with pytest.raises(UnsupportedModel, match="one embedding per token"):
            start(family)
        return
    with start(family) as llm:
        wanted, got = llm.generate(
            [{"prompt_token_ids": IDS}, {"prompt_embeds": embeds_of(family, IDS)}], GREEDY
        )
    assert got.outputs[0].token_ids == wanted.outputs[0].token_ids
    np.testing.assert_allclose(logprobs(got), logprobs(wanted), rtol=0, atol=1e-6)
    assert got.prompt_token_ids == [0] * len(IDS)


@pytest.mark.parametrize("backend", ["reference", "native", "torch"])
def test_rows_that_are_no_token_give_what_transformers_gives(backend):
    rows = torch.from_numpy(np.random.default_rng(1).normal(size=(37, 64)).astype(np.float32))
    twin = in_float64(tiny_model("llama").model)
    rows = rows[:, : twin.config.hidden_size]
    with torch.no_grad():
        logits = twin(inputs_embeds=rows.double()[None]).logits[0, -1]
    expected = torch.log_softmax(logits, -1)
    one = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    with start("llama", backend=backend, max_num_batched_tokens=16) as llm:
        for _ in range(2):
            (output,) = llm.generate([{"prompt_embeds": rows}], one)
            for token, got in output.outputs[0].logprobs[0].items():
                assert got.logprob == pytest.approx(float(expected[token]), abs=3e-5)
        assert output.num_cached_tokens == 32
        (other,) = llm.generate([{"prompt_embeds": rows + 0.5}], one)
        assert other.num_cached_tokens == 0


def saved(array: Any) -> str:
    file = io.BytesIO()
    torch.save(array, file) if isinstance(array, torch.Tensor) else np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


class Evil:
    def __reduce__(self) -> Any:
        return print, ("executed",)


def pickled(value: Any) -> str:
    file = io.BytesIO()
    torch.save(value, file)
    return base64.b64encode(file.getvalue()).decode()


def test_files_and_arrays_are_read_and_others_are_refused(capsys):
    rows = embeds_of("llama", IDS)
    wide = torch.cat([rows, rows], dim=1)[:, : rows.shape[1]]
    every = [rows, rows.numpy(), rows[None], saved(rows), saved(rows.double()), saved(wide)]
    every.append(saved(rows.numpy()))
    halves = [saved(rows.bfloat16()), saved(rows.half()), rows.bfloat16()]
    with start("llama", backend="native") as llm:
        outputs = llm.generate([{"prompt_embeds": one} for one in every + halves], GREEDY)
        first = outputs[0].outputs[0]
        for output in outputs[: len(every)]:
            assert output.outputs[0].token_ids == first.token_ids
            assert logprobs(output) == logprobs(outputs[0])
        refused = {
            "AAAA": "file cannot be read",
            "%": "base64 cannot be read",
            pickled([Evil()]): "print",
            pickled({"a": rows}): "expected a tensor",
            saved(rows.int()): "IntStorage",
            saved(np.array([Evil()], object)): "file cannot be read",
        }
        for source, message in refused.items():
            with pytest.raises(InvalidRequest, match=message):
                llm.generate([{"prompt_embeds": source}], GREEDY)
        for source, message in (
            (rows[:, 1:], "shape"),
            (rows[:0], "shape"),
            (rows.repeat(9, 1), "shape"),
            (rows * torch.nan, "NaN"),
            (rows.int(), "int32"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                llm.generate([{"prompt_embeds": source}], GREEDY)
        with pytest.raises(InvalidRequest, match="expected one of them"):
            llm.generate([{"prompt_embeds": rows, "prompt_token_ids": IDS}], GREEDY)
        with pytest.raises(InvalidRequest, match="prompt_logprobs"):
            llm.generate([{"prompt_embeds": rows}], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert "executed" not in capsys.readouterr().out


def test_embeddings_are_refused_unless_the_engine_accepts_them():
    rows = embeds_of("llama", IDS)
    with (
        start("llama", enable_prompt_embeds=False) as llm,
        pytest.raises(InvalidRequest, match="prompt_embeds: got embeddings"),
    ):
        llm.generate([{"prompt_embeds": rows}], GREEDY)
    with pytest.raises(ConfigError, match="requires one rank"):
        start("llama", backend="native", tensor_parallel_size=2)
