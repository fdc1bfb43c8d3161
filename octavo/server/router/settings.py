"""The options of `octavo route`: the servers, the policy, the checks, and the front's own address.

A field's name with dashes is its flag. What the front has in common with a server (address, keys,
limits) is handed on as `ServerSettings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.config.option import option
from octavo.errors import ConfigError
from octavo.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """All options of `octavo route` but the servers' URLs."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = option(8080, "port to listen on; 0 takes a free one")
    ssl_certfile: str | None = option(
        None, "certificate chain (PEM); the router then speaks HTTPS alone"
    )
    ssl_keyfile: str | None = option(
        None, "key of the certificate (PEM, without a password); default in ssl_certfile"
    )
    api_key: tuple[str, ...] = option(
        (), "key that clients must send to the router; may be given several times"
    )
    server_api_key: str | None = option(
        None,
        "key that the router sends to the servers; by default what the client sent, and none on"
        " the router's own requests",
    )
    routing_policy: Literal["kv", "least_tokens", "round_robin", "sticky"] = option(
        "kv",
        "which server gets a request: kv, the soonest by queue, cached blocks and measured rate;"
        " least_tokens; round_robin; or sticky, one for each prompt_cache_key, user, or beginning"
        " of a prompt",
    )
    kv_events: bool = option(
        True, "follow the KV events of servers that publish them (needs the policy kv)"
    )
    kv_events_secret: str | None = option(
        None, "secret of the servers' KV events, where they have one"
    )
    max_known_blocks: int = option(
        200_000, "most block names remembered for each server", unit="count", low=1
    )
    health_interval_s: float = option(
        1.0, "seconds between two checks of a server that is well", low=0.05
    )
    health_timeout_s: float = option(5.0, "seconds in which a server must answer a check", low=0.05)
    max_health_backoff_s: float = option(
        30.0, "most seconds between two checks of a server that stays away", low=0.05
    )
    connect_timeout_s: float = option(
        5.0, "seconds in which a server must accept a connection", low=0.05
    )
    max_attempts: int = option(
        3, "most servers that are asked for one request; before its first byte only", low=1
    )
    max_body_bytes: int = option(256 << 20, "largest request body", unit="bytes", low=1)
    request_timeout_s: int = option(
        60, "seconds in which a client must send a request's head, and then its body", low=1
    )
    max_connections: int = option(1024, "most open connections; more get a 503", low=1)
    slow_client_timeout_s: int = option(
        30, "seconds after which a client that does not read its answer is dropped", low=1
    )
    max_request_s: int = option(
        3600, "seconds that a request may take from its arrival to its last byte", low=1
    )
    shutdown_timeout_s: int = option(
        30, "seconds that running requests get to finish when the router is told to stop", low=0
    )
    open_metrics: bool = option(False, "serve /metrics without a key")
    access_log: bool = option(False, "log each HTTP request, on standard output")
    log_format: Literal["text", "json"] = option("text", "form of all log lines")

    def __post_init__(self) -> None:
        self.front  # noqa: B018 - refuses what no server may be given
        if self.server_api_key is not None and not self.server_api_key.isprintable():
            raise ConfigError("server_api_key: allowed are printable characters")

    @property
    def front(self) -> ServerSettings:
        """The settings of the router's own HTTP server."""
        return ServerSettings(
            host=self.host,
            port=self.port,
            ssl_certfile=self.ssl_certfile,
            ssl_keyfile=self.ssl_keyfile,
            api_key=self.api_key,
            open_metrics=self.open_metrics,
            max_body_bytes=self.max_body_bytes,
            request_timeout_s=self.request_timeout_s,
            max_connections=self.max_connections,
            slow_client_timeout_s=self.slow_client_timeout_s,
            max_request_s=self.max_request_s,
            shutdown_timeout_s=self.shutdown_timeout_s,
            access_log=self.access_log,
            log_format=self.log_format,
            state_dir="",
        )
