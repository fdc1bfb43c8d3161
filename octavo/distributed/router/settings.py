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

    host: str = option("127.0.0.1", "Server", "Bind to this address (0.0.0.0: all)", common=True)
    port: int = option(8080, "Server", "Listen on this port (0: any free port)", common=True)
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
    api_key: tuple[str, ...] = option((), "Security", "Require this API key", common=True)
    server_api_key: str | None = option(
        None,
        "Security",
        "Send this key to the servers",
        details="By default the client's key is forwarded, and the router's own requests have"
        " none.",
        derived="the client's",
        common=True,
    )
    routing_policy: Literal["kv", "least_tokens", "round_robin", "sticky"] = option(
        "kv",
        "Distributed",
        "Choose how requests are routed to servers",
        details="kv: shortest expected time by queue, cached blocks and measured speed;"
        " least_tokens: fewest tokens; round_robin: in turn; sticky: by prompt_cache_key, user or"
        " prompt prefix.",
        common=True,
    )
    kv_events: bool = option(
        True,
        "Distributed",
        "Subscribe to the KV events of servers",
        details="Requires the policy kv.",
    )
    kv_events_secret: str | None = option(
        None, "Distributed", "Authenticate KV events with this secret"
    )
    max_known_blocks: int = option(
        200_000, "Distributed", "Track at most N cached blocks per server", unit="count", low=1
    )
    health_interval_s: float = option(
        1.0, "Distributed", "Check a healthy server every N seconds", low=0.05
    )
    health_timeout_s: float = option(
        5.0, "Distributed", "Time out a health check after N seconds", low=0.05
    )
    max_health_backoff_s: float = option(
        30.0, "Distributed", "Check an unreachable server at least every N seconds", low=0.05
    )
    connect_timeout_s: float = option(
        5.0, "Distributed", "Time out connections to servers after N seconds", low=0.05
    )
    max_attempts: int = option(
        3,
        "Distributed",
        "Try at most N servers per request",
        details="Requests are retried only before the first byte of the response.",
        low=1,
    )
    max_body_bytes: int = option(
        256 << 20, "Server limits", "Reject larger request bodies", unit="bytes", low=1
    )
    request_timeout_s: int = option(
        60, "Server limits", "Time out after N s for headers, and N s for the body", low=1
    )
    max_connections: int = option(
        1024, "Server limits", "Reject connections (503) beyond N open ones", low=1
    )
    slow_client_timeout_s: int = option(
        30, "Server limits", "Disconnect a client that reads nothing for N seconds", low=1
    )
    max_request_s: int = option(
        3600, "Server limits", "Abort a request N seconds after its arrival", low=1
    )
    shutdown_timeout_s: int = option(
        30, "Server", "Wait N seconds for running requests at shutdown", low=0
    )
    open_metrics: bool = option(False, "Security", "Serve /metrics without a key")
    access_log: bool = option(False, "Logging", "Log each HTTP request to standard output")
    log_format: Literal["text", "json"] = option(
        "text", "Logging", "Write log lines in this format"
    )

    def __post_init__(self) -> None:
        self.server  # noqa: B018 - refuses what no server may be given
        if self.server_api_key is not None and not self.server_api_key.isprintable():
            raise ConfigError("server_api_key: expected printable characters")

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
