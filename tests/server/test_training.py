"""A trainer's routes: pause, sleep, and weight updates while requests are held."""

import json
import shutil
import threading
from functools import cache
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import load_file, save, save_file

from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.server.state.slot import EngineSlot
from tests.support.live_server import LASTING, LONG, PACE_FLAGS, LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text

TIMEOUT_S = 600
PROMPT = "Once upon a time"
TENSORS = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def server():
    path = str(tiny_model_with_text())
    server = LiveServer(path, "--served-model-name=tiny", "--training-routes", *PACE_FLAGS)
    yield server
    assert server.stop() == 0


@pytest.fixture
def http(server):
    with server.http() as client:
        client.timeout = TIMEOUT_S
        yield client


def post(http: httpx.Client, path: str, **body) -> dict:
    response = http.post(path, **body)
    assert response.status_code == 200, response.text
    return response.json()


def logprobs(http: httpx.Client, **fields) -> list:
    """Returns the logprobs of the prompt's and of eight greedy tokens."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "logprobs": 3, "echo": True}
    body["ignore_eos"] = True
    choice = post(http, "/v1/completions", json=body | fields)["choices"][0]
    return [choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]]


def perturbed(scale: float) -> dict[str, np.ndarray]:
    """Returns the tiny model's tensors with noise."""
    draw = np.random.default_rng(int(1000 * scale))
    return {
        name: array + scale * draw.standard_normal(array.shape).astype(array.dtype)
        for name, array in load_file(tiny_model_with_text() / "model.safetensors").items()
    }


@cache
def trained() -> dict[str, np.ndarray]:
    return perturbed(0.02)


def trained_model(folder: Path) -> Path:
    """Returns a directory with the model that a trainer saves."""
    path = folder / "trained"
    shutil.copytree(tiny_model_with_text(), path)
    save_file(trained(), path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """What a new server computes that starts with the trained model."""
    path = trained_model(tmp_path_factory.mktemp("models"))
    other = LiveServer(str(path), "--served-model-name=tiny")
    with other.http() as http:
        found = logprobs(http)
    assert other.stop() == 0
    return found


def test_an_updated_engine_equals_a_fresh_one(http, fresh):
    before = logprobs(http)
    names = sorted(trained())
    post(http, "/start_weight_update", json={})
    for part in (names[::2], names[1::2]):
        body = save({name: trained()[name] for name in part})
        post(http, "/update_weights", content=body, headers=TENSORS)
    assert logprobs(http) == before
    post(http, "/finish_weight_update", json={"weight_version": "step 1"})
    assert logprobs(http) == fresh != before
    assert http.get("/weight_info").json() == {"weight_version": "step 1"}


def test_held_requests_continue_on_the_new_weights(server, http, tmp_path):
    """A held request is answered once, with as many tokens as it asks for. The update replaces one
    tensor.
    """
    before = logprobs(http)
    answers = []

    def ask():
        with server.http() as own:
            body = LONG | {"n": 1, "max_tokens": 400, "return_token_ids": True}
            answers.append(own.post("/v1/completions", json=body, timeout=TIMEOUT_S).json())

    threads = [threading.Thread(target=ask)]
    threads[0].start()
    assert until(lambda: http.get("/v1/requests").json()["data"])
    assert post(http, "/pause?mode=keep") == {"status": "paused"}
    assert http.get("/is_paused").json() == {"is_paused": True}
    counted = server.metric("generation_tokens_total")
    threads.append(threading.Thread(target=ask))
    threads[1].start()
    name = "model.layers.0.mlp.down_proj.weight"
    save_file({name: perturbed(0.1)[name]}, tmp_path / "part.safetensors")
    path = str(tmp_path / "part.safetensors")
    post(http, "/update_weights", json={"update_info": {"path": path}})
    assert http.get("/is_paused").json() == {"is_paused": True}
    assert server.metric("generation_tokens_total") == counted and not answers
    assert post(http, "/resume") == {"status": "resumed"}
    for thread in threads:
        thread.join()
    assert [len(answer["choices"][0]["token_ids"]) for answer in answers] == [400, 400]
    assert logprobs(http) != before


def test_a_pause_aborts_or_waits(server, http):
    for mode, reason, num_tokens in (("abort", "abort", 480), ("wait", "length", 40)):
        answers = []

        def ask(answers=answers, num_tokens=num_tokens):
            with server.http() as own:
                body = LASTING | {"max_tokens": num_tokens}
                answers.append(own.post("/v1/completions", json=body, timeout=TIMEOUT_S).json())

        thread = threading.Thread(target=ask)
        thread.start()
        assert until(lambda: http.get("/v1/requests").json()["data"])
        post(http, f"/pause?mode={mode}")
        thread.join()
        assert answers[0]["choices"][0]["finish_reason"] == reason
        post(http, "/resume")
    refused = http.post("/pause?mode=never")
    assert refused.status_code == 400 and "abort" in refused.text


def test_an_aborted_request_ends_while_the_engine_is_paused(server, http):
    post(http, "/pause?mode=keep")
    with server.http() as own, pytest.raises(httpx.ReadTimeout):
        own.post("/v1/completions", json=LONG, timeout=1)
    assert until(lambda: not http.get("/v1/requests").json()["data"])
    post(http, "/resume")
    assert logprobs(http)


def test_a_sleeping_engine_has_no_process(server, http, tmp_path, fresh):
    assert logprobs(http) != fresh
    assert post(http, "/sleep?level=1") == {"status": "sleeping"}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert until(lambda: not server.children)
    assert http.get("/health").status_code == 503
    refused = http.post("/resume")
    assert refused.status_code == 400 and "wake_up" in refused.text
    post(http, "/update_weights", json={"update_info": {"path": str(trained_model(tmp_path))}})
    assert not server.children
    assert post(http, "/wake_up?tags=weights&tags=kv_cache") == {"status": "awake"}
    assert server.children and http.get("/health").status_code == 200
    assert logprobs(http) == fresh


def test_updates_at_the_same_time_are_all_applied(server, http, fresh):
    names = sorted(trained())
    bodies = [save({name: trained()[name] for name in part}) for part in (names[::2], names[1::2])]
    answers = []

    def update(body):
        with server.http() as own:
            answers.append(
                own.post("/update_weights", content=body, headers=TENSORS, timeout=TIMEOUT_S)
            )

    threads = [threading.Thread(target=update, args=[body]) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    assert logprobs(http) == fresh


def test_updates_that_do_not_fit_change_nothing(http, tmp_path):
    before = logprobs(http)
    name = "model.layers.0.mlp.down_proj.weight"
    wrong = [
        (save({"model.layers.9.w": np.zeros((2, 2), np.float32)}), "no such tensor"),
        (save({name: np.zeros((2, 2), np.float32)}), "got the shape [2, 2], expected"),
        (b"\0" * 100, "not a valid safetensors file"),
        (b"", "not a valid safetensors file"),
    ]
    for body, message in wrong:
        refused = http.post("/update_weights", content=body, headers=TENSORS)
        assert refused.status_code == 400 and message in refused.text, refused.text
    announced = {"update_info": {"names": [name], "dtype_names": ["float32"], "shapes": [[2, 2]]}}
    refused = http.post("/update_weights", json=announced)
    assert refused.status_code == 400 and "NCCL" in refused.text
    refused = http.post("/update_weights", json={"update_info": {"path": str(tmp_path / "none")}})
    assert refused.status_code == 400 and "does not exist" in refused.text
    refused = http.post("/update_weights", json={"update_info": {"path": str(tmp_path)}})
    assert refused.status_code == 400
    refused = http.post("/init_weight_transfer_engine", json={"init_info": {"rank_offset": 1}})
    assert refused.status_code == 400 and "safetensors" in refused.text
    assert logprobs(http) == before


def test_what_trainers_read(http):
    assert http.get("/get_world_size").json() == {"world_size": 1}
    config = http.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "http"}
    assert config["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert post(http, "/init_weight_transfer_engine", json={"init_info": {}})
    assert post(http, "/reset_prefix_cache") == {"success": True}
    post(http, "/update_weight_version", json={"new_version": "seven"})
    assert json.loads(http.get("/weight_info").text) == {"weight_version": "seven"}


def test_only_operators_may_pause():
    settings = ServerSettings(training_routes=True, api_key=("a",), operator_key="b")
    http = TestClient(create_app(EngineSlot(), settings), headers={"Authorization": "Bearer a"})
    for path in ("/pause", "/update_weights", "/sleep", "/finish_weight_update"):
        assert http.post(path, json={}).status_code == 403


def test_without_the_option_there_are_no_such_routes():
    assert "/pause" not in create_app(EngineSlot()).openapi()["paths"]
