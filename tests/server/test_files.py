"""/v1/files, through OpenAI's client and over plain HTTP."""

import openai
import pytest

BOUNDARY = "xx-boundary-xx"


def upload(client, content=b'{"a": 1}\n', name="lines.jsonl", **fields):
    return client.files.create(file=(name, content), purpose="batch", **fields)


def send_form(keeper, body, boundary=BOUNDARY):
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    with keeper.http() as http:
        return http.post("/v1/files", content=body, headers=headers)


def part(name, value, filename=None):
    more = f'; filename="{filename}"' if filename else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'
    return head.encode() + value + b"\r\n"


END = f"--{BOUNDARY}--\r\n".encode()


def test_a_file_comes_back_as_it_was_sent(kept):
    content = bytes(range(256)) * 2000
    made = upload(kept, content)
    assert (made.object, made.bytes, made.filename) == ("file", len(content), "lines.jsonl")
    assert (made.purpose, made.status) == ("batch", "processed")
    assert kept.files.retrieve(made.id) == made
    assert kept.files.content(made.id).content == content


def test_files_are_listed_in_pages_newest_first(kept):
    made = [upload(kept, name=f"{index}.jsonl").id for index in range(5)]
    assert [file.id for file in kept.files.list(limit=2)][:5] == made[::-1]
    page = kept.files.list(limit=2, after=made[3])
    assert [file.id for file in page.data] == [made[2], made[1]] and page.has_more
    oldest_first = [file.id for file in kept.files.list(order="asc", limit=100)]
    assert oldest_first[-5:] == made
    assert [file.id for file in kept.files.list(purpose="batch_output", limit=100)] == [
        file.id for file in kept.files.list(limit=100) if file.purpose == "batch_output"
    ]


def test_a_page_behind_a_file_that_is_gone_is_refused(kept):
    """An empty page would tell a client that there are no more."""
    gone = upload(kept)
    kept.files.delete(gone.id)
    for after in (gone.id, "file-none"):
        with pytest.raises(openai.BadRequestError, match="after: no file"):
            kept.files.list(after=after)
    with pytest.raises(openai.BadRequestError, match="after: no batch"):
        kept.batches.list(after="batch_none")


def test_a_deleted_file_is_gone(kept):
    made = upload(kept)
    assert kept.files.delete(made.id).deleted
    for ask in (kept.files.retrieve, kept.files.content, kept.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)


def test_a_file_answers_to_its_key_alone(kept, other):
    made = upload(kept)
    for ask in (other.files.retrieve, other.files.content, other.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(made.id)
    assert made.id not in [file.id for file in other.files.list()]
    with pytest.raises(openai.BadRequestError, match="no file"):
        other.batches.create(
            input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
        )


def test_a_file_that_is_too_large_leaves_nothing(keeper, kept, tmp_path):
    before = len(list(kept.files.list()))
    with pytest.raises(openai.APIStatusError, match="at most 1048576 bytes") as caught:
        upload(kept, b"x" * (1 << 20) + b"x")
    assert caught.value.status_code == 413
    upload(kept, b"x" * (1 << 20))
    assert len(list(kept.files.list())) == before + 1


def test_an_age_limit_is_kept_within_its_range(kept):
    made = upload(kept, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at - made.created_at == 3600
    with pytest.raises(openai.BadRequestError, match="3600 to"):
        upload(kept, expires_after={"anchor": "created_at", "seconds": 60})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (part("purpose", b"batch") + END, "file: field required"),
        (part("file", b"x", "a") + END, "purpose: got None"),
        (
            part("purpose", b"assistants") + part("file", b"x", "a") + END,
            "purpose: got 'assistants",
        ),
        (part("purpose", b"batch") + part("file", b"x", "a"), "file: field required"),
        (part("purpose", b"batch") + part("more", b"x", "a") + END, "file: field required"),
        (part("purpose", b"b" * 2000) + END, "exceeded maximum size of 1KB"),
        (part("file", b"x", "a") * 2 + part("purpose", b"batch") + END, "number of files is 1"),
        (part("a", b"x") * 17 + END, "number of fields is 15"),
        (b"--nothing", "Invalid multipart data"),
        (b"", "purpose: got None"),
        (part("n" * 9000, b"x") + END, "Invalid multipart data"),
    ],
)
def test_a_form_that_is_not_right_is_refused(keeper, body, message):
    response = send_form(keeper, body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_a_body_that_is_no_form_is_refused(keeper):
    with keeper.http() as http:
        assert http.post("/v1/files", json={"file": "x"}).status_code == 415
    assert send_form(keeper, b"x", boundary="b" * 80).status_code == 400
