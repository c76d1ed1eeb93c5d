"""Finite things with owners: metadata buffer slots and request-pool rows."""


class SlotPool:
    """Numbered places, each with at most one owner; the lowest free number is taken first."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self.owners: dict[int, str] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, owner: str) -> int | None:
        """A place for `owner`, or None."""
        if not self._free:
            return None
        place = self._free.pop()
        self.owners[place] = owner
        return place

    def give_back(self, place: int, owner: str) -> None:
        assert self.owners.get(place) == owner, f"{self.name} {place} of {self.owners.get(place)!r} freed by {owner!r}"
        del self.owners[place]
        self._free.append(place)

    def check_integrity(self, claims: dict[int, str]) -> None:
        """Raise AssertionError unless exactly these places are owned by these."""
        assert len(self._free) + len(self.owners) == self.count, f"a {self.name} is lost"
        leaked = {place: owner for place, owner in self.owners.items() if claims.get(place) != owner}
        assert not leaked, f"{self.name} leaked: {leaked}"
        assert claims.keys() <= self.owners.keys(), f"a {self.name} is used and not owned"
