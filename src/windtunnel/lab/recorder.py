"""What one client sees of its request, as it comes, to a frozen record."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from windtunnel.lab.connection import How, MalformedResponse
from windtunnel.lab.dialects import DIALECTS
from windtunnel.lab.plan import Api
from windtunnel.lab.record import Ask, End, StreamRecord
from windtunnel.lab.session import Session

ERROR_TEXT_LIMIT = 300


class Recorder:
    """Collects what one request sees. Owned by `run_request`; `record` makes the frozen value."""

    def __init__(self, session: Session, ask: Ask) -> None:
        self.session = session
        self.ask = ask
        self.stage = "incomplete"
        session.stages[self.stage] += 1
        self.target_state: str | None = None
        """The state that the target was last seen in; words may have come since."""
        self.enough = asyncio.Event()
        self.on_enough: Callable[[], None] | None = None
        self.head_seen = asyncio.Event()
        self.tokens_wanted = 0
        self.at_gate = False
        self._started_ns = session.now_ns()
        self._status: int | None = None
        self._head_ns: int | None = None
        self._frame_ns: list[int] = []
        self._texts: list[str] = []
        self._finish_reason: str | None = None
        self._done = False
        self._end: End | None = None
        self.error: str | None = None
        self._left: tuple[str, int, int, str] | None = None
        self._due_ns: int | None = None
        self._finished: set[int] = set()
        self._reader = DIALECTS[ask.api].reader()
        self.response_id: str | None = None
        self.gone_ns: int | None = None
        """Where it leaves before its connection ends."""

    @property
    def state(self) -> str:
        return f"tokens:{len(self._frame_ns)}" if self._frame_ns else self.stage

    def enter(self, stage: str) -> None:
        self.session.stages[self.stage] -= 1
        self.session.stages[stage] += 1
        self.stage = stage

    def head(self, status: int) -> None:
        self._status = status
        self._head_ns = self.session.now_ns()
        self.enter("head")
        self.head_seen.set()

    def frame(self, frame: bytes) -> None:
        """One SSE frame: comments and events without data mean nothing here."""
        lines = [line[5:].strip() for line in frame.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            return
        data = b"\n".join(lines)
        if data == b"[DONE]":
            self._done = True
            return
        payload = self._reader.event(_object(data))
        self._done = self._done or bool(payload.get("done"))
        if payload.get("error") is not None:
            self._end = End.ERROR_FRAME
            self.error = shortened(data)
        self.response_id = self.response_id or payload.get("id")
        for choice in payload.get("choices") or ():
            self.choice(choice)

    def choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index") or 0
        if choice.get("finish_reason"):
            self._finished.add(index)
        if index or (self._left is not None and self.on_enough is not None):
            return
        delta = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning") or ""
        if text:
            self._texts.append(text)
            if not self._frame_ns:
                self.enter("tokens")
            self._frame_ns.append(self.session.now_ns())
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        if self.tokens_wanted and len(self._frame_ns) >= self.tokens_wanted:
            self.enough.set()
            if self.on_enough is not None and self._left is None:
                self.on_enough()

    def whole_answer(self, body: bytes) -> None:
        payload = self._reader.whole(_object(body, or_list=self.ask.api is Api.GENERATE))
        for choice in payload.get("choices") or ():
            self.choice(choice)
        self._done = True
        self.stream_over(rest=b"")

    def terminated(self) -> None:
        """The terminator of a stream has come."""
        self._done = True

    def stream_over(self, rest: bytes) -> None:
        if self._end is End.ERROR_FRAME:
            self.error = f"{self.error}{'' if self._done else ' (and no terminator)'}"
        elif rest.strip():
            self.ended(End.UNTERMINATED, error="the body ends inside a frame")
        elif self._finish_reason and self._done and len(self._finished) >= self.ask.n:
            self._end = End.FINISHED
        elif self._done and not self._frame_ns:
            self.ended(End.EMPTY, error="the terminator and nothing else")
        else:
            missing = "terminator" if not self._done else f"finish reason ({len(self._finished)} of {self.ask.n})"
            self.ended(End.UNTERMINATED, error=f"the body ends without {missing} after {len(self._frame_ns)} frames of text")

    def refused(self, body: bytes) -> None:
        """The answer under another status than 200."""
        self.error = shortened(body)

    def ended(self, end: End, *, error: str) -> None:
        self._end = end
        self.error = error

    def failed(self, end: End, error: str) -> None:
        """What went wrong on the connection, unless this client had left before."""
        if self._left is None:
            self.ended(end, error=f"{error} (state {self.state})")

    def due(self) -> None:
        self._due_ns = self.session.now_ns()

    def left(self, how: How) -> None:
        self._left = (self.target_state or self.state, self.session.now_ns(), len(self.words()), how.value)

    def words(self) -> tuple[str, ...]:
        return tuple("".join(self._texts).split())

    def record(self) -> StreamRecord:
        words = self.words()
        end = End.LEFT if self._left else self._end or End.CUT
        state, left_ns, words_at_leaving, how = self._left or (None, None, len(words), None)
        ended_ns = self.session.now_ns()
        return StreamRecord(
            ask=self.ask,
            end=end,
            started_ns=self._started_ns,
            ended_ns=ended_ns,
            status=self._status,
            head_ns=self._head_ns,
            frame_ns=tuple(self._frame_ns),
            words=words,
            finish_reason=self._finish_reason,
            error=self.error,
            left_in=state,
            left_ns=left_ns,
            due_ns=self._due_ns,
            left_by=how,
            gone_ns=(self.gone_ns or ended_ns) if self._left else None,
            words_after_leaving=len(words) - words_at_leaving,
        )


def _object(data: bytes, *, or_list: bool = False) -> dict[str, Any]:
    """A JSON object; with `or_list` a list of them becomes `{"list": …}`."""
    try:
        payload = json.loads(data)
    except ValueError:
        raise MalformedResponse(f"not JSON: {shortened(data)!r}") from None
    if or_list and isinstance(payload, list):
        payload = {"list": payload}
    if not isinstance(payload, dict):
        raise MalformedResponse(f"not a JSON object: {shortened(data)!r}")
    return payload


def shortened(body: bytes) -> str:
    return body[:ERROR_TEXT_LIMIT].decode("utf-8", "replace")
