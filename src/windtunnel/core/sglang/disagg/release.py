"""Deferred release: pages of a failed decode request are kept until the prefill has stopped writing (reference §3.3, P30)."""

from collections import Counter
from collections.abc import Callable, Iterable

from windtunnel.core.sglang.disagg.receiver import RoomReceiver
from windtunnel.core.sglang.memory import HeldPages, KvMemory
from windtunnel.core.units import S


class _Deferred:
    __slots__ = ("give_back", "holding", "receivers", "since_ns")

    def __init__(self, holding: HeldPages, receivers: list[RoomReceiver], give_back: Callable[[], None], since_ns: int) -> None:
        self.holding = holding
        self.receivers = receivers
        self.give_back = give_back
        self.since_ns = since_ns


class DeferredReleases:
    """Owned by a decode worker. `counters`: `decode_deferred_kv_release_total` by outcome."""

    def __init__(self, memory: KvMemory, timeout_ns: int) -> None:
        self._memory = memory
        self._timeout_ns = timeout_ns
        self._entries: list[_Deferred] = []
        self.counters: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    def hold(self, holding: HeldPages, receivers: Iterable[RoomReceiver], give_back: Callable[[], None], now_ns: int) -> None:
        """Keep these pages until all receivers are acknowledged or the time is up; `give_back` releases what goes with them."""
        self._entries.append(_Deferred(holding, list(receivers), give_back, now_ns))

    def run(self, now_ns: int) -> list[float]:
        """Release what is due. Returns how long each was held, in seconds."""
        kept, took_s = [], []
        for entry in self._entries:
            drained = all(receiver.acknowledged for receiver in entry.receivers)
            if not drained and now_ns - entry.since_ns < self._timeout_ns:
                kept.append(entry)
                continue
            self.counters["drained" if drained else "timeout"] += 1
            took_s.append((now_ns - entry.since_ns) / S)
            self._release(entry)
        self._entries = kept
        return took_s

    def _release(self, entry: _Deferred) -> None:
        for receiver in entry.receivers:
            receiver.forget_acks()
        self._memory.release(entry.holding)
        entry.give_back()

    def deadline_ns(self) -> int | None:
        return min((entry.since_ns + self._timeout_ns for entry in self._entries), default=None)

    def holders(self) -> list[HeldPages]:
        return [entry.holding for entry in self._entries]
