"""LLM.embed gives the rows of transformers' models, and one text's fault is never another's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from octavo import LLM, PoolingParams, SamplingParams
from octavo.api.errors import ConfigError, ContextTooLong, InvalidRequest, UnsupportedModel
from octavo.utils.progress import quiet
from tests.support.tiny_encoders import encoder, save_encoder, save_word_tokenizer
from tests.support.tiny_models import tiny_model

LENGTHS = (1, 300, 17, 40, 2, 128)


def texts(seed: int = 3) -> list[list[int]]:
    """Returns token ids of several lengths, none of them a padding id, which has no position."""
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 130, length).tolist() for length in LENGTHS]


def started(path: Path, **options: Any) -> LLM:
    return LLM(str(path), report=quiet, skip_tokenizer_init=True, **options)


def embeddings(llm: LLM, prompts: Any, **how: Any) -> NDArray[np.float32]:
    outputs = llm.embed(prompts, use_tqdm=False, **how)
    return np.array([output.outputs.embedding for output in outputs], np.float32)


def wanted(family: str, mode: str = "mean") -> NDArray[np.float32]:
    model = encoder(family)
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).last_hidden_state[0] for ids in texts()]
    pooled = [each[0] if mode == "cls" else each.mean(axis=0) for each in rows]
    return torch.nn.functional.normalize(torch.stack(pooled)).numpy()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with started(save_encoder(tmp_path_factory.mktemp("bert"), "bert")) as llm:
        yield llm


@pytest.mark.parametrize("backend", ["native", "reference", "torch"])
@pytest.mark.parametrize("mode", ["cls", "mean"])
def test_embeddings_are_those_of_transformers(tmp_path: Path, backend: str, mode: str) -> None:
    with started(save_encoder(tmp_path, "bert", mode=mode), backend=backend) as llm:
        np.testing.assert_allclose(embeddings(llm, texts()), wanted("bert", mode), atol=3e-5)


@pytest.mark.parametrize("family", ["roberta", "mpnet", "nomic_bert"])
def test_other_families_embed_as_transformers(tmp_path: Path, family: str) -> None:
    with started(save_encoder(tmp_path, family)) as llm:
        np.testing.assert_allclose(embeddings(llm, texts()), wanted(family), atol=3e-5)


def test_a_text_alone_is_bitwise_as_in_company(bert: LLM) -> None:
    together = embeddings(bert, texts())
    for ids, row in zip(texts(), together, strict=True):
        np.testing.assert_array_equal(embeddings(bert, [ids])[0], row)


def test_steps_that_hold_one_long_text_give_the_same(bert: LLM, tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "bert")
    with started(path, max_num_batched_tokens=310, max_num_seqs=3) as llm:
        np.testing.assert_array_equal(embeddings(llm, texts()), embeddings(bert, texts()))


def test_a_text_longer_than_a_step_is_refused(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "bert")
    with started(path, max_num_batched_tokens=128) as llm:
        with pytest.raises(ContextTooLong, match=r"batch limit is 128 tokens a step.*has 300"):
            embeddings(llm, texts())
        cut = embeddings(llm, texts(), truncate_prompt_tokens=-1)
        np.testing.assert_array_equal(cut[1], embeddings(llm, [texts()[1][:128]])[0])


def test_the_checkpoints_limit_of_tokens_holds(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "bert", limits={"max_seq_length": 64})
    with started(path) as llm:
        assert llm.info.max_model_len == 64
        assert len(embeddings(llm, [[5] * 64])) == 1
        with pytest.raises(ContextTooLong, match=r"maximum context length is 64.*has 65"):
            embeddings(llm, [[5] * 65])


def test_the_checkpoints_prompt_stands_before_each_text(tmp_path: Path) -> None:
    """Texts are put into lower case with it; token ids are taken as they are."""
    path = save_encoder(tmp_path, "bert", limits={"do_lower_case": True})
    save_word_tokenizer(path)
    settings = {"prompts": {"search": "Find: "}, "default_prompt_name": "search"}
    with LLM(str(path), report=quiet) as llm:
        plain = embeddings(llm, ["find: a prism", [5, 6]])
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    with LLM(str(path), report=quiet) as llm:
        np.testing.assert_array_equal(embeddings(llm, ["a Prism", [5, 6]]), plain)


def test_positions_behind_padding_count_towards_the_limit(tmp_path: Path) -> None:
    with started(save_encoder(tmp_path, "roberta")) as llm:
        assert llm.info.max_model_len == 400 - 2
        assert np.isfinite(embeddings(llm, [[5] * 398])).all()


def test_normalizing_follows_the_checkpoint_and_the_request(bert: LLM, tmp_path: Path) -> None:
    lengths = np.linalg.norm(embeddings(bert, texts()), axis=1)
    np.testing.assert_allclose(lengths, 1, atol=1e-6)
    raw = embeddings(bert, texts(), pooling_params=PoolingParams(normalize=False))
    assert (np.linalg.norm(raw, axis=1) > 2).all()
    with started(save_encoder(tmp_path, "bert", normalize=False)) as llm:
        np.testing.assert_array_equal(embeddings(llm, texts()), raw)


def test_an_encoder_generates_nothing_and_says_so(bert: LLM) -> None:
    with pytest.raises(InvalidRequest, match="can make embeddings and does not generate text"):
        bert.generate([[5, 6]], SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="does not generate text"):
        bert.chat([{"role": "user", "content": "hello"}])


def test_a_decoder_embeds_nothing_and_says_so() -> None:
    refusal = "generates text and does not make embeddings"
    with started(tiny_model("llama").path) as llm, pytest.raises(InvalidRequest, match=refusal):
        llm.embed([[5, 6]])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dimensions": 0}, "dimensions: got 0"),
        ({"dimensions": 36}, "dimensions: got 36, expected 72"),
        ({"normalize": 1}, "normalize: got 1"),
        ({"truncate_prompt_tokens": 401}, "truncate_prompt_tokens: got 401, expected 1 to 400"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens: got -2"),
        ({"activation": "relu"}, "activation: got 'relu'"),
    ],
)
def test_params_out_of_range_are_refused(bert: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        bert.embed([[5, 6]], PoolingParams(**params))


@pytest.mark.parametrize("ids", [[], [130], [-1]])
def test_prompts_without_known_tokens_are_refused(bert: LLM, ids: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        bert.embed([ids], use_tqdm=False)


def test_4_bits_embed_nearly_as_32(tmp_path: Path) -> None:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model("bert", vocab_size=130, num_hidden_layers=2, **shape)
    torch.manual_seed(3)
    path = save_encoder(tmp_path, "bert")
    transformers.AutoModel.from_config(config).save_pretrained(path)
    with started(path) as whole, started(path, quantization="int4") as packed:
        cosines = (embeddings(whole, texts()) * embeddings(packed, texts())).sum(axis=1)
    assert cosines.min() > 0.98


def test_chunks_of_time_are_refused_for_whole_texts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="itl_target_ms"):
        started(save_encoder(tmp_path, "bert"), itl_target_ms=5)


@pytest.mark.parametrize(
    ("config", "dimensions", "allowed"),
    [
        ({"matryoshka_dimensions": [18, 36]}, (18, 36, 72), "18, 36, 72"),
        ({"is_matryoshka": True}, (1, 50, 72), "1 to 72"),
    ],
)
def test_an_embedding_is_cut_as_the_checkpoint_allows(
    tmp_path: Path, config: dict[str, Any], dimensions: tuple[int, ...], allowed: str
) -> None:
    path = save_encoder(tmp_path, "bert", normalize=False)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with started(path) as llm:
        whole = embeddings(llm, texts())
        for number in dimensions:
            params = PoolingParams(dimensions=number, normalize=True)
            rows = torch.nn.functional.normalize(torch.tensor(whole[:, :number])).numpy()
            np.testing.assert_allclose(
                embeddings(llm, texts(), pooling_params=params), rows, atol=1e-6
            )
        with pytest.raises(InvalidRequest, match=f"dimensions: got 99, expected {allowed}"):
            llm.embed([[5, 6]], PoolingParams(dimensions=99))


def test_impossible_dimensions_of_a_checkpoint_are_refused(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "bert")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"matryoshka_dimensions": [100]}))
    with pytest.raises(UnsupportedModel, match="matryoshka_dimensions holds 100, expected 1"):
        started(path)


def test_one_request_at_a_time(tmp_path: Path) -> None:
    """A single request needs a block more than its tokens fill."""
    path = save_encoder(tmp_path, "bert")
    with started(path, max_num_seqs=1) as one, started(path) as many:
        assert np.array_equal(embeddings(one, texts()), embeddings(many, texts()))
