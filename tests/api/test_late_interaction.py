"""Late-interaction models give the normalized token embeddings of transformers' encoder and their
linear head, and score queries and documents by MaxSim; Dense modules follow a pooling.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.api.errors import InvalidRequest, UnsupportedModel
from octavo.utils.progress import quiet
from tests.support.live_server import LiveServer
from tests.support.tiny_encoders import encoder, save_encoder, save_word_tokenizer

QUERY, DOCUMENTS = "where do whales sleep?", ["near the surface.", "a box, left on monday!"]
WIDTH = 16
HEAD = 0.3 * torch.randn(WIDTH, 72, generator=torch.Generator().manual_seed(2))


def save_dense(folder: Path, weight: torch.Tensor, **config: Any) -> None:
    folder.mkdir()
    save_file({"linear.weight": weight}, folder / "model.safetensors")
    sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
    (folder / "config.json").write_text(json.dumps(sizes | config))


def pylate(path: Path) -> Path:
    """Saves a model as PyLate does: no pooling, a Dense module, and two markers."""
    encoder("bert").save_pretrained(path)
    save_word_tokenizer(path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    assert tokenizer.token_to_id("q") is not None
    kinds = ("sentence_transformers.models.Transformer", "pylate.models.Dense.Dense")
    modules = [{"path": "", "type": kinds[0]}, {"path": "1_Dense", "type": kinds[1]}]
    (path / "modules.json").write_text(json.dumps(modules))
    save_dense(path / "1_Dense", HEAD, activation_function="torch.nn.modules.linear.Identity")
    settings = {"query_prefix": "q", "document_prefix": "d", "skiplist_words": [",", "!"]}
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return path


def colbert(path: Path) -> Path:
    """Saves a model as the ColBERT package does: its head is beside the encoder's tensors."""
    encoder("bert").save_pretrained(path)
    save_word_tokenizer(path)
    tensors = {f"bert.{name}": each for name, each in load_file(path / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": HEAD}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    return path


def token_rows(ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        rows = encoder("bert")(torch.tensor([ids])).last_hidden_state[0]
    return torch.nn.functional.normalize(rows @ HEAD.T, dim=-1)


def max_sim(query: list[int], document: list[int], skipped: set[int]) -> float:
    products = token_rows(query) @ token_rows(document).T
    kept = [index for index, token in enumerate(document) if token not in skipped]
    return float(products[:, kept].max(dim=1).values.sum())


@pytest.mark.parametrize("backend", ["native", "reference", "torch"])
@pytest.mark.parametrize("save", [pylate, colbert])
def test_tokens_have_the_embeddings_of_transformers(
    tmp_path: Path, save: Callable[[Path], Path], backend: str
) -> None:
    prompts = [[3, *range(5, 5 + length), 4] for length in (1, 40, 9)]
    with LLM(str(save(tmp_path)), backend=backend, report=quiet) as llm:
        outputs = llm.encode(prompts, use_tqdm=False)
        for output, ids in zip(outputs, prompts, strict=True):
            np.testing.assert_allclose(output.outputs.data, token_rows(ids), atol=3e-5)
        with pytest.raises(InvalidRequest, match="can make embeddings of tokens and does not make"):
            llm.embed("a")


def test_scores_are_sums_of_largest_products(tmp_path: Path) -> None:
    path = pylate(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))

    def marked(text: str, marker: str) -> list[int]:
        first, *others = tokenizer.encode(text).ids
        return [first, tokenizer.token_to_id(marker), *others]

    skipped = {tokenizer.token_to_id(word) for word in ",!"}
    wanted = [max_sim(marked(QUERY, "q"), marked(text, "d"), skipped) for text in DOCUMENTS]
    server = LiveServer(f"colbert={path}", "--max-model-len=400")
    with server.http() as http:
        scored = http.post("/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()["data"]
        np.testing.assert_allclose([each["score"] for each in scored], wanted, atol=1e-4)
        ranked = http.post("/v1/rerank", json={"query": QUERY, "documents": DOCUMENTS}).json()
        found = {each["index"]: each["relevance_score"] for each in ranked["results"]}
        np.testing.assert_allclose([found[0], found[1]], wanted, atol=1e-4)
        pooled = http.post("/pooling", json={"input": DOCUMENTS}).json()
        rows = token_rows(tokenizer.encode(DOCUMENTS[0]).ids)
        np.testing.assert_allclose(pooled["data"][0]["data"], rows, atol=3e-5)
        assert pooled["data"][1]["object"] == "pooling" and pooled["usage"]["total_tokens"] > 20
        refused = http.post("/v1/embeddings", json={"input": "a"})
        assert refused.status_code == 400 and "does not make embeddings" in refused.text
    assert server.stop() == 0


@pytest.mark.parametrize("activation", ["Tanh", "Identity"])
def test_a_dense_module_follows_the_pooling(tmp_path: Path, activation: str) -> None:
    path = save_encoder(tmp_path, "bert")
    modules = json.loads((path / "modules.json").read_text())
    dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    (path / "modules.json").write_text(json.dumps([*modules[:2], dense, modules[2]]))
    named = f"torch.nn.modules.activation.{activation}"
    save_dense(path / "2_Dense", HEAD, activation_function=named)
    with torch.no_grad():
        row = encoder("bert")(torch.tensor([[5, 6, 7]])).last_hidden_state[0].mean(dim=0) @ HEAD.T
    row = torch.nn.functional.normalize(row.tanh() if activation == "Tanh" else row, dim=0)
    with LLM(str(path), report=quiet, skip_tokenizer_init=True) as llm:
        (output,) = llm.embed([[5, 6, 7]], use_tqdm=False)
        np.testing.assert_allclose(output.outputs.embedding, row, atol=3e-5)
        (pooled,) = llm.encode([[5, 6, 7]], use_tqdm=False)
        assert pooled.outputs.data == output.outputs.embedding


def test_tokens_have_the_probabilities_of_their_labels(tmp_path: Path) -> None:
    model = encoder("bert", classifies=True, head="Token")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        rows = model(torch.tensor([[3, 5, 6, 7, 4]])).logits[0].softmax(dim=-1)
    with LLM(str(tmp_path), report=quiet, skip_tokenizer_init=True) as llm:
        (output,) = llm.encode([[3, 5, 6, 7, 4]], use_tqdm=False)
        np.testing.assert_allclose(output.outputs.data, rows, atol=3e-5)
        with pytest.raises(InvalidRequest, match="can classify tokens and does not classify texts"):
            llm.classify([[5, 6]])


def test_an_unknown_activation_is_rejected(tmp_path: Path) -> None:
    path = pylate(tmp_path)
    config = {"out_features": WIDTH, "bias": False, "activation_function": "torch.nn.GELU"}
    (path / "1_Dense" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="the activation is GELU, supported: Identity, Tanh"):
        LLM(str(path), report=quiet)
