"""Images from outside: what is read, and what is refused before it costs anything."""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import sys
import threading
import zlib
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import PIL.Image
import pytest

from octavo.api.errors import InvalidRequest, UnsupportedModel
from octavo.media.image_tokens import ImageTokens
from octavo.media.limits import ImageLimits
from octavo.media.reader import PillowReader
from octavo.media.rules import image_rules
from tests.support.tiny_images import picture

LIMITS = ImageLimits(max_images=3, max_bytes=100_000, max_pixels=100_000)
FACTOR = 8
TOKENS = ImageTokens(token_id=300, multiple=FACTOR)


def reader(limits: ImageLimits = LIMITS, *, side: int | None = None) -> PillowReader:
    rules = image_rules({}, side=side, multiple=FACTOR, max_tokens=100)
    return PillowReader(rules, limits, TOKENS)


def file_of(image: PIL.Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png_of_size(width: int, height: int) -> bytes:
    """Returns a PNG whose header promises pixels that the file does not have."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + body


GOOD = file_of(picture(0))


def refusal(source: object, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequest) as error:
        reader(limits).read([source])
    assert error.value.hint
    return error.value.message


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (data_url(GOOD)[:-400], "the file is damaged or ends too early"),
        (data_url(GOOD[:60]), "the file is damaged or ends too early"),
        (data_url(GOOD)[:-3] + "!!!", "its base64 cannot be read"),
        ("data:image/png;base64,", "got no bytes"),
        ("data:image/png,abc", "got the data URL"),
        (data_url(b"GIF? no image at all"), "the bytes are not a supported image"),
        (
            data_url(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
            "the bytes are not a supported image",
        ),
        (data_url(png_of_size(0, 0)), "the bytes are not a supported image"),
        (data_url(png_of_size(5, 0)), "the bytes are not a supported image"),
        (data_url(png_of_size(1 << 30, 1 << 30)), "it has too many pixels"),
        (data_url(png_of_size(100_000, 10)), "pixels, expected 1 to 65,536 a side"),
        (data_url(png_of_size(10_000, 10_000)), "10,000 pixels, expected at most 100,000 in all"),
        (data_url(b"x" * 100_001), "got a file of 100,00"),
        ("http://127.0.0.1:9/cat.png", "fetching URLs is disabled"),
        ("https://example.org/cat.png", "fetching URLs is disabled"),
        ("ftp://example.org/cat.png", "expected data URLs"),
        ("file:///etc/passwd", "expected data URLs"),
        ("/etc/passwd", "expected data URLs"),
        (data_url(file_of(picture(0, 900, 4))), "a side at most 200 times the other"),
        (np.zeros((4, 4), np.uint8), "got an array (4, 4) of uint8"),
        (np.zeros((0, 4, 3), np.uint8), "got 4 x 0 pixels"),
        (17, "got int, expected"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "source",
)
def test_what_is_no_image_is_refused_with_a_hint(source, said):
    assert said in refusal(source)


def test_a_small_file_that_would_fill_memory_is_refused_by_its_size():
    bomb = file_of(PIL.Image.new("L", (8_000, 8_000)))
    limits = ImageLimits(max_images=1, max_bytes=10 << 20, max_pixels=50_000_000)
    assert "8,000 x 8,000 pixels, expected at most 50,000,000 in all" in refusal(bomb, limits)


def test_more_images_than_allowed_are_refused():
    with pytest.raises(InvalidRequest, match="got 4 images, expected at most 3 per prompt"):
        reader().read([GOOD] * 4)


def test_files_are_read_within_their_folder_only(tmp_path):
    folder, outside = tmp_path / "media", tmp_path / "secret.png"
    folder.mkdir()
    (folder / "cat.png").write_bytes(GOOD)
    outside.write_bytes(GOOD)
    (folder / "link.png").symlink_to(outside)
    (folder / "sub").mkdir()
    limits = ImageLimits(3, 100_000, 100_000, folder)
    names = ["cat.png", "file:///cat.png", "file:cat.png", "sub/../cat.png"]
    names += [str(folder / "cat.png"), f"file://{folder}/cat.png"]
    for name in names:
        (image,) = reader(limits).read([name])
        assert image.token_ids
    for name in ("../secret.png", "link.png", str(outside), "sub", "", "nothing.png", "a\0b"):
        assert "there is no file" in refusal(name, limits)


def test_a_program_may_name_any_path(tmp_path):
    file = tmp_path / "cat.png"
    file.write_bytes(GOOD)
    (by_path,), (by_bytes,) = reader().read([file]), reader().read([GOOD])
    assert by_path == by_bytes
    assert not Path(tmp_path / "none").exists()


class Pictures(BaseHTTPRequestHandler):
    """Serves an image, redirects and a file without an end."""

    REDIRECTS: ClassVar = {
        "/moved": "/cat.png",
        "/local": "file:///etc/hostname",
        "/round": "/round",
    }

    def do_GET(self) -> None:
        if self.path in self.REDIRECTS:
            self.send_response(302)
            self.send_header("Location", self.REDIRECTS[self.path])
            self.end_headers()
        elif self.path == "/cat.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(GOOD)
        elif self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                while True:
                    self.wfile.write(bytes(1 << 16))
        elif self.path == "/empty":
            self.send_response(200)
            self.end_headers()
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pictures)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("path", ["/cat.png", "/moved"])
def test_an_address_is_fetched_where_that_is_allowed(site, path):
    (fetched,) = reader(replace(LIMITS, fetches_urls=True)).read([site + path])
    (given,) = reader().read([GOOD])
    assert fetched == given


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/none", "404"),
        ("/local", "cannot be fetched"),
        ("/round", "cannot be fetched"),
        ("/endless", "expected at most 100,000"),
        ("/empty", "got no bytes"),
    ],
)
def test_an_address_without_an_image_is_refused(site, path, message):
    assert message in refusal(site + path, replace(LIMITS, fetches_urls=True))


@pytest.mark.parametrize("address", ["http://127.0.0.1:1/cat.png", "http://[", "http:///cat.png"])
def test_an_address_that_does_not_answer_is_refused(address):
    assert "cannot be fetched" in refusal(address, replace(LIMITS, fetches_urls=True))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_each_format_is_read(kind):
    (image,) = reader().read([data_url(file_of(picture(0, 64, 40), kind), f"image/{kind.lower()}")])
    (pixels,), (item,) = image.pixels, image.media
    assert len(pixels.data) == 3 * pixels.height * pixels.width
    assert (pixels.height, pixels.width) == (item.grid[0] * FACTOR, item.grid[1] * FACTOR)


def test_an_image_is_turned_as_its_camera_was_held():
    image = picture(0, 64, 40)
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    (turned,) = reader().read([file.getvalue()])
    assert turned.pixels[0].height > turned.pixels[0].width


def test_the_digest_is_of_the_pixels_that_are_read():
    (one,), (same,) = reader().read([GOOD]), reader().read([data_url(GOOD)])
    (other,) = reader().read([picture(1)])
    digests = [image.pixels[0].digest for image in (one, same, other)]
    assert digests[0] == digests[1] != digests[2]
    rules = image_rules({"image_mean": [0, 0, 0]}, side=None, multiple=FACTOR, max_tokens=100)
    (scaled,) = PillowReader(rules, LIMITS, TOKENS).read([GOOD])
    assert scaled.pixels[0].data == one.pixels[0].data
    assert scaled.pixels[0].digest != digests[0]


@pytest.mark.parametrize(
    "given",
    [
        {"do_resize": False},
        {"do_pan_and_scan": True},
        {"image_mean": [0.5]},
        {"min_pixels": "many"},
    ],
)
def test_rules_that_are_not_followed_are_refused_by_name(given):
    with pytest.raises(UnsupportedModel, match=next(iter(given))):
        image_rules(given, side=None, multiple=FACTOR, max_tokens=100)


def test_an_image_has_the_tokens_that_its_model_allows() -> None:
    """Mistral Small 3.1 reads images of 1,540 pixels in 55 x 55 tokens."""
    given = {"size": {"longest_edge": 1540}}
    by_edge = image_rules(given, side=None, multiple=28, resize="longest_edge")
    assert by_edge.max_pixels == 3025 * 28**2
    assert image_rules({"max_pixels": 1 << 30}, side=None, multiple=28).max_pixels == 2048 * 28**2


def test_without_pillow_an_image_is_refused_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(
        InvalidRequest, match="decoding images requires Pillow, which is not"
    ) as error:
        reader().read([GOOD])
    assert "pip install 'octavo[media]'" in (error.value.hint or "")
