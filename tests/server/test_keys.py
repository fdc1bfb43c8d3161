"""Keys with names and limits, the file that holds them, and the operator's."""

import hashlib
import json
import os
import re
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.api.errors import ConfigError, InvalidRequest, Overloaded
from octavo.server.http.key_file import KeyLimits, read_key_file
from octavo.server.settings import ServerSettings
from octavo.server.state.account import Account
from octavo.server.state.key_ring import KeyRing
from tests.support.live_server import LiveServer, until
from tests.support.tiny_tokenizer import tiny_model_with_text

ASK = {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0, "ignore_eos": True}

YAML = """
keys:
  - {{name: ada, key: sk-ada, requests_per_minute: 3}}
  - {{name: bob, key: sk-bob, tokens_per_minute: 40}}
  - {{name: cyd, sha256: {}, max_running: 1}}
  - {{name: root, key: sk-root, operator: true}}
""".format(hashlib.sha256(b"sk-cyd").hexdigest())


class Clock:
    """A clock that stands until it is told to go on."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A server with a key file, whose path it carries."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(YAML)
    server = LiveServer(
        str(tiny_model_with_text()), "--served-model-name=tiny", f"--api-key-file={path}"
    )
    server.key_file = path
    yield server
    assert server.stop() == 0


def ask(http, key, path="/v1/completions", **fields):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return http.post(path, json=ASK | fields, headers=headers)


def test_a_key_of_the_file_opens_the_server_in_either_header(keyed):
    with keyed.http() as http:
        assert ask(http, None).status_code == 401
        assert ask(http, "sk-cyd").status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": "sk-cyd"}).status_code == 200
        assert http.get("/v1/models", headers={"x-api-key": "sk-cy"}).status_code == 401
        assert http.get("/health").status_code == 200
        for path in ("/metrics", "/openapi.json", "/version", "/load", "/v1/requests"):
            assert http.get(path).status_code == 401, path


def test_requests_beyond_the_limit_are_told_when_to_come_again(keyed):
    with keyed.http() as http:
        answers = [ask(http, "sk-ada") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers]
        assert left == [2, 1, 0, 0]
        last = answers[-1]
        assert 1 <= int(last.headers["retry-after"]) <= 20
        assert last.headers["x-ratelimit-limit-requests"] == "3"
        assert last.headers["x-ratelimit-reset-requests"].endswith("s")
        error = last.json()["error"]
        assert error["type"] == "RateLimitError"
        assert error["message"].startswith("this key is limited to 3 requests per minute, 0 left")
        own = {"Authorization": "Bearer sk-ada"}
        assert http.get("/v1/models", headers=own).status_code == 200, "only work is counted"


def test_tokens_of_prompts_and_answers_are_counted(keyed):
    with keyed.http() as http:
        first = ask(http, "sk-bob", max_tokens=30)
        assert first.headers["x-ratelimit-limit-tokens"] == "40"
        after = http.get("/v1/models", headers={"x-api-key": "sk-bob"})
        assert int(after.headers["x-ratelimit-remaining-tokens"]) <= 40 - 3 - 30 + 2
        refused = ask(http, "sk-bob", prompt=[5] * 20)
        assert refused.status_code == 429 and "40 tokens per minute" in refused.text
        too_long = ask(http, "sk-bob", prompt=[5] * 41)
        assert too_long.status_code == 400
        assert "got 41 tokens, expected at most 40" in too_long.json()["error"]["message"]


def test_one_request_at_a_time_where_the_key_says_so(keyed):
    """A job counts from its admission to its end, which a stopped engine puts off."""
    with keyed.http() as http:
        os.kill(keyed.core_pid, signal.SIGSTOP)
        try:
            jobs = [ask(http, key, "/generate") for key in ("sk-cyd", "sk-cyd", "sk-root")]
        finally:
            os.kill(keyed.core_pid, signal.SIGCONT)
        assert [job.status_code for job in jobs] == [202, 429, 202]
        assert "1 requests of this key are running, expected at most 1" in jobs[1].text
        assert until(lambda: ask(http, "sk-cyd").status_code == 200, 10)


def test_only_an_operators_key_may_load_models(keyed):
    with keyed.http() as http:
        for key, status in (("sk-cyd", 403), ("sk-root", 404)):
            headers = {"Authorization": f"Bearer {key}"}
            answer = http.post("/v1/models/unload", json={"model": "nothing"}, headers=headers)
            assert answer.status_code == status, answer.text


@pytest.mark.parametrize("path", ["/v1/cache/reset", "/v1/cache/pin"])
def test_what_all_keys_share_is_the_operators_to_forget_and_to_pin(keyed, path):
    with keyed.http() as http:
        headers = {"Authorization": "Bearer sk-cyd"}
        assert http.post(path, json={}, headers=headers).status_code == 403


def test_a_refused_prompt_is_not_computed(keyed):
    with keyed.http() as http:
        headers = {"Authorization": "Bearer sk-root"}

        def computed():
            text = http.get("/metrics", headers=headers).text
            (found,) = re.findall(r"^octavo:prompt_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
            return float(found)

        before = computed()
        assert ask(http, "sk-bob", prompt=[7] * 41).status_code == 400
        assert ask(http, "sk-root", prompt=[8] * 3).status_code == 200
        assert until(lambda: computed() >= before + 3, 5)
        assert computed() == before + 3


def test_the_file_is_read_again_on_sighup_and_a_broken_one_changes_nothing(keyed):
    new = "keys: [{name: dee, key: sk-dee}, {name: root, key: sk-root, operator: true}]"
    with keyed.http() as http:

        def status(key):
            return http.get("/version", headers={"x-api-key": key}).status_code

        keyed.key_file.write_text("keys: [{name: dee, key: sk-dee")
        keyed.process.send_signal(signal.SIGHUP)
        assert until(
            lambda: any("the API keys were not reloaded" in line for line in keyed.lines), 10
        )
        assert not any("sk-dee" in line for line in keyed.lines), "no key is logged"
        assert (status("sk-cyd"), status("sk-dee")) == (200, 401)
        keyed.key_file.write_text(new)
        keyed.process.send_signal(signal.SIGHUP)
        assert until(lambda: status("sk-dee") == 200, 10)
        assert status("sk-cyd") == 401


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("k.ini", "", "got {}, expected files named *.yaml"),
        ("k.yaml", "keys: []", "{} contains no key"),
        (
            "k.yaml",
            "keys: [{name: a}]",
            "{}:1:8: a: got neither, expected exactly one of key and sha256",
        ),
        ("k.yaml", "keys: [{name: a b, key: x}]", "{}:1:9: keys[0].name: "),
        (
            "k.json",
            '{"keys": [{"name": "a", "key": "x", "rpm": 3}]}',
            "{}:1:37: keys[0]: Object contains unknown field `rpm`",
        ),
        ("k.toml", "[[keys]]\nname = 'a'\nkey = 'x'\nmax_running = 0", "{}: keys[0].max_running: "),
        ("k.yaml", "keys: [{name: a, key: x}, {name: a, key: y}]", "{}:1:27: another key has"),
        ("k.yaml", "keys: [{name: a, key: x}, {name: b, key: x}]", "{}:1:27: another key has"),
        ("k.json", '{"keys": [{"name": "a", "key": "sec', "{}:1:32: not valid JSON: Unterminated"),
        ("k.yaml", "keys:\n  - name: ada key: sec", "{}:2:18: not valid YAML: mapping values"),
        ("k.yaml", "keys:\n  - key: *sec", "{}:2:10: not valid YAML: found undefined alias"),
        (
            "k.yaml",
            "keys:\n- {key: a, key: b}",
            "{}:2:12: not valid YAML: the key ... occurs twice",
        ),
        (
            "k.yaml",
            "keys: [{name: a, key: 12}]",
            "{}:1:18: keys[0].key: got `int`, expected `str",
        ),
        ("k.toml", "[[keys]]\nname = sec", "{}:2:8: not valid TOML: Invalid value"),
        ("k.toml", "[[keys]]\nname = 'sec", "{}:2:12: not valid TOML: "),
    ],
)
def test_a_broken_file_is_named_by_its_fault(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_key_file(str(path))
    assert message.format(path) in caught.value.message and "sec" not in caught.value.message


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("name", ["k.yaml", "k.json", "k.toml"])
def test_all_three_forms_of_a_file_say_the_same(tmp_path, name, encoding):
    path = tmp_path / name
    text = json.dumps({"keys": [{"name": "a", "key": "x", "requests_per_minute": 5}]})
    if name.endswith("toml"):
        text = "[[keys]]\nname = 'a'\nkey = 'x'\nrequests_per_minute = 5\n"
    path.write_text(text, encoding=encoding)
    (key,) = read_key_file(str(path))
    assert (key.name, key.limits.requests_per_minute) == ("a", 5)
    assert key.digest == hashlib.sha256(b"x").digest()
    ring = KeyRing(ServerSettings(api_key_file=str(path)))
    assert ring.find("x") == key and ring.find("y") is None and ring.may_operate(key)


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 20)), max_size=60),
    st.integers(20, 100),
)
def test_no_minute_takes_more_than_twice_the_limit(steps, limit):
    """A full allowance and a minute's refill are the most that any minute can take."""
    clock = Clock()
    account = Account("a", KeyLimits(tokens_per_minute=limit), clock)
    taken = []
    for pause, tokens in steps:
        clock.now += pause
        try:
            account.charge_prompt(tokens)
        except Overloaded as error:
            assert error.retry_after_s > 0
            clock.now += error.retry_after_s + 1e-6
            account.charge_prompt(tokens)
        taken.append((clock.now, tokens))
    for moment, _ in taken:
        in_minute = [count for when, count in taken if moment <= when < moment + 60]
        assert sum(in_minute) <= 2 * limit + 1


def test_a_changed_limit_keeps_what_was_taken():
    clock = Clock()
    account = Account("a", KeyLimits(requests_per_minute=2), clock)
    account.count_request()
    account.count_request()
    account.change(KeyLimits(requests_per_minute=3))
    account.count_request()
    with pytest.raises(Overloaded):
        account.count_request()
    account.change(KeyLimits())
    account.count_request()
    with pytest.raises(InvalidRequest):
        Account("b", KeyLimits(tokens_per_minute=4), clock).charge_prompt(5)
