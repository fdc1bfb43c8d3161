"""LLM.classify and LLM.score give what transformers' classifiers give, for texts and for pairs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from octavo import LLM, AsyncLLM, PoolingParams, TextPair
from octavo.api.errors import ContextTooLong, InvalidRequest, UnsupportedModel
from octavo.utils.progress import quiet
from tests.support.tiny_encoders import encoder, save_classifier, save_encoder, save_word_tokenizer

QUERY = "where do whales sleep?"
PASSAGES = [
    "they rest near the surface, half awake.",
    "the box left on monday. " * 8,
    "q",
    "Whales sleep, one half of the brain at a time! " * 5,
]
PAIRS = [TextPair(QUERY, passage) for passage in PASSAGES]


def started(path: Path, **options: Any) -> LLM:
    return LLM(str(path), report=quiet, **options)


def tokenized(path: Path, pair: TextPair, **how: Any) -> dict[str, torch.Tensor]:
    """Returns a pair as transformers tokenizes it."""
    file = str(path / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    return dict(tokenizer(pair.first, pair.second, return_tensors="pt", **how))


def logits(path: Path, family: str, num_labels: int, pairs: list[TextPair]) -> NDArray[Any]:
    model = encoder(family, classifies=True, num_labels=num_labels)
    rows = []
    for pair in pairs:
        inputs = tokenized(path, pair, return_token_type_ids=family == "bert")
        with torch.no_grad():
            rows.append(model(**inputs).logits[0].numpy())
    return np.array(rows)


def probs(llm: LLM, prompts: Any, **how: Any) -> NDArray[np.float64]:
    return np.array([one.outputs.probs for one in llm.classify(prompts, use_tqdm=False, **how)])


def scores(llm: LLM, first: Any, second: Any, **how: Any) -> NDArray[np.float64]:
    outputs = llm.score(first, second, use_tqdm=False, **how)
    return np.array([output.outputs.score for output in outputs])


def softmax(rows: NDArray[Any]) -> NDArray[Any]:
    return torch.tensor(rows).softmax(dim=-1).numpy()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = save_classifier(tmp_path_factory.mktemp("three"))
    with started(path) as llm:
        yield llm


@pytest.fixture(scope="module")
def ranker_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("ranker"), num_labels=1)


@pytest.fixture(scope="module")
def ranker(ranker_path: Path) -> Iterator[LLM]:
    with started(ranker_path) as llm:
        yield llm


@pytest.mark.parametrize("backend", ["native", "reference", "torch"])
def test_pairs_have_the_probabilities_of_transformers(tmp_path: Path, backend: str) -> None:
    path = save_classifier(tmp_path)
    expected = softmax(logits(path, "bert", 3, PAIRS))
    with started(path, backend=backend) as llm:
        np.testing.assert_allclose(probs(llm, PAIRS), expected, atol=3e-5)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "mpnet", "distilbert"])
def test_other_families_read_pairs_as_transformers(tmp_path: Path, family: str) -> None:
    path = save_classifier(tmp_path, family)
    expected = softmax(logits(path, family, 3, PAIRS))
    with started(path) as llm:
        np.testing.assert_allclose(probs(llm, PAIRS), expected, atol=3e-5)


def test_a_text_by_itself_is_classified(three: LLM) -> None:
    found = three.classify([*PASSAGES, [5, 6, 7]], use_tqdm=False)
    model = encoder("bert", classifies=True)
    for output in found:
        with torch.no_grad():
            row = model(torch.tensor([output.prompt_token_ids])).logits[0]
        np.testing.assert_allclose(output.outputs.probs, row.softmax(dim=-1), atol=3e-5)
        assert output.outputs.label == f"LABEL_{int(row.argmax())}"
        assert output.outputs.num_classes == 3
    assert [output.prompt for output in found] == [*PASSAGES, None]


def test_a_pair_alone_is_bitwise_as_in_company(three: LLM) -> None:
    together = probs(three, PAIRS)
    for pair, row in zip(PAIRS, together, strict=True):
        np.testing.assert_array_equal(probs(three, pair)[0], row)


@pytest.mark.parametrize("most", [3, 4, 11, 40, 60, 61, 130])
def test_pairs_are_cut_as_transformers_cuts_them(three: LLM, most: int) -> None:
    path = Path(three.config.model.model)
    for pair in (*PAIRS, TextPair(PASSAGES[1], QUERY), TextPair(PASSAGES[1], PASSAGES[3])):
        cut = tokenized(path, pair, truncation="longest_first", max_length=most)
        (output,) = three.classify(pair, use_tqdm=False, truncate_prompt_tokens=most)
        assert output.prompt_token_ids == cut["input_ids"][0].tolist()


def test_the_second_text_may_have_a_bound_of_its_own(three: LLM) -> None:
    (cut,) = three.classify(TextPair(QUERY, PASSAGES[3], 5), use_tqdm=False)
    (short,) = three.classify(TextPair(QUERY, "whale"), use_tqdm=False)
    assert cut.prompt_token_ids == short.prompt_token_ids


def test_text_that_spells_a_special_token_stays_text(three: LLM) -> None:
    (output,) = three.classify(TextPair("a [SEP] b", "c"), use_tqdm=False)
    assert output.prompt_token_ids.count(4) == 2


@pytest.mark.parametrize(
    ("config", "num_labels", "made"),
    [
        ({}, 3, softmax),
        ({}, 1, lambda rows: 1 / (1 + np.exp(-rows))),
        ({"problem_type": "multi_label_classification"}, 3, lambda rows: 1 / (1 + np.exp(-rows))),
        ({"problem_type": "single_label_classification"}, 3, softmax),
        ({"problem_type": "regression"}, 1, lambda rows: rows),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            1,
            lambda rows: rows,
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            3,
            lambda rows: 1 / (1 + np.exp(-rows)),
        ),
    ],
)
def test_the_checkpoint_says_what_scores_go_through(
    tmp_path: Path, config: dict[str, Any], num_labels: int, made: Any
) -> None:
    path = save_classifier(tmp_path, num_labels=num_labels, **config)
    rows = logits(path, "bert", num_labels, PAIRS)
    with started(path) as llm:
        np.testing.assert_allclose(probs(llm, PAIRS), made(rows), atol=3e-5)
        raw = probs(llm, PAIRS, pooling_params=PoolingParams(activation="none"))
        np.testing.assert_allclose(raw, rows, atol=3e-5 * abs(rows).max())


def test_the_activation_may_stand_beside_the_modules(tmp_path: Path) -> None:
    path = save_classifier(tmp_path, num_labels=1)
    name = "torch.nn.modules.linear.Identity"
    settings = path / "config_sentence_transformers.json"
    settings.write_text(f'{{"model_type": "CrossEncoder", "activation_fn": "{name}"}}')
    with started(path) as llm:
        rows = logits(path, "bert", 1, PAIRS)
        np.testing.assert_allclose(probs(llm, PAIRS), rows, atol=3e-5 * abs(rows).max())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"problem_type": "ranking"}, "problem_type is 'ranking', expected regression"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
            "activation_fn is 'Tanh', supported: Identity, Sigmoid, Softmax",
        ),
    ],
)
def test_an_unknown_activation_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        started(save_classifier(tmp_path, **config))


def test_labels_have_the_names_of_the_config(tmp_path: Path) -> None:
    names = {"0": "contradiction", "1": "entailment", "2": "neutral"}
    with started(save_classifier(tmp_path, id2label=names)) as llm:
        for output in llm.classify(PAIRS, use_tqdm=False):
            place = int(np.argmax(output.outputs.probs))
            assert output.outputs.label == names[str(place)]


# -- scores ----------------------------------------------------------------------------------------


def test_a_cross_encoder_scores_pairs(ranker: LLM, ranker_path: Path) -> None:
    expected = 1 / (1 + np.exp(-logits(ranker_path, "bert", 1, PAIRS)[:, 0]))
    np.testing.assert_allclose(scores(ranker, QUERY, PASSAGES), expected, atol=3e-5)
    np.testing.assert_allclose(scores(ranker, [QUERY] * 4, PASSAGES), expected, atol=3e-5)
    np.testing.assert_allclose(
        scores(ranker, {"prompt": QUERY}, PASSAGES[0]), expected[:1], atol=3e-5
    )


def test_an_embedder_scores_by_the_cosine(tmp_path: Path) -> None:
    path = save_encoder(tmp_path, "bert", normalize=False)
    save_word_tokenizer(path)
    with started(path) as llm:
        rows = [one.outputs.embedding for one in llm.embed([QUERY, *PASSAGES], use_tqdm=False)]
        query, *others = torch.tensor(rows)
        expected = torch.cosine_similarity(query[None], torch.stack(others))
        np.testing.assert_allclose(scores(llm, QUERY, PASSAGES), expected, atol=1e-6)
        np.testing.assert_allclose(scores(llm, PASSAGES, PASSAGES), 1, atol=1e-6)
        with pytest.raises(InvalidRequest, match="got a pair of texts, expected one"):
            llm.embed([TextPair("a", "b")])  # type: ignore[list-item]
        with pytest.raises(InvalidRequest, match="can make embeddings and does not classify"):
            llm.classify("a")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (["a", "b"], ["a", "b", "c"], "data_1: got 2 texts, expected one, or 3"),
        ([], ["a"], "data_1: got 0 texts"),
        ("a", [], "data_2: got no text"),
        ("a", [[5, 6]], r"data_2: got \[5, 6\], expected texts"),
        (7, "a", "data_1: got int"),
        ("\ud800", "a", "prompt: got .* as character 0, expected Unicode text"),
        ("a", "\ud800", "prompt: got .* as character 0, expected Unicode text"),
    ],
)
def test_what_makes_no_pairs_is_refused(ranker: LLM, first: Any, second: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ranker.score(first, second)


def test_a_long_pair_is_refused_or_cut_as_asked(ranker: LLM) -> None:
    for second in ("word " * 200, "word " * 20_000):
        with pytest.raises(ContextTooLong, match="maximum context length is 400"):
            ranker.score(QUERY, second)
        (cut,) = ranker.score(QUERY, second, truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(cut.prompt_token_ids) == 400


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dimensions": 1}, "dimensions: got 1, which classifiers do not support"),
        ({"normalize": True}, "normalize: got True, which classifiers do not support"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens: got 2, expected at least 3"),
    ],
)
def test_params_of_other_tasks_are_refused(ranker: LLM, params: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        ranker.score("a", "b", pooling_params=PoolingParams(**params))


def test_several_labels_make_no_score(three: LLM) -> None:
    with pytest.raises(InvalidRequest, match="has 3 labels; scoring requires a model with one"):
        three.score("a", "b")


def test_a_pair_of_what_is_no_text_is_refused(three: LLM) -> None:
    with pytest.raises(InvalidRequest, match="got 7 in a pair, expected two texts"):
        three.classify(TextPair("a", 7))  # type: ignore[arg-type]


def test_async_calls_give_the_same(ranker_path: Path, ranker: LLM) -> None:
    async def ask() -> tuple[list[Any], list[Any]]:
        llm = AsyncLLM.from_options(model=str(ranker_path), in_process=True, report=quiet)
        try:
            return await llm.classify(PAIRS), await llm.score(QUERY, PASSAGES)
        finally:
            llm.close()

    classes, scored = asyncio.run(ask())
    expected = scores(ranker, QUERY, PASSAGES)
    np.testing.assert_array_equal([one.outputs.probs[0] for one in classes], expected)
    np.testing.assert_array_equal([one.outputs.score for one in scored], expected)
