"""An MCP server over streamable HTTP with two tools, in a thread of the test."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOOLS = [
    {
        "name": "look_up",
        "description": "Looks a city up.",
        "inputSchema": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
    {"name": "fail", "inputSchema": {"type": "object", "properties": {}}},
]


class McpTestServer:
    """Notes the messages and headers that it gets. `mode` changes its answers."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.mode = "json"
        """json, stream (event streams), huge, slow, redirect or broken."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.messages.append(json.loads(body))
                server.headers.append({k.lower(): v for k, v in self.headers.items()})
                server.answer(self, server.messages[-1])

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/mcp"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def calls(self) -> list[dict[str, Any]]:
        return [each["params"] for each in self.messages if each["method"] == "tools/call"]

    def answer(self, handler: BaseHTTPRequestHandler, message: dict[str, Any]) -> None:
        if "id" not in message:
            self._send(handler, 202, b"", "application/json")
            return
        result: dict[str, Any] = {"protocolVersion": "2025-06-18", "capabilities": {}}
        if message["method"] == "tools/list":
            result = {"tools": TOOLS[:1], "nextCursor": "2"}
            if message["params"].get("cursor"):
                result = {"tools": TOOLS[1:]}
        elif message["method"] == "tools/call":
            failed = message["params"]["name"] == "fail"
            result = {"content": [{"type": "text", "text": "sunny"}], "isError": failed}
            if self.mode == "redirect":
                self._send(handler, 307, b"", "application/json")
                return
            if self.mode == "slow":
                time.sleep(6)
            if self.mode == "huge":
                result["content"][0]["text"] = "x" * 100_000
        data = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
        if self.mode == "broken" and message["method"] == "tools/call":
            data = data[:20]
        if self.mode == "stream":
            note = b'event: message\ndata: {"jsonrpc": "2.0", "method": "notifications/x"}\n\n'
            self._send(handler, 200, note + b"data: " + data + b"\n\n", "text/event-stream")
        else:
            self._send(handler, 200, data, "application/json")

    def _send(self, handler: BaseHTTPRequestHandler, status: int, data: bytes, kind: str) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        handler.send_header("Content-Length", str(len(data)))
        handler.send_header("Mcp-Session-Id", "session-1")
        if status == 307:
            handler.send_header("Location", "http://127.0.0.1:1/elsewhere")
        handler.end_headers()
        handler.wfile.write(data)

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
