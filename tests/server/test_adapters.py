"""Adapters of a running server: its command line's, those that come and go, and bad ones."""

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.api.errors import ConfigError
from octavo.server.state.adapters import LoraModule
from tests.support.live_server import LiveServer
from tests.support.peft_adapters import save_adapter
from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.tiny_tokenizer import tiny_model_with_text

OPERATOR = "the operator"
GREEDY = {
    "prompt": [5, 17, 3, 99, 42, 50, 7, 8, 23, 60, 11, 20, 31, 77, 2, 9, 12, 18],
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of adapters: v1 and v2, and what lies outside of it."""
    root = tmp_path_factory.mktemp("loras")
    tiny = tiny_model("llama")
    own = TinyModel(tiny.config, tiny_model_with_text(), tiny.model)
    for seed, name in enumerate(("lora/v1", "lora/v2", "outside")):
        save_adapter(own, root / name, seed=seed, r=4 + seed, lora_alpha=8)
    return root


@pytest.fixture(scope="module")
def lora_server(folder):
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        "--enable-lora",
        "--max-loras=2",
        f"--lora-modules=first={folder}/lora/v1",
        f"--lora-dir={folder}/lora",
        f"--operator-key={OPERATOR}",
        key="a key",
    )
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.lines)


@pytest.fixture
def http(lora_server):
    with lora_server.http() as client:
        yield client


@pytest.fixture
def operator(lora_server):
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    with httpx.Client(base_url=lora_server.url, headers=headers, timeout=60) as client:
        yield client


def tokens_of(http, model):
    answer = http.post("/v1/completions", json=GREEDY | {"model": model})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["token_ids"]


def load(operator, name, path, **fields):
    return operator.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path} | fields
    )


def unload(operator, name):
    return operator.post("/v1/unload_lora_adapter", json={"lora_name": name})


def test_the_model_field_picks_an_adapter(http):
    assert tokens_of(http, "first") != tokens_of(http, "tiny")
    chat = http.post(
        "/v1/chat/completions",
        json={"model": "first", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    )
    assert chat.status_code == 200 and chat.json()["model"] == "first"


def test_models_lists_adapters_with_their_parent(http):
    cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
    assert cards["first"]["parent"] == "tiny" and cards["first"]["root"] == "v1"
    assert cards["tiny"]["parent"] is None
    assert http.get("/v1/models/first").json() == cards["first"]


def test_an_adapter_comes_and_goes(http, operator):
    """A loaded adapter answers by its name; an unloaded one is not found."""
    loaded = load(operator, "second", "v2")
    assert loaded.status_code == 200, loaded.text
    assert loaded.text == "Success: LoRA adapter 'second' added successfully."
    assert tokens_of(http, "second") != tokens_of(http, "first")
    again = load(operator, "second", "v2")
    assert again.status_code == 400 and "already loaded" in again.text
    assert unload(operator, "second").status_code == 200
    gone = http.post("/v1/completions", json=GREEDY | {"model": "second"})
    assert gone.status_code == 404
    assert "The model `second` does not exist." in gone.text
    assert unload(operator, "second").status_code == 404


def test_an_adapters_name_unloads_no_model(http, operator):
    answer = operator.post("/v1/models/unload", json={"model": "first"})
    assert answer.status_code == 400 and "/v1/unload_lora_adapter" in answer.text
    assert http.post("/v1/completions", json=GREEDY).status_code == 200


def test_only_the_operator_loads(http):
    assert load(http, "mine", "v2").status_code == 403
    assert unload(http, "first").status_code == 403


def change(folder, array):
    """Puts an array in the place of the first product's A."""
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.lora_A.weight"))
    save_file(tensors | {name: array}, file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_path": "../outside"}, "expected folders under --lora-dir"),
        ({"lora_path": "v1/../../outside"}, "expected folders under --lora-dir"),
        ({"lora_path": "/etc"}, "expected folders under --lora-dir"),
        ({"lora_path": "."}, "expected folders under --lora-dir"),
        ({"lora_path": "v1\0"}, "expected folders under --lora-dir"),
        ({"lora_path": "link"}, "expected folders under --lora-dir"),
        ({"lora_path": "nowhere"}, "not an adapter"),
        ({"lora_path": "truncated"}, "not a valid safetensors file"),
        ({"lora_path": "rank0"}, "r is 0, expected"),
        ({"lora_path": "nan"}, "contains NaN or infinite values"),
        ({"lora_path": "wide"}, "has shape (4, 65), expected (4, 64)"),
        ({"lora_path": ""}, "lora_path"),
        ({"lora_name": "a b"}, "lora_name: got 'a b', expected"),
        ({"lora_name": "../bad"}, "lora_name: got '../bad', expected"),
        ({"lora_name": ".."}, "lora_name: got '..', expected"),
        ({"lora_name": "org/./bad"}, "lora_name: got 'org/./bad', expected"),
        ({"lora_name": "org/.."}, "lora_name: got 'org/..', expected"),
        ({"lora_name": "tiny"}, "a model is already named `tiny`"),
        ({"lora_name": 3}, "lora_name"),
        ({"load_inplace": "perhaps"}, "load_inplace"),
    ],
)
def test_bad_adapters_are_refused_and_the_server_goes_on(http, operator, folder, fields, message):
    """Each is a 400 that says what is wrong; requests of others are answered as before."""
    lora = folder / "lora"
    if not (lora / "rank0").exists():
        (lora / "link").symlink_to(folder / "outside")
        for name in ("truncated", "rank0", "nan", "wide"):
            shutil.copytree(lora / "v1", lora / name)
        change(lora / "nan", np.full((4, 64), np.nan, np.float32))
        change(lora / "wide", np.zeros((4, 65), np.float32))
        file = lora / "truncated" / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:5000])
        config = lora / "rank0" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 0}))
    body = {"lora_name": "bad", "lora_path": "v1"} | fields
    answer = operator.post("/v1/load_lora_adapter", json=body)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]
    assert http.post("/v1/completions", json=GREEDY | {"model": "bad"}).status_code == 404
    assert tokens_of(http, "first")


def test_a_reload_under_load_hits_nothing_old(http, operator, lora_server):
    """Requests beside reloads of the name that they give get one version's answer or the other's,
    whole; the first after a reload gets the new one's.
    """
    assert load(operator, "v1", "v1").status_code == load(operator, "v2", "v2").status_code == 200
    wanted = {path: tokens_of(http, path) for path in ("v1", "v2")}
    assert wanted["v1"] != wanted["v2"]
    assert load(operator, "turn", "v1").status_code == 200
    found, stopped = [], threading.Event()

    def ask():
        with lora_server.http() as own:
            while not stopped.is_set():
                found.append(tokens_of(own, "turn"))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(6):
            path = ("v2", "v1")[turn % 2]
            assert load(operator, "turn", path, load_inplace=True).status_code == 200
            assert tokens_of(http, "turn") == wanted[path]
    finally:
        stopped.set()
        for thread in threads:
            thread.join()
    assert len(found) > 6 and all(tokens in wanted.values() for tokens in found)


def test_a_stream_goes_on_when_its_adapter_is_unloaded(http, operator):
    """A stream keeps the weights of the name that it began with to its end."""
    assert load(operator, "brief", "v2").status_code == 200
    long = GREEDY | {"model": "brief", "max_tokens": 60}
    wanted = http.post("/v1/completions", json=long).json()["choices"][0]["token_ids"]
    found = []
    with http.stream("POST", "/v1/completions", json=long | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            if not found:
                assert unload(operator, "brief").status_code == 200
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                found += choice.get("token_ids") or []
    assert found == wanted
    assert http.post("/v1/completions", json=long).status_code == 404


def test_files_that_go_after_they_were_named_fail_their_requests_alone(http, operator, folder):
    """An adapter that has to be read again and is gone ends its request, with the reason. Others
    are answered, and so is this one once its files are back.
    """
    shutil.copytree(folder / "lora" / "v1", folder / "lora" / "gone")
    other = folder / "lora" / "gone" / "adapter_config.json"
    other.write_text(json.dumps(json.loads(other.read_text()) | {"lora_alpha": 3}))
    assert load(operator, "gone", "gone").status_code == 200
    (folder / "lora" / "gone").rename(folder / "elsewhere")
    answer = http.post("/v1/completions", json=GREEDY | {"model": "gone"})
    assert answer.status_code == 500, answer.text
    assert "the adapter gone could not be loaded" in answer.text
    assert tokens_of(http, "first")
    (folder / "elsewhere").rename(folder / "lora" / "gone")
    assert tokens_of(http, "gone") != tokens_of(http, "first")
    assert unload(operator, "gone").status_code == 200


def test_one_of_many_that_load_a_name_at_once_gets_it(http, operator):
    """The others are told that it is taken."""
    with ThreadPoolExecutor(8) as pool:
        codes = sorted(pool.map(lambda _: load(operator, "race", "v2").status_code, range(8)))
    assert codes == [200] + [400] * 7
    assert tokens_of(http, "race")
    assert unload(operator, "race").status_code == 200


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("first", "got 'first': a path is required"),
        ("a b=/x", "a name has 1 to 200 letters"),
        ("a=", "a path is required"),
        ('{"name": "a", "path": "/x", "other": 1}', "unknown key other"),
        ('{"name": "a", "path": 3}', "a path is required"),
        ('{"name"', "it is not valid JSON"),
    ],
)
def test_a_module_that_cannot_be_read_is_refused(module, message):
    with pytest.raises(ConfigError, match=message) as refused:
        LoraModule.parse(module)
    assert refused.value.hint == "use NAME=PATH"


def test_a_module_names_its_model():
    assert LoraModule.parse("a=/x/y=z") == LoraModule("a", Path("/x/y=z"))
    given = LoraModule.parse('{"name": "a", "path": "/x", "base_model_name": "tiny"}')
    assert given == LoraModule("a", Path("/x"), "tiny")
    with pytest.raises(ConfigError, match="two adapters are named a"):
        LoraModule.parse_all(["a=/x", "a=/y"])


def test_a_bad_adapter_of_the_command_line_ends_the_start():
    model = str(tiny_model_with_text())
    server = LiveServer(model, "--enable-lora", "--lora-modules=a=/nowhere", wait=False)
    assert server.process.wait(60) == 2
    assert "not an adapter" in "\n".join(server.lines)
