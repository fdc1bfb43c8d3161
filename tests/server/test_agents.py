"""Requests as coding agents and chat pages send them, to models with four kinds of chat templates:
each is answered, and the header names what is ignored.

`tests/data/agent_requests.jsonl` has one request a line: a name, a path, a body without its model,
and the paths that are ignored. A name OWNER/REPO#NUMBER is that of a report about another server.
"""

import json
import random
import shutil
from pathlib import Path

import pytest

from octavo.server.anthropic.bodies import CountTokensBody, MessagesBody
from octavo.server.cohere.bodies import CohereChatBody
from octavo.server.http.body import Body
from octavo.server.http.body_part import BodyPart
from octavo.server.ignored import join_path, quote_label
from octavo.server.notes import build_note
from octavo.server.ollama.bodies import OllamaChatBody
from octavo.server.openai.bodies import ChatBody, CompletionBody
from octavo.server.openai.embeddings import EmbeddingBody
from octavo.server.openai.responses.body import ResponseBody
from octavo.server.routes.tokenize import TokenizeBody
from tests.support.live_server import LiveServer
from tests.support.role_templates import TEMPLATES
from tests.support.tiny_tokenizer import tiny_model_with_text

CASES = [
    json.loads(line)
    for line in Path("tests/data/agent_requests.jsonl").read_text("utf-8").splitlines()
]
CONTEXT_TOKENS = 16384
BODIES: dict[str, type[Body]] = {
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v2/chat": CohereChatBody,
    "/api/chat": OllamaChatBody,
    "/tokenize": TokenizeBody,
}
MAX_TOKENS = 8
CHAT = "/v1/chat/completions"
SEEDS = 40


def save_model(folder, template):
    """Saves the tiny model with a template, and with room for an agent's prompt."""
    shutil.copytree(tiny_model_with_text(), folder)
    for file, fields in (
        ("config.json", {"max_position_embeddings": CONTEXT_TOKENS}),
        ("tokenizer_config.json", {"chat_template": template}),
    ):
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.fixture(scope="module")
def agents_server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    models = [f"{name}={save_model(folder / name, text)}" for name, text in TEMPLATES.items()]
    limits = (
        "--max-num-seqs=4",
        f"--max-model-len={CONTEXT_TOKENS}",
        f'--override-generation-config={{"max_new_tokens": {MAX_TOKENS}}}',
    )
    server = LiveServer(*models, *limits)
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.lines)


@pytest.fixture
def agents(agents_server):
    with agents_server.http() as client:
        yield client


def named(header):
    """Returns the paths of a header's value; [] without one."""
    return sorted(header.split(", ")) if header else []


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_an_agents_request_is_answered(agents, case, template):
    for stream in (False, True):
        body = case["body"] | {"model": template}
        if not case["path"].endswith("count_tokens"):
            body |= {"stream": stream}
        body = {k: v for k, v in body.items() if k != "stream_options" or stream}
        if (body.get("max_tokens") or 0) > MAX_TOKENS:
            body["max_tokens"] = MAX_TOKENS
        answer = agents.post(case["path"], json=body)
        assert answer.status_code == 200, answer.text
        assert '"error"' not in answer.text.replace('"error":null', ""), answer.text
        assert named(answer.headers.get("x-octavo-ignored")) == case["ignored"]
        assert '"thinking"' not in answer.text, "no model here thinks"


# -- random extra fields ---------------------------------------------------------------------------


def places(part, data, path=""):
    """Yields (object, its path) for all objects of a body whose fields the server knows."""
    yield data, path
    for name, info in type(part).model_fields.items():
        key = info.alias or name
        value, where = getattr(part, name), join_path(path, key)
        if isinstance(value, BodyPart):
            yield from places(value, data[key], where)
        elif isinstance(value, list):
            for inner, given in zip(value, data[key], strict=False):
                if isinstance(inner, BodyPart):
                    yield from places(inner, given, f"{where}[]")


def random_value(rng, depth=3):
    kind = rng.choice(["number", "text", "flag", "list", "object"] if depth else ["text"])
    if kind == "list":
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 2))]
    if kind == "object":
        return {f"k{i}": random_value(rng, depth - 1) for i in range(rng.randint(0, 2))}
    return {"number": rng.uniform(-9, 9), "text": rng.choice(["", "é", "x, y"]), "flag": True}[kind]


FUZZED = [
    *(case for case in CASES if case["path"] in BODIES),
    {
        "name": "tokenize",
        "path": "/tokenize",
        "body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
        "ignored": [],
    },
]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_extra_fields_are_named_exactly(agents, seed):
    rng = random.Random(seed)
    for case in rng.sample(FUZZED, 6):
        body = json.loads(json.dumps(case["body"])) | {"model": "free"}
        parsed = BODIES[case["path"]].model_validate_json(json.dumps(body))
        found = list(places(parsed, body))
        expected = set(case["ignored"])
        for index in range(rng.randint(1, 5)):
            data, path = rng.choice(found)
            name = rng.choice([f"x_{index}", f"x-{index}", f"x {index}", f"ü{index}", f"[{index}]"])
            data[name] = random_value(rng)
            expected.add(join_path(path, name))
        answer = agents.post(case["path"], json=body)
        assert answer.status_code == 200, (case["name"], answer.text)
        assert named(answer.headers["x-octavo-ignored"]) == sorted(expected), case["name"]


def test_bodies_of_embeddings_are_read_the_same_way():
    body = EmbeddingBody.model_validate({"input": "a", "task": "x", "extra": {"deep": 1}})
    body.note_unknown_fields(body.ignored)
    assert body.ignored.paths == ["task", "extra"]


# -- what reaches the prompt -----------------------------------------------------------------------

RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "no such file"}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}


def test_a_failed_tools_result_says_so_in_the_prompt(agents):
    def count(**fields):
        talk = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [RESULT | fields]},
        ]
        body = {"model": "free", "messages": talk}
        return agents.post("/v1/messages/count_tokens", json=body).json()["input_tokens"]

    assert count(is_error=True) - count() == len("Error:\n")
    told = {"content": "Error: no such file", "is_error": True}
    assert count(**told) == count(content="Error: no such file"), "it says so already"


def test_what_is_dropped_leaves_the_rest_of_the_prompt_as_it_is(agents):
    """The prompt of a body is that of the same body without its unknown parts."""
    plain = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    odd = {"role": "user", "content": [{"type": "sparkle"}, {"type": "text", "text": "a", "z": 1}]}
    texts = [
        agents.post(
            "/v1/chat/completions",
            json={
                "model": "strict",
                "messages": [message],
                "max_tokens": 1,
                "return_prompt_text": True,
                **fields,
            },
        ).json()["prompt_text"]
        for message, fields in ((plain, {}), (odd, {"tools": [{"type": "web_search"}]}))
    ]
    assert texts[0] == texts[1] and texts[0].endswith("[user]a[assistant]")


def test_pages_that_say_what_the_engine_is_given_fit_roles_too(agents):
    talk = [{"role": role, "content": role[0]} for role in ("system", "developer", "user")]
    body = {"model": "no-system", "messages": talk}
    answer = agents.post("/apply-template", json=body)
    assert answer.json()["prompt"] == "[user]s\n\nd\n\nu[assistant]"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": [{"type": "compaction"}]}, "input"),
        ("/v1/responses", {"input": "a", "conversation": "conv_1"}, "conversation"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": "xml"}}}, "text.format"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0]",
        ),
        ("/v1/responses", {"input": "a", "tools": [{"name": "f"}]}, "tools[0].type"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tool_choice": "required"},
            "tool_choice",
        ),
    ],
)
def test_what_cannot_be_left_out_is_still_a_400(agents, path, body, param):
    answer = agents.post(path, json=body | {"model": "free"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


PDF = {"type": "base64", "media_type": "application/pdf", "data": "AA"}
PNG = {"type": "base64", "media_type": "image/png", "data": "AA"}


def talk_of(block):
    talk = [{"role": "user", "content": [block]}]
    return {"model": "free", "max_tokens": 1, "messages": talk}


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "source": PDF},
        {"type": "image", "source": PNG},
    ],
)
def test_what_a_text_model_cannot_read_is_an_error(agents, block):
    answer = agents.post("/v1/messages", json=talk_of(block))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_an_image_in_a_tools_result_ends_no_session(agents):
    result = RESULT | {"content": [{"type": "image", "source": PNG}]}
    answer = agents.post("/v1/messages", json=talk_of(result))
    assert answer.status_code == 200, answer.text


DOCUMENT = {"type": "document", "source": PDF, "title": "a.pdf"}
FILE = {"type": "file", "file": {"file_id": "f1"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
SEARCHED = {
    "type": "web_search_tool_result",
    "tool_use_id": "s1",
    "content": [
        {"type": "web_search_result", "title": "Oslo", "url": "http://o", "page_age": "1d"}
    ],
}
SHELL = {
    "type": "local_shell_call",
    "call_id": "s1",
    "status": "completed",
    "action": {"type": "exec", "command": ["ls", "-l"], "env": {"A": "b"}},
}
UNREADABLE_PARTS = [
    # path, message or item of the history, what the prompt tells of it
    ("/v1/messages", {"role": "user", "content": [RESULT | {"content": [DOCUMENT]}]}, "'a.pdf'"),
    ("/v1/messages", {"role": "user", "content": [DOCUMENT]}, "a part of type document 'a.pdf'"),
    ("/v1/messages", {"role": "assistant", "content": [{"type": "image", "source": PNG}]}, "image"),
    ("/v1/messages", {"role": "assistant", "content": [SEARCHED]}, "Oslo; http://o]"),
    (CHAT, {"role": "user", "content": [FILE]}, "a part of type file"),
    (CHAT, {"role": "assistant", "content": [FILE]}, "a part of type file"),
    (CHAT, {"role": "tool", "tool_call_id": "t1", "content": [FILE]}, "a part of type file"),
    ("/v1/responses", SHELL, "[local_shell_call: ls; -l]"),
    ("/v1/responses", SHELL | {"type": "shell_call_output", "output": "no"}, "no]"),
    ("/v1/responses", {"role": "user", "content": [{"type": "input_file"}]}, "input_file"),
    (
        "/v1/responses",
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_file"}]},
        "input_file",
    ),
]


@pytest.mark.parametrize(("path", "part", "told"), UNREADABLE_PARTS)
def test_a_note_stands_for_what_cannot_be_read_in_a_history(agents, path, part, told):
    """The request is answered, the part is named in the header, and the prompt tells of it."""
    talk = [{"role": "user", "content": "a"}, part, {"role": "user", "content": "b"}]
    field = "input" if path == "/v1/responses" else "messages"
    body = {"model": "free", field: talk}
    body |= {} if field == "input" else {"max_tokens": 1}
    body |= {"return_prompt_text": True} if path == CHAT else {}
    answer = agents.post(path, json=body | ({"max_output_tokens": 1} if field == "input" else {}))
    assert answer.status_code == 200, answer.text
    assert "[type=" in answer.headers["x-octavo-ignored"]
    if path == CHAT:
        assert told in answer.json()["prompt_text"]
    plain = [*talk[:1], {"role": "user", "content": "x"}, *talk[2:]]
    count = "/v1/messages/count_tokens" if path == "/v1/messages" else f"{path}/input_tokens"
    if path != CHAT:
        with_note, without = (
            agents.post(count, json={"model": "free", field: one}).json()["input_tokens"]
            for one in (talk, plain)
        )
        assert with_note - without > len(told)


@pytest.mark.parametrize(("part", "told"), [(FILE, "type 'file'"), (SOUND, "got audio")])
def test_what_is_asked_about_must_be_readable(agents, part, told):
    body = {"model": "free", "messages": [{"role": "user", "content": [part]}]}
    answer = agents.post(CHAT, json=body)
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]


def test_a_document_in_base64_text_is_read(agents):
    source = {"type": "base64", "media_type": "text/plain", "data": "aGVsbG8="}
    talk = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    texts = [
        agents.post("/v1/messages/count_tokens", json={"model": "free", "messages": one}).json()
        for one in (talk, [{"role": "user", "content": "hello"}])
    ]
    assert texts[0] == texts[1]


def test_notes_tell_texts_and_no_data():
    part = {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "container_id": "c",
        "code": "print(1)",
        "outputs": [{"type": "logs", "logs": "1"}, {"type": "image", "image_url": "data:AAAA"}],
    }
    assert build_note(part) == "[code_interpreter_call: print(1); 1]"
    assert build_note({"type": "container_upload", "file_id": "f"}) == "[container_upload]"
    assert len(build_note({"type": "x", "text": "y" * 9999})) < 4100


ODD_NAMES = ["server/tool", "My Tool", "a.b:c", "\u67e5\u8be2", 'say "hi"', "<tool_call>", "a\nb"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_tool_may_have_any_name(agents, name, stream):
    """The model may see another name; the client sees its own, in answers and in the header."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "name": name, "content": "rain"},
    ]
    parameters = {"properties": {"a": {"type": "boolean", "not": {}}}}
    tools = [
        {"type": "function", "function": {"name": one, "parameters": parameters}}
        for one in (name, "say_hi")
    ]
    choice = {"type": "function", "function": {"name": name}}
    body = {"model": "free", "tools": tools, "messages": messages, "tool_choice": choice}
    answer = agents.post(CHAT, json=body | {"max_tokens": 200, "stream": stream})
    assert answer.status_code == 200, answer.text
    label = f"tools[{quote_label(name)}].parameters.properties.a.not"
    assert label in answer.headers["x-octavo-ignored"]
    if stream:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        calls = [found for delta in deltas for found in delta.get("tool_calls", ())]
        names = [found["function"]["name"] for found in calls if "name" in found["function"]]
    else:
        calls = answer.json()["choices"][0]["message"]["tool_calls"]
        names = [found["function"]["name"] for found in calls]
    assert names[0] == name


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_the_old_api_are_called_in_its_form(agents, stream):
    """As in the API of 2023: one function_call in the message, and its name first in a stream."""
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "function_call": {"name": "g", "arguments": "{}"}},
        {"role": "function", "name": "g", "content": "rain"},
    ]
    body = {"functions": [{"name": "look_up", "parameters": CITY}], "messages": history}
    named = {"function_call": {"name": "look_up"}, "max_tokens": 80, "stream": stream}
    body |= named | {"model": "free", "return_prompt_text": True}
    answer = agents.post(CHAT, json=body)
    assert answer.status_code == 200 and "x-octavo-ignored" not in answer.headers, answer.text
    if not stream:
        assert "rain" in answer.json()["prompt_text"] and "look_up" in answer.json()["prompt_text"]
        (choice,) = answer.json()["choices"]
        called = choice["message"]["function_call"]
        assert choice["message"]["content"] is None and "tool_calls" not in choice["message"]
    else:
        chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line[6:7] == "{"]
        choice = chunks[-1]["choices"][0]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        parts = [delta["function_call"] for delta in deltas if "function_call" in delta]
        assert parts[0] == {"name": "look_up", "arguments": ""}
        called = parts[0] | {"arguments": "".join(part["arguments"] for part in parts)}
    assert called["name"] == "look_up" and choice["finish_reason"] in ("function_call", "length")
    if choice["finish_reason"] == "function_call":
        assert json.loads(called["arguments"]).keys() == {"city"}
