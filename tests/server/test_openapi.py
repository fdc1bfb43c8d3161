"""The OpenAPI description of a live server is true: schemathesis asks every operation that it
lists, with what it allows and with what it does not.
"""

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.live_server import LiveServer
from tests.support.tiers import examples
from tests.support.tiny_tokenizer import tiny_model_with_text

NUM_EXAMPLES = examples(3)
"""Requests for each operation and mode."""
ENDLESS = "/v1/engine/events"
"""Path whose answer has no end; its own tests read it."""
FORM = "/v1/files"
"""Path that takes a form, whose values are texts whatever was meant: an empty list is no field."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server that keeps things, asked by a key that may not load models; its answers are
    short.
    """
    folder = tmp_path_factory.mktemp("state")
    server = LiveServer(
        str(tiny_model_with_text()),
        "--served-model-name=tiny",
        f"--state-dir={folder}",
        "--operator-key=root",
        "--max-model-len=64",
        "--max-n=4",
        "--max-prompts=4",
        "--max-jobs=50",
        key="a key",
    )
    yield server
    assert server.stop() == 0
    assert not any("Traceback" in line for line in server.lines), server.lines


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=server.headers)


def operations(schema):
    """Returns the described operations whose answers end."""
    found = [one.ok() for one in schema.get_all_operations()]
    return [one for one in found if one.path != ENDLESS]


@pytest.mark.timeout(600 * examples(1))
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(GenerationMode.POSITIVE, id="allowed"),
        pytest.param(GenerationMode.NEGATIVE, id="not allowed", marks=pytest.mark.slow),
    ],
)
def test_every_operation_answers_as_it_is_described(server, schema, mode):
    """No request ends in a 500, and each answer has a status, a type and a form that are listed."""

    def ask_often(operation):
        has_faults = mode == GenerationMode.NEGATIVE and operation.path != FORM
        checks = [*CHECKS, *([negative_data_rejection] if has_faults else [])]

        @hypothesis.settings(
            max_examples=NUM_EXAMPLES,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(operation.as_strategy(generation_mode=mode))
        def ask(case):
            answer = case.call(headers=server.headers, timeout=30)
            case.validate_response(answer, checks=checks)
            asked.add(operation.label)

        ask()

    asked = set()
    labels = set()
    for operation in operations(schema):
        labels.add(operation.label)
        try:
            ask_often(operation)
        except hypothesis.errors.Unsatisfiable:
            assert mode == GenerationMode.NEGATIVE, "an operation without parameters has no fault"
    assert len(labels) > 50
    if mode == GenerationMode.POSITIVE:
        assert asked == labels
    with server.http() as http:
        assert http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).is_success
