"""`octavo cluster PLAN`: starts servers and a router on several machines through Ray."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octavo.distributed.cluster.controller import Cluster
    from octavo.distributed.cluster.plan import ClusterPlan

KEY_VARIABLE = "OCTAVO_API_KEY"
SECRET_VARIABLE = "OCTAVO_CLUSTER_SECRET"
PERIOD_S = 1.0
"""Interval between checks of all instances, in seconds."""

logger = logging.getLogger(__name__)


def cluster(
    plan: Annotated[
        str,
        typer.Argument(metavar="PLAN", help="YAML file with groups of instances and a router"),
    ],
    *,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Connect to this Ray cluster (auto: detect it)",
            show_default="start one",
            metavar="HOST:PORT",
        ),
    ] = None,
) -> None:
    """Run servers on several machines behind a router. Follows changes of the plan's file:
    instances join, drain and leave. Stops on SIGTERM or Ctrl-C.
    """
    from octavo.api.errors import ConfigError
    from octavo.distributed.cluster.controller import Cluster, ClusterKeys
    from octavo.distributed.cluster.ray_placer import RayPlacer
    from octavo.distributed.cluster.router_admin import RouterAdmin

    path = Path(plan)
    read_plan = _read(path)
    keys = ClusterKeys(os.environ.get(KEY_VARIABLE), os.environ.get(SECRET_VARIABLE))
    placer = RayPlacer(ray_address)
    running = Cluster(read_plan, placer, lambda url: RouterAdmin(url, keys.api_key), keys, _report)
    try:
        is_several = len({machine.host for machine in placer.machines()}) > 1
        if is_several and (keys.secret is None or keys.api_key is None):
            missing = SECRET_VARIABLE if keys.secret is None else KEY_VARIABLE
            raise ConfigError(
                f"cluster: several machines require {missing}, which is not set",
                hint=f"set {SECRET_VARIABLE} to a secret that the instances and the router share,"
                f" and {KEY_VARIABLE} to the key that clients send",
            )
        running.check()
        _keep(running, path)
    finally:
        running.close()


def _keep(running: Cluster, path: Path) -> None:
    """Runs the cluster, and follows changes of the plan's file, until the process is stopped."""
    from octavo.api.errors import OctavoError

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    read_at = _changed_at(path)
    was_serving = False
    while not stop.is_set():
        if (changed_at := _changed_at(path)) != read_at:
            read_at = changed_at
            try:
                running.change(_read(path))
                _report("the plan has changed")
            except OctavoError as error:
                _report(f"the new plan is invalid, the previous one stays active: {error}")
        running.step(time.monotonic())
        if running.is_serving and not was_serving:
            _report(f"serving: {running.describe()}")
        was_serving = running.is_serving
        stop.wait(PERIOD_S)


def _read(path: Path) -> ClusterPlan:
    """Reads a plan and checks the options that it sets for `octavo serve` and `octavo route`."""
    from octavo.config.engine_config import option_fields
    from octavo.config.option import get_options
    from octavo.distributed.cluster.plan import KnownOptions, read_plan
    from octavo.distributed.router.settings import RouterSettings
    from octavo.server.settings import ServerSettings

    plan = read_plan(path)
    serve = get_options(ServerSettings) | option_fields()
    del serve["model"]
    KnownOptions(serve, get_options(RouterSettings)).check(plan)
    return plan


def _changed_at(path: Path) -> float:
    """Returns a file's modification time; 0 if it does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
