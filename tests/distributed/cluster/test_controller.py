"""What a cluster does of its plan: who is started in which order, joins, is drained and leaves."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from octavo.api.errors import ConfigError
from octavo.config.data_file import DataFile
from octavo.distributed.cluster.controller import LEAVE_S, Cluster, ClusterKeys
from octavo.distributed.cluster.instance import InstanceSpec, find_free_ports, make_rank_spec
from octavo.distributed.cluster.placing import ClusterMachine
from octavo.distributed.cluster.plan import ClusterPlan, parse_plan
from tests.distributed.cluster.fakes import FakePlacer, FakeRouter

APART: dict[str, Any] = {
    "instances": [
        {"name": "answers", "role": "decode", "peers": "prompts", "count": 2},
        {"name": "prompts", "role": "prefill"},
    ]
}


def plan(document: dict[str, Any]) -> ClusterPlan:
    return parse_plan(DataFile("plan", "a test", document))


def cluster(
    document: dict[str, Any], *, hosts: int = 1, keys: ClusterKeys | None = None
) -> tuple[Cluster, FakePlacer, FakeRouter, list[str]]:
    machines = [ClusterMachine(f"10.0.0.{at}", {"CPU": 4.0}) for at in range(1, hosts + 1)]
    placer, router, lines = FakePlacer(machines), FakeRouter(), list[str]()
    made = Cluster(plan(document), placer, lambda url: router, keys or ClusterKeys(), lines.append)
    return made, placer, router, lines


def steps(made: Cluster, count: int = 4, now: float = 0.0) -> None:
    for _ in range(count):
        made.step(now)


def test_all_are_started_and_join_the_router() -> None:
    made, placer, router, _ = cluster({"instances": [{"name": "a", "count": 2}]})
    made.check()
    steps(made)
    assert placer.names == ["a-0", "a-1", "router"]
    assert router.there == ["http://127.0.0.1:20000", "http://127.0.0.1:20001"]
    assert made.is_serving
    assert placer.reserved == [("a", 2, False), ("router", 1, False)]


def test_who_computes_prompts_is_started_first_and_gets_no_requests() -> None:
    made, placer, router, _ = cluster(APART)
    made.step(0.0)
    assert placer.names == ["prompts-0"]
    steps(made)
    assert placer.names == ["prompts-0", "answers-0", "answers-1", "router"]
    answers = placer.running("answers-0").spec
    assert answers.peers == ["127.0.0.1:20001"]
    assert answers.config["role"] == "decode" and answers.config["kv-transfer"] == "zmq"
    assert len(router.there) == 2


def test_ranks_apart_have_places_of_their_own() -> None:
    """Two instances of two ranks on four machines: two do not do."""
    options = {"backend": "torch", "tensor-parallel-size": 2}
    group = {"name": "a", "count": 2, "ranks_apart": True, "spread": True, "options": options}
    with pytest.raises(ConfigError, match="a: requires 4 machines with"):
        cluster({"instances": [group]}, hosts=2)[0].check()
    made, placer, router, _ = cluster(
        {"instances": [group]}, hosts=4, keys=ClusterKeys("clients", "of all")
    )
    made.check()
    steps(made)
    assert placer.reserved[0] == ("a", 4, True)
    assert placer.places == [("a-0", 0), ("a-1", 2), ("router", 0)]
    spec = placer.running("a-1").spec
    assert (spec.num_ranks, spec.rank_secret) == (2, "of all")
    assert len(router.there) == 2


def test_each_rank_that_sends_blocks_has_a_port() -> None:
    answers, prompts = APART["instances"]
    prompts = prompts | {"options": {"tensor-parallel-size": 6}}
    made, placer, _, _ = cluster({"instances": [answers, prompts]})
    steps(made)
    assert placer.running("prompts-0").spec.num_block_ports == 6
    assert placer.running("answers-0").spec.num_block_ports == 1


def test_neighbouring_ports_are_as_many_as_are_wanted() -> None:
    first = find_free_ports("127.0.0.1", "a name", 8)
    assert first == find_free_ports("127.0.0.1", "a name", 8)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 7))
        taken.listen()
        assert find_free_ports("127.0.0.1", "a name") == first
        assert find_free_ports("127.0.0.1", "a name", 8) != first


def test_another_rank_of_an_instance_joins_the_first_one() -> None:
    spec = InstanceSpec("a-0", "", ["serve", "m"], num_ranks=2, rank_secret="of all")
    rank = make_rank_spec(spec, 1, "10.0.0.1:20003")
    assert rank.words == ["rank", "10.0.0.1:20003", "--rank", "1"]
    assert rank.environment == {"OCTAVO_RANK_SECRET": "of all"} and not rank.health


def test_peers_at_another_address_are_followed() -> None:
    made, placer, router, _ = cluster(APART)
    steps(made)
    before = list(router.there)
    placer.running("prompts-0").port = 31_000
    steps(made, 6)
    assert placer.running("answers-0").spec.peers == ["127.0.0.1:31001"]
    assert len(router.there) == 2 and not set(before) & set(router.there)
    assert sum(one.stopped for one in placer.instances) == 2


def test_an_instance_that_is_away_keeps_its_place_and_joins_again_elsewhere() -> None:
    made, placer, router, _ = cluster({"instances": [{"name": "a", "count": 2}]})
    steps(made)
    lost = placer.running("a-0")
    lost.is_away = True
    steps(made)
    assert not lost.stopped and len(placer.instances) == 3
    lost.is_away, lost.port = False, 30_000
    steps(made)
    assert router.there == ["http://127.0.0.1:20001", "http://127.0.0.1:30000"]


def test_a_router_that_was_started_again_is_told_of_all() -> None:
    made, placer, router, _ = cluster({"instances": [{"name": "a", "count": 2}]})
    steps(made)
    placer.running("router").is_away = True
    steps(made)
    router.urls.clear()
    placer.running("router").is_away = False
    steps(made)
    assert len(router.there) == 2


def test_instances_that_the_plan_has_no_longer_are_drained_before_they_end() -> None:
    made, placer, router, lines = cluster({"instances": [{"name": "a", "count": 2}]})
    steps(made)
    router.busy.add(1)
    made.change(plan({"instances": [{"name": "a"}]}))
    steps(made)
    leaving = placer.instances[1]
    assert router.there == ["http://127.0.0.1:20000"] and not leaving.stopped
    router.busy.clear()
    steps(made)
    assert leaving.stopped and "a-1 has left" in lines
    assert placer.given_back == []  # the other instance still has it
    made.close()
    assert len(placer.given_back) == 2


def test_one_that_never_ends_its_requests_is_stopped_in_time() -> None:
    made, placer, router, _ = cluster({"instances": [{"name": "a", "count": 2}]})
    steps(made)
    router.busy.add(1)
    made.change(plan({"instances": [{"name": "a"}]}))
    steps(made)
    steps(made, now=LEAVE_S + 1)
    assert placer.instances[1].stopped


def test_instances_join_a_running_cluster() -> None:
    made, placer, router, _ = cluster({"instances": [{"name": "a"}]})
    steps(made)
    made.change(plan({"instances": [{"name": "a", "count": 2}, {"name": "b"}]}))
    steps(made)
    assert placer.names == ["a-0", "router", "a-1", "b-0"]
    assert len(router.there) == 3


def test_another_option_replaces_the_instances() -> None:
    made, placer, router, _ = cluster({"instances": [{"name": "a"}]})
    steps(made)
    made.change(plan({"instances": [{"name": "a", "options": {"max-num-seqs": 4}}]}))
    steps(made)
    assert placer.instances[0].stopped
    assert placer.running("a-0").spec.config["max-num-seqs"] == 4
    assert len(router.there) == 1


def test_a_router_that_is_away_ends_nothing() -> None:
    made, placer, router, _ = cluster({"instances": [{"name": "a", "count": 2}]})
    steps(made)
    router.is_away = True
    made.change(plan({"instances": [{"name": "a"}]}))
    steps(made)
    assert placer.names == ["a-0", "a-1", "router"]
    steps(made, now=LEAVE_S + 1)
    assert placer.names == ["a-0", "router"]


def test_what_finds_no_room_is_said_once_and_tried_again() -> None:
    made, placer, _, lines = cluster({"instances": [{"name": "a"}]})
    placer.is_full = True
    steps(made)
    assert lines == ["a cannot be started: plan: a: no room"]
    placer.is_full = False
    steps(made)
    assert placer.names == ["a-0", "router"]


@pytest.mark.parametrize("broken", ["a-1", "router"])
def test_what_cannot_be_started_leaves_nothing_and_holds_up_no_other(broken: str) -> None:
    made, placer, router, lines = cluster({"instances": [{"name": "a", "count": 2}, {"name": "b"}]})
    placer.broken = broken
    steps(made)
    name = broken.partition("-")[0]
    assert lines.count(f"{name} cannot be started: no such resource") == 1
    assert placer.given_back and {place[0] for place in placer.given_back} == {name}
    assert len(placer.names) == (2 if name == "a" else 3)
    placer.broken = ""
    steps(made)
    assert sorted(placer.names) == ["a-0", "a-1", "b-0", "router"] and len(router.there) == 3


def test_another_router_takes_the_place_of_the_one_before() -> None:
    made, placer, router, lines = cluster({"instances": [{"name": "a", "count": 2}]})
    steps(made)
    before = placer.running("router")
    other = {"port": 9000, "options": {"routing-policy": "sticky"}}
    made.change(plan({"instances": [{"name": "a", "count": 2}], "router": other}))
    router.urls.clear()
    steps(made)
    assert (
        before.stopped and len(placer.given_back) == 1 and "the router is being replaced" in lines
    )
    now = placer.running("router").spec
    assert now.port == 9000 and now.words[-2:] == ["--routing-policy", "sticky"]
    assert placer.names == ["a-0", "a-1", "router"] and len(router.there) == 2 and made.is_serving
    steps(made)
    assert placer.names == ["a-0", "a-1", "router"]


def test_secrets_go_by_the_environment_and_files_and_several_machines_are_reached() -> None:
    keys = ClusterKeys("outer", "inner")
    made, placer, _, _ = cluster(APART, hosts=2, keys=keys)
    steps(made)
    prompts, router = placer.running("prompts-0").spec, placer.running("router").spec
    assert prompts.host == router.host == ""
    assert prompts.environment == {"OCTAVO_API_KEY": "inner"}
    assert prompts.config["kv-transfer-secret"] == "inner"
    assert router.environment == {"OCTAVO_API_KEY": "outer", "OCTAVO_SERVER_API_KEY": "inner"}
    assert not any("inner" in word or "outer" in word for word in (*prompts.words, *router.words))


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        ({"cpus": 9}, "a: no Ray machine has the required 9 CPU; Ray has 10"),
        ({"resources": {"big": 1}}, "no Ray machine has the required 1 CPU, 1 big"),
        ({"count": 3, "spread": True}, "a: requires 3 machines with"),
        ({"cpus": 4, "count": 2}, "the router require 9 CPU in total, Ray's machines have 8"),
    ],
)
def test_machines_that_ray_does_not_have_are_refused(
    instance: dict[str, Any], message: str
) -> None:
    made, placer, _, _ = cluster({"instances": [{"name": "a", **instance}]}, hosts=2)
    with pytest.raises(ConfigError, match=message) as refused:
        made.check()
    assert refused.value.hint and "ray start" in refused.value.hint
    assert not placer.instances


def test_a_change_that_is_refused_leaves_the_plan_as_it_was() -> None:
    made, placer, _, _ = cluster({"instances": [{"name": "a"}]})
    steps(made)
    with pytest.raises(ConfigError):
        made.change(plan({"instances": [{"name": "a", "cpus": 99}]}))
    steps(made)
    assert placer.names == ["a-0", "router"]
