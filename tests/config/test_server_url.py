"""Addresses of servers as users write them."""

from __future__ import annotations

import pytest

from octavo.api.errors import ConfigError
from octavo.config.server_url import parse_server_url
from octavo.distributed.router.upstream import UpstreamClient
from octavo.tools.bench.stream_client import StreamClient
from octavo.utils.http_client import HttpClient


@pytest.mark.parametrize(
    ("text", "url", "port"),
    [
        ("localhost:8000", "http://localhost:8000", 8000),
        ("localhost", "http://localhost:8000", 8000),
        ("localhost:", "http://localhost:8000", 8000),
        ("127.0.0.1:9/v1/", "http://127.0.0.1:9", 9),
        (":9000", "http://127.0.0.1:9000", 9000),
        ("[::1]:8001", "http://[::1]:8001", 8001),
        ("[::1]", "http://[::1]:8000", 8000),
        ("my-host.lan:80", "http://my-host.lan:80", 80),
        ("http://h", "http://h", 80),
        ("https://h/", "https://h", 443),
        ("HTTP://h:1/v1", "http://h:1", 1),
        ("https://h/llm/v1", "https://h/llm", 443),
    ],
)
def test_every_common_form_is_taken(text, url, port):
    address = parse_server_url(text)
    assert (str(address), address.port) == (url, port)
    assert str(parse_server_url(url)) == url
    assert HttpClient(text).url == StreamClient(text).url == url
    assert UpstreamClient(text, connect_timeout_s=1).url == url


@pytest.mark.parametrize(
    "text",
    [
        *("", "http://", "ftp://h", "unix:///run/x", "h:port", "h:99999", "http://h:-1", "[::1"),
        *("u:p@h:1", "http://u@h", "h:1/?x", "h:1/#x", "a b:1", "h:1\n", "http://h/é", "::1"),
    ],
)
def test_others_are_refused_with_what_is_allowed(text):
    with pytest.raises(ConfigError, match="expected HOST:PORT, http://HOST:PORT or https://HOST"):
        parse_server_url(text)
