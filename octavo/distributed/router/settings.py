"""Options of `octavo route`: servers, policy, health checks, and its own HTTP server.

Options that it shares with `octavo serve` (address, keys, limits) are passed on as
`ServerSettings`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from octavo.api.errors import ConfigError
from octavo.config.option import option, shared_option
from octavo.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """All options of `octavo route` except the servers' URLs."""

    host: str = shared_option(ServerSettings, "host")
    port: int = shared_option(ServerSettings, "port", default=8080)
    ssl_certfile: str | None = shared_option(ServerSettings, "ssl_certfile")
    ssl_keyfile: str | None = shared_option(ServerSettings, "ssl_keyfile")
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
    max_body_bytes: int = shared_option(ServerSettings, "max_body_bytes", default=256 << 20)
    request_timeout_s: int = shared_option(ServerSettings, "request_timeout_s")
    max_connections: int = shared_option(ServerSettings, "max_connections")
    slow_client_timeout_s: int = shared_option(ServerSettings, "slow_client_timeout_s")
    max_request_s: int = shared_option(ServerSettings, "max_request_s")
    shutdown_timeout_s: int = shared_option(ServerSettings, "shutdown_timeout_s", default=30)
    open_metrics: bool = shared_option(ServerSettings, "open_metrics")
    access_log: bool = shared_option(ServerSettings, "access_log")
    log_format: Literal["text", "json"] = shared_option(ServerSettings, "log_format")

    def __post_init__(self) -> None:
        self.server  # noqa: B018 - refuses what no server may be given
        if self.server_api_key is not None and not self.server_api_key.isprintable():
            raise ConfigError("server_api_key: expected printable characters")

    @property
    def server(self) -> ServerSettings:
        """The settings of the router's own HTTP server."""
        own = {entry.name for entry in fields(self)}
        shared = [entry.name for entry in fields(ServerSettings) if entry.name in own]
        return ServerSettings(**{name: getattr(self, name) for name in shared}, state_dir="")
