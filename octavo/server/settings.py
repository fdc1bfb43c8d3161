"""Options of the server: address, keys and limits. The engine's are in `config/engine_config.py`.

A field's name with dashes is its flag.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.api.errors import ConfigError
from octavo.config.hosts import is_local
from octavo.config.option import option
from octavo.config.paths import state_home


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Options of `octavo serve` other than the engine's."""

    host: str = option("127.0.0.1", "Server", "Bind to this address (0.0.0.0: all)", common=True)
    port: int = option(8000, "Server", "Listen on this port (0: any free port)", common=True)
    uds: str | None = option(
        None,
        "Server",
        "Listen on this Unix socket instead of host and port",
        metavar="PATH",
    )
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
    root_path: str = option(
        "", "Server", "Serve under this path prefix of a proxy, e.g. /llm", metavar="PATH"
    )
    trusted_proxies: tuple[str, ...] = option(
        (),
        "Security",
        "Trust X-Forwarded-* headers from this address",
        details="Address or network of the proxies; applies to X-Forwarded-For and"
        " X-Forwarded-Proto.",
        metavar="ADDRESS",
    )
    allow_origin: tuple[str, ...] = option(
        (), "Security", "Allow requests from this web origin, or * (CORS)"
    )
    allow_local_origins: bool = option(
        True, "Security", "Allow requests from web pages on this machine"
    )
    api_key: tuple[str, ...] = option(
        (),
        "Security",
        "Require this API key",
        details="Clients send it as a bearer token; also read from `OCTAVO_API_KEY`.",
        common=True,
    )
    operator_key: str | None = option(
        None,
        "Security",
        "Require this key to load and unload models",
        details="Valid for every other route too; also read from `OCTAVO_OPERATOR_KEY`.",
    )
    api_key_file: str | None = option(
        None,
        "Security",
        "Load API keys with names and limits from this file",
        details="YAML, TOML or JSON; reloaded on SIGHUP.",
        metavar="FILE",
    )
    open_metrics: bool = option(False, "Security", "Serve /metrics without a key")
    strict: bool = option(
        False,
        "Server",
        "Reject unknown or unsupported request fields (400)",
        details="By default they are ignored and listed in the header X-Octavo-Ignored.",
    )
    lenient: bool = option(
        False, "Server", "No effect; unknown request fields are ignored by default"
    )
    trust_request_chat_template: bool = option(
        False, "Security", "Allow the request field chat_template"
    )
    max_body_bytes: int = option(
        32 << 20, "Server limits", "Reject larger request bodies", unit="bytes", low=1
    )
    max_body_values: int = option(
        1 << 20, "Server limits", "Reject JSON bodies with more than N values", unit="count", low=1
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
    max_prompts: int = option(2048, "Server limits", "Accept at most N prompts per request", low=1)
    max_n: int = option(
        1024,
        "Server limits",
        "Accept at most N samples per prompt",
        details="The fields n and best_of.",
        low=1,
    )
    max_stop_strings: int = option(
        64, "Server limits", "Accept at most N stop strings per request", low=1
    )
    max_stop_characters: int = option(
        1024, "Server limits", "Accept at most N characters per stop string", low=1
    )
    max_tools: int = option(128, "Server limits", "Accept at most N tools per request", low=1)
    max_tool_bytes: int = option(
        1 << 20, "Server limits", "Limit the JSON of a request's tools", unit="bytes", low=1
    )
    mcp_server: tuple[str, ...] = option(
        (),
        "Server",
        "Allow requests to use this MCP server",
        details="Format: NAME=URL. Responses with tools of the type mcp and the server_label NAME"
        " then call its tools on this server.",
        metavar="NAME=URL",
    )
    mcp_timeout_s: float = option(
        30.0, "Server limits", "Wait N seconds for a response of an MCP server", low=0
    )
    mcp_max_calls: int = option(
        32, "Server limits", "Call at most N MCP tools per response", unit="count", low=1
    )
    mcp_max_output_bytes: int = option(
        1 << 20, "Server limits", "Limit one response of an MCP server", unit="bytes", low=1
    )
    max_jobs: int = option(1000, "Server limits", "Keep at most N jobs of POST /generate", low=1)
    job_ttl_s: int = option(
        600, "Server limits", "Keep a finished job's result for N seconds", low=1
    )
    max_models: int = option(
        16,
        "Server limits",
        "Load at most N models",
        details="Includes models that are loading or have failed, but not unloaded ones.",
        low=1,
    )
    model_alias: tuple[str, ...] = option(
        (),
        "Server",
        "Add an alias for a model or adapter",
        details="Format: ALIAS=NAME; ALIAS may be a pattern, such as claude-*.",
        metavar="ALIAS=NAME",
    )
    training_routes: bool = option(
        False,
        "Server",
        "Serve the routes for trainers: pause, sleep, weight updates",
        details="For the operator; see the guide Training and evaluation.",
    )
    lazy_load: bool = option(False, "Server", "Load each model at its first request")
    idle_unload: float | None = option(
        None,
        "Server",
        "Unload a model after this idle time",
        details="The next request loads it again. By default models stay loaded.",
        metavar="TIME",
        unit="seconds",
        low=0,
    )
    pin: tuple[str, ...] = option(
        (),
        "Server",
        "Keep this model loaded",
        details="It is not unloaded when idle or to free memory for another model.",
        metavar="NAME",
    )
    load_on_demand: Literal["none", "known", "local"] = option(
        "known",
        "Server",
        "Choose which models a request can load",
        details="known: models of the command line and models pulled by the operator; local: also"
        " models in the caches of this machine; none: no models, and idle models are not unloaded."
        " Requests cannot load paths.",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "LoRA",
        "Serve an adapter under a model name",
        details="Format: NAME=PATH, or a JSON object of name, path and base_model_name. Requires"
        " enable_lora.",
        metavar="NAME=PATH",
    )
    lora_dir: str | None = option(
        None, "LoRA", "Allow the operator to load adapters in this directory"
    )
    max_lora_adapters: int = option(10_000, "LoRA", "Accept at most N named adapters", low=1)
    memory_budget: int | None = option(
        None,
        "Memory and KV cache",
        "Limit the total memory of all models",
        derived="free memory",
        unit="bytes",
        low=1,
    )
    state_dir: str | None = option(
        None,
        "Server",
        "Store responses, files and batches in this directory",
        details="The default is one directory per port in the user's state directory. With port 0"
        " or an empty text, nothing is stored.",
    )
    stored_ttl_s: int = option(
        30 * 86400,
        "Server limits",
        "Keep stored objects for N seconds",
        details="Responses, files and batches.",
        low=1,
    )
    max_stored_bytes: int = option(
        8 << 30, "Server limits", "Limit the size of state_dir", unit="bytes", low=1
    )
    max_file_bytes: int = option(
        200 << 20, "Server limits", "Reject larger uploads", unit="bytes", low=1
    )
    max_batch_lines: int = option(
        50_000, "Server limits", "Accept at most N requests per batch", unit="count", low=1
    )
    max_running_batch_lines: int | None = option(
        None,
        "Server limits",
        "Run at most N batch requests at once",
        derived="half of max_num_seqs",
        unit="count",
        low=1,
    )
    shutdown_timeout_s: int = option(
        5, "Server", "Wait N seconds for running requests at shutdown", low=0
    )
    access_log: bool = option(False, "Logging", "Log each HTTP request to standard output")
    log_format: Literal["text", "json"] = option(
        "text", "Logging", "Write log lines in this format"
    )
    slow_request_s: float | None = option(
        None, "Logging", "Log requests slower than N seconds, with their timings", low=0
    )
    log_stats_interval_s: float = option(
        10.0, "Logging", "Log throughput every N seconds (0: never)", low=0
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Logging",
        "Send a trace of each request to this URL (OTLP)",
        details="OTLP over HTTP, e.g. http://localhost:4318/v1/traces; requires octavo[otel].",
        metavar="URL",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: got {self.port}, expected 0 to 65535")
        if any(not key.strip() for key in self.api_key):
            raise ConfigError(
                "api_key: got an empty key", hint="remove the option to serve without keys"
            )
        if self.operator_key is not None and not self.operator_key.strip():
            raise ConfigError("operator_key: got an empty key", hint="remove the option")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile: requires ssl_certfile", hint="set both")
        if self.root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path):
            raise ConfigError(
                f"root_path: got {self.root_path!r}, expected a path such as /llm, without a"
                f" trailing slash"
            )
        self.model_aliases()
        self.mcp_servers()
        for proxy in self.trusted_proxies:
            _check_network(proxy)
        for origin in self.allow_origin:
            if not re.fullmatch(r"\*|https?://[^\s/?#@]+", origin):
                raise ConfigError(
                    f"allow_origin: got {origin!r}, expected * or an origin such as"
                    " https://example.org"
                )

    @property
    def state_folder(self) -> Path | None:
        """Directory of stored objects; None if storage is disabled."""
        if self.state_dir is not None:
            return Path(self.state_dir).expanduser() if self.state_dir else None
        if not self.port:
            return None  # the next server would have another port and would not find the folder
        return state_home() / f"port-{self.port}"

    def model_aliases(self) -> dict[str, str]:
        """Parses the aliases; raises ConfigError for an invalid one."""
        return _parse_pairs(
            "model_alias",
            self.model_alias,
            expected="ALIAS=NAME, with distinct ALIASes",
            hint="e.g. --model-alias 'claude-*=smollm2'",
        )

    def mcp_servers(self) -> dict[str, str]:
        """Returns the URLs of MCP servers by name; raises ConfigError for an invalid one."""
        return _parse_pairs(
            "mcp_server",
            self.mcp_server,
            expected="NAME=URL, with distinct NAMEs and http or https URLs",
            hint="e.g. --mcp-server docs=http://127.0.0.1:9000/mcp",
            value=r"https?://[^\s/?#@]+[^\s#]*",
        )

    @property
    def is_open_to_all(self) -> bool:
        """Whether the server is reachable from other machines without a key."""
        stays_here = self.uds is not None or is_local(self.host)
        return not self.has_keys and (bool(self.trusted_proxies) or not stays_here)

    @property
    def has_keys(self) -> bool:
        return bool(self.api_key or self.operator_key or self.api_key_file)


def _parse_pairs(
    option: str, texts: Iterable[str], *, expected: str, hint: str, value: str = "(?s:.+)"
) -> dict[str, str]:
    """Parses texts NAME=VALUE, whose values match the pattern `value`."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, content = text.partition("=")
        if not name or name in pairs or not re.fullmatch(value, content):
            raise ConfigError(f"{option}: got {text!r}, expected {expected}", hint=hint)
        pairs[name] = content
    return pairs


def _check_network(text: str) -> None:
    try:
        if text != "*":
            ipaddress.ip_network(text)
    except ValueError:
        raise ConfigError(
            f"trusted_proxies: got {text!r}, expected *, an address, or a network such as"
            " 10.0.0.0/8"
        ) from None
