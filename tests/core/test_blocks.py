"""The block pool against a naive model, and the order of its free list (vLLM reference §5.4)."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.core.rig import replay

from windtunnel.core.kv import blocks as module
from windtunnel.core.kv.blocks import BlockPool
from windtunnel.core.outputs import BlockRemoved

BLOCKS = 9


def digest(number: int) -> bytes:
    return number.to_bytes(32, "big")


def stored(pool: BlockPool, blocks: list[int], hashes: list[bytes]) -> None:
    pool.enter(blocks, hashes, 0, len(blocks))
    pool.stored(hashes, None, tuple(range(len(blocks) * pool.block_size)), None, (None,) * len(blocks))


def test_blocks_come_in_order_and_block_0_never() -> None:
    pool = BlockPool(5, 16)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.free_blocks == 0
    assert pool.usage == 1.0


def test_freeing_puts_unhashed_in_front_and_hashed_behind_tail_first() -> None:
    pool = BlockPool(10, 16)
    first = pool.allocate(4)
    pool.enter(first, [digest(1), digest(2)], 0, 2)
    pool.free(first)
    assert pool.free_list() == [4, 3, 5, 6, 7, 8, 9, 2, 1]


def test_a_cached_block_is_dropped_only_when_it_is_taken() -> None:
    pool = BlockPool(4, 16, collect_events=True)
    blocks = pool.allocate(3)
    pool.enter(blocks, [digest(1), digest(2), digest(3)], 0, 3)
    pool.free(blocks)
    assert pool.usage == 0
    assert len(pool.lookup([digest(1), digest(2), digest(3)], 3)) == 3
    pool.allocate(1)
    assert pool.take_events() == [BlockRemoved((digest(3),))], "the tail goes before the prefix"
    assert pool.lookup([digest(1), digest(2), digest(3)], 3) == [1, 2]


def test_touch_takes_a_block_off_the_free_list_and_counts_owners() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(1)
    pool.enter(blocks, [digest(1)], 0, 1)
    pool.free(blocks)
    pool.touch(blocks)
    pool.touch(blocks)
    assert pool.free_list() == [2, 3]
    pool.free(blocks)
    assert pool.free_list() == [2, 3]
    pool.free(blocks)
    assert pool.free_list() == [2, 3, 1]


def test_the_last_copy_of_a_hash_removes_it() -> None:
    pool = BlockPool(3, 16, collect_events=True)
    for block in pool.allocate(2):
        pool.enter([block], [digest(7)], 0, 1)
    pool.free([1, 2])
    pool.allocate(1)
    assert pool.take_events() == []
    pool.allocate(1)
    assert pool.take_events() == [BlockRemoved((digest(7),))]


def test_misuse_is_an_assertion() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    with pytest.raises(AssertionError, match="1 blocks asked of 0"):
        pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([1])


def test_the_integrity_check_sees_a_leak_and_a_thief() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.check_integrity([("a", blocks)])
    with pytest.raises(AssertionError, match="block 2: 1 references, 0 owners"):
        pool.check_integrity([("a", blocks[:1])])
    with pytest.raises(AssertionError, match="block 1: 1 references, 2 owners"):
        pool.check_integrity([("a", blocks), ("b", blocks[:1])])


@pytest.mark.parametrize("at_once", [1, 2, 3, 256])
def test_touching_in_parts_is_touching_one_by_one(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Rows of blocks that were freed together, blocks that somebody holds, and blocks that stand elsewhere."""
    monkeypatch.setattr(module, "_LOOKUP_AT_ONCE", at_once)
    pool = BlockPool(30, 16)
    row, others, held = pool.allocate(9), pool.allocate(6), pool.allocate(2)
    for owner in (row, others, held):
        pool.enter(owner, [digest(block) for block in owner], 0, len(owner))
    pool.free(row)
    pool.free(others[::-1])
    pool.touch([*row[:5], held[0], *others[1:4], *row[6:]])
    assert pool.free_list() == [*range(18, 30), row[5], others[0], *others[4:]]
    pool.check_integrity([("all", [*row[:5], held[0], *others[1:4], *row[6:]]), ("held", held)])


class CountedLooks(dict[bytes, int]):
    looks = 0

    def __getitem__(self, digest: bytes) -> int:
        self.looks += 1
        return super().__getitem__(digest)


def test_what_was_foreseen_is_looked_up_again_only_from_where_it_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOKUP_AT_ONCE", 4)
    pool = BlockPool(41, 16)
    owner = pool.allocate(40)
    pool.enter(owner, [digest(block) for block in owner], 0, 40)
    pool.free(owner)
    hashes = [digest(block) for block in owner]
    foreseen = pool.foresee(hashes)
    pool._cached = counted = CountedLooks(pool._cached)
    assert pool.lookup(hashes, 40, foreseen) == owner
    assert counted.looks == 0
    assert pool.allocate(6) == owner[:33:-1]
    assert pool.lookup(hashes, 40, foreseen) == owner[:34]
    assert counted.looks == 3, "those of the last part that is there in part, and the one that ends it"


class PoolMachine(RuleBasedStateMachine):
    """The naive model: a plain list of free blocks, owners as lists, hashes as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, 4, collect_events=True)
        self.free = list(range(1, BLOCKS))
        self.hash_of: dict[int, bytes] = {}
        self.owners: list[list[int]] = []
        self.index: set[bytes] = set()
        self.foreseen: tuple[list[bytes], list[int]] = [], []

    @rule(count=st.integers(1, 4))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            return
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.hash_of.pop(block, None)
        assert self.pool.allocate(count) == taken
        self.owners.append(taken)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), hashes=st.lists(st.integers(0, 5), min_size=1, max_size=4))
    def publish(self, data: st.DataObject, hashes: list[int]) -> None:
        owner = data.draw(st.sampled_from(self.owners))
        blocks = [block for block in owner if block not in self.hash_of][: len(hashes)]
        if not blocks:
            return
        digests = [digest(number) for number in hashes[: len(blocks)]]
        self.hash_of.update(zip(blocks, digests, strict=True))
        stored(self.pool, blocks, digests)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        gone = [block for block in reversed(owner) if all(block not in other for other in self.owners)]
        self.free = [
            *[block for block in gone if block not in self.hash_of],
            *self.free,
            *[block for block in gone if block in self.hash_of],
        ]
        self.pool.free(owner)

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    def hit(self, numbers: list[int]) -> None:
        self._hit([digest(number) for number in numbers], [])

    @rule(numbers=st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
    def foresee(self, numbers: list[int]) -> None:
        hashes = [digest(number) for number in numbers]
        self.foreseen = hashes, self.pool.foresee(hashes)
        assert hashes == [digest(number) for number in numbers]

    @rule()
    def hit_what_was_foreseen(self) -> None:
        """Whatever has happened since."""
        self._hit(*self.foreseen)

    def _hit(self, hashes: list[bytes], foreseen: list[int]) -> None:
        known = set(self.hash_of.values())
        length = next((at for at, value in enumerate(hashes) if value not in known), len(hashes))
        found = self.pool.lookup(hashes, len(hashes), foreseen)
        assert [self.hash_of[block] for block in found] == hashes[:length]
        assert self.pool.idle_among(found) == len(set(found) & set(self.free))
        self.pool.touch(found)
        self.free = [block for block in self.free if block not in found]
        if found:
            self.owners.append(found)

    @rule()
    def reset(self) -> None:
        idle = not self.owners
        assert self.pool.reset() == idle
        if idle:
            self.hash_of.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.pool.free_list() == self.free
        assert self.pool.cached_hashes == set(self.hash_of.values())
        self.pool.check_integrity((str(at), owner) for at, owner in enumerate(self.owners))
        for event in self.pool.take_events():
            replay(self.index, event)
        assert self.index == self.pool.cached_hashes


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
