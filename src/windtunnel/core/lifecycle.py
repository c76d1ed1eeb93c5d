"""The life of a sequence, as data: one table for both engine flavours.

Rules this file lives by:

* A state changes only through `next_state`; a pair that is not in `TABLE` is a bug and raises `IllegalTransition`.
* A terminal state has no exit. `TABLE` has no row for one, and importing this module checks it.
* Every change is one `Transition` in the step's output. Metrics, traces, `/debug/requests` and the lab's oracles
  are folds over those records, so none of them can disagree with the engine.

The vLLM names (§5.3 of the vLLM reference) and the SGLang queues (§3 of the SGLang reference) map onto these states:
`DEFERRED` is WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, a LoRA slot or a grammar queue; `TRANSFERRING` is
WAITING_FOR_REMOTE_KVS or the decode's transfer queue; `INFLIGHT` is the prefill's inflight queue. A vLLM prefill's request
has finished when its blocks are held for a decode: holds are no sequences.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple


class State(Enum):
    """Where a sequence is. The value is the name shown in `/debug/requests`."""

    NEW = "new"
    BOOTSTRAPPING = "bootstrapping"
    PREALLOC = "prealloc"
    QUEUED = "queued"
    DEFERRED = "deferred"
    TRANSFERRING = "transferring"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    INFLIGHT = "inflight"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    REFUSED = "refused"

    @property
    def terminal(self) -> bool:
        return self in TERMINAL


class Event(Enum):
    """What happened to a sequence."""

    SUBMIT = "submit"
    REFUSE = "refuse"
    BOOTSTRAP = "bootstrap"
    BOOTSTRAPPED = "bootstrapped"
    PREALLOCATE = "preallocate"
    DEFER = "defer"
    RESUME = "resume"
    FETCH = "fetch"
    FETCHED = "fetched"
    SCHEDULE = "schedule"
    FIRST_TOKEN = "first_token"
    PREEMPT = "preempt"
    HAND_OVER = "hand_over"
    FINISH = "finish"
    ABORT = "abort"
    FAIL = "fail"


TERMINAL = frozenset({State.FINISHED, State.ABORTED, State.FAILED, State.REFUSED})

_S, _E = State, Event
_LIVE = tuple(state for state in State if state not in TERMINAL and state is not State.NEW)

TABLE: Mapping[tuple[State, Event], State] = MappingProxyType(
    {
        (_S.NEW, _E.SUBMIT): _S.QUEUED,
        (_S.NEW, _E.REFUSE): _S.REFUSED,
        (_S.NEW, _E.BOOTSTRAP): _S.BOOTSTRAPPING,
        (_S.NEW, _E.PREALLOCATE): _S.PREALLOC,
        (_S.BOOTSTRAPPING, _E.BOOTSTRAPPED): _S.QUEUED,
        (_S.PREALLOC, _E.FETCH): _S.TRANSFERRING,
        (_S.QUEUED, _E.DEFER): _S.DEFERRED,
        (_S.PREEMPTED, _E.DEFER): _S.DEFERRED,
        (_S.DEFERRED, _E.RESUME): _S.QUEUED,
        (_S.QUEUED, _E.FETCH): _S.TRANSFERRING,
        (_S.TRANSFERRING, _E.FETCHED): _S.QUEUED,
        (_S.QUEUED, _E.SCHEDULE): _S.PREFILL,
        (_S.PREEMPTED, _E.SCHEDULE): _S.PREFILL,
        (_S.PREFILL, _E.FIRST_TOKEN): _S.DECODE,
        (_S.PREFILL, _E.PREEMPT): _S.PREEMPTED,
        (_S.DECODE, _E.PREEMPT): _S.PREEMPTED,
        (_S.PREFILL, _E.HAND_OVER): _S.INFLIGHT,
        (_S.DECODE, _E.HAND_OVER): _S.INFLIGHT,
        (_S.PREFILL, _E.FINISH): _S.FINISHED,
        (_S.DECODE, _E.FINISH): _S.FINISHED,
        (_S.INFLIGHT, _E.FINISH): _S.FINISHED,
        **{(state, _E.ABORT): _S.ABORTED for state in _LIVE},
        **{(state, _E.FAIL): _S.FAILED for state in _LIVE},
    }
)


class IllegalTransition(AssertionError):
    """A (state, event) pair outside the table: a defect of windtunnel, never of its user."""


class Transition(NamedTuple):
    """One row of the event log. `detail` holds plain values only (token counts, reasons)."""

    at_ns: int
    request_id: str
    event: Event
    before: State
    after: State
    detail: Mapping[str, int | str] | None = None


def next_state(state: State, event: Event) -> State:
    """The state after `event`, or IllegalTransition."""
    try:
        return TABLE[state, event]
    except KeyError:
        raise IllegalTransition(f"no transition for {event.name} in {state.name}") from None


def _check_table() -> None:
    for state, _event in TABLE:
        if state in TERMINAL:
            raise AssertionError(f"terminal state {state.name} has an exit")


_check_table()
