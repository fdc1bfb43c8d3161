"""Both clients over a pseudo-model yield the same tokens; a core's process has a clear end."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time

import pytest

from octavo.api.errors import ConfigError, EngineDead, InvalidRequest, Unavailable
from octavo.engine.clients.in_process import InProcessClient
from octavo.engine.clients.process import ProcessClient
from octavo.engine.protocol.requests import Pin, PrefixRef, ResetPrefixCache, ViewEngine
from tests.support.core_builders import INFO, build
from tests.support.engine_fakes import expected_tokens, make_request

BUILDERS = "tests.support.core_builders"


def start(function="build", **options):
    client = ProcessClient(f"{BUILDERS}:{function}", options)
    lines = []
    client.wait_until_ready(lines.append)
    assert lines == ["loading nothing"]
    return client


@pytest.fixture(params=["in process", "own process"])
def client(request):
    client = (
        InProcessClient(build({}, print)[0], INFO) if request.param == "in process" else start()
    )
    yield client
    client.close()


def collect(client, num_finals):
    tokens, reasons = {}, {}
    while len(reasons) < num_finals:
        step = client.receive(timeout_s=10)
        assert step is not None
        for output in step.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in reasons
                reasons[output.request_id] = output.finish_reason
    return tokens, reasons


def test_requests_come_back_as_tokens(client):
    assert client.info.kv_capacity_tokens == 1024
    client.add(
        [
            make_request("a", [1, 2, 3]),
            make_request("b", list(range(50)), stop=["x"], logit_bias={3: 1.0}),
        ]
    )
    tokens, reasons = collect(client, 2)
    assert tokens == {"a": expected_tokens([1, 2, 3], 8), "b": expected_tokens(list(range(50)), 8)}
    assert reasons == {"a": "length", "b": "length"}


@pytest.mark.parametrize("kind", ["in process", "own process"])
def test_queries_are_answered_or_refused(kind):
    options = {"num_slots": 40}
    client = (
        InProcessClient(build(options, print)[0], INFO)
        if kind == "in process"
        else start(**options)
    )
    prompt = list(range(200))
    client.add([make_request("a", prompt)])
    collect(client, 1)
    with receiving(client):
        assert client.query(Pin(PrefixRef(prompt[:100]), until=20, now=10)) == 96
        assert client.query(Pin(PrefixRef([7] * 100), until=20, now=10)) == 0, (
            "it was never computed"
        )
        with pytest.raises(
            InvalidRequest, match=r"the prompt's blocks have .* bytes, and 0 are pinned"
        ) as refused:
            client.query(Pin(PrefixRef(prompt), until=20, now=10))
        assert refused.value.hint == "raise prefix_cache_size, or unpin another prompt"
        assert client.query(ResetPrefixCache(reset_connector=True)) == 1
    client.close()


def test_a_query_to_a_dead_core_is_refused_at_once():
    client = start()
    os.kill(client.pid, signal.SIGSTOP)
    with receiving(client):
        threading.Timer(0.2, os.kill, (client.pid, signal.SIGKILL)).start()
        with pytest.raises(Unavailable, match="the engine exited before it responded"):
            client.query(ResetPrefixCache())
        with pytest.raises(Unavailable, match="the engine exited before it responded"):
            client.query(ResetPrefixCache())
    client.close()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(monkeypatch):
    client = start()
    with receiving(client):
        os.kill(client.pid, signal.SIGSTOP)
        with (
            monkeypatch.context() as patch,
            pytest.raises(Unavailable, match=r"has not responded for 0.1 s"),
        ):
            patch.setattr("octavo.engine.clients.process.ANSWER_S", 0.1)
            client.query(ResetPrefixCache())
        os.kill(client.pid, signal.SIGCONT)
        assert client.query(Pin(PrefixRef([7] * 100), until=20, now=10)) == 0
        assert client.query(ResetPrefixCache()) == 1
    client.close()


@contextlib.contextmanager
def receiving(client):
    """Calls `receive` in another thread, as long as the core lives."""
    ended = threading.Event()

    def receive():
        with contextlib.suppress(EngineDead):
            while not ended.is_set():
                client.receive(timeout_s=0.02)

    thread = threading.Thread(target=receive)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_abort_ends_in_one_final_output(client):
    client.add([make_request("a", [1], max_tokens=400)])
    client.receive(timeout_s=10)
    client.abort(["a", "unknown"])
    assert collect(client, 1)[1] == {"a": "abort"}


def test_a_query_that_takes_a_command_first_does_not_keep_the_core_asleep():
    """A view asked for right after a request does not leave it waiting for the next command."""
    client = InProcessClient(build({}, print)[0], INFO)
    ended = queue.SimpleQueue()

    def receive():
        for _ in range(50):
            ended.put(collect(client, 1)[1])

    thread = threading.Thread(target=receive)
    thread.start()
    for number in range(50):
        client.add([make_request(str(number), [1, 2, 3])])
        client.query(ViewEngine(with_blocks=False))
        assert ended.get(timeout=10) == {str(number): "length"}
    thread.join()
    client.close()


def test_without_work_receive_waits_its_time(client):
    began = time.monotonic()
    assert client.receive(timeout_s=0.05) is None
    assert 0.04 < time.monotonic() - began < 5


def test_an_idle_core_uses_no_cpu():
    client = start()
    try:
        time.sleep(0.2)
        before = _cpu_ticks(client.pid)
        time.sleep(0.5)
        assert _cpu_ticks(client.pid) - before <= 1
    finally:
        client.close()


def _cpu_ticks(pid):
    with open(f"/proc/{pid}/stat") as file:
        words = file.read().rsplit(")", 1)[1].split()
    return int(words[11]) + int(words[12])


def test_what_keeps_a_core_from_starting_is_raised_as_it_is():
    with pytest.raises(ConfigError) as error:
        start("refuse", threads=9)
    assert str(error.value) == "threads: got 9, expected 1\nhint: use one"


def test_a_crash_while_starting_names_the_exception(capfd):
    with pytest.raises(
        EngineDead, match="the engine process has failed: ZeroDivisionError: unexpected"
    ):
        start("crash")


def test_an_end_while_starting_is_seen_at_once():
    began = time.monotonic()
    with pytest.raises(EngineDead, match=r"the engine process has exited \(exit code 3\)"):
        start("end")
    assert time.monotonic() - began < 20


def test_death_in_a_step_is_seen():
    client = start(kind="die")
    client.add([make_request("a", [1])])
    with pytest.raises(EngineDead, match="exit code 7"):
        client.receive(timeout_s=20)
    client.close()


def test_a_killed_core_is_seen():
    client = start(kind="slow")
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(EngineDead, match="killed by signal 9"):
        client.receive(timeout_s=20)
    client.close()


def test_the_core_ends_with_its_parent():
    script = (
        "import os, signal\n"
        "from octavo.engine.clients.process import ProcessClient\n"
        f"client = ProcessClient('{BUILDERS}:build', {{}})\n"
        "client.wait_until_ready(lambda text: None)\n"
        "print(client.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    run = subprocess.run(
        [sys.executable, "-c", script],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )
    pid = int(run.stdout)
    for _ in range(100):
        if not _alive(pid):
            return
        time.sleep(0.05)
    raise AssertionError("the core outlived its parent")


@pytest.mark.parametrize("moment", ["at once", "ready"])
def test_a_killed_front_leaves_no_folder(tmp_path, moment):
    wait = {"at once": "", "ready": "client.wait_until_ready(lambda text: None)\n"}[moment]
    script = (
        "import os, signal\n"
        "from octavo.engine.clients.process import ProcessClient\n"
        f"client = ProcessClient('{BUILDERS}:build', {{}})\n"
        f"{wait}"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TMPDIR": str(tmp_path),
    }
    subprocess.run([sys.executable, "-c", script], check=False, env=environment, timeout=60)
    for _ in range(200):
        if not list(tmp_path.iterdir()):
            return
        time.sleep(0.05)
    raise AssertionError(f"left behind: {list(tmp_path.rglob('*'))}")


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
