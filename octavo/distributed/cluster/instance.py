"""One server or router of a cluster: its process, ports and health.

Body of a Ray actor. The actor ends with its process, and Ray restarts both; a server uses the same
ports again if they are free.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import zlib
from pathlib import Path

import httpx2
import msgspec

from octavo.utils.child_process import end_process, start_bound_child

MAIN = "octavo.cli.common.bound:main"
FIRST_PORT, NUM_PORTS = 20_000, 12_000
"""Port range of instances, below the ephemeral ports of common systems."""
PORTS_EACH = 4
"""Number of ports of an instance: for its HTTP server, prompts, blocks and ranks. An instance has
more if several ranks send their part of the blocks.
"""
RANK_SECRET = "OCTAVO_RANK_SECRET"
"""Environment variable from which `octavo rank` reads the secret."""
ANSWER_S = 2.0
"""Timeout of a health check, in seconds."""


class InstanceSpec(msgspec.Struct, frozen=True):
    """Command line of an instance, complete except for its machine's address."""

    name: str
    host: str
    """Address to listen on; "" means the machine's own address."""
    words: list[str]
    """Command and arguments of `octavo`, without the address."""
    port: int = 0
    """Port of its HTTP server; 0: a free one."""
    health: str = "/health"
    """Path that returns 200 when it accepts requests; "" if it has no HTTP server and is ready as
    soon as it runs.
    """
    config: dict[str, str | int | float | bool | list[str]] = {}
    """Contents of its configuration file, for `serve`."""
    environment: dict[str, str] = {}
    """Keys and secrets, which must not be on the command line."""
    transfers: bool = False
    """Whether its engine exchanges blocks with others."""
    peers: list[str] = []
    """Addresses of the instances that compute prompts for it."""
    num_ranks: int = 1
    """Ranks of its engine; each but the first has its own process (`make_rank_spec`)."""
    rank_secret: str | None = None
    """Shared secret of the ranks."""
    num_block_ports: int = 1
    """Number of ports for sending blocks, one for each rank, after the port for prompts."""


class InstanceState(msgspec.Struct, frozen=True):
    """Address and state of an instance, as it reports them."""

    url: str
    kv_address: str
    is_ready: bool
    rank_address: str = ""
    """Address of the first rank, for the others to join."""


def make_rank_spec(spec: InstanceSpec, rank: int, address: str) -> InstanceSpec:
    """Returns the command of a further rank of an instance; `address` is that of its first rank."""
    return InstanceSpec(
        f"{spec.name}-rank-{rank}",
        spec.host,
        ["rank", address, "--rank", str(rank)],
        health="",
        environment={} if spec.rank_secret is None else {RANK_SECRET: spec.rank_secret},
    )


class Instance:
    """A running instance. `ended` is called when its process has ended, and must not return."""

    def __init__(self, spec: InstanceSpec, host: str, ended: object = None) -> None:
        """`host` is the machine's own address."""
        self._ended = ended if callable(ended) else lambda: os._exit(1)
        self._spec = spec
        self._host = spec.host or host
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-instance-")
        count = max(PORTS_EACH, 2 + spec.num_block_ports)
        first = spec.port or find_free_ports(self._host, spec.name, count)
        self._port = first
        self._kv_port = first + 1
        self._rank_port = first + 3
        self._process = self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def state(self) -> InstanceState:
        """Returns the instance's addresses and whether it accepts requests; ends the actor if its
        process has ended.
        """
        if self._process.poll() is not None:
            self._ended()
        url = f"http://{self._host}:{self._port}"
        health = self._spec.health
        is_ready = not health or _answers(url + health)
        return InstanceState(url, f"{self._host}:{self._kv_port}", is_ready, self._rank_address)

    @property
    def _rank_address(self) -> str:
        return f"{self._host}:{self._rank_port}"

    def stop(self, patience_s: float) -> None:
        """Asks the process to finish its requests and exit; kills it after `patience_s` seconds."""
        self._process.terminate()
        end_process(self._process, patience_s)
        self._folder.cleanup()

    def _start(self) -> subprocess.Popen[bytes]:
        spec = self._spec
        words = list(spec.words)
        if spec.health:
            words += ["--host", self._host, "--port", str(self._port)]
        if spec.words[0] == "serve":
            words += ["--config", self._write_config()]
        return start_bound_child(MAIN, words, environment=spec.environment)

    def _write_config(self) -> str:
        """Writes the configuration file, which contains the secret, readable only by this user."""
        config = dict(self._spec.config)
        if self._spec.transfers:
            config["kv-transfer-address"] = f"{self._host}:{self._kv_port}"
        if self._spec.peers:
            config["prefill-peer"] = list(self._spec.peers)
        if self._spec.num_ranks > 1:
            config["rank-address"] = self._rank_address
            if self._spec.rank_secret is not None:
                config["rank-secret"] = self._spec.rank_secret
        path = Path(self._folder.name) / "config.yaml"
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))  # JSON is valid YAML
        return str(path)


def find_free_ports(host: str, name: str, count: int = PORTS_EACH) -> int:
    """Returns the first of `count` adjacent free ports; the same for a name as long as they are
    free.
    """
    start = zlib.crc32(name.encode()) % (NUM_PORTS // PORTS_EACH)
    for step in range(NUM_PORTS // PORTS_EACH):
        offset = (start + step) % (NUM_PORTS // PORTS_EACH)
        first = FIRST_PORT + PORTS_EACH * offset
        if all(_is_free(host, first + i) for i in range(count)):
            return first
    raise OSError(f"no ports are free on {host}")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _answers(url: str) -> bool:
    try:
        return httpx2.get(url, timeout=ANSWER_S, verify=False, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False
