"""The block pool, as vLLM keeps it (reference §5.4).

Rules this file lives by:

* Block 0 is the null block: never handed out, never counted.
* A block is free exactly while its reference count is 0. Free blocks form one doubly linked list; allocation takes the
  front, and only then a block loses its hash (`BlockRemoved`).
* Freed blocks go back from the sequence's tail to its head: those without a hash to the front, hashed ones to the back.
  So memory nobody can use again goes first, then the tail of the oldest sequence, its prefix last.
* Several blocks may carry one hash (two sequences computed the same prompt at once). `BlockRemoved` is published when
  the last of them goes, so that a replayed event stream equals the set of cached hashes.

Every operation costs O(blocks named in the call). A cached block costs about 230 bytes: the digest, two dictionary words, its
places in four lists and the numbers that stand there. (Arrays of C integers are smaller, but each look into one makes a number,
and a prompt of 100,000 tokens takes ten thousand looks while everybody waits.)
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat, takewhile
from typing import cast

from windtunnel.core.kv.hashing import ShownKeys
from windtunnel.core.kv.tiers import DISK, HOST, Tier
from windtunnel.core.outputs import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent

NULL_BLOCK = 0
_LOOKUP_AT_ONCE = 256


class BlockPool:
    """Owns all blocks of one engine. Callers hold block ids and give each back once."""

    def __init__(
        self, num_blocks: int, block_size: int, *, collect_events: bool = False, host_blocks: int = 0, disk_blocks: int = 0
    ) -> None:
        """`disk_blocks` stand behind `host_blocks`."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}: must be at least 2 (block 0 is the null block)")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free_blocks = num_blocks - 1
        self.version = 0
        """Grows whenever an allocation that failed might succeed: blocks were freed, or the cache gained an entry."""
        self.collects_events = collect_events
        self.generations: dict[int, int] = {}
        """For each block somebody watches (`watch`): how often it has been handed out since."""
        self._events: list[KvEvent] = []
        told = self._events if collect_events else None
        disk = Tier(DISK, disk_blocks, told) if disk_blocks else None
        self.tier = Tier(HOST, host_blocks, told, disk) if host_blocks else None
        self._refs = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._copies: dict[bytes, list[int]] = {}
        """Further blocks of a hash, in the order in which they were entered."""
        numbers = list(range(num_blocks + 1))
        # Entry `num_blocks` is the list's head: its next is the front, its previous the back.
        self._next = [*numbers[1:], 1]
        self._prev = [0, num_blocks, *numbers[1:-1]]

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """0…1: 1 - free / (blocks - 1); cached but free blocks count as free."""
        return 1.0 - self.free_blocks / (self.num_blocks - 1)

    @property
    def cached_hashes(self) -> frozenset[bytes]:
        return frozenset(self._cached)

    def lookup(self, hashes: Sequence[bytes], limit: int, foreseen: Sequence[int] = ()) -> list[int]:
        """The blocks of the longest cached prefix, at most `limit`. They are not held until `touch`.

        `foreseen` is what `foresee` found earlier: what of it still holds is not looked up again.
        """
        found = self._still(hashes, foreseen[:limit])
        block_of = self._cached.__getitem__
        for at in range(len(found), min(limit, len(hashes)), _LOOKUP_AT_ONCE):
            part = hashes[at : min(at + _LOOKUP_AT_ONCE, limit)]
            try:
                found += list(map(block_of, part))
            except KeyError:
                found += takewhile(bool, map(self._cached.get, part, repeat(NULL_BLOCK)))
                break
        return found

    def _still(self, hashes: Sequence[bytes], foreseen: Sequence[int]) -> list[int]:
        """The longest prefix of `foreseen`, in whole parts, whose blocks carry these hashes."""
        for at in range(0, len(foreseen), _LOOKUP_AT_ONCE):
            part = foreseen[at : at + _LOOKUP_AT_ONCE]
            if list(map(self._hash_of.__getitem__, part)) != hashes[at : at + len(part)]:
                return list(foreseen[:at])
        return list(foreseen)

    def foresee(self, hashes: list[bytes]) -> list[int]:
        """What `lookup` finds at this moment. In `hashes` the pool's own objects take the place of equal ones.

        A lookup costs several cache misses for each block; whether a block still carries the same object shows at a glance.
        This is the only method that another thread may call: each look into a dictionary or list is whole in CPython.
        """
        found = self.lookup(hashes, len(hashes))
        for at in range(0, len(found), _LOOKUP_AT_ONCE):
            stop = min(at + _LOOKUP_AT_ONCE, len(found))
            carried = list(map(self._hash_of.__getitem__, found[at:stop]))
            if carried == hashes[at:stop]:
                hashes[at:stop] = cast(list[bytes], carried)
        return found

    def lookup_tiers(self, hashes: Sequence[bytes], limit: int, foreseen: Sequence[int] = ()) -> list[int]:
        """The longest prefix of which each block is here or in a tier: the null block stands for those in a tier."""
        found = self.lookup(hashes, limit, foreseen)
        tier = self.tier
        while tier is not None and len(found) < min(limit, len(hashes)):
            digest = hashes[len(found)]
            here = [NULL_BLOCK] if digest in tier else self.lookup([digest], 1)
            if not here:
                break
            found += here
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """How many of these are on the free list, so that touching them takes memory."""
        refs = self._refs
        return list(map(refs.__getitem__, blocks)).count(0)

    def touch(self, blocks: list[int]) -> None:
        """One more owner for each; a free one leaves the free list. In parts: a long prompt hits thousands, mostly in rows."""
        for at in range(0, len(blocks), _LOOKUP_AT_ONCE):
            part = blocks[at : at + _LOOKUP_AT_ONCE]
            if self._in_a_row(part):
                self._take_row(part)
            else:
                self._touch_each(part)

    def _in_a_row(self, blocks: list[int]) -> bool:
        """All are free and stand on the free list as `free` puts the blocks of one owner: the last first."""
        if any(map(self._refs.__getitem__, blocks)):
            return False
        return list(map(self._next.__getitem__, blocks[1:])) == blocks[:-1]

    def _take_row(self, blocks: Sequence[int]) -> None:
        before, after = self._prev[blocks[-1]], self._next[blocks[0]]
        self._next[before] = after
        self._prev[after] = before
        self.free_blocks -= len(blocks)
        refs = self._refs
        for block in blocks:
            refs[block] = 1

    def _touch_each(self, blocks: Iterable[int]) -> None:
        refs, after_of, before_of = self._refs, self._next, self._prev
        for block in blocks:
            if not refs[block]:
                before, after = before_of[block], after_of[block]
                after_of[before] = after
                before_of[after] = before
                self.free_blocks -= 1
            refs[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one owner each. The caller has checked `free_blocks`."""
        assert count <= self.free_blocks, f"{count} blocks asked of {self.free_blocks}"
        after_of, refs, hash_of, head = self._next, self._refs, self._hash_of, self.num_blocks
        taken: list[int] = []
        block = after_of[head]
        for _ in range(count):
            taken.append(block)
            refs[block] = 1
            block = after_of[block]
        after_of[head] = block
        self._prev[block] = head
        self.free_blocks -= count
        for block in taken:
            if hash_of[block] is not None:
                self._evict(block)
        if self.generations:
            self._age(taken)
        return taken

    def _age(self, taken: Iterable[int]) -> None:
        generations = self.generations
        for block in taken:
            if block in generations:
                generations[block] += 1

    def watch(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Count from here on how often these are handed out; returns the counts as they stand."""
        return tuple(self.generations.setdefault(block, 0) for block in blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one owner of each block of a sequence, given from head to tail."""
        refs, hash_of, head = self._refs, self._hash_of, self.num_blocks
        unhashed: list[int] = []
        hashed: list[int] = []
        for block in reversed(blocks):
            count = refs[block] = refs[block] - 1
            assert count >= 0, f"block {block} freed twice"
            if not count:
                (unhashed if hash_of[block] is None else hashed).append(block)
        self._link(head, unhashed)
        self._link(self._prev[head], hashed)
        self.version += 1

    def _link(self, before: int, blocks: Sequence[int]) -> None:
        """Put `blocks` on the free list, in this order, behind `before`."""
        after_of, before_of = self._next, self._prev
        last = after_of[before]
        for block in blocks:
            after_of[before] = block
            before_of[block] = before
            before = block
        after_of[before] = last
        before_of[last] = before
        self.free_blocks += len(blocks)

    def enter(self, blocks: Sequence[int], hashes: Sequence[bytes], first: int, stop: int) -> None:
        """Enter blocks first … stop - 1 of one owner, full and computed, into the cache."""
        for at in range(first, stop):
            block, digest = blocks[at], hashes[at]
            assert self._refs[block], f"block {block} has no owner"
            assert self._hash_of[block] is None, f"block {block} is published already"
            self._hash_of[block] = digest
            if self._cached.setdefault(digest, block) != block:
                self._copies.setdefault(digest, []).append(block)
        if self.tier is not None:
            self.tier.drop(hashes[first:stop])
        self.version += 1

    def stored(
        self,
        hashes: Sequence[bytes],
        parent: bytes | None,
        token_ids: tuple[int, ...],
        lora: tuple[int, str] | None,
        extra_keys: tuple[ShownKeys | None, ...],
        session_id: str | None = None,
    ) -> None:
        """Publish BlockStored: consecutive blocks of one sequence, just entered or (`kv_cache_report_mode = full`) hit."""
        if self.collects_events:
            size = self.block_size
            self._events.append(BlockStored(tuple(hashes), parent, token_ids, size, lora, extra_keys, session_id=session_id))

    def reset(self) -> bool:
        """Forget all hashes. Succeeds only while every block is free."""
        if self.free_blocks != self.usable_blocks:
            return False
        self._hash_of = [None] * self.num_blocks
        self._cached.clear()
        self._copies.clear()
        if self.tier is not None:
            self.tier.clear()
        if self.collects_events:
            self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[KvEvent]:
        """The events since the last call, in order."""
        if not self._events:
            return []
        events = self._events.copy()
        self._events.clear()
        return events

    def _evict(self, block: int) -> None:
        digest = self._hash_of[block]
        assert digest is not None
        self._hash_of[block] = None
        copies = self._copies.get(digest)
        if copies:
            if self._cached[digest] == block:
                self._cached[digest] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[digest]
            return
        del self._cached[digest]
        if self.collects_events:
            self._events.append(BlockRemoved((digest,)))
        if self.tier is not None:
            self.tier.keep(digest)

    def free_list(self) -> list[int]:
        """All free blocks in the order in which they will be taken."""
        order: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            order.append(block)
            block = self._next[block]
            assert len(order) < self.num_blocks, "the free list has a loop"
        return order

    def check_integrity(self, held: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Raise AssertionError unless the owners in `held` (owner, its blocks) account for every reference."""
        owners: Counter[int] = Counter()
        for owner, blocks in held:
            assert len(set(blocks)) == len(blocks), f"{owner} holds a block twice"
            owners.update(blocks)
        free = self.free_list()
        assert len(free) == len(set(free)) == self.free_blocks, "the free list does not match its count"
        assert NULL_BLOCK not in (*owners, *free), "the null block is in use"
        assert len(self._refs) - self._refs.count(0) == len(owners), self._stray_references(owners)
        for block, count in owners.items():
            assert self._refs[block] == count, f"block {block}: {self._refs[block]} references, {count} owners"
        assert all(not self._refs[block] for block in free), "an owned block is on the free list"
        assert len(free) + len(owners) == self.usable_blocks, "a block is neither free nor owned"
        self._check_cache()
        if self.tier is not None:
            self.tier.check_integrity(self._cached)

    def _stray_references(self, owners: Mapping[int, int]) -> str:
        block = next(at for at, count in enumerate(self._refs) if bool(count) != (at in owners))
        return f"block {block}: {self._refs[block]} references, {owners.get(block, 0)} owners"

    def _check_cache(self) -> None:
        entries = [(digest, [block, *self._copies.get(digest, ())]) for digest, block in self._cached.items()]
        cached = sum(len(blocks) for _digest, blocks in entries)
        assert all(self._copies.values()) and self._copies.keys() <= self._cached.keys(), "copies of nothing"
        assert cached == sum(digest is not None for digest in self._hash_of), "a hashed block is not in the cache"
