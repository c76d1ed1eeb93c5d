"""What the coordinator of a storm and its client processes say to each other: frozen values, each pickled into one frame.

Both ends are ours and of one version (`Ready` says which), and frames pass between processes of one user only.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.lab.leave import Leave
from windtunnel.lab.plan import Moment
from windtunnel.lab.record import Ask, StreamRecord
from windtunnel.lab.target import Target

FRAME_LIMIT_BYTES = 256 * 1024 * 1024
"""A record of a stream is some bytes per token."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The first word of a client process."""

    version: str
    python: str
    pid: int
    host: str


@dataclass(frozen=True, slots=True)
class Clock:
    """Sent by the coordinator and sent back with the client's own clock in it."""

    sent_ns: int
    own_ns: int = 0


@dataclass(frozen=True, slots=True)
class Begin:
    """What all requests of the storm share. `start_ns` is the storm's start on the client's own clock."""

    target: Target
    timeout_ns: int
    linger_ns: int
    kind: str
    start_ns: int


@dataclass(frozen=True, slots=True)
class Run:
    """Send one request. `leave` comes without `wait` and `gate`: those are messages. `gate` is its number and its patience."""

    number: int
    ask: Ask
    leave: Leave | None
    gate: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Cancel:
    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A request waits for a state that only the target knows; `State` answers."""

    number: int
    moment: Moment


@dataclass(frozen=True, slots=True)
class State:
    number: int
    name: str


@dataclass(frozen=True, slots=True)
class AtGate:
    """A request has come to its gate, or has ended before."""

    number: int


@dataclass(frozen=True, slots=True)
class Open:
    gate: int


@dataclass(frozen=True, slots=True)
class Stages:
    """How many requests of this process are in which stage, for whoever watches."""

    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Done:
    number: int
    record: StreamRecord
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A request that ended by an error of our own."""

    number: int
    text: str


def encode(message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode(frame: bytes) -> Any:
    return pickle.loads(frame)
