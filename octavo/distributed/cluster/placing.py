"""Machines of a cluster, and checks whether a plan fits on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octavo.api.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClusterMachine:
    """A machine of the cluster: its address and its total resources."""

    host: str
    resources: Mapping[str, float]

    def has(self, needs: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0.0) >= amount for name, amount in needs.items())


def check_machines(
    name: str,
    needs: Mapping[str, float],
    count: int,
    machines: Sequence[ClusterMachine],
    *,
    spread: bool,
) -> None:
    """Raises ConfigError if instances require machines that do not exist."""
    fitting = [machine for machine in machines if machine.has(needs)]
    requested = ", ".join(f"{amount:g} {resource}" for resource, amount in needs.items())
    there = "; ".join(
        f"{machine.host}: "
        + ", ".join(f"{machine.resources.get(resource, 0.0):g} {resource}" for resource in needs)
        for machine in machines
    )
    hint = (
        "start Ray on such a machine: ray start --address=HEAD:6379, with the required --resources"
    )
    if not fitting:
        raise ConfigError(
            f"plan: {name}: no Ray machine has the required {requested}; Ray has"
            f" {there or 'no machines'}",
            hint=hint,
        )
    if spread and len(fitting) < count:
        raise ConfigError(
            f"plan: {name}: requires {count} machines with {requested}, one for each instance or"
            f" rank, got {len(fitting)}; Ray has {there}",
            hint=hint,
        )


def check_total(needs: Sequence[Mapping[str, float]], machines: Sequence[ClusterMachine]) -> None:
    """Raises ConfigError if the plan requires more in total than all machines have."""
    for name in sorted({name for instance_needs in needs for name in instance_needs}):
        requested = sum(instance_needs.get(name, 0.0) for instance_needs in needs)
        there = sum(machine.resources.get(name, 0.0) for machine in machines)
        if requested > there * (1 + 1e-9):
            raise ConfigError(
                f"plan: the instances and the router require {requested:g} {name} in total, Ray's"
                f" machines have {there:g}",
                hint="use fewer instances, or add machines: ray start --address=HEAD:6379",
            )
