"""Several cores behind one client: each request has one core's tokens, whichever computes it and
whatever becomes of the others.
"""

import os
import signal

import pytest

from octavo.engine.clients.fleet import FleetClient
from octavo.engine.protocol.requests import ResetPrefixCache, ViewEngine
from octavo.engine.protocol.stats import EngineStats, GroupBlocks, KvBytes, total_stats
from octavo.engine.routing.policies import ROUTING_POLICIES
from octavo.engine.routing.router import Router
from octavo.engine.routing.target import Target
from tests.support.core_builders import BAD
from tests.support.engine_fakes import expected_tokens, make_request
from tests.support.supervised_cores import NotedClient, collect, collect_good

pytestmark = pytest.mark.sampled(one_in=2)

BLOCK = 4
PROMPTS = {f"request {number}": [number, 1, 2, 3, number] for number in range(8)}


@pytest.fixture
def fleet():
    """A way to start two cores behind a client, which is closed after the test."""
    started = []

    def start(kind="slow", policy="round_robin", **options):
        clients = [NotedClient(kind), NotedClient(kind, **options)]
        for client in clients:  # the fleet waits for them again
            client.wait_until_ready = lambda report, info=client.info: info
        targets = [Target("engine 0"), Target("engine 1")]
        router = Router(ROUTING_POLICIES[policy](), targets)
        started.append(FleetClient(clients, router, BLOCK))
        started[-1].wait_until_ready(lambda text: None)
        return started[-1], clients

    yield start
    for client in started:
        client.close()


def requests(prompts=PROMPTS):
    return [make_request(name, prompt, max_tokens=40) for name, prompt in prompts.items()]


def send(client, prompts=PROMPTS):
    for request in requests(prompts):
        client.add([request])


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
def test_every_policy_yields_one_cores_tokens(fleet, policy):
    client, _ = fleet(policy=policy)
    send(client)
    tokens = {}
    last = None
    ends = {}
    while len(ends) < len(PROMPTS):
        last = client.receive(timeout_s=10)
        for output in last.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason:
                ends[output.request_id] = output.finish_reason
    assert tokens == {name: expected_tokens(prompt, 40) for name, prompt in PROMPTS.items()}
    assert last.stats.num_added == len(PROMPTS)
    assert sum(one.num_added for one in last.stats.engines) == len(PROMPTS)
    if policy == "round_robin":
        assert [one.num_added for one in last.stats.engines] == [4, 4]


def test_the_requests_of_a_killed_core_go_on_and_the_others_never_wait(fleet):
    client, clients = fleet()
    send(client)
    tokens = {}
    for _ in range(12):
        for output in client.receive(timeout_s=10).outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    os.kill(clients[1].pid, signal.SIGKILL)
    ends = collect_good(client, PROMPTS, [], tokens)
    assert len(ends) == len(PROMPTS) and client.trouble == ""
    assert clients[0].starts == [0] and clients[1].starts == [0, 1]


def test_all_requests_of_a_core_that_cannot_be_replaced_go_on_in_another(fleet):
    """No request is to blame for a core that does not even start, so the other core takes all."""
    client, clients = fleet(build_of=lambda num_before: "end" if num_before else "build")
    send(client)
    tokens = {}
    for _ in range(12):
        for output in client.receive(timeout_s=10).outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    os.kill(clients[1].pid, signal.SIGKILL)
    collect_good(client, PROMPTS, [], tokens)
    assert clients[1].trouble and client.trouble == "" and clients[0].starts == [0]
    send(client, {"later": [9, 9]})
    collect_good(client, {"later": [9, 9]}, [])


def test_requests_that_wait_in_a_dead_core_go_on_in_another_at_once(fleet):
    """A request that its last step did not compute is under no suspicion."""
    client, clients = fleet("crash")
    prompts = {f"request {number}": [number, 1, 2, 3] for number in range(40)}
    first, *others = requests(prompts)
    for request in [first, make_request("bad", [5, BAD, 6]), *others]:
        client.add([request])
    collect_good(client, prompts, ["bad"])
    assert clients[0].stats.generation_tokens > 30 * 40, "it took over what had waited"
    assert clients[0].stats.num_added + clients[1].stats.num_added == len(prompts) + 1
    # A third core may be started only after the last answer.
    assert clients[0].starts == [0] and len(clients[1].starts) in (2, 3)


def test_a_request_that_kills_its_core_fails_alone(fleet):
    client, clients = fleet("crash")
    send(client)
    client.add([make_request("bad", [5, BAD, 6])])
    collect_good(client, PROMPTS, ["bad"])
    assert sorted(len(one.starts) for one in clients)[0] == 1, "it never reached the other core"


def test_aborts_and_forks_reach_the_core_of_their_request(fleet):
    client, _ = fleet()
    client.add([make_request("parent", [1, 2, 3], max_tokens=400)])
    client.add([make_request("other", [4, 5, 6], max_tokens=400)])
    client.receive(timeout_s=10)
    client.add([make_request("child", [1, 2, 3], max_tokens=4, fork_of="parent")])
    client.abort(["parent", "other", "unknown"])
    tokens, ends = collect(client, 3)
    assert {name: end.finish_reason for name, end in ends.items()} == {
        "parent": "abort",
        "other": "abort",
        "child": "length",
    }
    assert tokens["child"] == expected_tokens([1, 2, 3], 4)


def test_views_and_resets_are_of_all_cores(fleet):
    client, _ = fleet()
    send(client)
    client.receive(timeout_s=10)
    assert client.query(ViewEngine(with_blocks=False)).num_requests == len(PROMPTS)
    assert not client.query(ResetPrefixCache()), "requests hold blocks"
    collect(client, len(PROMPTS))
    assert client.query(ResetPrefixCache())
    client.close()
    assert client.receive() is None and client.receive(timeout_s=1) is None


def test_stats_of_several_engines_are_their_sums():
    groups = [GroupBlocks(None, 8, 1, 2, 3, 4)]
    one = EngineStats(num_running=2, busy_s=0.5, kv=KvBytes(1, 2, 4), groups=groups)
    total = total_stats([one, one, EngineStats()])
    assert (total.num_running, total.busy_s, total.kv) == (4, 1.0, KvBytes(2, 4, 8))
    assert total.groups == [GroupBlocks(None, 16, 2, 4, 6, 8)] and len(total.engines) == 3
