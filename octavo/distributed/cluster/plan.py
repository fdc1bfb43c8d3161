"""The file of `octavo cluster`: groups of instances, the resources that each needs, and a router.

    instances:
      - name: prompts
        role: prefill
        cpus: 2
      - name: answers
        role: decode
        peers: prompts
        count: 2
        spread: true
        options: {max-num-seqs: 64}
    router:
      port: 8080

Independent of Ray and of how processes are started.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo.api.errors import ConfigError, did_you_mean
from octavo.config.data_file import DataFile, read_data_file
from octavo.config.option import OptionField, convert

MAX_FILE_BYTES = 1 << 20
MAX_AMOUNT = 1 << 20
MAX_MEMORY_BYTES = 1 << 60
MAX_INSTANCES = 256
"""Maximum number of instances of a plan, equal to the router's maximum number of servers."""
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
OWN_OPTIONS = frozenset(
    (
        *("host", "port", "config", "api_key", "role", "prefill_peer"),
        *("kv_transfer_address", "kv_transfer_secret", "rank_address", "rank_secret"),
    )
)
"""Options of an instance that the plan determines."""
OWN_ROUTER_OPTIONS = frozenset(("host", "port", "api_key", "server_api_key"))
KNOWN_RESOURCES = {"CPU": "cpus", "object_store_memory": "nothing: no token goes through Ray"}
"""Resource names that Ray reserves, and the plan's fields to use instead."""
Options = dict[str, str | int | float | bool | list[str]]


class InstanceGroup(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A group of equal instances."""

    name: str
    model: str = "smollm2"
    role: Literal["both", "prefill", "decode"] = "both"
    count: int = 1
    peers: str | None = None
    """Name of the group that prefills prompts for this group."""
    cpus: float = 1
    """CPUs of each instance."""
    resources: dict[str, float] = {}
    """Additional resources of each instance, by the names with which Ray was started."""
    spread: bool = False
    """Whether each instance has a separate machine."""
    ranks_apart: bool = False
    """Whether each rank is placed separately, with its own `cpus` and `resources`; with `spread`
    on separate machines."""
    options: Options = {}
    """Options of `octavo serve`, by the names of its flags."""

    @property
    def needs(self) -> dict[str, float]:
        """Resources of each instance, by Ray's names."""
        return {"CPU": self.cpus, **self.resources}

    @property
    def num_ranks(self) -> int:
        """Number of ranks of each instance that are placed separately."""
        return self.tensor_parallel_size if self.ranks_apart else 1

    @property
    def num_placed(self) -> int:
        """Number of separately placed ranks of all instances."""
        return self.count * self.num_ranks

    @property
    def tensor_parallel_size(self) -> int:
        """Tensor-parallel size of each instance."""
        size = flag_names(self.options).get("tensor_parallel_size", 1)
        return size if isinstance(size, int) else 1


class RouterPart(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The router of a plan."""

    port: int = 8080
    cpus: float = 1
    resources: dict[str, float] = {}
    options: Options = {}
    """Options of `octavo route`, by the names of its flags."""

    @property
    def needs(self) -> dict[str, float]:
        return {"CPU": self.cpus, **self.resources}


class ClusterPlan(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A cluster plan."""

    instances: list[InstanceGroup]
    router: RouterPart = RouterPart()

    def group(self, name: str) -> InstanceGroup:
        return next(group for group in self.instances if group.name == name)


def read_plan(path: Path) -> ClusterPlan:
    """Reads and checks a plan file; raises ConfigError if it is invalid."""
    file = read_data_file(path, name="plan", max_bytes=MAX_FILE_BYTES, kind="YAML")
    return parse_plan(file)


def parse_plan(file: DataFile) -> ClusterPlan:
    """Parses and checks the content of a plan file."""
    plan = file.convert(ClusterPlan, hint="docs/guides/cluster.md shows a plan and its fields")
    _check(plan)
    return plan


@dataclass(frozen=True, slots=True)
class KnownOptions:
    """Options that a plan may set for its instances and its router, by name."""

    serve: Mapping[str, OptionField]
    route: Mapping[str, OptionField]

    def check(self, plan: ClusterPlan) -> None:
        """Raises ConfigError for an option that the command does not have, or an invalid value:
        otherwise the instances would fail and be restarted again and again.
        """
        for group in plan.instances:
            _check_values(group.name, group.options, self.serve, "octavo serve")
        _check_values("router", plan.router.options, self.route, "octavo route")


def _check_values(
    where: str, options: Options, known: Mapping[str, OptionField], command: str
) -> None:
    for name, value in flag_names(options).items():
        flag = name.replace("_", "-")
        if name not in known:
            flags = [flag_name.replace("_", "-") for flag_name in known]
            raise ConfigError(
                f"plan: {where}: options: {command} has no option {flag}",
                hint=did_you_mean(flag, flags, listed_in="docs/reference/options.md"),
            )
        spec = known[name]
        try:
            convert(spec, [value] if spec.is_list and isinstance(value, str) else value)
        except ConfigError as error:
            what = f"plan: {where}: options: {error.message}"
            raise ConfigError(what, hint=error.hint) from None


def flag_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options with dashes in their names replaced by underscores."""
    return {name.replace("-", "_"): value for name, value in options.items()}


def _check(plan: ClusterPlan) -> None:
    if not plan.instances:
        raise ConfigError("plan: no instances", hint="add at least one group")
    names = [group.name for group in plan.instances]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"plan: two groups are named {twice[0]}")
    if (total := sum(group.count for group in plan.instances)) > MAX_INSTANCES:
        raise ConfigError(f"plan: {total} instances, expected at most {MAX_INSTANCES}")
    for group in plan.instances:
        _check_group(plan, group)
    if all(group.role == "prefill" for group in plan.instances):
        raise ConfigError(
            "plan: all instances have the role prefill, so none can serve requests",
            hint="add a group with the role decode and these groups as peers",
        )
    if not 0 < plan.router.port < 65536:
        raise ConfigError(f"plan: router: port: got {plan.router.port}, expected 1 to 65535")
    _check_needs("router", plan.router.cpus, plan.router.resources)
    _check_options("router", plan.router.options, OWN_ROUTER_OPTIONS)


def _check_group(plan: ClusterPlan, group: InstanceGroup) -> None:
    where = group.name
    if not NAME.fullmatch(group.name):
        raise ConfigError(
            f"plan: name: got {group.name!r}, expected up to 40 lower-case letters, digits and"
            " dashes"
        )
    if group.count < 1:
        raise ConfigError(f"plan: {where}: count: got {group.count}, expected at least 1")
    _check_needs(where, group.cpus, group.resources)
    _check_options(where, group.options, OWN_OPTIONS)
    if group.ranks_apart and (group.num_ranks == 1 or group.options.get("backend") != "torch"):
        raise ConfigError(
            f"plan: {where}: ranks_apart: requires the options backend: torch and"
            f" tensor-parallel-size above 1, got {group.options.get('backend', 'auto')} and"
            f" {group.num_ranks}",
            hint="native ranks run on one machine; remove ranks_apart",
        )
    transfers = group.role != "both" or "kv_transfer" in flag_names(group.options)
    if group.ranks_apart and transfers:
        raise ConfigError(
            f"plan: {where}: ranks_apart: not supported with KV transfer, got"
            f" {'the option kv-transfer' if group.role == 'both' else f'the role {group.role}'}",
            hint="remove ranks_apart: KV transfer requires all ranks on one machine",
        )
    if (group.role == "decode") != (group.peers is not None):
        raise ConfigError(
            f"plan: {where}: peers: got {group.peers} with role {group.role}",
            hint="set peers to a group with role prefill if the role is decode, else remove it",
        )
    if group.peers is None:
        return
    if group.peers not in (other.name for other in plan.instances):
        raise ConfigError(f"plan: {where}: peers: unknown group {group.peers!r}")
    peers = plan.group(group.peers)
    if peers.role != "prefill" or peers.model != group.model:
        raise ConfigError(
            f"plan: {where}: peers: {peers.name} has the role {peers.role} and the model"
            f" {peers.model}, expected prefill and {group.model}"
        )


def _check_needs(where: str, cpus: float, resources: Mapping[str, float]) -> None:
    for name, amount in {"cpus": cpus, **resources}.items():
        if instead := KNOWN_RESOURCES.get(name):
            raise ConfigError(
                f"plan: {where}: resources: {name} is a built-in resource of Ray",
                hint=f"use {instead}",
            )
        max_amount = MAX_MEMORY_BYTES if name == "memory" else MAX_AMOUNT
        if not 0 < amount <= max_amount:
            raise ConfigError(
                f"plan: {where}: {name}: got {amount:g}, expected a number above 0 and at most"
                f" {max_amount:,}"
            )
        if amount > 1 and amount != int(amount):
            raise ConfigError(
                f"plan: {where}: {name}: got {amount:g}, expected an integer or a fraction below 1",
                hint="Ray allocates whole units, or a fraction of one",
            )


def _check_options(where: str, options: Mapping[str, Any], own: frozenset[str]) -> None:
    if conflicting := sorted(own & flag_names(options).keys()):
        raise ConfigError(
            f"plan: {where}: options: {conflicting[0]} is set by the plan",
            hint="remove it; keys and secrets are read from OCTAVO_API_KEY and"
            " OCTAVO_CLUSTER_SECRET",
        )
