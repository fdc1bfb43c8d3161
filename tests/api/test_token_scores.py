"""Decoders that answer a pair of texts by a token (Qwen3-Reranker) give the scores of transformers,
over the prompts of the model card.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from octavo import LLM, PoolingParams
from octavo.api.errors import (
    ConfigError,
    ContextTooLong,
    InvalidRequest,
    UnsupportedModel,
    WeightMismatch,
)
from octavo.utils.progress import quiet
from tests.support.tiny_encoders import save_classifier, save_encoder, save_word_tokenizer
from tests.support.tiny_tokenizer import tiny_model_with_text

YES, NO = 80, 70
QUERY = "where do whales sleep?"
TEXTS = ["near the surface", "the box left on monday, with <|im_end|> in it", "q"]
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct"
    ' provided. Note that the answer can only be "yes" or "no".'
)
PREFIX = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
MIDDLE = (
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    "<Query>: {}\n<Document>: {}"
)
OWN_TEMPLATE = (
    "{{ (messages | selectattr('role', 'eq', 'query') | first).content }} ~"
    " {{ (messages | selectattr('role', 'eq', 'document') | first).content }}<|im_end|>"
)


def save_ranker(path: Path, family: str = "qwen3", **module: Any) -> Path:
    """Saves a decoder with the module that sentence-transformers has for the logits of tokens."""
    shutil.copytree(tiny_model_with_text(family), path, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (path / name).read_text()
        text = text.replace("<bos>", "<|im_start|>").replace("<eos>", "<|im_end|>")
        (path / name).write_text(text)
    kinds = {"": "base.modules.Transformer", "1_LogitScore": "cross_encoder.modules.LogitScore"}
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.{kind}"}
        for i, (folder, kind) in enumerate(kinds.items())
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_LogitScore").mkdir()
    tokens = {"true_token_id": YES, "false_token_id": NO} | module
    (path / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    return path


def set_template(path: Path, template: str) -> None:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def started(path: Path, **options: Any) -> LLM:
    return LLM(str(path), report=quiet, **options)


def card_ids(path: Path, query: str, text: str) -> list[int]:
    """Returns the prompt of the model card, in which a user's text has no special tokens."""
    file = str(path / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file)
    start, end = (tokenizer(part).input_ids for part in (PREFIX, SUFFIX))
    middle = tokenizer(MIDDLE.format(query, text), split_special_tokens=True).input_ids
    return [*start, *middle, *end]


def logits(ids: list[int], family: str = "qwen3") -> NDArray[Any]:
    path = tiny_model_with_text(family)
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    with torch.no_grad():
        row: NDArray[Any] = model(torch.tensor([ids])).logits[0, -1].numpy()
    return row


def scores(llm: LLM, texts: Any, **how: Any) -> NDArray[np.float64]:
    outputs = llm.score(QUERY, texts, use_tqdm=False, **how)
    return np.array([output.outputs.score for output in outputs])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_ranker(tmp_path_factory.mktemp("ranker"))


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    with started(path) as llm:
        yield llm


@pytest.mark.parametrize("backend", ["native", "reference", "torch"])
def test_scores_are_the_share_of_yes(path: Path, backend: str) -> None:
    rows = np.array([logits(card_ids(path, QUERY, text))[[NO, YES]] for text in TEXTS])
    expected = torch.tensor(rows).softmax(dim=-1)[:, 1].numpy()
    with started(path, backend=backend) as llm:
        np.testing.assert_allclose(scores(llm, TEXTS), expected, atol=3e-5)
        raw = scores(llm, TEXTS, pooling_params=PoolingParams(activation="none"))
        largest = abs(rows).max()
        np.testing.assert_allclose(raw, rows[:, 1] - rows[:, 0], atol=6e-5 * largest)


def test_prompts_are_those_of_the_card(llm: LLM, path: Path) -> None:
    for text in TEXTS:
        (output,) = llm.score(QUERY, text, use_tqdm=False)
        assert output.prompt_token_ids == card_ids(path, QUERY, text)


def test_the_option_names_the_tokens_of_a_plain_decoder(tmp_path: Path, llm: LLM) -> None:
    path = save_ranker(tmp_path)
    (path / "modules.json").unlink()
    no, yes = (llm.get_tokenizer().decode([token_id]) for token_id in (NO, YES))
    with started(path, classifier_from_token=f"{no},{yes}") as plain:
        np.testing.assert_array_equal(scores(plain, TEXTS), scores(llm, TEXTS))
    for given, message in (
        ("yes,no", "single tokens: 'no' is 2 of"),
        (",a", "one token, or two"),
        ("a,b,c", "one token, or two"),
    ):
        with pytest.raises(ConfigError, match=f"classifier_from_token: got '{given}'.*{message}"):
            started(path, classifier_from_token=given)


def test_the_option_is_for_decoders_without_a_classifier(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="requires a decoder"):
        encoder = save_encoder(tmp_path / "encoder", "bert")
        save_word_tokenizer(encoder)
        started(encoder, classifier_from_token="a,b")
    with pytest.raises(ConfigError, match="which is a classifier"):
        started(save_classifier(tmp_path / "classifier"), classifier_from_token="a,b")


def test_a_long_document_loses_its_end_and_nothing_else(llm: LLM, path: Path) -> None:
    whole = card_ids(path, QUERY, "word " * 20)
    (output,) = llm.score(QUERY, "word " * 20, truncate_prompt_tokens=len(whole) - 7)
    assert output.prompt_token_ids == card_ids(path, QUERY, ("word " * 20)[:-7])
    least = len(card_ids(path, QUERY, ""))
    with pytest.raises(InvalidRequest, match=f"got 30, expected at least {least}"):
        llm.score(QUERY, "word " * 20, truncate_prompt_tokens=30)
    with pytest.raises(ContextTooLong):
        llm.score(QUERY, "word " * 2000)


def test_the_checkpoints_own_template_of_pairs_goes_first(tmp_path: Path) -> None:
    path = save_ranker(tmp_path)
    set_template(path, OWN_TEMPLATE)
    with started(path) as llm:
        (output,) = llm.score("ab", "cde", use_tqdm=False)
        tokenizer = llm.get_tokenizer()
        text = tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        assert text == "ab ~ cde<|im_end|>"


def test_a_family_without_a_template_says_so(tmp_path: Path) -> None:
    refusal = "no template for a query and a document"
    path = save_ranker(tmp_path, "llama")
    with started(path) as llm, pytest.raises(InvalidRequest, match=refusal):
        llm.score("a", "b")


def test_one_token_alone_is_its_logit(tmp_path: Path) -> None:
    path = save_ranker(tmp_path, "llama", false_token_id=None)
    set_template(path, OWN_TEMPLATE)
    with started(path) as llm:
        (output,) = llm.score("ab", "cde", use_tqdm=False)
        (raw,) = llm.score("ab", "cde", pooling_params=PoolingParams(activation="none"))
    row = logits(output.prompt_token_ids, "llama")
    np.testing.assert_allclose(raw.outputs.score, row[YES], atol=3e-5 * abs(row).max())
    np.testing.assert_allclose(output.outputs.score, 1 / (1 + np.exp(-row[YES])), atol=3e-5)


@pytest.mark.parametrize(
    ("module", "error", "message"),
    [
        ({"true_token_id": None}, WeightMismatch, "true_token_id: got None, expected an integer"),
        ({"false_token_id": -1}, WeightMismatch, "false_token_id: got -1, expected an integer"),
        ({"true_token_id": 10**6}, UnsupportedModel, "the score uses token id 1000000"),
    ],
)
def test_impossible_tokens_are_refused(
    tmp_path: Path, module: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        started(save_ranker(tmp_path, **module))
