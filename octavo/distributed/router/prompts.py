"""Extracts the data that routing needs from a request: the model, the prompt's length and hashes of
its prefixes.

If the token ids are known, these are KV block hashes. Token ids are in the request, or a server
tokenizes the prompt if any server publishes KV events. Otherwise chunks of the text are hashed. A
wrong or missing hash affects only speed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from octavo.distributed.router.members import Members
from octavo.distributed.router.upstream import UpstreamLost
from octavo.distributed.transfer.messages import UNREADABLE
from octavo.engine.protocol.block_hashes import BlockHashing
from octavo.engine.protocol.kv_events import HASH_BYTES
from octavo.engine.routing.job import RoutingJob

MAX_TOKEN_IDS = 1 << 31
HASHED_BYTES = 256
"""Bytes of text per hash."""
BYTES_PER_TOKEN = 4
"""Assumed bytes of text per token."""
SESSION_BYTES = 1024
"""Bytes at the beginning of a prompt that identify a session."""
DEFAULT_BLOCK_SIZE = 16
"""Block size if no server reports it."""
TOKENIZE_TIMEOUT_S = 2.0
"""Timeout for tokenizing a prompt, in seconds, after which the text is hashed instead."""
LEADING_FIELDS = ("tools", "functions", "system", "instructions")
"""Fields that chat templates render before the messages."""
PROMPT_FIELDS = ("messages", "prompt", "input", "content", "message")
CHAT_FIELDS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
)
"""Chat fields that affect the tokens and that POST /tokenize accepts."""
OTHER_CHAT_FIELDS = ("tools", "functions", "chat_template", "add_special_tokens", "echo")
"""Chat fields that affect the tokens and that POST /tokenize does not accept."""

MODELS = "/v1/models/"
"""Path prefix of model cards."""

Fields = Mapping[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """The parts of a request that routing needs."""

    job: RoutingJob
    model: str | None = None
    response_id: str | None = None
    """Id of the stored response that the request continues; only one server has it."""


class PromptReader:
    """Parses the bodies of requests."""

    def __init__(self, members: Members, *, needs_hashes: bool) -> None:
        self._members = members
        self._reads_names = needs_hashes
        self._decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

    async def read(self, path: str, body: bytes, sender: bytes) -> ParsedRequest:
        """Parses a body; if it is not a JSON object, only its length is used. `sender` is the
        client's API key.
        """
        try:
            fields = self._decoder.decode(body)
        except UNREADABLE:
            return ParsedRequest(RoutingJob(len(body) // BYTES_PER_TOKEN))
        model = _text(fields, "model")
        job = await self._job(path, fields, model, sender)
        return ParsedRequest(job, model, _text(fields, "previous_response_id"))

    def get_model(self, path: str, body: bytes) -> str | None:
        """Returns the model named in the path or body; None if there is none."""
        if path.startswith(MODELS):
            return path.removeprefix(MODELS)
        try:
            fields = self._decoder.decode(body)
        except UNREADABLE:
            return None
        return _text(fields, "model") or _text(fields, "name")

    async def _job(self, path: str, fields: Fields, model: str | None, sender: bytes) -> RoutingJob:
        start = _get_raw_prompt(fields)
        session = _get_session(fields, start, sender)
        salt = _text(fields, "cache_salt") or ""
        if self._reads_names and not self._members.is_adapter(model):
            tokens = await self._tokens(path, fields)
            if tokens is not None:
                size = self._members.block_size or DEFAULT_BLOCK_SIZE
                names = await _in_thread_if_long(
                    len(tokens), lambda: BlockHashing(salt).digests(tokens, size)
                )
                short = [name[-HASH_BYTES:] for name in names]
                return RoutingJob(len(tokens), short, size, session)
        num_tokens = len(start) // BYTES_PER_TOKEN
        if not self._reads_names:
            return RoutingJob(num_tokens, session=session)
        root = f"{model or ''}\0{salt}".encode()
        names = await _in_thread_if_long(len(start) // 16, lambda: hash_text(root, start))
        return RoutingJob(num_tokens, names, HASHED_BYTES // BYTES_PER_TOKEN, session)

    async def _tokens(self, path: str, fields: Fields) -> list[int] | None:
        """Returns the token ids of the prompt, or of the first prompt if there are several; None if
        they are unknown.
        """
        prompt = fields.get("prompt")
        if prompt is not None and bytes(prompt)[:1] == b"[":
            return _ids(prompt)
        if not self._members.has_events:
            return None
        if path == "/v1/completions" and prompt is not None and "suffix" not in fields:
            request_fields = {name: fields[name] for name in ("model", "prompt") if name in fields}
        elif path == "/v1/chat/completions" and not any(n in fields for n in OTHER_CHAT_FIELDS):
            request_fields = {
                name: fields[name] for name in ("model", *CHAT_FIELDS) if name in fields
            }
        else:
            return None
        return await self._tokenize(msgspec.json.encode(request_fields), _text(fields, "model"))

    async def _tokenize(self, body: bytes, model: str | None) -> list[int] | None:
        """Tokenizes a prompt on the least busy server; returns None if that fails."""
        candidates = self._members.get_candidates(model, set())
        if not candidates:
            return None
        member = min(
            (self._members[index] for index in candidates), key=lambda each: each.num_running
        )
        try:
            async with asyncio.timeout(TOKENIZE_TIMEOUT_S):
                status, answer = await member.client.fetch("POST", "/tokenize", body)
            return _TOKENIZED.decode(answer).tokens if status == 200 else None
        except (UpstreamLost, TimeoutError, *UNREADABLE):
            return None


class _Tokenized(msgspec.Struct):
    tokens: list[int]


_TOKENIZED = msgspec.json.Decoder(_Tokenized)


def hash_text(root: bytes, text: bytes) -> list[bytes]:
    """Returns a hash for each complete chunk of a text, which depends on all text before it and on
    `root`.
    """
    parent = blake2b(root, digest_size=HASH_BYTES).digest()
    names = []
    for end in range(HASHED_BYTES, len(text) + 1, HASHED_BYTES):
        parent = blake2b(parent + text[end - HASHED_BYTES : end], digest_size=HASH_BYTES).digest()
        names.append(parent)
    return names


def _get_raw_prompt(fields: Fields) -> bytes:
    """Returns the prompt as raw JSON, with the fields in the order in which chat templates render
    them.
    """
    parts = [bytes(fields[name]) for name in (*LEADING_FIELDS, *PROMPT_FIELDS) if name in fields]
    return b"".join(parts)


def _get_session(fields: Fields, start: bytes, sender: bytes) -> bytes:
    """Returns the key that identifies a session."""
    key = _text(fields, "prompt_cache_key") or _text(fields, "session_id")
    if key is not None:
        return b"key\0" + sender + b"\0" + key.encode()
    user = (_text(fields, "user") or "").encode()
    return b"user\0" + sender + b"\0" + user + b"\0" + (b"" if user else start[:SESSION_BYTES])


def _text(fields: Fields, name: str) -> str | None:
    """Returns a field's text; None if it is not a string."""
    raw = fields.get(name)
    if raw is None or bytes(raw)[:1] != b'"':
        return None
    try:
        return msgspec.json.decode(raw, type=str)
    except UNREADABLE:
        return None


def _ids(prompt: msgspec.Raw) -> list[int] | None:
    """Returns the token ids of the prompt, or of the first prompt if there are several; None if the
    prompt is text.
    """
    token_ids: list[int] = []
    try:
        token_ids = msgspec.json.decode(prompt, type=list[int])
    except UNREADABLE:
        with contextlib.suppress(*UNREADABLE, IndexError):
            token_ids = msgspec.json.decode(prompt, type=list[list[int]])[0]
    return (
        token_ids if token_ids and min(token_ids) >= 0 and max(token_ids) < MAX_TOKEN_IDS else None
    )


async def _in_thread_if_long(num_tokens: int, work: Callable[[], list[bytes]]) -> list[bytes]:
    """Returns the result of `work`; runs it in a thread if it would delay other requests."""
    return await asyncio.to_thread(work) if num_tokens > 16384 else work()
