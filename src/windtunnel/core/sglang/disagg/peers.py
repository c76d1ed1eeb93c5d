"""The prefills that a decode worker knows, and the questions it asks about them (SGLang reference §2.2, §2.5)."""

from collections.abc import Iterable

from windtunnel.core.sglang.disagg.config import DisaggConfig
from windtunnel.core.sglang.disagg.topology import Topology
from windtunnel.core.transfer.frames import DpRankQuery, Outgoing, TopologyQuery


class _Asking:
    """One prefill whose topology is not known yet."""

    __slots__ = ("next_ns", "open", "tries")

    def __init__(self) -> None:
        self.tries = 0
        self.next_ns = 0
        self.open = False


class Prefills:
    """Owned by a decode worker. Addresses are bootstrap_host:port."""

    def __init__(self, config: DisaggConfig) -> None:
        self._config = config
        self._known: dict[str, Topology] = {}
        self._asking: dict[str, _Asking] = {}
        self._dp_next_ns: dict[str, int] = {}
        self._misses: dict[str, int] = {}

    def __getitem__(self, address: str) -> Topology | None:
        return self._known.get(address)

    @property
    def addresses(self) -> tuple[str, ...]:
        """What the heartbeat visits."""
        return tuple(self._known)

    def learn(self, address: str, topology: Topology) -> None:
        self._known[address] = topology
        self._asking.pop(address, None)
        self._misses.pop(address, None)

    def drop(self, address: str) -> None:
        """Forget what is cached of a prefill; the next request asks again."""
        self._known.pop(address, None)
        self._misses.pop(address, None)

    def could_not_learn(self, address: str, now_ns: int) -> bool:
        """One try has failed. True: it was the last; the next request begins to count anew."""
        asking = self._asking.setdefault(address, _Asking())
        asking.open = False
        asking.tries += 1
        asking.next_ns = now_ns + self._config.topology_interval_ns
        limit = self._config.profile.topology_tries
        if limit is None or asking.tries < limit:
            return False
        asking.tries = 0
        return True

    def question(self, address: str, now_ns: int) -> Outgoing | None:
        """Ask for a topology, at most once per interval and never twice at a time."""
        asking = self._asking.setdefault(address, _Asking())
        if asking.open or now_ns < asking.next_ns:
            return None
        asking.open = True
        return Outgoing(0, address, TopologyQuery(address))

    def dp_question(self, address: str, rooms: Iterable[int], now_ns: int) -> Outgoing | None:
        if now_ns < self._dp_next_ns.get(address, 0):
            return None
        self._dp_next_ns[address] = now_ns + self._config.dp_query_interval_ns
        return Outgoing(0, address, DpRankQuery(address, tuple(rooms)))

    def next_question_at(self, addresses: Iterable[str]) -> int | None:
        """When one of these may be asked about again."""
        times = [
            self._dp_next_ns.get(address, 0) if address in self._known else self._topology_at(address) for address in addresses
        ]
        return min((at for at in times if at is not None), default=None)

    def _topology_at(self, address: str) -> int | None:
        asking = self._asking.get(address)
        if asking is None:
            return 0
        return None if asking.open else asking.next_ns

    def heartbeat(self, address: str, *, alive: bool) -> bool:
        """The outcome of one visit. True: the prefill counts as lost, and is forgotten."""
        if alive or address not in self._known:
            self._misses.pop(address, None)
            return False
        self._misses[address] = self._misses.get(address, 0) + 1
        if self._misses[address] < self._config.heartbeat_max_failure:
            return False
        self.drop(address)
        return True
