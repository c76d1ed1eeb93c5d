"""Sessions: a request of a session goes on from an earlier one, whose prompt and answer come before its own tokens.

As SGLang 0.5.23 has them (`session/session_controller.py`), without streaming sessions:

* A session is a tree of requests by `rid`. `session_params.rid` names the request to go on from; without one nothing is before.
* `offset` keeps so many of the tokens before, `drop_previous_output` leaves the answer out. The BOS of an appended text goes.
* `replace` with a `rid` drops what has gone on from that request, and ends it, if it still runs; without one, the whole tree.
* What does not fit is found by the scheduler: a 400, under 200 in a native stream. A request that cannot join has no place in
  its session. One that has joined keeps it, whatever becomes of it: the tree holds what was submitted, not what succeeded.
* One that leaves the waiting queue without having run (the queue is full, an abort, a time-out) never gets a finish reason: it
  counts as running for ever, and only `replace` goes on from it. One refused for its length is left with a token of each.
* No KV is kept for a session. What its requests share is in the radix cache like everything else, and can be evicted.

Limits of ours: TURNS_MAX requests in a session and TOKENS_MAX tokens in all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from windtunnel.core.lifecycle import State, Transition
from windtunnel.core.outputs import Refusal, StepOutput
from windtunnel.serve.ranks import Ranks
from windtunnel.wire.family import Generation, PromptPlan, WireError
from windtunnel.wire.sglang.requests import SessionTurn

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

TURNS_MAX = 1000
TOKENS_MAX = 16_000_000
NAME_LIMIT = 1024
"""Characters in the id of a session, and in those of its requests."""
_WAITING = (State.NEW, State.QUEUED, State.PREEMPTED)
"""What ends here is taken out of the waiting queue, and nothing is noted in the request."""
_REFUSED_BY_THE_ENGINE = ("too_long", "queue_full", "dead")


@dataclass(slots=True)
class _Turn:
    rid: str
    prompt: tuple[int, ...]
    max_tokens: int
    answer: list[int] = field(default_factory=list)
    after: "dict[str, _Turn]" = field(default_factory=dict)
    begun: bool = False
    """The engine has said that it took it."""
    finished: bool = False

    def tokens(self, asked: SessionTurn) -> tuple[int, ...]:
        """What comes before a request that goes on from here."""
        before = self.prompt if asked.drop_previous_output else (*self.prompt, *self.answer[: self.max_tokens])
        return before[: asked.offset] if asked.offset else before


@dataclass(slots=True)
class _Session:
    patience_ns: int | None
    active_ns: int
    turns: dict[str, _Turn] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Joined:
    """A request on its way to the engine: where in its session it would stand."""

    session: _Session
    turn: _Turn
    before: _Turn | None


class Sessions:
    """All sessions of one server, and an observer of its steps, from which it learns the answers. Owned by its flavour."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._hears: Callable[[str], bool] = _nobody
        self._sessions: dict[str, _Session] = {}
        self._running: dict[str, _Turn] = {}
        self._tokens = 0

    def watch(self, driver: Ranks) -> None:
        """See the steps of all ranks from here on."""
        self._hears = driver.live
        driver.observe(self)

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        if not self._running:
            return
        for output in step.outputs:
            turn = self._running.get(output.request_id)
            if turn is not None and self._hears(turn.rid):
                turn.answer += output.token_ids
                self._tokens += len(output.token_ids)
        for change in step.transitions:
            turn = self._running.get(change.request_id)
            if turn is not None:
                self._changed(turn, change)

    def _changed(self, turn: _Turn, change: Transition) -> None:
        """A record of an earlier request with the same id comes before the one that begins this turn."""
        if change.before is State.NEW:
            turn.begun = not change.after.terminal
        elif turn.begun and change.after.terminal:
            del self._running[turn.rid]
            turn.finished = change.before not in _WAITING
            if change.before is State.DEFERRED:
                self._shorten(turn)

    def enter(self, joined: Joined, refusal: Refusal | None) -> None:
        """Its place in the tree, once the engine has been asked. What a limit of ours keeps from the engine has none."""
        if refusal is not None and refusal.reason not in _REFUSED_BY_THE_ENGINE:
            return
        session, turn = joined.session, joined.turn
        earlier = session.turns.get(turn.rid)
        if earlier is not None:
            self._forget(earlier, session)
        session.active_ns = self._now_ns()
        session.turns[turn.rid] = turn
        self._tokens += len(turn.prompt)
        if joined.before is not None:
            joined.before.after[turn.rid] = turn
        if refusal is None:
            self._running[turn.rid] = turn
        elif refusal.reason == "too_long":
            turn.finished = True
            self._shorten(turn)

    def _shorten(self, turn: _Turn) -> None:
        """An error found before the prefill: one token is computed in place of the prompt, and one answers it."""
        self._tokens += 2 - len(turn.prompt) - len(turn.answer)
        turn.prompt, turn.answer = (0,), [0]

    def open(self, name: str, patience_ns: int | None, limit: int) -> str | None:
        """Why it is not: it was open before, or there are `limit` sessions (ours)."""
        self._reap()
        if name in self._sessions:
            return "Failed to open the session. Check if a session with the same id is still open."
        if len(self._sessions) >= limit:
            return f"Failed to open the session: {limit} are open, which is the limit. Close one (/close_session)."
        self._sessions[name] = _Session(patience_ns, self._now_ns())
        return None

    def close(self, name: str) -> None:
        """Requests at work go on; unknown names are ignored."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self._drop(list(session.turns.values()), session)

    def join(self, server: "Server", generation: Generation, asked: SessionTurn) -> Generation:
        """The request with what comes before it; with a `late_error` if it cannot have that.

        One whose id is at work is left to be refused for that, as in SGLang before its sessions see it.
        """
        if server.driver.live(generation.response_id):
            return replace(generation, extra={})
        try:
            return self._joined(server, generation, asked)
        except WireError as error:
            return replace(generation, late_error=error)

    def _joined(self, server: "Server", generation: Generation, asked: SessionTurn) -> Generation:
        self._reap()
        session = self._sessions.get(asked.session)
        if session is None:
            raise _refusal(f"Invalid request: session id {asked.session} does not exist")
        before = self._branch(server, session, asked)
        own = generation.prompts[0].token_ids
        tokens = own
        if before is not None:
            special = server.env.tokenizer.encode("")[:1]
            tokens = (*before.tokens(asked), *(own[1:] if list(own[:1]) == special else own))
        if not tokens:
            raise _refusal("A session request must contain input tokens after restoring history.")
        rid, prompt = generation.response_id, PromptPlan(tuple(tokens), None)
        self._check_room(session, len(tokens), rid)
        joined = Joined(session, _Turn(rid, prompt.token_ids, generation.sampling.max_tokens), before)
        spec = replace(generation.spec, prompts=(prompt,))
        return replace(generation, prompts=(prompt,), spec=spec, extra={"joined": joined})

    def _branch(self, server: "Server", session: _Session, asked: SessionTurn) -> _Turn | None:
        """The request to go on from."""
        if asked.rid is None:
            if asked.replace:
                self._end(server, list(session.turns.values()), session)
            return None
        turn = session.turns.get(asked.rid)
        if turn is None:
            raise _refusal("Invalid request session id")
        if asked.replace:
            if self._at_work(turn):
                server.jobs.abort_by_id([turn.rid])
            self._end(server, list(turn.after.values()), session)
            turn.after.clear()
        elif self._unfinished(turn):
            raise _refusal("Session request is appending to a request that hasn't finished.")
        return turn

    def _unfinished(self, turn: _Turn) -> bool:
        """What nobody listens to any more has been ended by the front end, and the engine is about to say so."""
        return not turn.finished and (not self._at_work(turn) or self._hears(turn.rid))

    def _at_work(self, turn: _Turn) -> bool:
        """Its `rid` is its own: once it has ended, that may be the id of somebody else's request."""
        return self._running.get(turn.rid) is turn

    def _check_room(self, session: _Session, tokens: int, rid: str) -> None:
        if len(rid) > NAME_LIMIT:
            raise _refusal(f"rid has {len(rid)} characters: at most {NAME_LIMIT} in a session")
        if len(session.turns) >= TURNS_MAX:
            raise _refusal(f"The session already has {TURNS_MAX} requests: close it and open another one.")
        if self._tokens + tokens > TOKENS_MAX:
            raise _refusal(f"The sessions of this server already hold {self._tokens} tokens: close some.")

    def _end(self, server: "Server", turns: "list[_Turn]", session: _Session) -> None:
        server.jobs.abort_by_id(self._drop(turns, session))

    def _drop(self, turns: "list[_Turn]", session: _Session) -> list[str]:
        """Forget these and what has gone on from them, each once; the ids of those at work."""
        dropped: set[int] = set()
        at_work: list[str] = []
        while turns:
            turn = turns.pop()
            if id(turn) in dropped:
                continue
            dropped.add(id(turn))
            turns += turn.after.values()
            if self._at_work(turn):
                at_work.append(turn.rid)
            self._forget(turn, session)
        return at_work

    def _forget(self, turn: _Turn, session: _Session) -> None:
        if session.turns.get(turn.rid) is turn:
            del session.turns[turn.rid]
            self._tokens -= len(turn.prompt) + len(turn.answer)
        if self._at_work(turn):
            del self._running[turn.rid]

    def _reap(self) -> None:
        """Close what has been left alone for longer than its `timeout`."""
        now = self._now_ns()
        late = [
            name
            for name, one in self._sessions.items()
            if one.patience_ns is not None and now - one.active_ns > one.patience_ns
        ]
        for name in late:
            self.close(name)


def _nobody(_request_id: str) -> bool:
    """Before there is a driver."""
    return False


def _refusal(message: str) -> WireError:
    return WireError(message, 400, "BadRequestError")
