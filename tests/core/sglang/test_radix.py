"""The radix cache against a naive model: a set of cached prefixes."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.core.sglang import pages as module
from windtunnel.core.sglang.hashing import ROOT, page_digests, wire_hash
from windtunnel.core.sglang.pages import TREE, PagePool
from windtunnel.core.sglang.radix import RadixCache, RadixNode

_PAGE = 2


class _Naive:
    """Every cached prefix in whole pages, and how many hold it."""

    def __init__(self) -> None:
        self.prefixes: set[tuple[int, ...]] = set()
        self.locks: list[tuple[int, ...]] = []

    def match(self, tokens: tuple[int, ...]) -> int:
        best = 0
        for stop in range(_PAGE, len(tokens) + 1, _PAGE):
            if tokens[:stop] in self.prefixes:
                best = stop
        return best

    def insert(self, tokens: tuple[int, ...]) -> None:
        self.prefixes |= {tokens[:stop] for stop in range(_PAGE, len(tokens) + 1, _PAGE)}

    @property
    def protected(self) -> int:
        return len({key[:stop] for key in self.locks for stop in range(_PAGE, len(key) + 1, _PAGE)})


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6))
def test_matches_inserts_locks_and_evicts_as_the_naive_model(seed: int) -> None:
    chance = Random(seed)
    pool = PagePool(40, _PAGE)
    tree, naive = RadixCache(pool), _Naive()
    locked: list[tuple[RadixNode, tuple[int, ...]]] = []
    for _ in range(60):
        tokens = tuple(chance.randrange(3) for _ in range(chance.randrange(1, 14)))
        tokens = tokens[: tree.aligned(len(tokens))]
        action = chance.random()
        if action < 0.4 and len(tokens) // _PAGE <= pool.free_pages:
            pages = pool.allocate(len(tokens) // _PAGE, "me")
            behind, before = chance.choice([(tree.root(ROOT), ()), *locked])
            path = tree.insert(tokens, pages, "me", behind)
            tokens = before + tokens
            naive.insert(tokens)
            assert len(path.pages) == len(pages)
            if tokens and chance.random() < 0.5:
                tree.lock(path.node)
                locked.append((path.node, tokens))
                naive.locks.append(tokens)
        elif action < 0.6 and locked:
            node, key = locked.pop(chance.randrange(len(locked)))
            tree.unlock(node)
            naive.locks.remove(key)
        elif action < 0.8:
            assert len(tree.match(tokens).pages) * _PAGE == naive.match(tokens)
        else:
            before = tree.pages
            freed = tree.evict(chance.randrange(6))
            assert freed == before - tree.pages
            naive.prefixes = {key for key in naive.prefixes if len(tree.match(key).pages) * _PAGE == len(key)}
        tree.check_integrity()
        pool.check_integrity([(TREE, tree.cached_pages())])
        assert tree.pages == len(naive.prefixes)
        assert tree.protected_pages == naive.protected


def test_the_least_recently_used_leaf_goes_first_and_its_parent_stays() -> None:
    pool = PagePool(10, 1)
    tree = RadixCache(pool)
    for key in ((1, 2, 3), (1, 2, 4), (5,)):
        tree.insert(key, pool.allocate(len(key), "me"), "me", tree.root(ROOT))
    tree.match((1, 2, 3))
    assert tree.evict(1) == 1
    assert [len(tree.match(key).pages) for key in ((1, 2, 3), (1, 2, 4), (5,))] == [3, 2, 1]
    assert tree.evict(1) == 1
    assert len(tree.match((5,)).pages) == 1
    assert tree.evicted_pages == 2


def test_a_locked_path_survives_any_eviction() -> None:
    pool = PagePool(10, 1)
    tree = RadixCache(pool)
    path = tree.insert((1, 2, 3), pool.allocate(3, "me"), "me", tree.root(ROOT))
    tree.lock(path.node)
    tree.match((1, 2))
    assert tree.evict(10) == 0
    tree.unlock(path.node)
    assert tree.evict(10) == 3


def test_going_on_behind_a_held_path_makes_it_younger() -> None:
    pool = PagePool(10, 1)
    tree = RadixCache(pool)
    path = tree.insert((1, 2), pool.allocate(2, "me"), "me", tree.root(ROOT))
    tree.lock(path.node)
    other = tree.insert((5,), pool.allocate(1, "me"), "me", tree.root(ROOT))
    tree.lock(other.node)
    assert tree.insert((3,), pool.allocate(1, "me"), "me", path.node).pages == [3]
    tree.unlock(path.node)
    assert tree.evict(1) == 1
    tree.unlock(other.node)
    assert tree.evict(1) == 1
    assert [len(tree.match(key).pages) for key in ((5,), (1, 2, 3))] == [0, 2]


def test_page_hashes_chain_and_show_as_signed_integers() -> None:
    first, second = page_digests(None, (1, 2, 3, 4), 2)
    assert page_digests(first, (3, 4), 2) == [second]
    assert wire_hash(b"\xff" * 32) == -1
    assert wire_hash(bytes.fromhex("0000000000000001") + b"\xff" * 24) == 1


def test_a_write_under_an_old_stamp_names_the_new_owner() -> None:
    pool = PagePool(2, 1)
    pages = pool.allocate(2, "a")
    stamp = pool.last_stamp
    pool.free(pages, "a")
    assert pool.strangers(pages, stamp) == [(pages[0], ""), (pages[1], "")]
    assert pool.allocate(1, "b") == [pages[0]]
    assert pool.strangers(pages, stamp) == [(pages[0], "b"), (pages[1], "")]
    assert pool.strangers(pages[:1], pool.last_stamp) == []


def test_pages_in_rows_are_kept_as_single_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of any length, from parts of one page on; whoever names a page that is not his is told which."""
    for part in (1, 2, 3, 256):
        monkeypatch.setattr(module, "_PART", part)
        pool = PagePool(12, 1)
        pool.free(pool.allocate(3, "a"), "a")
        pages = pool.allocate(11, "a")
        assert pages == [*range(3, 12), 0, 1]
        pool.hand_over(pages[:7], "a", TREE)
        assert [pool.owner_of(page) for page in pages] == [TREE] * 7 + ["a"] * 4
        assert pool.strangers(pages, pool.last_stamp) == []
        with pytest.raises(AssertionError, match="page 9 of 'radix tree' given away by 'a'"):
            pool.hand_over([pages[8], pages[6]], "a", TREE)
        pool.free(pages[:7], TREE)
        pool.check_integrity([("a", [pages[7], *pages[9:]]), (TREE, [pages[8]])])
