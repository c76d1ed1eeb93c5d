"""What happened: frozen records of requests, samples and whole storms."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from windtunnel.lab.plan import Api, Role, StormPlan


class End(Enum):
    """How a request ended, as its client saw it. Exactly one applies."""

    FINISHED = "finished"
    """A finish reason, the terminator and the end of the body; without streaming: a whole answer."""
    ERROR_STATUS = "error_status"
    """A status other than 200 before the body."""
    ERROR_FRAME = "error_frame"
    """An error inside a 200 stream."""
    UNTERMINATED = "unterminated"
    """The body ended properly, but without finish reason or terminator."""
    EMPTY = "empty"
    """A stream that is its terminator and nothing else."""
    CUT = "cut"
    """The connection ended inside the message."""
    MALFORMED = "malformed"
    """Not HTTP, not SSE or not JSON where that is due."""
    REFUSED = "refused"
    """No connection."""
    TIMEOUT = "timeout"
    LEFT = "left"
    """The client left on purpose."""
    CLIENT_DIED = "client_died"
    """The client process of the lab that held the request has ended: what it saw is not known."""


class Damage(Enum):
    """What is wrong with a text."""

    WRONG = "wrong"
    MISSING = "missing"
    DUPLICATED = "duplicated"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True)
class TextFault:
    """The first place where a text is not what the oracle would have written."""

    damage: Damage
    position: int
    have: str
    want: str
    owner: int | None = None
    """The tag of the request that the foreign words belong to."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One generation request of a storm."""

    tag: int
    role: Role
    round: int
    api: Api
    prompt: str
    max_tokens: int
    stream: bool
    n: int = 1
    request_id: str = ""
    """Sent as `X-Request-Id`."""


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """One generation request and all that its client saw. Times in nanoseconds from the start of the storm."""

    ask: Ask
    end: End
    started_ns: int
    ended_ns: int
    status: int | None = None
    head_ns: int | None = None
    frame_ns: tuple[int, ...] = ()
    """When each frame with text arrived."""
    words: tuple[str, ...] = ()
    finish_reason: str | None = None
    error: str | None = None
    fault: TextFault | None = None
    left_in: str | None = None
    """The state it left in: `incomplete`, `sent`, `head`, `tokens:N`, or the target's, as `queued` or `queued (inferred)`."""
    left_ns: int | None = None
    due_ns: int | None = None
    """When the state in which it leaves was reached."""
    left_by: str | None = None
    gone_ns: int | None = None
    """When it had left for certain: its connection was closed, its end of it sent, or its abort acknowledged."""
    words_after_leaving: int = 0
    """Read after a half-close."""

    @property
    def complete(self) -> bool:
        """Answered in full: a proper end and nothing wrong with the text."""
        return self.end is End.FINISHED and self.fault is None and self.finish_reason != "abort"


@dataclass(frozen=True, slots=True)
class BystanderRecord:
    """One request of somebody else."""

    kind: str
    sent_ns: int
    ended_ns: int
    expect_status: int
    status: int | None
    error: str | None = None
    """Why the answer is bad in spite of its status, or why there is none."""
    tag: int | None = None
    """Of a generation: its stream record carries the same tag."""
    fault: TextFault | None = None

    @property
    def harmed(self) -> bool:
        return self.status != self.expect_status or self.error is not None or self.fault is not None


@dataclass(frozen=True, slots=True)
class Sample:
    """The target's metrics at one instant between `at_ns`, when the first source was asked, and the last answer."""

    at_ns: int
    phase: str
    clients: int
    """So many sequences our open generation requests asked for, at most; n counts n times."""
    opened: int
    """How many generation requests had been opened so far; equal in two samples: none came and went between them."""
    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    status: int | None = 200
    error: str | None = None
    process: Mapping[str, float] = field(default_factory=dict)
    """`rss_bytes`, `threads`, `fds`, `sockets` of the server's process, where that is ours to see."""

    @property
    def usable(self) -> bool:
        return self.error is None


class Lag(NamedTuple):
    """The lab's own timer was due at `at_ns` and fired so much later: this machine was busy with something else."""

    at_ns: int
    late_ns: int


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    started_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class KnownPair:
    """One prompt, answered before and after the storm at temperature 0."""

    tag: int
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DirectCheck:
    """A client that leaves a worker which it asked without the router: how long the worker ran on (None: too long)."""

    source: str
    freed_ns: int | None


@dataclass(frozen=True, slots=True)
class DrainRecord:
    """What came after SIGTERM."""

    streams: int
    unended: int
    """Streams that had neither ended nor failed at the deadline."""
    exited_ns: int | None
    """From the signal to the end of the process; None: it was still there at the deadline."""
    deadline_ns: int
    by_end: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LostClient:
    """A client process of the lab that ended before the storm did."""

    name: str
    why: str
    at_ns: int
    requests: int
    """How many requests were at work in it; their records end as `client_died`."""


@dataclass(frozen=True, slots=True)
class StormResult:
    """Everything that one storm left behind."""

    plan: StormPlan
    kind: str
    cancel_grace_ns: int
    watches: Mapping[str, str]
    """Gauge key → what it watches (`running`, `waiting`, `kv_usage`, `queue`, `other`)."""
    baseline: Sample
    oracle: bool
    """Whether texts were checked against the oracle."""
    streams: tuple[StreamRecord, ...]
    """Victims, survivors, later streams and probes, in the order in which they ended."""
    bystanders: tuple[BystanderRecord, ...]
    samples: tuple[Sample, ...]
    phases: tuple[Phase, ...]
    quiet_ns: int | None
    """When the target was quiet again after the storm; None: not before the deadline."""
    at_deadline: Sample | None
    """The last sample before the probe; None when it became quiet or nothing could be sampled."""
    after_probe: Sample | None
    """The sample after a probe request, taken only when it did not become quiet."""
    interrupted: str | None = None
    """Why the storm ended early."""
    settled: Sample | None = None
    """The last sample, taken when all requests of the storm had ended."""
    known: tuple[KnownPair, ...] = ()
    direct: DirectCheck | None = None
    drain: DrainRecord | None = None
    front: bool = False
    """Whether the target is not itself one of the metrics sources: a router."""
    server: Mapping[str, str] = field(default_factory=dict)
    """What the server says about itself (`lab.server_info`)."""
    lost_clients: tuple[LostClient, ...] = ()
    lags: tuple[Lag, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def untried(self) -> str | None:
        """Why a storm without findings proves nothing: interrupted, a client lost, or no victim left. None: it does."""
        if self.interrupted:
            return self.interrupted
        if self.lost_clients:
            return "; ".join(f"{one.name} {one.why}, {one.requests} requests lost" for one in self.lost_clients)
        left = any(victim.left_ns for victim in self.of(Role.VICTIM))
        return None if left else "no client left, so nothing was tried"

    def of(self, *roles: Role) -> tuple[StreamRecord, ...]:
        return tuple(stream for stream in self.streams if stream.ask.role in roles)

    @property
    def final(self) -> Sample | None:
        """The sample that leaks are read from."""
        usable = [sample for sample in self.samples if sample.usable]
        return self.after_probe or self.at_deadline or (usable[-1] if usable else None)
