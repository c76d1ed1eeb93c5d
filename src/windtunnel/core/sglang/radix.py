"""The radix cache: prompts and answers as a tree of token pages (SGLang reference §9).

Rules this file lives by:

* A node holds whole pages only; paths from the root spell cached prefixes, one subtree for each namespace.
* A running request locks the node at the end of its prefix, and with it the whole path to the root. So a node's lock count
  is never below any child's.
* Only leaves without locks are evicted, the least recently used first; then their parents may follow.
* A partial match splits a node, so the end of a match is always the end of a node.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from windtunnel.core.outputs import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from windtunnel.core.sglang.hashing import ROOT, Namespace, page_digests, seed_of
from windtunnel.core.sglang.pages import TREE, PagePool

Key = tuple[int, ...]


class RadixNode:
    """Owned by its tree. `key` and `pages` describe the same tokens."""

    __slots__ = ("accessed", "children", "digests", "key", "locks", "namespace", "pages", "parent")

    def __init__(self, parent: "RadixNode | None", key: Key, pages: list[int], namespace: Namespace) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.namespace = namespace
        self.children: dict[Key, RadixNode] = {}
        self.locks = 0
        self.accessed = 0
        self.digests: list[bytes] = []
        """One for each page; empty while no events are collected."""


class Match(NamedTuple):
    """The longest cached prefix. It is not held until its node is locked."""

    node: RadixNode
    pages: list[int]


class RadixCache:
    """Owns the pages tagged `TREE`. Cost of a call: the tokens it names, plus a logarithm for each node."""

    def __init__(self, pool: PagePool, *, collect_events: bool = False) -> None:
        self._pool = pool
        self._size = pool.page_size
        self._collect = collect_events
        self._events: list[KvEvent] = []
        self._ticks = 0
        self._heap: list[tuple[int, int, RadixNode]] = []
        self._pushes = 0
        self._roots: dict[Namespace, RadixNode] = {}
        self.evictable_pages = 0
        self.protected_pages = 0
        self.evicted_pages = 0
        """Evicted so far."""

    @property
    def pages(self) -> int:
        return self.evictable_pages + self.protected_pages

    def root(self, namespace: Namespace) -> RadixNode:
        node = self._roots.get(namespace)
        if node is None:
            node = self._roots[namespace] = RadixNode(None, (), [], namespace)
        return node

    def aligned(self, tokens: int) -> int:
        """The tokens in whole pages."""
        return tokens - tokens % self._size

    # Lookup

    def match(self, tokens: Key, namespace: Namespace = ROOT) -> Match:
        """The longest cached prefix of `tokens`, in whole pages; its nodes become the most recently used."""
        self._ticks += 1
        return self._match_below(self.root(namespace), tokens)

    def _match_below(self, node: RadixNode, tokens: Key) -> Match:
        """`tokens` and pages are those behind `node`."""
        pages: list[int] = []
        at = 0
        while (child := node.children.get(tokens[at : at + self._size])) is not None:
            shared = self._shared(child.key, tokens, at)
            if shared < len(child.key):
                child = self._split(child, shared)
            self._touch(child)
            pages += child.pages
            at += shared
            node = child
            if len(tokens) - at < self._size:
                break
        return Match(node, pages)

    def _shared(self, key: Key, tokens: Key, at: int) -> int:
        """How many tokens of `key`, in whole pages, equal `tokens` from `at` on."""
        piece = tokens[at : at + len(key)]
        if piece == key:
            return len(key)
        low, high = 0, len(piece)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if piece[:middle] == key[:middle] else (low, middle - 1)
        return self.aligned(low)

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        """Cut `node` after `tokens`; returns the new upper part."""
        pages = tokens // self._size
        assert node.parent is not None, "a root has nothing to split"
        upper = RadixNode(node.parent, node.key[:tokens], node.pages[:pages], node.namespace)
        upper.locks, upper.accessed, upper.digests = node.locks, node.accessed, node.digests[:pages]
        node.parent.children[upper.key[: self._size]] = upper
        node.parent, node.key, node.pages, node.digests = upper, node.key[tokens:], node.pages[pages:], node.digests[pages:]
        upper.children[node.key[: self._size]] = node
        return upper

    def _touch(self, node: RadixNode) -> None:
        node.accessed = self._ticks
        self._offer(node)

    # Insertion

    def insert(self, tokens: Key, pages: list[int], owner: str, node: RadixNode, session_id: str | None = None) -> Match:
        """Enter `tokens` (whole pages) that `owner` computed into `pages` behind `node`: a root, or what the owner has locked.

        Pages that turn out to be cached under another number are given back to the pool. Returns the end of the path in the
        tree and its pages behind `node`.
        """
        self._ticks += 1
        self._touch_path(node)
        match = self._match_below(node, tokens)
        known = len(match.pages)
        self._pool.free(pages[:known], owner)
        if known == len(pages):
            return match
        added = pages[known:]
        self._pool.hand_over(added, owner, TREE)
        return Match(self._append(match.node, tokens[known * self._size :], added, session_id), match.pages + added)

    def _touch_path(self, node: RadixNode) -> None:
        """What is locked is no leaf to evict, but its age counts when it is one again."""
        while node.parent is not None:
            assert node.locks, "a held path is not locked"
            node.accessed = self._ticks
            node = node.parent

    def _append(self, parent: RadixNode, key: Key, pages: list[int], session_id: str | None) -> RadixNode:
        node = RadixNode(parent, key, pages, parent.namespace)
        parent.children[key[: self._size]] = node
        self.evictable_pages += len(pages)
        self._touch(node)
        if self._collect:
            self._stored(node, session_id)
        return node

    # Locks

    def lock(self, node: RadixNode) -> None:
        while node.parent is not None:
            if not node.locks:
                self.evictable_pages -= len(node.pages)
                self.protected_pages += len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, node: RadixNode) -> None:
        while node.parent is not None:
            assert node.locks, "a node is unlocked twice"
            node.locks -= 1
            if not node.locks:
                self.evictable_pages += len(node.pages)
                self.protected_pages -= len(node.pages)
                self._offer(node)
            node = node.parent

    # Eviction

    def evict(self, pages: int) -> int:
        """Drop least recently used leaves until `pages` are free, or none is left. Returns how many were freed."""
        freed = 0
        while freed < pages and (node := self._pop_oldest()) is not None:
            freed += len(node.pages)
            self._drop(node)
        return freed

    def _offer(self, node: RadixNode) -> None:
        """Note a leaf that may be evicted, at its present age. Older notes of it are stale."""
        if node.locks or node.children or node.parent is None:
            return
        self._pushes += 1
        heappush(self._heap, (node.accessed, self._pushes, node))
        if len(self._heap) > 4 * self.pages + 64:
            self._heap = [entry for entry in self._heap if self._fresh(entry)]
            heapify(self._heap)

    def _fresh(self, entry: tuple[int, int, RadixNode]) -> bool:
        accessed, _push, node = entry
        evictable = not node.locks and not node.children and node.parent is not None
        return evictable and node.accessed == accessed and bool(node.pages)

    def _pop_oldest(self) -> RadixNode | None:
        while self._heap:
            entry = heappop(self._heap)
            if self._fresh(entry):
                return entry[2]
        return None

    def _drop(self, node: RadixNode) -> None:
        parent = node.parent
        assert parent is not None, "a root is evicted"
        del parent.children[node.key[: self._size]]
        self.evictable_pages -= len(node.pages)
        self.evicted_pages += len(node.pages)
        self._pool.free(node.pages, TREE)
        if self._collect:
            self._events.append(BlockRemoved(tuple(node.digests)))
        node.pages, node.parent = [], None
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.namespace, None)
        self._offer(parent)

    def reset(self) -> None:
        """Forget everything. Nothing is locked."""
        assert not self.protected_pages, "a cache in use is reset"
        for node in self.nodes():
            self._pool.free(node.pages, TREE)
        self._roots.clear()
        self._heap.clear()
        self.evictable_pages = 0
        if self._collect:
            self._events.append(AllBlocksCleared())

    # Looking in

    def nodes(self) -> Iterator[RadixNode]:
        """All nodes but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def cached_pages(self) -> list[int]:
        return [page for node in self.nodes() for page in node.pages]

    @property
    def cached_digests(self) -> frozenset[bytes]:
        """What a replay of all events gives. Empty while no events are collected."""
        return frozenset(digest for node in self.nodes() for digest in node.digests)

    def take_events(self) -> list[KvEvent]:
        taken, self._events = self._events, []
        return taken

    def _stored(self, node: RadixNode, session_id: str | None) -> None:
        above = node.parent
        known = above.digests[-1] if above is not None and above.digests else None
        node.digests = page_digests(known or seed_of(node.namespace), node.key, self._size)
        keys = node.namespace[1:] if any(node.namespace[1:]) else None
        extra_keys, adapter = (keys,) * len(node.pages), _adapter(node.namespace)
        self._events.append(
            BlockStored(tuple(node.digests), known, node.key, self._size, adapter, extra_keys, session_id=session_id)
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts, locks and tree agree."""
        evictable = protected = 0
        for node in self.nodes():
            assert len(node.key) == len(node.pages) * self._size > 0, "a node without whole pages"
            assert all(child.locks <= node.locks for child in node.children.values()), "a child is locked more than its parent"
            assert all(child.parent is node for child in node.children.values()), "a child has another parent"
            protected += len(node.pages) if node.locks else 0
            evictable += 0 if node.locks else len(node.pages)
        assert (evictable, protected) == (self.evictable_pages, self.protected_pages), "pages of the tree miscounted"


def _adapter(namespace: Namespace) -> tuple[int, str] | None:
    return (0, namespace[0]) if namespace[0] else None
