"""What all requests of one storm have in common: the target, the clock, the counts of what is open."""

import time
from collections import Counter
from dataclasses import dataclass, field

from windtunnel.lab.links import Links
from windtunnel.lab.record import Ask, Lag
from windtunnel.lab.target import Target


@dataclass(slots=True)
class Session:
    """What the requests of one storm share. Owned by the storm; requests only count themselves in and out."""

    target: Target
    timeout_ns: int
    linger_ns: int
    start_ns: int = field(default_factory=time.monotonic_ns)
    clients: int = 0
    """Sequences that open requests have asked for; n counts n times."""
    asked: int = 0
    """The same of all requests so far."""
    opened: int = 0
    kind: str = "unknown"
    """The engine kind: it decides the route by which requests are aborted."""
    notes: dict[str, None] = field(default_factory=dict)
    """What whoever reads the result should know, once each."""
    last_closed_ns: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    """How many open requests are in which stage (`incomplete`, `sent`, `head`, `tokens`)."""
    lags: list[Lag] = field(default_factory=list)
    """When the lab itself was late (`pulse`)."""

    links: Links = field(init=False)

    def __post_init__(self) -> None:
        self.links = Links(self.target)

    def now_ns(self) -> int:
        return time.monotonic_ns() - self.start_ns

    def came(self, ask: Ask) -> None:
        """A request is about to be sent, here or by another process of the lab."""
        self.clients += ask.n
        self.asked += ask.n
        self.opened += 1

    def went(self, ask: Ask, ended_ns: int) -> None:
        self.clients -= ask.n
        self.last_closed_ns = max(self.last_closed_ns, ended_ns)
