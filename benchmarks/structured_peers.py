"""Answers of a given form on several servers: how many meet it, tokens a second, first tokens.

    python benchmarks/structured_peers.py --rounds 3 --clients 1 --clients 8 \\
        --server 'octavo|Q4_1|smollm2|{}' \\
        --server 'xllamacpp|Q4_1|GGUF_FILE|{}|PYTHON_THAT_HAS_IT' \\
        --server 'vllm|bf16|MODEL_DIRECTORY|{}|PYTHON_OF_ITS_OWN'

engines/servers.py says what a server is. The same chats go to each in turns: without a form, with a
JSON schema of their own each, as required calls of a function whose parameters are that schema, and
with a grammar of the server's kind for the same object (llama.cpp: GBNF; the others: a regular
expression). An answer counts as whole where the server says that it ended by itself or with a call,
and as valid where jsonschema agrees; one that is cut by its length is neither right nor wrong.

Prints one JSON line for each server, case, temperature and number of clients, the medians of
rounds: answers, whole, valid, refused, tokens/s of all, milliseconds to the first token (median).
Nothing else should run on the machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema
from compare import machine
from engines.servers import Needs, Server

CASES = ("none", "schema", "tool", "grammar")
CONTEXT = 1024
TIMEOUT_S = 120.0
NAMES = ("title", "kind", "count", "tags", "owner", "price", "state", "notes")


def schema_of(number: int) -> dict[str, Any]:
    """Returns a schema with names of its own, whose answers end soon."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 24},
        {"enum": ["new", "used", f"kind {number}"]},
        {"type": "integer", "minimum": 0, "maximum": 1000 + number},
        {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        {"type": "boolean"},
    ]
    names = [f"{NAMES[(number + at) % len(NAMES)]}_{number}" for at in range(len(kinds))]
    return {
        "type": "object",
        "properties": dict(zip(names, kinds, strict=True)),
        "required": names,
        "additionalProperties": False,
    }


PAIR = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^[A-Za-z]{1,12}$"}, "year": {}},
    "required": ["city", "year"],
    "additionalProperties": False,
}
"""Schema of what the grammars below allow."""
PAIR["properties"]["year"] = {"type": "integer", "minimum": 1000, "maximum": 2999}
GBNF = r"""root ::= "{\"city\": \"" [A-Za-z]{1,12} "\", \"year\": " [12] [0-9]{3} "}" """
REGEX = r'\{"city": "[A-Za-z]{1,12}", "year": [12][0-9]{3}\}'


@dataclass
class Load:
    """One case on one server, with what was found in the rounds."""

    case: str
    temperature: float
    clients: int
    rows: list[dict[str, float]] = field(default_factory=list)

    def body(self, number: int, server: str) -> dict[str, Any]:
        """Returns a request."""
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": f"Describe thing number {number} as JSON."}],
            "max_tokens": 160,
            "temperature": self.temperature,
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.case == "schema":
            form = {"name": "thing", "schema": schema_of(number), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        if self.case == "tool":
            function = {"name": "store", "parameters": schema_of(number), "strict": True}
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"], body["parallel_tool_calls"] = "required", False
        if self.case == "grammar" and "llama" in server:
            body["grammar"] = GBNF
        elif self.case == "grammar":
            body["structured_outputs"] = {"regex": REGEX}
        return body

    def is_valid(self, answer: "Answer", number: int) -> bool:
        """Returns whether a whole answer has its form."""
        schema = PAIR if self.case == "grammar" else schema_of(number)
        text = answer.arguments if self.case == "tool" else answer.text
        try:
            jsonschema.validate(json.loads(text), schema)
        except (ValueError, jsonschema.ValidationError):
            return False
        return self.case != "tool" or answer.name == "store"


@dataclass
class Answer:
    """Answer to one request, as far as it has come."""

    text: str = ""
    name: str = ""
    arguments: str = ""
    finish_reason: str | None = None
    num_tokens: int = 0
    first_s: float | None = None
    refused: str = ""

    def take(self, chunk: dict[str, Any], elapsed_s: float) -> None:
        """Adds a chunk of the stream."""
        if chunk.get("usage"):
            self.num_tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta", {})
            self.text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                self.name += call["function"].get("name") or ""
                self.arguments += call["function"].get("arguments") or ""
            if self.first_s is None and (self.text or self.name):
                self.first_s = elapsed_s
            self.finish_reason = choice.get("finish_reason") or self.finish_reason

    @property
    def is_whole(self) -> bool:
        return self.finish_reason in ("stop", "tool_calls")


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Returns the answer to a request, as its stream brings it."""
    answer, began = Answer(), time.perf_counter()
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            answer.refused = (await response.aread()).decode()[:200]
            return answer
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                answer.take(json.loads(line[6:]), time.perf_counter() - began)
    return answer


async def measure(url: str, model: str, server: str, load: Load, first: int, num: int) -> None:
    """Sends `num` requests, as many at once as the load has clients, and notes what came."""
    turn = asyncio.Semaphore(load.clients)

    async def one(client: httpx.AsyncClient, number: int) -> Answer:
        async with turn:
            return await ask(client, {"model": model} | load.body(number, server))

    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        began = time.perf_counter()
        numbers = range(first, first + num)
        answers = await asyncio.gather(*(one(client, number) for number in numbers))
        elapsed_s = time.perf_counter() - began
    for refused in {answer.refused for answer in answers} - {""}:
        print(json.dumps({"server": server, "case": load.case, "refused": refused}), flush=True)
    whole = [(n, answer) for n, answer in zip(numbers, answers, strict=True) if answer.is_whole]
    times = [answer.first_s for answer in answers if answer.first_s is not None]
    load.rows.append(
        {
            "answers": num,
            "whole": len(whole),
            "valid": sum(load.is_valid(answer, number) for number, answer in whole),
            "refused": sum(bool(answer.refused) for answer in answers),
            "tokens_per_s": sum(answer.num_tokens for answer in answers) / elapsed_s,
            "first_token_ms": 1e3 * statistics.median(times) if times else 0.0,
        }
    )


def loads_of(args: argparse.Namespace) -> Iterator[Load]:
    for clients in args.clients or [1, 8]:
        for temperature in (0.0, 1.0):
            for case in CASES:
                yield Load(case, temperature, clients)


async def served_name(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        return str((await client.get("/v1/models")).json()["data"][0]["id"])


async def round_on(url: str, server: str, loads: list[Load], args: argparse.Namespace) -> None:
    """Runs every load once; a first request of each case warms the server up."""
    model = await served_name(url)
    for load in loads:
        warm = Load(load.case, load.temperature, 1)
        await measure(url, model, server, warm, 10_000, 1)
    for load in loads:
        await measure(url, model, server, load, 1 + 100 * len(load.rows), args.requests)


def summary(load: Load) -> dict[str, float]:
    """Returns sums of counts and medians of figures over the rounds."""
    counts = ("answers", "whole", "valid", "refused")
    found = {name: sum(row[name] for row in load.rows) for name in counts}
    for name in ("tokens_per_s", "first_token_ms"):
        found[name] = round(statistics.median(row[name] for row in load.rows), 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", type=Server.parse, action="append", required=True)
    parser.add_argument("--clients", type=int, action="append", help="default: 1 and 8")
    parser.add_argument("--requests", type=int, default=16, help="of each case in a round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(json.dumps({"machine": machine(), "load": os.getloadavg()}), flush=True)
    found = [(server, list(loads_of(args))) for server in args.server]
    for _ in range(args.rounds):
        for server, loads in found:
            needs = Needs(max(load.clients for load in loads), CONTEXT)
            with server.running(needs) as url:
                asyncio.run(round_on(url, server.name, loads, args))
    for server, loads in found:
        for load in loads:
            case = {"case": load.case, "temperature": load.temperature, "clients": load.clients}
            who = {"engine": server.name, "format": server.format}
            print(json.dumps(who | case | summary(load)), flush=True)


if __name__ == "__main__":
    main()
