"""Blocks kept for other engines: leases, room, and who waits."""

from octavo.engine.protocol.kv_messages import BlockKey, BlockName
from octavo.transfer.messages import WantedBlock
from octavo.worker.kv_connectors.outbox import LEASE_S, MAX_WAITING, Ask, Outbox


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), b"parent", (number,))


def wanted(number: int) -> WantedBlock:
    return WantedBlock(0, key_of(number))


def name_of(number: int) -> BlockName:
    return wanted(number).name


def put(outbox: Outbox, number: int, now: float = 0.0) -> tuple[bool, list[BlockName]]:
    return outbox.put(name_of(number), key_of(number), bytes(10), now)


def test_a_block_that_was_fetched_goes_first_and_a_leased_one_stays():
    outbox = Outbox(20)
    assert put(outbox, 1) == (True, [])
    assert put(outbox, 2) == (True, [])
    assert put(outbox, 3) == (False, [])
    assert outbox.take(name_of(2), key_of(2)) == bytes(10)
    assert put(outbox, 3) == (True, [name_of(2)])
    assert outbox.take(name_of(1), key_of(1)) is not None
    assert outbox.num_bytes == 20


def test_a_lease_ends():
    outbox = Outbox(10)
    put(outbox, 1)
    assert put(outbox, 2, now=LEASE_S - 1) == (False, [])
    assert put(outbox, 2, now=LEASE_S) == (True, [name_of(1)])


def test_a_block_that_is_read_stays_until_it_was_read_or_its_reader_is_silent():
    outbox, first, second = Outbox(10), Ask(b"a", 1), Ask(b"b", 4)
    put(outbox, 1)
    outbox.take(name_of(1), key_of(1))
    outbox.lend(name_of(1), first, now=0.0)
    outbox.lend(name_of(1), second, now=0.0)
    outbox.renew(first, [name_of(1), name_of(9)], now=LEASE_S - 1)
    outbox.give_back(second, [name_of(1)])
    outbox.give_back(Ask(b"a", 0), [name_of(1)])  # of an older ask
    assert put(outbox, 2, now=LEASE_S + 1) == (False, [])
    outbox.renew(first, [name_of(1)], now=2 * LEASE_S)  # too late
    assert put(outbox, 2, now=2 * LEASE_S) == (True, [name_of(1)])
    assert outbox.num_expired == 1
    outbox.give_back(first, [name_of(1)])


def test_a_block_that_was_read_goes_at_once():
    released: list[object] = []
    outbox = Outbox(10, released.append)
    put(outbox, 1)
    outbox.take(name_of(1), key_of(1))
    outbox.lend(name_of(1), Ask(b"a", 1), now=0.0)
    for _ in range(2):  # the second time does nothing
        outbox.give_back(Ask(b"a", 1), [name_of(1)])
    assert put(outbox, 2) == (True, [name_of(1)])
    outbox.remove(name_of(1))
    assert (len(released), outbox.num_expired) == (1, 0)


def test_a_peer_that_asks_again_is_answered_by_its_newest_ask():
    outbox = Outbox(10)
    outbox.wait(Ask(b"a", 1), [wanted(1)], until=9.0)
    outbox.wait(Ask(b"a", 2), [wanted(1)], until=9.0)
    assert outbox.waiting(name_of(1)) == [Ask(b"a", 2)]


def test_a_block_of_other_tokens_is_not_handed_out():
    outbox = Outbox(10)
    put(outbox, 1)
    other = key_of(1)._replace(token_ids=(7,))
    assert outbox.take(name_of(1), other) is None


def test_waits_end_once_however_they_end():
    outbox = Outbox(10)
    outbox.wait(Ask(b"a", 1), [wanted(1), wanted(2)], until=5.0)
    outbox.wait(Ask(b"b", 1), [wanted(1)], until=9.0)
    assert outbox.waiting_peers == {b"a", b"b"}
    outbox.drop(b"a", [name_of(1), name_of(3)])
    assert outbox.waiting(name_of(1)) == [Ask(b"b", 1)]
    assert outbox.waiting(name_of(1)) == []
    outbox.expire(5.0)
    assert outbox.waiting_peers == set()


def test_waits_are_bounded():
    outbox = Outbox(10)
    assert outbox.wait(Ask(b"a", 1), map(wanted, range(MAX_WAITING)), until=1.0) == []
    assert outbox.wait(Ask(b"b", 1), [wanted(MAX_WAITING)], until=1.0) == [name_of(MAX_WAITING)]


def test_a_block_whose_prompt_ended_without_it_is_not_waited_for():
    outbox = Outbox(10)
    outbox.wait(Ask(b"a", 1), [wanted(1)], until=9.0)
    assert outbox.ended(name_of(1), now=0.0) == [Ask(b"a", 1)]
    assert outbox.is_absent(name_of(1), now=1.0)
    assert not outbox.is_absent(name_of(1), now=LEASE_S)
    assert not outbox.is_absent(name_of(2), now=1.0)
    put(outbox, 1)
    assert outbox.ended(name_of(1), now=0.0) == []
    assert not outbox.is_absent(name_of(1), now=1.0)
