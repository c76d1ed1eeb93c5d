"""The front end's memory of media, as `mm_cache_*` tell of it."""

from collections.abc import Iterable

from windtunnel.core.request import MediaItem

MEDIA_KEPT = 4096
"""Media that the front end remembers. vLLM's processor cache has a size in bytes (4 GiB); there are no bytes here."""


class MediaCache:
    """What media the front end has seen lately, and what is to be told of its look-ups. Owned by a `VllmMetrics`."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}
        self.untold: dict[int, tuple[int, int]] = {}
        """Rank → look-ups and hits since the rank's last step."""

    def look_up(self, rank: int, items: Iterable[MediaItem]) -> None:
        queries, hits = self.untold.get(rank, (0, 0))
        for item in items:
            queries += 1
            hits += item.identifier in self._known
            self._known.pop(item.identifier, None)
            self._known[item.identifier] = None
            if len(self._known) > MEDIA_KEPT:
                del self._known[next(iter(self._known))]
        if queries:
            self.untold[rank] = queries, hits

    def clear(self) -> None:
        self._known.clear()
