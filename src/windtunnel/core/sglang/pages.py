"""The page pool: who holds which page, since which allocation.

A page that is handed out carries its owner's tag and the number of the allocation, its *stamp*. Whoever writes into a page
from outside names the stamp it was told; a stamp that does not match is a write into memory that has been freed (and perhaps
given to somebody else) since.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat, starmap

FREE = ""
TREE = "radix tree"
_PART = 256
"""Pages that are looked at together: those of a long prompt mostly stand in rows, and a row is one assignment."""


class PagePool:
    """Owns all pages of one engine. The list of free pages is first in, first out, as in SGLang."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(num_pages))
        self._owner = [FREE] * num_pages
        self._stamp = array("q", bytes(8 * num_pages))
        self._stamps = 0

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def last_stamp(self) -> int:
        """The stamp of the latest allocation."""
        return self._stamps

    def allocate(self, count: int, owner: str) -> list[int]:
        """Pages for `owner`, under a new stamp. The caller has made sure that they are there."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        self._stamps += 1
        pages = list(starmap(self._free.popleft, repeat((), count)))
        for part in _parts(pages):
            if _is_row(part):
                row = slice(part[0], part[-1] + 1)
                self._owner[row] = [owner] * len(part)
                self._stamp[row] = array("q", [self._stamps]) * len(part)
            else:
                for page in part:
                    self._owner[page] = owner
                    self._stamp[page] = self._stamps
        return pages

    def allocate_one(self, owner: str) -> int:
        """As `allocate`, for one page."""
        page = self._free.popleft()
        self._stamps += 1
        self._owner[page] = owner
        self._stamp[page] = self._stamps
        return page

    def free(self, pages: Sequence[int], owner: str) -> None:
        """Give pages back; each must be held by `owner`."""
        for page in pages:
            assert self._owner[page] == owner, f"page {page} of {self._owner[page]!r} freed by {owner!r}"
            self._owner[page] = FREE
            self._stamp[page] = 0
            self._free.append(page)

    def hand_over(self, pages: Sequence[int], before: str, after: str) -> None:
        """Change the owner; the stamp stays."""
        for part in _parts(pages):
            row = slice(part[0], part[-1] + 1)
            if _is_row(part) and self._owner[row].count(before) == len(part):
                self._owner[row] = [after] * len(part)
                continue
            for page in part:
                assert self._owner[page] == before, f"page {page} of {self._owner[page]!r} given away by {before!r}"
                self._owner[page] = after

    def owner_of(self, page: int) -> str:
        """The owner's tag; empty for a free page."""
        return self._owner[page]

    def stamp_of(self, page: int) -> int:
        """The allocation by which this page is held; 0 for a free one."""
        return self._stamp[page]

    def strangers(self, pages: Sequence[int], stamp: int) -> list[tuple[int, str]]:
        """Those of `pages` that are no longer held under `stamp`, with the owner each has instead (empty: free)."""
        return [(page, self._owner[page]) for page in pages if self._stamp[page] != stamp]

    def held_by(self) -> Counter[str]:
        """Pages for each owner."""
        counts = Counter(self._owner)
        del counts[FREE]
        return counts

    def check_integrity(self, claims: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Raise AssertionError unless `claims` (owner, pages) and the free list together name every page exactly once."""
        owners: dict[int, str] = dict.fromkeys(self._free, FREE)
        assert len(owners) == len(self._free), "a page is free twice"
        for owner, pages in claims:
            for page in pages:
                assert page not in owners, f"page {page} belongs to {owners[page]!r} and {owner!r}"
                owners[page] = owner
        lost = [page for page in range(self.num_pages) if page not in owners]
        assert not lost, f"{len(lost)} pages leaked: held by {sorted({self._owner[page] for page in lost})}"
        wrong = [page for page, owner in owners.items() if self._owner[page] != owner]
        assert not wrong, f"pages {wrong[:8]} carry another owner's tag"


def _parts(pages: Sequence[int]) -> Iterator[list[int]]:
    return (list(pages[at : at + _PART]) for at in range(0, len(pages), _PART))


def _is_row(pages: list[int]) -> bool:
    """Each number is the one before plus 1."""
    return pages == list(range(pages[0], pages[0] + len(pages)))
