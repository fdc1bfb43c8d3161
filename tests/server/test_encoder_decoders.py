"""/v1/completions of an encoder before a decoder: the prompt is the encoder's text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams
from octavo.utils.progress import quiet
from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

TEXT = "Light bends in glass."
OPTIONS = ("--max-model-len=128", "--max-num-seqs=4")


@pytest.fixture(scope="module")
def translator() -> Iterator[LiveServer]:
    server = LiveServer(str(tiny_model_with_text("m2m_100")), *OPTIONS)
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def wanted() -> list[str]:
    """Texts behind the model's own beginning, and behind another one."""
    path = tiny_model_with_text("m2m_100")
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(path), report=quiet, max_model_len=128, threads=1) as llm:
        prompts = [{"prompt": TEXT}, {"prompt": TEXT, "decoder_prompt_token_ids": [2, 30, 40]}]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def test_openais_client_gets_the_text_of_generate(
    translator: LiveServer, wanted: list[str]
) -> None:
    with translator.openai() as client:
        asked = {"model": "m", "prompt": TEXT, "temperature": 0, "max_tokens": 12}
        asked["model"] = client.models.list().data[0].id
        made = client.completions.create(**asked)
        other = client.completions.create(
            **asked, extra_body={"decoder_prompt_token_ids": [2, 30, 40]}
        )
        streamed = client.completions.create(**asked, stream=True)
        text = "".join(chunk.choices[0].text for chunk in streamed)
    assert [made.choices[0].text, other.choices[0].text] == wanted
    assert text == wanted[0]
    assert made.usage.prompt_tokens == len(TEXT)


def test_a_bad_request_is_told_what_to_do(translator: LiveServer) -> None:
    with translator.http() as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        for more, message in (
            ({"prompt": "x" * 600}, "encoder accepts 300 tokens"),
            ({"prompt": TEXT, "prompt_logprobs": 1}, "which an encoder-decoder does not support"),
            ({"prompt": TEXT, "decoder_prompt": ""}, "decoder_prompt_token_ids: got none"),
        ):
            response = http.post("/v1/completions", json={"model": model, "max_tokens": 1, **more})
            assert response.status_code == 400, response.text
            assert message in response.json()["error"]["message"]
