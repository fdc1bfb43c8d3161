"""Web pages of other origins change nothing on a server without keys."""

import asyncio

import httpx
import pytest

from octavo.server.app import create_app
from octavo.server.settings import ServerSettings
from octavo.server.state.slot import EngineSlot

HOST = "127.0.0.1:8000"
OWN = f"http://{HOST}"
OTHER = "https://example.org"
FOREIGN = [
    {"Origin": OTHER},
    {"Origin": "null"},
    {"Origin": "http://localhost.example.org:9000"},
    {"Origin": "http://127.0.0.1.example.org"},
    {"Origin": "http://127.0.0.1:9000@example.org"},
    {"Origin": "ftp://localhost"},
    {"Origin": OTHER, "Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "cross-site"},
]
LOCAL = [
    "http://localhost:3000",
    "http://localhost",
    "https://localhost:5173",
    "http://127.0.0.1:9000",
    "http://[::1]:8080",
]
OWN_OR_NONE = [
    {},
    {"Origin": OWN},
    {"Origin": OWN, "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none"},
]
FILE = {"files": {"purpose": (None, "batch"), "file": ("in.jsonl", b"{}")}}


def ask(headers, *, method="POST", path="/v1/files", settings=None, app=None, **content):
    """Asks an application without an engine or a store, where /v1/files is a 404."""
    app = app or create_app(EngineSlot(), settings or ServerSettings())

    async def send():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url=OWN) as client:
            return await client.request(method, path, headers=headers, **content)

    return asyncio.run(send())


def changing_routes(app):
    """Yields (method, path) of each route that may change something."""
    for path, methods in app.openapi()["paths"].items():
        for method in methods:
            if method.upper() not in ("GET", "HEAD"):
                yield method.upper(), path.replace("{", "").replace("}", "")


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_form_of_another_origin_is_refused(headers):
    """A page needs no leave to send a form, so the server looks at where it comes from."""
    answer = ask(headers, **FILE)
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["type"] == "PermissionDeniedError" and "--allow-origin" in error["message"]


@pytest.mark.parametrize("headers", OWN_OR_NONE, ids=str)
def test_the_own_page_and_clients_that_are_no_browser_are_served(headers):
    assert ask(headers, **FILE).status_code == 404


def test_every_route_that_changes_something_refuses_other_origins():
    app = create_app(EngineSlot())
    routes = list(changing_routes(app))
    assert len(routes) > 25
    for method, path in routes:
        answer = ask({"Origin": OTHER}, method=method, path=path, app=app)
        assert answer.status_code == 403, (method, path)


def test_reading_is_left_to_the_browsers_own_rule():
    assert ask({"Origin": OTHER}, method="GET", path="/version").status_code == 200


def test_an_allowed_origin_is_served_and_another_is_not():
    settings = ServerSettings(allow_origin=(OTHER,))
    cross = {"Sec-Fetch-Site": "cross-site"}
    served = ask({"Origin": OTHER} | cross, settings=settings, **FILE)
    assert served.status_code == 404 and served.headers["access-control-allow-origin"] == OTHER
    refused = ask({"Origin": "https://evil.example"} | cross, settings=settings, **FILE)
    assert refused.status_code == 403
    everyone = ServerSettings(allow_origin=("*",))
    assert ask({"Origin": "https://any.example"}, settings=everyone, **FILE).status_code == 404


def test_a_key_is_proof_enough_of_leave():
    """With keys a page of another origin has none to send, and an extension that has one may."""
    settings = ServerSettings(api_key=("one",))
    assert ask({"Origin": OTHER}, settings=settings, **FILE).status_code == 401
    with_key = {"Origin": OTHER, "Authorization": "Bearer one"}
    assert ask(with_key, settings=settings, **FILE).status_code == 404


@pytest.mark.parametrize("origin", LOCAL)
def test_pages_of_this_machine_are_served(origin):
    cross = {"Origin": origin, "Sec-Fetch-Site": "cross-site"}
    served = ask(cross, **FILE)
    assert served.status_code == 404
    assert served.headers["access-control-allow-origin"] == origin
    preflight = cross | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    answer = ask(preflight, method="OPTIONS", path="/v1/chat/completions")
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]


def test_a_preflight_of_another_origin_is_refused():
    preflight = {"Origin": OTHER, "Access-Control-Request-Method": "POST"}
    answer = ask(preflight, method="OPTIONS", path="/v1/chat/completions")
    assert answer.status_code == 400 and "access-control-allow-origin" not in answer.headers
    answer = ask({"Origin": OTHER}, method="GET", path="/version")
    assert "access-control-allow-origin" not in answer.headers


def test_pages_of_this_machine_may_be_refused():
    settings = ServerSettings(allow_local_origins=False)
    answer = ask({"Origin": LOCAL[0]}, settings=settings, **FILE)
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers


def test_pages_of_this_machine_need_the_key_as_others_do():
    settings = ServerSettings(api_key=("one",))
    headers = {"Origin": LOCAL[0]}
    assert ask(headers, settings=settings, **FILE).status_code == 401
    with_key = headers | {"Authorization": "Bearer one"}
    served = ask(with_key, settings=settings, **FILE)
    assert served.status_code == 404
    assert served.headers["access-control-allow-origin"] == LOCAL[0]
