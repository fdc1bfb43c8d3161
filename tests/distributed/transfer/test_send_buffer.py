"""Blocks kept for other engines: leases, room, and who waits."""

from octavo.distributed.transfer.messages import WantedBlock
from octavo.distributed.transfer.send_buffer import LEASE_S, MAX_WAITING, Ask, SendBuffer
from octavo.engine.protocol.kv_messages import BlockHashWithGroupId, BlockKey


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), b"parent", (number,))


def wanted(number: int) -> WantedBlock:
    return WantedBlock(0, key_of(number))


def name_of(number: int) -> BlockHashWithGroupId:
    return wanted(number).name


def put(
    send_buffer: SendBuffer, number: int, now: float = 0.0
) -> tuple[bool, list[BlockHashWithGroupId]]:
    return send_buffer.put(name_of(number), key_of(number), bytes(10), now)


def test_a_block_that_was_fetched_goes_first_and_a_leased_one_stays():
    send_buffer = SendBuffer(20)
    assert put(send_buffer, 1) == (True, [])
    assert put(send_buffer, 2) == (True, [])
    assert put(send_buffer, 3) == (False, [])
    assert send_buffer.take(name_of(2), key_of(2)) == bytes(10)
    assert put(send_buffer, 3) == (True, [name_of(2)])
    assert send_buffer.take(name_of(1), key_of(1)) is not None
    assert send_buffer.num_bytes == 20


def test_a_lease_ends():
    send_buffer = SendBuffer(10)
    put(send_buffer, 1)
    assert put(send_buffer, 2, now=LEASE_S - 1) == (False, [])
    assert put(send_buffer, 2, now=LEASE_S) == (True, [name_of(1)])


def test_a_block_that_is_read_stays_until_it_was_read_or_its_reader_is_silent():
    send_buffer, first, second = SendBuffer(10), Ask(b"a", 1), Ask(b"b", 4)
    put(send_buffer, 1)
    send_buffer.take(name_of(1), key_of(1))
    send_buffer.lend(name_of(1), first, now=0.0)
    send_buffer.lend(name_of(1), second, now=0.0)
    send_buffer.renew(first, [name_of(1), name_of(9)], now=LEASE_S - 1)
    send_buffer.end_leases(second, [name_of(1)])
    send_buffer.end_leases(Ask(b"a", 0), [name_of(1)])  # of an older ask
    assert put(send_buffer, 2, now=LEASE_S + 1) == (False, [])
    send_buffer.renew(first, [name_of(1)], now=2 * LEASE_S)  # too late
    assert put(send_buffer, 2, now=2 * LEASE_S) == (True, [name_of(1)])
    assert send_buffer.num_expired == 1
    send_buffer.end_leases(first, [name_of(1)])


def test_a_block_that_was_read_goes_at_once():
    released: list[object] = []
    send_buffer = SendBuffer(10, released.append)
    put(send_buffer, 1)
    send_buffer.take(name_of(1), key_of(1))
    send_buffer.lend(name_of(1), Ask(b"a", 1), now=0.0)
    for _ in range(2):  # the second time does nothing
        send_buffer.end_leases(Ask(b"a", 1), [name_of(1)])
    assert put(send_buffer, 2) == (True, [name_of(1)])
    send_buffer.remove(name_of(1))
    assert (len(released), send_buffer.num_expired) == (1, 0)


def test_a_peer_that_asks_again_is_answered_by_its_newest_ask():
    send_buffer = SendBuffer(10)
    send_buffer.wait(Ask(b"a", 1), [wanted(1)], until=9.0)
    send_buffer.wait(Ask(b"a", 2), [wanted(1)], until=9.0)
    assert send_buffer.waiting(name_of(1)) == [Ask(b"a", 2)]


def test_a_block_of_other_tokens_is_not_handed_out():
    send_buffer = SendBuffer(10)
    put(send_buffer, 1)
    other = key_of(1)._replace(token_ids=(7,))
    assert send_buffer.take(name_of(1), other) is None


def test_waits_end_once_however_they_end():
    send_buffer = SendBuffer(10)
    send_buffer.wait(Ask(b"a", 1), [wanted(1), wanted(2)], until=5.0)
    send_buffer.wait(Ask(b"b", 1), [wanted(1)], until=9.0)
    assert send_buffer.waiting_peers == {b"a", b"b"}
    send_buffer.drop(b"a", [name_of(1), name_of(3)])
    assert send_buffer.waiting(name_of(1)) == [Ask(b"b", 1)]
    assert send_buffer.waiting(name_of(1)) == []
    send_buffer.expire(5.0)
    assert send_buffer.waiting_peers == set()


def test_waits_are_bounded():
    send_buffer = SendBuffer(10)
    assert send_buffer.wait(Ask(b"a", 1), map(wanted, range(MAX_WAITING)), until=1.0) == []
    assert send_buffer.wait(Ask(b"b", 1), [wanted(MAX_WAITING)], until=1.0) == [
        name_of(MAX_WAITING)
    ]


def test_a_block_whose_prompt_ended_without_it_is_not_waited_for():
    send_buffer = SendBuffer(10)
    send_buffer.wait(Ask(b"a", 1), [wanted(1)], until=9.0)
    assert send_buffer.ended(name_of(1), now=0.0) == [Ask(b"a", 1)]
    assert send_buffer.is_absent(name_of(1), now=1.0)
    assert not send_buffer.is_absent(name_of(1), now=LEASE_S)
    assert not send_buffer.is_absent(name_of(2), now=1.0)
    put(send_buffer, 1)
    assert send_buffer.ended(name_of(1), now=0.0) == []
    assert not send_buffer.is_absent(name_of(1), now=1.0)
