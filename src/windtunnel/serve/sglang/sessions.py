"""Sessions: a request of a session goes on from an earlier one, whose prompt and answer come before its own tokens.

As SGLang 0.5.23 has them (`session/session_controller.py`), without streaming sessions:

* A session is a tree of requests by `rid`. `session_params.rid` names the request to go on from; without one nothing is before.
* `offset` keeps so many of the tokens before, `drop_previous_output` leaves the answer out. The BOS of an appended text goes.
* `replace` with a `rid` drops what has gone on from that request, and ends it, if it still runs; without one, the whole tree.
* What does not fit is found by the scheduler: a 400, under 200 in a native stream.
* No KV is kept for a session. What its requests share is in the radix cache like everything else, and can be evicted.

Limits of ours: TURNS_MAX requests in a session and TOKENS_MAX tokens in all of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from windtunnel.core.outputs import StepOutput
from windtunnel.wire.family import Generation, PromptPlan, WireError
from windtunnel.wire.sglang.env import SglangEnv
from windtunnel.wire.sglang.native import NativeSpec
from windtunnel.wire.sglang.requests import SessionTurn, output_limit

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

TURNS_MAX = 1000
TOKENS_MAX = 16_000_000
NAME_LIMIT = 1024
"""Characters in the id of a session, and in those of its requests."""


@dataclass(slots=True)
class _Turn:
    rid: str
    prompt: tuple[int, ...]
    max_tokens: int
    answer: list[int] = field(default_factory=list)
    after: "dict[str, _Turn]" = field(default_factory=dict)

    def tokens(self, asked: SessionTurn) -> tuple[int, ...]:
        """What comes before a request that goes on from here."""
        before = self.prompt if asked.drop_previous_output else (*self.prompt, *self.answer[: self.max_tokens])
        return before[: asked.offset] if asked.offset else before


@dataclass(slots=True)
class _Session:
    patience_ns: int | None
    active_ns: int
    turns: dict[str, _Turn] = field(default_factory=dict)


class Sessions:
    """All sessions of one server, and an observer of its steps, from which it learns the answers. Owned by its flavour."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._sessions: dict[str, _Session] = {}
        self._running: dict[str, _Turn] = {}
        self._tokens = 0

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        if not self._running:
            return
        for output in step.outputs:
            turn = self._running.get(output.request_id)
            if turn is not None:
                turn.answer += output.token_ids
                self._tokens += len(output.token_ids)
                if output.finish_reason is not None or output.error is not None:
                    del self._running[output.request_id]

    def open(self, name: str, patience_ns: int | None, limit: int) -> bool:
        """Whether it is open; not if it was before, nor if there are `limit` sessions."""
        self._reap()
        if name in self._sessions or len(self._sessions) >= limit:
            return False
        self._sessions[name] = _Session(patience_ns, self._now_ns())
        return True

    def close(self, name: str) -> None:
        """Requests at work go on; unknown names are ignored."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self._drop(list(session.turns.values()), session)

    def join(self, server: "Server", generation: Generation, asked: SessionTurn) -> Generation:
        """The request with what comes before it; with a `late_error` if it cannot have that.

        One whose id is at work is left to be refused for that, as in SGLang before its sessions see it.
        """
        if any(map(server.driver.live, generation.engine_ids or ())):
            return generation
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
        self._check_room(session, len(tokens), (generation.engine_ids or ("",))[0])
        prompt = PromptPlan(tuple(tokens), None)
        env, names = server.env, generation.engine_ids
        assert isinstance(env, SglangEnv) and names is not None, "a request of one of SGLang's families"
        limit = output_limit(generation.sampling.max_tokens, (prompt,), env)
        self._enter(session, _Turn(names[0], prompt.token_ids, limit), before)
        spec = generation.spec
        if isinstance(spec, NativeSpec):
            spec = replace(spec, prompts=(prompt,))
        return replace(generation, prompts=(prompt,), spec=spec)

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
            server.jobs.abort_by_id([turn.rid])
            self._end(server, list(turn.after.values()), session)
            turn.after.clear()
        elif server.driver.live(turn.rid):
            raise _refusal("Session request is appending to a request that hasn't finished.")
        return turn

    def _enter(self, session: _Session, turn: _Turn, before: _Turn | None) -> None:
        earlier = session.turns.get(turn.rid)
        if earlier is not None:
            self._forget(earlier, session)
        session.active_ns = self._now_ns()
        session.turns[turn.rid] = self._running[turn.rid] = turn
        self._tokens += len(turn.prompt)
        if before is not None:
            before.after[turn.rid] = turn

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
        """Forget these and what has gone on from them; their ids."""
        dropped: list[str] = []
        while turns:
            turn = turns.pop()
            turns += turn.after.values()
            dropped.append(turn.rid)
            self._forget(turn, session)
        return dropped

    def _forget(self, turn: _Turn, session: _Session) -> None:
        if session.turns.get(turn.rid) is turn:
            del session.turns[turn.rid]
            self._tokens -= len(turn.prompt) + len(turn.answer)
        if self._running.get(turn.rid) is turn:
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


def _refusal(message: str) -> WireError:
    return WireError(message, 400, "BadRequestError")
