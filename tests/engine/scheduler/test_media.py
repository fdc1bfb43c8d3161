"""Images in the control plane: what is encoded when, what is found again, where chunks may end."""

from __future__ import annotations

import msgspec
import pytest

from octavo.engine.media import EncoderCacheManager
from octavo.engine.protocol.block_hashes import BlockHashing, get_block_media
from octavo.engine.protocol.step import MediaContent, MediaItem
from tests.support.engine_fakes import (
    BLOCK,
    FakeExecutor,
    expected_tokens,
    make_core,
    make_request,
    run_all,
    tokens_of,
)

PLACEHOLDER = 999


def item(name: str, start: int, num_tokens: int, *, is_whole: bool = False) -> MediaItem:
    return MediaItem(name.encode(), start, num_tokens, (1, num_tokens), is_whole)


def request_with(request_id: str, tokens: list[int], *items: MediaItem, max_tokens: int = 2):
    """Returns a request whose tokens are placeholders where an image stands."""
    tokens = list(tokens)
    for each in items:
        tokens[each.start : each.end] = [PLACEHOLDER] * each.num_tokens
    pixels = [MediaContent(digest, 1, 1, b"rgb") for digest in {each.digest for each in items}]
    return msgspec.structs.replace(
        make_request(request_id, tokens, max_tokens=max_tokens), media=list(items), pixels=pixels
    )


def encoded(executor: FakeExecutor) -> list[bytes]:
    return [pixels.digest for plan in executor.plans for pixels in plan.encodes]


def run(core, *requests):
    for request in requests:
        core.add(request)
    return run_all(core)


def test_an_image_that_comes_twice_is_encoded_once_and_its_blocks_are_found():
    executor = FakeExecutor()
    core = make_core(budget=64, executor=executor)
    text = list(range(60))
    run(core, request_with("a", text, item("cat", 5, 40)))
    found = run(core, request_with("b", text, item("cat", 5, 40)))
    assert encoded(executor) == [b"cat"]
    assert found["b"][0].num_cached_tokens == 48
    assert tokens_of(found["b"]) == expected_tokens(executor_tokens(text, 5, 40), 2)


def executor_tokens(text: list[int], place: int, num_tokens: int) -> list[int]:
    return [*text[:place], *[PLACEHOLDER] * num_tokens, *text[place + num_tokens :]]


def test_other_images_behind_equal_tokens_share_only_what_stands_before_them():
    core = make_core(budget=64)
    text = list(range(60))
    run(core, request_with("a", text, item("cat", 20, 30)))
    found = run(core, request_with("b", text, item("dog", 20, 30)))
    assert found["b"][0].num_cached_tokens == BLOCK
    found = run(core, make_request("c", executor_tokens(text, 20, 30), max_tokens=2))
    assert found["c"][0].num_cached_tokens in (BLOCK, 20)


def test_the_part_of_an_image_that_a_block_holds_is_in_its_name():
    tokens = tuple([PLACEHOLDER] * BLOCK)
    names = set()
    for first in (4, 8, 12):
        media = get_block_media([item("a", 0, first), item("b", first, BLOCK - first)], BLOCK)
        names.add(BlockHashing(media=media).block(b"", tokens, 0).digest)
    assert len(names) == 3


@pytest.mark.parametrize("budget", [7, 16, 33])
def test_a_chunk_may_end_inside_an_image_whose_tokens_see_no_later_ones(budget):
    executor = FakeExecutor()
    core = make_core(budget=budget, executor=executor, caching=False)
    text = list(range(60))
    found = run(core, request_with("a", text, item("cat", 5, 40), item("dog", 45, 15)))
    assert tokens_of(found["a"]) == expected_tokens([*range(5), *[PLACEHOLDER] * 55], 2)
    assert encoded(executor) == [b"cat", b"dog"]
    ends = [row.start + row.num_tokens for plan in executor.plans for row in plan.rows]
    assert any(5 < end < 45 for end in ends)


def test_an_image_whose_tokens_see_one_another_is_computed_in_one_step():
    executor = FakeExecutor()
    core = make_core(budget=32, executor=executor, caching=False, max_num_seqs=4)
    text = list(range(70))
    whole = [item("cat", 10, 20, is_whole=True), item("dog", 40, 24, is_whole=True)]
    requests = [request_with(str(index), text, *whole) for index in range(3)]
    found = run(core, *requests)
    for index in range(3):
        history = executor_tokens(executor_tokens(text, 10, 20), 40, 24)
        assert tokens_of(found[str(index)]) == expected_tokens(history, 2)
    for plan in executor.plans:
        for row in plan.rows:
            end = row.start + row.num_tokens
            assert not any(each.start < end < each.end for each in whole)


def test_an_image_is_encoded_again_where_its_rows_were_dropped():
    cache = EncoderCacheManager(capacity_tokens=10)
    requests = {name: request_with(name, [0] * 20, item(name, 2, 8)) for name in ("a", "b")}
    for name, encodes, dropped in (
        ("a", [b"a"], []),
        ("b", [b"b"], [b"a"]),
        ("b", [], []),
        ("a", [b"a"], [b"b"]),
    ):
        cache.use(requests[name], 0, 5)
        assert [pixels.digest for pixels in cache.pop_encodes()] == encodes
        assert cache.pop_dropped() == dropped
    cache.use(requests["b"], 10, 20)  # behind the image
    assert cache.pop_encodes() == []


def test_what_a_step_reads_is_kept_whatever_room_there_is():
    cache = EncoderCacheManager(capacity_tokens=1)
    for name in ("a", "b"):
        cache.use(request_with(name, [0] * 20, item(name, 2, 8)), 0, 20)
    assert cache.pop_dropped() == []
    assert cache.digests == [b"a", b"b"]


def test_an_image_that_could_not_be_encoded_is_tried_again():
    cache = EncoderCacheManager(capacity_tokens=100)
    request = request_with("a", [0] * 20, item("a", 2, 8))
    cache.use(request, 0, 20)
    assert len(cache.pop_encodes()) == 1
    cache.discard([b"a"])
    cache.use(request, 0, 20)
    assert len(cache.pop_encodes()) == 1
