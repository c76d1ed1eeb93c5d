"""What a client knows of its calls: plain records with one writer (`clients.Clients`)."""

from array import array
from dataclasses import dataclass, field
from typing import Literal

from windtunnel.sim.kernel import Timer
from windtunnel.sim.workload import Question

Outcome = Literal["finished", "aborted", "refused", "timed_out", "failed", "in_flight"]
OUTCOMES: tuple[Outcome, ...] = ("finished", "aborted", "refused", "timed_out", "failed", "in_flight")
NEVER = -1


@dataclass(slots=True)
class Attempt:
    """One request on its way. `times_ns` are the engine's: a token reaches the client `return_ns` later."""

    request_id: str
    call: "Call"
    sent_ns: int
    prompt_tokens: int
    engine: int = NEVER
    outcome: Outcome | None = None
    ended_ns: int = NEVER
    status: int = 200
    back_router_ns: int = NEVER
    """From the engine to the router, for every message of this attempt."""
    return_ns: int = NEVER
    cancelled: bool = False
    """The router knows that the client has gone."""
    closed: bool = False
    """The router has closed its connection to the engine."""
    left_ns: int = NEVER
    """When the news that its client has gone reached the router."""
    owner: "Attempt | None" = None
    """Of a prefill leg: the attempt that it is a leg of."""
    prefill: "Attempt | None" = None
    released: bool = False
    """The router no longer counts it."""
    generation: int = 0
    times_ns: "array[int]" = field(default_factory=lambda: array("q"))
    trigger: int = NEVER
    """Tell the client when so many tokens have been sent."""
    cached_tokens: int = 0
    timers: list[Timer] = field(default_factory=list)

    @property
    def live(self) -> bool:
        return self.outcome is None

    def received(self, now_ns: int) -> int:
        """Tokens that the client has seen by `now_ns`."""
        times = self.times_ns
        if times and times[-1] + self.return_ns <= now_ns:
            return len(times)
        return sum(1 for at_ns in times if at_ns + self.return_ns <= now_ns)


@dataclass(slots=True)
class Call:
    """One question until it is answered or given up."""

    question: Question
    started_ns: int
    abort: bool = False
    """This client will leave early."""
    outcome: Outcome | None = None
    ended_ns: int = NEVER
    attempts: list[Attempt] = field(default_factory=list)
    retries: int = 0
    winner: Attempt | None = None
    retry_at: Timer | None = None
