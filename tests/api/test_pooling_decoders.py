"""Decoders that pool give the rows of transformers' models: embeddings, classes and scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from tokenizers import Tokenizer, processors

from octavo import LLM
from octavo.api.errors import InvalidRequest, UnsupportedModel
from octavo.models.registry import build_programs
from octavo.utils.progress import quiet
from tests.support.tiny_encoders import save_modules
from tests.support.tiny_models import tiny_model
from tests.support.tiny_tokenizer import save_tiny_tokenizer

LENGTHS = (1, 150, 17, 40, 2, 128)


def texts() -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(3, 100, length).tolist() for length in LENGTHS]


def started(path: Path, **options: Any) -> LLM:
    return LLM(str(path), report=quiet, skip_tokenizer_init=True, **options)


def embeddings(llm: LLM) -> NDArray[np.float32]:
    outputs = llm.embed(texts(), use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def save_embedder(path: Path, family: str, mode: str) -> NDArray[np.float32]:
    """Saves a decoder without its head, as sentence-transformers does; returns the embeddings of
    the texts.
    """
    model = transformers.AutoModel.from_pretrained(tiny_model(family).path).eval()
    model.save_pretrained(path)
    save_modules(path, mode, model.config.hidden_size)
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).last_hidden_state[0] for ids in texts()]
    pooled = [row[-1] if mode == "last" else row.mean(dim=0) for row in rows]
    return torch.nn.functional.normalize(torch.stack(pooled)).numpy()


@pytest.mark.parametrize("backend", ["native", "reference", "torch"])
@pytest.mark.parametrize("mode", ["last", "mean"])
def test_qwen3_embeds_as_transformers(tmp_path: Path, backend: str, mode: str) -> None:
    expected = save_embedder(tmp_path, "qwen3", mode)
    with started(tmp_path, backend=backend) as llm:
        np.testing.assert_allclose(embeddings(llm), expected, atol=3e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_other_families_embed_as_transformers(tmp_path: Path, family: str) -> None:
    expected = save_embedder(tmp_path, family, "last")
    with started(tmp_path) as llm:
        np.testing.assert_allclose(embeddings(llm), expected, atol=3e-5)


def test_chunks_cached_prefixes_and_company_change_no_bit(tmp_path: Path) -> None:
    save_embedder(tmp_path, "qwen3", "last")
    with started(tmp_path, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        first, second = embeddings(llm), embeddings(llm)
    with started(tmp_path, enable_prefix_caching=False) as llm:
        np.testing.assert_array_equal(embeddings(llm), first)
    np.testing.assert_array_equal(second, first)


def test_the_end_token_of_the_tokenizer_is_pooled(tmp_path: Path) -> None:
    save_embedder(tmp_path, "qwen3", "last")
    save_tiny_tokenizer(tmp_path)
    file = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    end = tokenizer.token_to_id("<eos>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", end)]
    )
    tokenizer.save(file)
    with LLM(str(tmp_path), report=quiet) as llm:
        whole, cut = (
            llm.embed("a word", use_tqdm=False, truncate_prompt_tokens=most)[0]
            for most in (None, 4)
        )
        (given,) = llm.embed([whole.prompt_token_ids], use_tqdm=False)
    assert whole.prompt_token_ids[-1] == end and len(whole.prompt_token_ids) == 7
    assert cut.prompt_token_ids == [*whole.prompt_token_ids[:3], end]
    assert given.outputs.embedding == whole.outputs.embedding


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_classifiers_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    kind = transformers.AutoModelForSequenceClassification
    torch.manual_seed(5)
    model = kind.from_pretrained(tiny_model(family).path, num_labels=3).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).logits[0].softmax(dim=-1).numpy() for ids in texts()]
    with started(tmp_path) as llm:
        found = [one.outputs.probs for one in llm.classify(texts(), use_tqdm=False)]
        np.testing.assert_allclose(found, np.array(rows), atol=3e-5)
        with pytest.raises(InvalidRequest, match="can classify texts and does not generate text"):
            llm.generate([[5, 6]])


def test_a_family_that_cannot_pool_says_so(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = json.loads((tiny_model("t5").path / "config.json").read_text())
    path.write_text(json.dumps(config | {"architectures": ["T5ForSequenceClassification"]}))
    with pytest.raises(UnsupportedModel, match="t5: embeddings and classifiers of this family"):
        build_programs(json.loads(path.read_text()))
