"""The file of a cluster: what it says, and what is wrong in it, by name and with a hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.api.errors import ConfigError
from octavo.config.data_file import DataFile
from octavo.config.engine_config import option_fields
from octavo.config.option import get_options
from octavo.distributed.cluster.plan import ClusterPlan, KnownOptions, parse_plan, read_plan
from octavo.distributed.router.settings import RouterSettings
from octavo.server.settings import ServerSettings

PROMPTS: dict[str, Any] = {"name": "prompts", "role": "prefill"}


def file_of(document: object) -> DataFile:
    return DataFile("plan", "plan.yaml", document)


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "instances:\n"
        "  - {name: prompts, role: prefill, cpus: 2, resources: {big: 1}}\n"
        "  - name: answers\n"
        "    role: decode\n"
        "    peers: prompts\n"
        "    count: 2\n"
        "    spread: true\n"
        "    options: {max-num-seqs: 64, enable-prefix-caching: true}\n"
        "router:\n"
        "  port: 9000\n"
    )
    plan = read_plan(path)
    assert [group.count for group in plan.instances] == [1, 2]
    assert plan.group("prompts").needs == {"CPU": 2, "big": 1}
    assert plan.group("answers").options["max-num-seqs"] == 64
    assert plan.router.port == 9000


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "missing required field `instances`"),
        ({"instances": []}, "no instances"),
        ({"instances": [{"name": "a"}], "routers": {}}, "unknown field `routers`"),
        ({"instances": [{"name": "a", "size": 2}]}, "unknown field `size`"),
        ({"instances": [{"name": "A"}]}, "name: got 'A', expected"),
        ({"instances": [{"name": "a"}, {"name": "a"}]}, "two groups are named a"),
        ({"instances": [{"name": "a", "count": 0}]}, "a: count: got 0, expected at least 1"),
        ({"instances": [{"name": "a", "count": 999}]}, "999 instances, expected at most 256"),
        ({"instances": [{"name": "a", "cpus": 0}]}, "a: cpus: got 0, expected a number above 0"),
        ({"instances": [{"name": "a", "cpus": float("nan")}]}, "a: cpus: got nan"),
        ({"instances": [{"name": "a", "cpus": 1.5}]}, "a: cpus: got 1.5, expected an integer"),
        ({"instances": [{"name": "a", "resources": {"big": 2.5}}]}, "a: big: got 2.5"),
        (
            {"instances": [{"name": "a", "resources": {"CPU": 2}}]},
            "CPU is a built-in resource of Ray",
        ),
        (
            {"instances": [{"name": "a", "ranks_apart": True, "options": {"backend": "torch"}}]},
            "ranks_apart: requires the options backend: torch and tensor-parallel-size"
            " above 1, got torch and 1",
        ),
        (
            {
                "instances": [
                    {
                        "name": "a",
                        "role": "prefill",
                        "ranks_apart": True,
                        "options": {"backend": "torch", "tensor-parallel-size": 2},
                    }
                ]
            },
            "ranks_apart: not supported with KV transfer, got the role prefill",
        ),
        (
            {"instances": [{"name": "a", "options": {"rank-address": "127.0.0.1:9"}}]},
            "options: rank_address is set by the plan",
        ),
        ({"instances": [{"name": "a", "role": "decode"}]}, "peers: got None with role decode"),
        ({"instances": [{"name": "a", "peers": "b"}]}, "peers: got b with role both"),
        (
            {"instances": [{"name": "a", "role": "decode", "peers": "b"}]},
            "unknown group 'b'",
        ),
        (
            {"instances": [PROMPTS, {"name": "a", "role": "decode", "peers": "a"}]},
            "peers: a has the role decode",
        ),
        (
            {
                "instances": [
                    PROMPTS,
                    {"name": "a", "role": "decode", "peers": "prompts", "model": "other"},
                ]
            },
            "expected prefill and other",
        ),
        ({"instances": [PROMPTS]}, "all instances have the role prefill"),
        ({"instances": [{"name": "a", "options": {"port": 1}}]}, "port is set by the plan"),
        (
            {"instances": [{"name": "a"}], "router": {"options": {"api-key": "x"}}},
            "router: options: api_key is set by the plan",
        ),
        ({"instances": [{"name": "a"}], "router": {"port": 0}}, "router: port: got 0"),
    ],
)
def test_what_is_wrong_is_named(document: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_plan(file_of(document))


KNOWN = KnownOptions(option_fields() | get_options(ServerSettings), get_options(RouterSettings))


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"max-num-seqz": 4}, "octavo serve has no option max-num-seqz", "max-num-seqs"),
        ({"max-num-seqs": "many"}, "max_num_seqs: got 'many', expected an integer", None),
        ({"backend": "gpu"}, "backend: got 'gpu', expected 'native'", None),
        ({"routing-policy": "fastest"}, "routing_policy: got 'fastest', expected", None),
        (
            {"kv-cache-memory-bytes": "9" * 400},
            r"kv_cache_memory_bytes: got '9+\.\.\.', expected at most",
            None,
        ),
    ],
)
def test_options_that_no_instance_could_start_with_are_refused(
    options: dict[str, Any], message: str, hint: str | None
) -> None:
    """Ray would start their processes again and again."""
    with pytest.raises(ConfigError, match="plan: a: options: " + message) as refused:
        KNOWN.check(parse_plan(file_of({"instances": [{"name": "a", "options": options}]})))
    assert hint is None or hint in str(refused.value.hint)


def test_options_of_the_router_are_its_own() -> None:
    def plan_with(options: dict[str, Any]) -> ClusterPlan:
        return parse_plan(file_of({"instances": [{"name": "a"}], "router": {"options": options}}))

    KNOWN.check(plan_with({"routing-policy": "sticky", "kv-events": False}))
    with pytest.raises(ConfigError, match="router: options: octavo route has no option max-num-"):
        KNOWN.check(plan_with({"max-num-seqs": 4}))
    with pytest.raises(ConfigError, match="router: options: routing_policy: got 'fastest'"):
        KNOWN.check(plan_with({"routing-policy": "fastest"}))


@pytest.mark.parametrize("text", ["instances: [", "- a\n", "instances: &a [*a]\n"])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="plan: "):
        read_plan(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(tmp_path / "absent.yaml")
