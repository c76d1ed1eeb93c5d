"""KV memory of one engine: page pool and radix cache together, in the sizes that admission thinks in."""

from collections.abc import Iterable
from typing import Protocol

from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.pages import TREE, PagePool
from windtunnel.core.sglang.radix import RadixCache, RadixNode
from windtunnel.core.sglang.sequence import SglangSequence


class Holder(Protocol):
    """Whoever holds pages: `pages[i]` in order, the first `held` of them the tree's, locked at `node`."""

    tag: str
    pages: list[int]
    held: int
    node: RadixNode | None
    computed: int


class HeldPages:
    """Pages that outlive their sequence. Owned by whoever took them over."""

    __slots__ = ("computed", "held", "node", "pages", "tag")

    def __init__(self, source: Holder) -> None:
        """Take over all that `source` holds."""
        self.tag, self.pages, self.held, self.node, self.computed = (
            source.tag,
            source.pages,
            source.held,
            source.node,
            source.computed,
        )
        source.pages, source.held, source.node, source.computed = [], 0, None, 0


class KvMemory:
    """Gives pages to sequences and takes them back. Each sequence's pages are released exactly once, by `release`."""

    def __init__(self, config: SglangEngineConfig) -> None:
        self.page_size = config.page_size
        self.pool = PagePool(config.num_pages, config.page_size)
        self.tree = RadixCache(self.pool, collect_events=config.collect_kv_events)
        self.caching = not config.disable_radix_cache

    @property
    def available_tokens(self) -> int:
        return self.pool.free_pages * self.page_size

    @property
    def evictable_tokens(self) -> int:
        return self.tree.evictable_pages * self.page_size

    @property
    def capacity(self) -> int:
        return self.pool.num_pages * self.page_size

    @property
    def used_tokens(self) -> int:
        """Neither free nor evictable."""
        return self.capacity - self.available_tokens - self.evictable_tokens

    @property
    def usage(self) -> float:
        return self.used_tokens / self.capacity

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def whole(self, tokens: int) -> int:
        """Tokens rounded up to whole pages."""
        return self.pages_for(tokens) * self.page_size

    def prefix_tokens(self, sequence: SglangSequence) -> int:
        """Cached tokens of what a sequence would prefill; its last token is always computed."""
        if not self.caching:
            return 0
        match = self.tree.match(sequence.tokens(sequence.num_tokens - 1), sequence.namespace)
        return len(match.pages) * self.page_size

    def attach(self, sequence: SglangSequence) -> int:
        """Lock the longest cached prefix for a sequence that holds nothing. Returns its tokens."""
        assert not sequence.pages, "a sequence is attached twice"
        if not self.caching:
            return 0
        match = self.tree.match(sequence.tokens(sequence.num_tokens - 1), sequence.namespace)
        self.tree.lock(match.node)
        sequence.node, sequence.pages, sequence.held = match.node, list(match.pages), len(match.pages)
        sequence.computed = sequence.held * self.page_size
        return sequence.computed

    def missing_pages(self, sequence: SglangSequence, tokens: int) -> int:
        """Pages to add so that `tokens` of the sequence fit."""
        return max(0, self.pages_for(tokens) - len(sequence.pages))

    def reclaim(self, pages: int) -> bool:
        """Evict until `pages` are free. False if that is impossible."""
        short = pages - self.pool.free_pages
        if short > 0:
            self.tree.evict(short)
        return pages <= self.pool.free_pages

    def grow(self, sequence: SglangSequence, tokens: int) -> bool:
        """Add pages until `tokens` fit, evicting if need be. False: nothing is changed but the cache."""
        missing = self.missing_pages(sequence, tokens)
        if not missing:
            return True
        if not self.reclaim(missing):
            return False
        sequence.pages += self.pool.allocate(missing, sequence.tag)
        return True

    def full_ones(self, sequences: Iterable[SglangSequence]) -> int:
        """How many of these have no place for another token."""
        size = self.page_size
        return sum([sequence.computed >= len(sequence.pages) * size for sequence in sequences])

    def grow_by_one(self, sequences: Iterable[SglangSequence]) -> None:
        """One more token each; the pages for it are free."""
        size, pool = self.page_size, self.pool
        for sequence in sequences:
            if sequence.computed >= len(sequence.pages) * size:
                sequence.pages.append(pool.allocate_one(sequence.tag))
            sequence.computed += 1

    def publish(self, sequence: SglangSequence, tokens: int) -> None:
        """Enter the whole pages of the first `tokens` into the cache; the sequence goes on with the tree's pages, locked."""
        whole = tokens // self.page_size
        if not self.caching or whole <= sequence.held:
            return
        held, size = sequence.held, self.page_size
        node = sequence.node if sequence.node is not None and held else self.tree.root(sequence.namespace)
        key = sequence.tokens(whole * size, held * size)
        match = self.tree.insert(key, sequence.pages[held:whole], sequence.tag, node, sequence.request.session_id)
        self.tree.lock(match.node)
        self._unlock(sequence)
        sequence.pages[held:whole] = match.pages
        sequence.node, sequence.held = match.node, whole

    def release(self, holder: Holder) -> None:
        """Give back all that somebody holds. What is in the tree stays cached."""
        self.pool.free(holder.pages[holder.held :], holder.tag)
        self._unlock(holder)
        holder.pages, holder.held, holder.node, holder.computed = [], 0, None, 0

    def _unlock(self, holder: Holder) -> None:
        if holder.node is not None:
            self.tree.unlock(holder.node)

    def check_integrity(self, holders: Iterable[Holder]) -> None:
        """Raise AssertionError unless pages, locks and `holders` agree: what SGLang checks when it is idle."""
        holding = list(holders)
        claims = [(holder.tag, holder.pages[holder.held :]) for holder in holding]
        self.pool.check_integrity([*claims, (TREE, self.tree.cached_pages())])
        self.tree.check_integrity()
        for holder in holding:
            assert len(holder.pages) * self.page_size >= holder.computed, "KV without a page"
        if not any(holder.node is not None and holder.node.parent is not None for holder in holding):
            assert not self.tree.protected_pages, "memory leak detected: tree nodes are locked by nobody"
