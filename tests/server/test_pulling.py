"""Ollama's /api/pull, /api/delete, /api/copy and keep_alive on a server with a hub on 127.0.0.1."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from tests.support.live_hub import HubRepository, live_hub
from tests.support.live_server import LASTING, PACE_FLAGS, LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text

pytestmark = pytest.mark.sampled(one_in=2)

SOURCE = tiny_model_with_text()
ASK = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
FILL = 40 << 20
"""Bytes of a file that takes a while; huggingface-hub writes, and tells, 10 MiB at a time."""
NAMES = ("one", "slow", "cancelled", "shared", "damaged", "gated", "renamed", "streaming")


def repository(name: str) -> HubRepository:
    """Returns a repository of a tiny model; every file name and content but the weights' is one."""
    small = {path.name: path.read_bytes() for path in SOURCE.iterdir() if path.suffix == ".json"}
    weights = (SOURCE / "model.safetensors").read_bytes()
    return HubRepository(f"maker/{name}", small, {"model.safetensors": weights})


@pytest.fixture(scope="module")
def hubs():
    found = {name: repository(name) for name in NAMES}
    for name in ("slow", "cancelled", "shared"):
        found[name].large["fill.safetensors"] = bytes(FILL)
        found[name].pace_s = 0.03
    found["damaged"].damaged.add("model.safetensors")
    found["gated"].is_gated = True
    with live_hub(*found.values()):
        yield found


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def puller(hubs, home):
    """A server whose tests leave the models that they have pulled; `tiny` is its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hubs["one"].url)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_HOME", str(home))
        patch.setenv("OCTAVO_CACHE", str(home / "octavo"))
        flags = (f"--state-dir={home / 'state'}", "--load-on-demand=local", *PACE_FLAGS)
        server = LiveServer(str(SOURCE), "--served-model-name=tiny", *flags)
        yield server
        assert server.stop() == 0
        assert not any("Traceback" in line for line in server.lines), server.lines


@pytest.fixture
def http(puller):
    with puller.http() as client:
        yield client


def pull(http, model, **fields):
    return http.post("/api/pull", json={"model": model, **fields})


def lines(response):
    return [json.loads(line) for line in response.text.splitlines()]


def ask(http, model, **fields):
    return http.post("/v1/completions", json=ASK | {"model": model, **fields})


def states(http):
    return {entry["name"]: entry["state"] for entry in http.get("/api/tags").json()["models"]}


def delete(http, model):
    return http.request("DELETE", "/api/delete", json={"model": model})


def is_cached(home, name):
    return any((home / "hub" / f"models--maker--{name}").glob("snapshots/*/model.safetensors"))


# -- pulls -----------------------------------------------------------------------------------------


def test_a_pull_tells_its_progress_and_the_next_request_loads_the_model(http, hubs):
    response = pull(http, "maker/one")
    assert response.headers["content-type"] == "application/x-ndjson"
    first, *told, verifying, writing, last = lines(response)
    assert first == {"status": "pulling manifest"}
    digest = hubs["one"].etag("model.safetensors")
    done = [one for one in told if one["digest"] == f"sha256:{digest}"][-1]
    size = len(hubs["one"].large["model.safetensors"])
    assert done["status"] == f"pulling {digest[:12]}"
    assert done["total"] == done["completed"] == size
    assert verifying == {"status": "verifying sha256 digest"}
    assert (writing, last) == ({"status": "writing manifest"}, {"status": "success"})
    assert states(http)["maker/one:latest"] == "unloaded"
    assert ask(http, "maker/one").status_code == 200
    assert states(http)["maker/one:latest"] == "ready"
    assert ask(http, "hf.co/maker/one:latest").status_code == 200, "another spelling is the same"


def test_a_cached_model_is_pulled_without_a_transfer(http, hubs):
    assert pull(http, "maker/one", stream=False).json() == {"status": "success"}
    sent = hubs["one"].sent_bytes
    (first, *_, last) = lines(pull(http, "maker/one"))
    assert (first["status"], last["status"]) == ("pulling manifest", "success")
    assert hubs["one"].sent_bytes == sent


def test_progress_comes_while_the_transfer_runs(http, hubs):
    hubs["slow"].sent_bytes = 0
    seen = []
    body = {"name": "maker/slow"}  # deprecated name of the field
    with http.stream("POST", "/api/pull", json=body) as response:
        for line in response.iter_lines():
            seen.append((json.loads(line).get("completed", 0), hubs["slow"].sent_bytes))
    assert any(0 < completed < FILL and sent < FILL for completed, sent in seen)


def test_two_clients_share_one_transfer(http, hubs):
    hub = hubs["shared"]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(pull, http, "maker/shared") for _ in range(2)]
        for one in both:
            assert lines(one.result())[-1] == {"status": "success"}
    assert hub.sent_bytes == sum(map(len, hub.large.values()))


def test_a_pull_ends_with_its_last_client_and_goes_on_at_the_next(http, hubs, home):
    hub = hubs["cancelled"]
    with http.stream("POST", "/api/pull", json={"model": "maker/cancelled"}) as response:
        assert next(response.iter_lines())
        assert until(lambda: hub.sent_bytes >= 2 << 20)
    parts = home / "hub" / "models--maker--cancelled" / "blobs"
    assert until(lambda: any(part.stat().st_size for part in parts.glob("*.octavo-part")))
    sent = -1
    while sent != hub.sent_bytes:
        sent = hub.sent_bytes
        time.sleep(0.5)
    (part,) = parts.glob("*.octavo-part")
    assert 0 < part.stat().st_size < FILL > sent
    assert "maker/cancelled:latest" not in states(http)
    hub.pace_s, hub.ranges[:] = 0.0, []
    assert pull(http, "maker/cancelled", stream=False).json() == {"status": "success"}
    assert any(part.startswith("bytes=") for part in hub.ranges), "it goes on where it stopped"


def test_a_model_of_the_caches_is_described_before_any_request_names_it(http, home):
    pull(http, "maker/shared", stream=False)
    cached = home / "hub" / "models--maker--shared"
    shutil.copytree(cached, cached.with_name("models--maker--found"), symlinks=True)
    assert until(lambda: "maker/found:latest" in states(http))
    shown = http.post("/api/show", json={"model": "maker/found"}).json()
    assert shown["capabilities"] == ["completion", "tools"] and shown["template"]
    card = http.get("/v1/models/maker/found").json()
    assert (card["state"], card["capabilities"]) == ("unloaded", ["completions", "chat"])
    assert http.delete("/v1/models/maker/found").status_code == 405
    assert http.request("DELETE", "/api/delete", json={"model": "maker/found"}).status_code == 200


@pytest.mark.parametrize(
    ("model", "status", "said"),
    [
        ("maker/none", 404, "no such repository on Hugging Face"),
        ("maker/one:Q4_K_M", 404, "has no quantization Q4_K_M"),
        ("maker/gated", 403, "accept its terms"),
        ("maker/damaged", 502, "expected"),
        pytest.param(str(SOURCE), 400, "expected", id="a path"),
        ("../../etc", 400, "expected"),
        ("./x", 400, "expected"),
        ("maker/x/../y", 400, "expected"),
        ("", 400, "field required"),
        ("a b", 400, "expected"),
    ],
)
def test_what_cannot_be_pulled_is_refused_with_its_reason(http, model, status, said):
    refused = pull(http, model, stream=False)
    assert (refused.status_code, said in refused.json()["error"]) == (status, True), refused.text
    streamed = pull(http, model)
    assert said in lines(streamed)[-1]["error"]
    assert streamed.status_code == (400 if status == 400 else 200)
    assert f"{model}:latest" not in states(http)


def test_a_flood_of_unknown_names_keeps_nothing(http, home):
    before = states(http), sorted(home.rglob("*"))
    for index in range(200):
        assert ask(http, f"maker/unknown-{index}").status_code == 404
    for index in range(20):
        assert pull(http, f"maker/unknown-{index}", stream=False).status_code == 404
    after = states(http), sorted(home.rglob("*"))
    assert before == after


# -- copies and deletions --------------------------------------------------------------------------


def copy(http, source, destination):
    return http.post("/api/copy", json={"source": source, "destination": destination})


def test_a_copy_is_another_name_and_outlives_the_first(http, home):
    assert pull(http, "maker/renamed", stream=False).status_code == 200
    assert copy(http, "maker/renamed", "mine:latest").status_code == 200
    assert copy(http, "mine", "ours").status_code == 200
    assert ask(http, "mine").status_code == 200
    digests = {one["name"]: one["digest"] for one in http.get("/api/tags").json()["models"]}
    assert digests["mine:latest"] == digests["maker/renamed:latest"] == digests["ours:latest"]
    assert delete(http, "maker/renamed:latest").status_code == 200
    assert is_cached(home, "renamed")
    assert states(http)["mine:latest"] == "ready", "it goes on without being loaded again"
    assert ask(http, "mine").status_code == ask(http, "ours").status_code == 200
    assert delete(http, "mine").status_code == 200
    assert ask(http, "mine").status_code == 404
    assert ask(http, "ours").status_code == 200
    assert delete(http, "ours").status_code == 200
    assert not is_cached(home, "renamed")
    assert ask(http, "ours").status_code == 404
    assert ask(http, "maker/renamed").status_code == 404


@pytest.mark.parametrize(
    ("source", "destination", "status"),
    [
        ("tiny", "tiny", 200),
        ("nobody", "x", 404),
        ("tiny", "a b", 400),
        ("tiny", "../x", 400),
        ("tiny", "", 400),
        ("tiny", "x" * 201, 400),
        ("maker/one", "tiny", 409),
    ],
)
def test_names_that_a_copy_may_and_may_not_have(http, source, destination, status):
    pull(http, "maker/one", stream=False)
    before = set(states(http))
    assert copy(http, source, destination).status_code == status
    assert set(states(http)) == before


def test_a_copy_replaces_an_earlier_copy_of_that_name(http):
    pull(http, "maker/one", stream=False)
    assert copy(http, "tiny", "either").status_code == 200
    assert copy(http, "maker/one", "either").status_code == 200
    digests = {one["name"]: one["digest"] for one in http.get("/api/tags").json()["models"]}
    assert digests["either:latest"] == digests["maker/one:latest"]
    assert delete(http, "either").status_code == 200
    assert ask(http, "maker/one").status_code == 200


def test_what_cannot_be_deleted(http):
    assert delete(http, "nobody").status_code == 404
    assert delete(http, "").status_code == 400
    refused = delete(http, "tiny")
    assert refused.status_code == 400 and "not in a cache" in refused.json()["error"]
    assert ask(http, "tiny").status_code == 200


@pytest.mark.skipif(not PACE_FLAGS, reason="needs a request that lasts")
def test_a_deletion_waits_for_a_stream(http, puller, home):
    pull(http, "maker/streaming", stream=False)
    body = LASTING | {"model": "maker/streaming", "max_tokens": 60, "stream": True}
    with puller.http() as other, other.stream("POST", "/v1/completions", json=body) as stream:
        told = stream.iter_lines()
        next(told)
        deleting = threading.Thread(target=delete, args=(http, "maker/streaming"))
        deleting.start()
        text = list(told)
    deleting.join()
    assert [line for line in text if line][-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(text)
    assert not is_cached(home, "streaming")
    assert ask(http, "maker/streaming").status_code == 404


# -- keep_alive ------------------------------------------------------------------------------------


def stays(http, model, keep_alive):
    """Returns for how many seconds a model stays after a request, as /api/ps tells it."""
    body = {"model": model, "prompt": "Hi", "stream": False, "options": {"num_predict": 2}}
    answer = http.post("/api/generate", json=body | {"keep_alive": keep_alive})
    assert answer.status_code == 200, answer.text
    running = {one["name"]: one["expires_at"] for one in http.get("/api/ps").json()["models"]}
    at = datetime.fromisoformat(running[f"{model}:latest"])
    return (at - datetime.now(UTC)).total_seconds()


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [("5m", 300), ("1h30m", 5400), (90, 90), ("90", 90), (90.5, 90.5), ("1500ms", 1.5)],
)
def test_a_model_stays_for_as_long_as_a_request_says(http, keep_alive, seconds):
    pull(http, "maker/one", stream=False)
    assert seconds - 10 < stays(http, "maker/one", keep_alive) <= seconds


@pytest.mark.parametrize("keep_alive", [-1, "-1", "-1m", -0.5, "1000000h"])
def test_a_model_stays_for_good(http, keep_alive):
    pull(http, "maker/one", stream=False)
    assert stays(http, "maker/one", keep_alive) > 1e10


@pytest.mark.parametrize("keep_alive", ["soon", "5 minutes", "", "m", "5x", [1], {"s": 1}])
def test_what_is_no_duration_is_refused_and_changes_nothing(http, keep_alive):
    body = {"model": "tiny", "prompt": "Hi", "stream": False, "keep_alive": keep_alive}
    refused = http.post("/api/generate", json=body)
    assert refused.status_code == 400 and "keep_alive" in refused.json()["error"]
    refused = http.post("/api/chat", json={"model": "tiny", "keep_alive": keep_alive})
    assert refused.status_code == 400


def test_keep_alive_0_unloads_a_model_and_the_next_request_loads_it(http):
    pull(http, "maker/one", stream=False)
    assert ask(http, "maker/one").status_code == 200
    for path, empty in (("/api/generate", {}), ("/api/chat", {"messages": []})):
        answer = http.post(path, json={"model": "maker/one", "keep_alive": 0, **empty}).json()
        assert (answer["done"], answer["done_reason"]) == (True, "unload")
        assert until(lambda: states(http)["maker/one:latest"] == "unloaded")
        assert "maker/one:latest" not in {m["name"] for m in http.get("/api/ps").json()["models"]}
        body = {"model": "maker/one", "prompt": "Hi", "stream": False}
        answer = http.post("/api/generate", json=body | {"options": {"num_predict": 2}}).json()
        assert answer["load_duration"] > 10_000_000
        assert answer["total_duration"] > answer["load_duration"]
    body = {"model": "nobody", "keep_alive": 0}
    assert http.post("/api/generate", json=body).status_code == 404


def test_a_model_is_described_before_and_after_it_is_loaded(http):
    pull(http, "maker/one", stream=False)
    before = http.post("/api/show", json={"model": "maker/one"}).json()
    card = http.get("/v1/models/maker/one").json()
    assert card["capabilities"] == ["completions", "chat"]
    assert before["capabilities"] == ["completion", "tools"]
    assert before["details"]["family"] == "llama" and before["template"]
    assert ask(http, "maker/one").status_code == 200
    tags = {one["name"]: one for one in http.get("/api/tags").json()["models"]}
    running = {one["name"]: one for one in http.get("/api/ps").json()["models"]}
    listed, loaded = tags["maker/one:latest"], running["maker/one:latest"]
    for field in ("digest", "size", "details", "model"):
        assert listed[field] == loaded[field]
    assert loaded["context_length"] == 512
    shown = http.post("/api/show", json={"model": "maker/one:latest"}).json()
    assert shown["details"] == listed["details"]
    for field in ("capabilities", "details", "template", "parameters", "model_info"):
        assert before[field] == shown[field], f"{field} before and after the load"
    assert http.get("/v1/models/maker/one").json()["capabilities"] == card["capabilities"]
    http.post("/api/generate", json={"model": "maker/one", "keep_alive": 0})
    assert until(lambda: states(http)["maker/one:latest"] == "unloaded")
    tags = {one["name"]: one for one in http.get("/api/tags").json()["models"]}
    for field in ("digest", "size", "details"):
        assert tags["maker/one:latest"][field] == loaded[field]


# -- another server ------------------------------------------------------------------------------


def test_pulls_and_copies_outlive_the_server_and_need_the_operator(hubs, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hubs["one"].url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "octavo"))
    flags = ("--served-model-name=tiny", f"--state-dir={tmp_path}", "--operator-key=operators")
    owner = {"Authorization": "Bearer operators"}
    first = LiveServer(str(SOURCE), *flags, key="a guest's")
    with httpx.Client(base_url=first.url, headers=owner, timeout=60) as http, first.http() as guest:
        assert pull(http, "maker/one", stream=False).status_code == 200
        assert copy(http, "maker/one", "mine").status_code == 200
        assert pull(guest, "maker/one").status_code == 403
        assert copy(guest, "tiny", "x").status_code == 403
        assert delete(guest, "maker/one").status_code == 403
        assert ask(guest, "mine").status_code == 200, "a pulled model is everyone's"
        body = {"model": "mine", "prompt": "Hi", "stream": False, "keep_alive": 0}
        ignored = guest.post("/api/generate", json=body)
        assert ignored.status_code == 200 and ignored.headers["x-octavo-ignored"] == "keep_alive"
        assert guest.post("/api/generate", json=body | {"prompt": ""}).status_code == 403
        assert states(http)["mine:latest"] == "ready"
    assert first.stop() == 0
    second = LiveServer(str(SOURCE), *flags, key="a guest's")
    with second.http() as http:
        assert states(http)["mine:latest"] == states(http)["maker/one:latest"] == "unloaded"
        assert ask(http, "mine").status_code == 200
    assert second.stop() == 0
    (cached,) = Path(tmp_path, "hub").glob("models--maker--one")
    shutil.rmtree(cached)
    third = LiveServer(str(SOURCE), *flags, key="a guest's")
    with third.http() as http:
        assert set(states(http)) == {"tiny:latest"}, "what is not cached any more is forgotten"
    assert third.stop() == 0
