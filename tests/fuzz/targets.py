"""What is fuzzed: readers of files and messages that others write.

A target takes bytes. It may raise the errors in its `refusals`; anything else is a finding: another
exception, a crash of the process, or a run longer than MAX_S.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request

from octavo.api.errors import OctavoError
from octavo.api.structured_outputs import StructuredOutputs
from octavo.checkpoint.gguf.gguf_checkpoint import GgufCheckpoint
from octavo.checkpoint.ports import TokenizerSource
from octavo.checkpoint.safetensors import read_tensors
from octavo.distributed.transfer import messages
from octavo.server.http.forms import open_form
from octavo.text.chat_template import ChatTemplate
from octavo.text.grammar.lazy import GrammarSetup, LazyGrammars
from octavo.text.tokenizer import load_tokenizer
from tests.support.tiny_gguf import tiny_model, write_tiny_gguf
from tests.support.tiny_tokenizer import SPECIALS, save_tiny_tokenizer

MAX_S = 10.0
MAX_BYTES = 1 << 16
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]


@dataclass(frozen=True, slots=True)
class Target:
    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    """Valid inputs, from which others are made."""
    refusals: tuple[type[BaseException], ...] = (OctavoError,)


@cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="octavo-fuzz-"))
    (path / "grammars").mkdir()
    return path


# -- files -----------------------------------------------------------------------------------------


def gguf(data: bytes) -> None:
    path = folder() / "model.gguf"
    path.write_bytes(data)
    checkpoint = GgufCheckpoint(path)
    checkpoint.tokenizer_source()
    for name in list(checkpoint.names())[:8]:
        checkpoint.tensor(name)


def gguf_seeds() -> list[bytes]:
    path = folder() / "seed.gguf"
    write_tiny_gguf(path, "llama", tiny_model("llama"), tokens=96)
    return [path.read_bytes()]


def safetensors(data: bytes) -> None:
    path = folder() / "model.safetensors"
    path.write_bytes(data)
    read_tensors(path)


def safetensors_seeds() -> list[bytes]:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return [len(header).to_bytes(8, "little") + header + bytes(8)]


def tokenizer(data: bytes) -> None:
    path = folder() / "tokenizer.json"
    path.write_bytes(data)
    loaded = load_tokenizer(TokenizerSource(path, path))
    loaded.encode("Hello, <s> world\n")


def tokenizer_seeds() -> list[bytes]:
    save_tiny_tokenizer(folder())
    return [(folder() / "tokenizer.json").read_bytes()]


# -- texts -----------------------------------------------------------------------------------------


def template(data: bytes) -> None:
    ChatTemplate(data.decode(errors="replace"), {"bos_token": "<s>"}).render(TALK, True, {})


def template_seeds() -> list[bytes]:
    loop = (
        "{% for m in messages %}{{ m['role'] + ': ' + m.content|trim }}{% if loop.last %}."
        "{% endif %}{% endfor %}{{ raise_exception('x') if tools }}"
    )
    return [loop.encode(), b"{%- set ns = namespace(a=1) -%}{{ ns.a * 3 }}{{ '%s' % bos_token }}"]


@cache
def grammars() -> LazyGrammars:
    save_tiny_tokenizer(folder() / "grammars")
    path = folder() / "grammars" / "tokenizer.json"
    tokenizer = load_tokenizer(TokenizerSource(path.parent, path))
    return LazyGrammars(lambda: GrammarSetup(tokenizer, 300, (SPECIALS.index("<eos>"),)))


def schema(data: bytes) -> None:
    grammars().admit(StructuredOutputs(json=data.decode(errors="replace")))


def regex(data: bytes) -> None:
    grammars().admit(StructuredOutputs(regex=data.decode(errors="replace")))


def schema_seeds() -> list[bytes]:
    whole = {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "minimum": 1, "maximum": 9},
            "b": {"type": "array", "items": {"$ref": "#/$defs/c"}, "minItems": 1},
        },
        "required": ["a"],
        "additionalProperties": False,
        "$defs": {"c": {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"const": None}]}},
    }
    return [json.dumps(whole).encode()]


# -- messages --------------------------------------------------------------------------------------


def multipart(data: bytes) -> None:
    head, _, body = data.partition(b"\n")
    kind = b"multipart/form-data; boundary=" + head[:70].strip()
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind)]}
    parts = [body[at : at + 37] for at in range(0, len(body), 37)] or [b""]

    async def receive() -> dict[str, Any]:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def read() -> None:
        async with open_form(Request(scope, receive), max_bytes=1 << 12, timeout_s=1):
            pass

    asyncio.run(read())


def multipart_seeds() -> list[bytes]:
    file = (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc\r\n--b--\r\n'
    )
    field = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    return [b"b\n" + file, b"b\n" + field]


@cache
def message_decoder() -> msgspec.msgpack.Decoder[Any]:
    kinds = [each for each in vars(messages).values() if _is_tagged(each)]
    joined: Any = kinds[0]
    for kind in kinds[1:]:
        joined |= kind
    return msgspec.msgpack.Decoder(joined)


def _is_tagged(value: Any) -> bool:
    is_struct = isinstance(value, type) and issubclass(value, msgspec.Struct)
    return is_struct and value.__struct_config__.tag is not None


def transfer(data: bytes) -> None:
    message_decoder().decode(data)


def transfer_seeds() -> list[bytes]:
    return [
        msgspec.msgpack.encode(each)
        for each in (
            messages.Hello({"a": "b"}),
            messages.Prefill("r", [1, 2, 3]),
            messages.Ended("r", 2, "x"),
        )
    ]


TARGETS: dict[str, Target] = {
    "gguf": Target(gguf, gguf_seeds),
    "safetensors": Target(safetensors, safetensors_seeds),
    "tokenizer": Target(tokenizer, tokenizer_seeds),
    "template": Target(template, template_seeds),
    "schema": Target(schema, schema_seeds),
    "regex": Target(regex, lambda: [rb"^[a-z]{2,5}(\d|x)+$", rb"(?:a|b)*\p{L}?"]),
    "multipart": Target(multipart, multipart_seeds, (HTTPException, MultiPartException)),
    "transfer": Target(transfer, transfer_seeds, messages.UNREADABLE),
}
