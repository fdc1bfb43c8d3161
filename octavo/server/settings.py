"""The server's own options: address, keys and limits. The engine's are in
`config/engine_config.py`.

A field's name with dashes is its flag.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.config.hosts import is_local
from octavo.config.option import option
from octavo.config.paths import state_home
from octavo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All options of `octavo serve` that are not the engine's."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    uds: str | None = option(None, "path of a unix socket to listen on, in place of host and port")
    ssl_certfile: str | None = option(
        None, "certificate chain (PEM); the server then speaks HTTPS alone"
    )
    ssl_keyfile: str | None = option(
        None, "key of the certificate (PEM, without a password); default in ssl_certfile"
    )
    root_path: str = option(
        "", "path under which a proxy serves this server, and which it strips, e.g. /llm"
    )
    trusted_proxies: tuple[str, ...] = option(
        (),
        "address or network of a proxy whose X-Forwarded-For and -Proto are believed; may be given"
        " several times",
    )
    allow_origin: tuple[str, ...] = option(
        (), "origin whose web pages may ask this server (CORS), or *; may be given several times"
    )
    api_key: tuple[str, ...] = option(
        (), "key that clients must send as a bearer token; may be given several times"
    )
    operator_key: str | None = option(
        None, "key of the operator, who may load and unload models; it opens every other route too"
    )
    api_key_file: str | None = option(
        None,
        "YAML, TOML or JSON file of keys with names and limits; read again on SIGHUP",
    )
    open_metrics: bool = option(False, "serve /metrics without a key")
    lenient: bool = option(
        False,
        "ignore unknown request fields and name them in a response header, instead of"
        " answering 400",
    )
    trust_request_chat_template: bool = option(
        False, "take the field chat_template of a request, in place of the model's template"
    )
    max_body_bytes: int = option(32 << 20, "largest request body", unit="bytes", low=1)
    max_body_values: int = option(
        1 << 20, "most values in the JSON of a request body", unit="count", low=1
    )
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
    max_prompts: int = option(2048, "most prompts of one request", low=1)
    max_n: int = option(1024, "most samples (n, best_of) of a prompt", low=1)
    max_stop_strings: int = option(64, "most stop texts of a request", low=1)
    max_stop_characters: int = option(1024, "most characters of a stop text", low=1)
    max_tools: int = option(128, "most tools of a request", low=1)
    max_tool_bytes: int = option(
        1 << 20, "most bytes of a request's tools, as JSON", unit="bytes", low=1
    )
    max_jobs: int = option(1000, "most jobs (POST /generate) kept at once", low=1)
    job_ttl_s: int = option(600, "seconds for which a finished job's result is kept", low=1)
    max_models: int = option(16, "most models at once, loading and failed ones too", low=1)
    lora_modules: tuple[str, ...] = option(
        (),
        "NAME=PATH of an adapter that requests may name as their model, or a JSON object of name,"
        " path, base_model_name; needs enable_lora; may be given several times",
    )
    lora_dir: str | None = option(
        None, "folder under which the operator may load adapters while the server runs"
    )
    max_lora_adapters: int = option(10_000, "most adapters that have a name at once", low=1)
    memory_budget: int | None = option(
        None,
        "memory that the engines of all models may take together, e.g. 16GiB; default what is free",
        unit="bytes",
        low=1,
    )
    state_dir: str | None = option(
        None,
        "folder in which responses, files and batches are kept; '' keeps nothing; by default one"
        " for each port under the user's state folder, and nothing with port 0",
    )
    stored_ttl_s: int = option(
        30 * 86400, "seconds for which stored responses, files and batches are kept", low=1
    )
    max_stored_bytes: int = option(8 << 30, "most bytes in state_dir", unit="bytes", low=1)
    max_file_bytes: int = option(200 << 20, "largest uploaded file", unit="bytes", low=1)
    max_batch_lines: int = option(50_000, "most requests in one batch", unit="count", low=1)
    max_running_batch_lines: int | None = option(
        None,
        "most lines of batches that run at once; by default half of max_num_seqs",
        unit="count",
        low=1,
    )
    shutdown_timeout_s: int = option(
        5, "seconds that running requests get to finish when the server is told to stop", low=0
    )
    access_log: bool = option(False, "log each HTTP request, on standard output")
    log_format: Literal["text", "json"] = option("text", "form of all log lines")
    slow_request_s: float | None = option(
        None, "log requests that take longer, with where their time went", low=0
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL to which a trace of each request is sent (OTLP over HTTP), e.g."
        " http://localhost:4318/v1/traces; needs octavo[otel]",
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: got {self.port}, allowed are 0 to 65535")
        if any(not key.strip() for key in self.api_key):
            raise ConfigError(
                "api_key: got an empty one", hint="leave the option out to serve without keys"
            )
        if self.operator_key is not None and not self.operator_key.strip():
            raise ConfigError("operator_key: got an empty one", hint="leave the option out")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ConfigError("ssl_keyfile: needs ssl_certfile", hint="give both")
        if self.root_path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", self.root_path):
            raise ConfigError(
                f"root_path: got {self.root_path!r}, allowed is a path such as /llm, without a"
                " slash at its end"
            )
        for proxy in self.trusted_proxies:
            _check_network(proxy)
        for origin in self.allow_origin:
            if not re.fullmatch(r"\*|https?://[^\s/?#@]+", origin):
                raise ConfigError(
                    f"allow_origin: got {origin!r}, allowed are * and origins such as"
                    " https://example.org"
                )

    @property
    def state_folder(self) -> Path | None:
        """Folder in which the server keeps things; None where it keeps nothing."""
        if self.state_dir is not None:
            return Path(self.state_dir).expanduser() if self.state_dir else None
        if not self.port:
            return None  # the next server would have another port, and not find it
        return state_home() / f"port-{self.port}"

    @property
    def is_open_to_all(self) -> bool:
        """Whether other machines can reach the server and no key is needed."""
        stays_here = self.uds is not None or is_local(self.host)
        return not self.has_keys and (bool(self.trusted_proxies) or not stays_here)

    @property
    def has_keys(self) -> bool:
        """Whether requests need a key."""
        return bool(self.api_key or self.operator_key or self.api_key_file)


def _check_network(text: str) -> None:
    try:
        if text != "*":
            ipaddress.ip_network(text)
    except ValueError:
        raise ConfigError(
            f"trusted_proxies: got {text!r}, allowed are addresses, networks such as 10.0.0.0/8,"
            " and *"
        ) from None
