"""TLS, unix sockets, CORS, a path prefix and proxies, each on a real listener."""

import socket
import ssl

import httpx
import pytest
import trustme

from octavo.api.errors import ConfigError
from octavo.server.http.listener import listen_on_path, remove_socket
from octavo.server.settings import ServerSettings
from tests.support.live_server import LiveServer
from tests.support.tiny_tokenizer import tiny_model_with_text

ASK = {"prompt": [5, 6, 7], "max_tokens": 2}
PAGE = "https://pages.example"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder):
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    for pem in certificate.cert_chain_pems:
        pem.write_to_path(str(folder / "cert.pem"), append=True)
    return authority


@pytest.fixture(scope="module")
def secure(folder, authority):
    """A server behind TLS, for a page of another origin and behind a proxy's path."""
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        f"--ssl-certfile={folder / 'cert.pem'}",
        f"--ssl-keyfile={folder / 'key.pem'}",
        f"--allow-origin={PAGE}",
        "--root-path=/llm",
        "--trusted-proxies=127.0.0.0/8",
    )
    yield server
    assert server.stop() == 0


@pytest.fixture
def tls(secure, authority):
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with httpx.Client(base_url=secure.url, verify=context, timeout=60) as client:
        yield client


def test_a_certificate_is_shown_that_clients_can_check(secure, tls):
    assert secure.url.startswith("https://")
    assert tls.post("/v1/completions", json=ASK).status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secure.url}/health")
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(secure.url.replace("https", "http") + "/health")


def test_only_an_allowed_origin_may_ask_from_a_page(tls, http):
    asks = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    for origin, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
        preflight = tls.options("/v1/completions", headers=asks | {"Origin": origin})
        assert preflight.headers.get("access-control-allow-origin") == allowed
        answer = tls.get("/health", headers={"Origin": origin})
        assert answer.headers.get("access-control-allow-origin") == allowed
    default = http.get("/health", headers={"Origin": PAGE})
    assert "access-control-allow-origin" not in default.headers


def test_a_path_prefix_that_the_proxy_strips_is_in_the_description(tls):
    assert tls.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


def test_a_unix_socket_serves_and_is_removed(folder):
    path = str(folder / "octavo.sock")
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(path)
    stale.close()
    server = LiveServer(str(tiny_model_with_text()), f"--uds={path}")
    with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as http:
        assert http.get("/health").status_code == 200
        assert http.post("/v1/completions", json=ASK).status_code == 200
    with pytest.raises(ConfigError, match="another server listens"):
        listen_on_path(path)
    assert server.stop() == 0
    assert not (folder / "octavo.sock").exists()


def test_a_file_in_the_sockets_place_stays(tmp_path):
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="exists and is not a socket"):
        listen_on_path(str(path))
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot listen on"):
        listen_on_path(str(tmp_path / "no" / "folder"))
    listener = listen_on_path(str(tmp_path / "good"))
    listener.close()
    remove_socket(str(tmp_path / "good"))
    assert not (tmp_path / "good").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"root_path": "llm/"}, "root_path: got 'llm/', expected a path such as /llm"),
        ({"trusted_proxies": ("proxy",)}, "trusted_proxies: got 'proxy', expected *, an address"),
        ({"allow_origin": ("example.org",)}, "allow_origin: got 'example.org', expected"),
        ({"ssl_keyfile": "k.pem"}, "ssl_keyfile: requires ssl_certfile"),
    ],
)
def test_a_bad_setting_is_named(fields, message):
    with pytest.raises(ConfigError) as caught:
        ServerSettings(**fields)
    assert caught.value.message.startswith(message)


def test_a_proxy_without_keys_opens_the_server_to_all():
    assert ServerSettings(trusted_proxies=("127.0.0.1",)).is_open_to_all
    assert not ServerSettings(uds="/tmp/x", host="0.0.0.0").is_open_to_all


def test_a_certificate_that_cannot_be_used_ends_the_start(tmp_path):
    command = LiveServer(
        str(tiny_model_with_text()), f"--ssl-certfile={tmp_path / 'none.pem'}", wait=False
    )
    assert command.process.wait(60) == 2
    assert any("ssl_certfile: cannot load" in line for line in command.lines)


@pytest.mark.parametrize(
    ("proxies", "client"), [(("--trusted-proxies=127.0.0.1",), "203.0.113.9"), ((), "127.0.0.1")]
)
def test_a_forwarded_address_is_believed_from_a_trusted_proxy_alone(capfd, proxies, client):
    server = LiveServer(str(tiny_model_with_text()), "--access-log", *proxies)
    with server.http() as http:
        http.get("/health", headers={"X-Forwarded-For": "203.0.113.9"})
    assert server.stop() == 0
    assert capfd.readouterr().out.startswith(client)
