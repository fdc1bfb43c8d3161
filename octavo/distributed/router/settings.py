"""Options of `octavo route`: servers, policy, health checks, and its own HTTP server.

Options that it shares with `octavo serve` (address, keys, limits) are passed on as
`ServerSettings`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.api.errors import ConfigError
from octavo.config.option import option
from octavo.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """All options of `octavo route` except the servers' URLs."""

    host: str = option(
        "127.0.0.1", "Server", "Listen on this address, 0.0.0.0 for all", common=True
    )
    port: int = option(8080, "Server", "Listen on this port, 0 for a free one", common=True)
    ssl_certfile: str | None = option(
        None,
        "Security",
        "Serve HTTPS with this certificate chain (PEM)",
        metavar="FILE",
    )
    ssl_keyfile: str | None = option(
        None,
        "Security",
        "Read the certificate's key from this file",
        details="PEM, without a password.",
        derived="the certfile",
        metavar="FILE",
    )
    api_key: tuple[str, ...] = option((), "Security", "Require this key from clients", common=True)
    server_api_key: str | None = option(
        None,
        "Security",
        "Send this key to the servers",
        details="The router's own requests have no key by default.",
        derived="the client's",
        common=True,
    )
    routing_policy: Literal["kv", "least_tokens", "round_robin", "sticky"] = option(
        "kv",
        "Distributed",
        "Choose the server of a request",
        details="kv: the soonest by queue, cached blocks and measured rate; least_tokens: the one"
        " with the fewest tokens; round_robin: each in turn; sticky: one for each prompt_cache_key,"
        " user or prompt prefix.",
        common=True,
    )
    kv_events: bool = option(
        True,
        "Distributed",
        "Follow the KV events that servers publish",
        details="Needs the policy kv.",
    )
    kv_events_secret: str | None = option(
        None, "Distributed", "Authenticate the servers' KV events by this secret"
    )
    max_known_blocks: int = option(
        200_000, "Distributed", "Remember at most N blocks per server", unit="count", low=1
    )
    health_interval_s: float = option(
        1.0, "Distributed", "Check a healthy server every N seconds", low=0.05
    )
    health_timeout_s: float = option(
        5.0, "Distributed", "Wait N seconds for the answer to a check", low=0.05
    )
    max_health_backoff_s: float = option(
        30.0, "Distributed", "Check an absent server at least every N seconds", low=0.05
    )
    connect_timeout_s: float = option(
        5.0, "Distributed", "Wait N seconds for a connection to a server", low=0.05
    )
    max_attempts: int = option(
        3,
        "Distributed",
        "Try at most N servers for a request",
        details="Only before the first byte of the answer.",
        low=1,
    )
    max_body_bytes: int = option(
        256 << 20, "Server limits", "Refuse larger request bodies", unit="bytes", low=1
    )
    request_timeout_s: int = option(
        60, "Server limits", "Wait N seconds for a request's head, and for its body", low=1
    )
    max_connections: int = option(
        1024, "Server limits", "Answer 503 if more than N connections are open", low=1
    )
    slow_client_timeout_s: int = option(
        30, "Server limits", "Drop a client that reads nothing for N seconds", low=1
    )
    max_request_s: int = option(
        3600, "Server limits", "End a request N seconds after its arrival", low=1
    )
    shutdown_timeout_s: int = option(
        30, "Server", "Give running requests N seconds at shutdown", low=0
    )
    open_metrics: bool = option(False, "Security", "Serve /metrics without a key")
    access_log: bool = option(False, "Logging", "Log each HTTP request to standard output")
    log_format: Literal["text", "json"] = option(
        "text", "Logging", "Write log lines in this format"
    )

    def __post_init__(self) -> None:
        self.server  # noqa: B018 - refuses what no server may be given
        if self.server_api_key is not None and not self.server_api_key.isprintable():
            raise ConfigError("server_api_key: allowed are printable characters")

    @property
    def server(self) -> ServerSettings:
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
