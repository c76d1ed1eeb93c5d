"""From engine outputs to the client: streamed frames or one collected answer.

Nothing here, and nothing it calls, can name the HTTP request or response: an answer owns its encoder (over a frozen spec), the
state of its choices and a `Sink`, which is a way to write bytes and nothing else. `tools/check_ownership.py` holds that.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from windtunnel.core.outputs import TokenOutput
from windtunnel.wire.family import ChoiceResult, Delta, OpeningEncoder, StreamEncoder, Usage, WireError
from windtunnel.wire.output import ChoiceState, merge

LANE_TEXT_MAX = 40
"""Longest JSON text, in bytes, that takes the lane."""


class Sink(Protocol):
    """Where frames go. Writes after the client has left are dropped."""

    @property
    def blocked(self) -> bool:
        """The reader is slow and the write buffer full."""
        ...

    def write(self, frames: bytes) -> None:
        """Whole SSE frames."""
        ...

    def on_writable(self, callback: Callable[[], None]) -> None: ...

    def lane(self, head: bytes, tail: bytes) -> "Lane":
        """The fast way for frames that differ in a short text only."""
        ...


class Lane(Protocol):
    def push(self, text: bytes) -> bool:
        """False, and nothing done, while the reader is slow."""
        ...


class Answer:
    """Common to streamed and collected answers: the choices, the counts and the end.

    `ended` is called exactly once: when the last choice has finished, or when the answer has failed.
    """

    def __init__(
        self, choices: Sequence[ChoiceState], usage: Usage, ended: Callable[[], None], counted: Iterable[int] = ()
    ) -> None:
        self.usage = usage
        self.error: WireError | None = None
        self._counted = set(counted)
        """Prompts whose cached tokens are in `usage`; of `n` choices only the first counts."""
        self._choices = choices
        self._unfinished = len(choices)
        self._ended: Callable[[], None] | None = ended

    wants_metrics = False
    """Show the request's own timings (`--enable-per-request-metrics`, one choice only)."""

    @property
    def open(self) -> bool:
        return self._ended is not None

    def lane(self, choice: ChoiceState) -> Lane | None:
        """The fast way for plain one-token outputs of this choice, where there is one at the moment."""
        return None

    def on_output(self, choice: ChoiceState, output: TokenOutput) -> None:
        """One engine output of one choice. Returns after whatever it makes visible has been written."""
        if self._ended is None:
            return
        reason, stop_reason, error = output.finish_reason, output.stop_reason, output.error
        if error is not None and error.failed:
            self.fail(WireError(error.message, error.status, error.kind))
            return
        if error is not None:
            stop_reason = error.message
        self.usage.completion_tokens += len(output.token_ids)
        if output.cached_tokens and choice.prompt_index not in self._counted:
            self._counted.add(choice.prompt_index)
            self.usage.count_cached(output.cached_tokens, choice.prompt_index)
        if output.kv_transfer is not None and choice.prompt_index == 0:
            self.usage.kv_transfer = output.kv_transfer
        delta = choice.push(output.token_ids, reason and reason.value, stop_reason)
        if delta is not None:
            if delta.finish_reason is not None:
                self._unfinished -= 1
            self._emit(delta)

    def fail(self, error: WireError) -> None:
        """End the answer with an error; later outputs are ignored."""
        self.error = error
        self._end()

    def abandon(self) -> None:
        """The client has gone: nothing is written or reported any more."""
        self._ended = None

    def _emit(self, delta: Delta) -> None:
        if not self._unfinished:
            self._end()

    def _end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            ended()


class CollectedAnswer(Answer):
    """An answer that goes out whole. The text stays in the choices until the end."""

    def results(self) -> list[ChoiceResult]:
        return [choice.result() for choice in self._choices]


class StreamedAnswer(Answer):
    """An answer that goes out frame by frame.

    While the reader is slow, deltas of one choice merge into one, as in vLLM; the buffer is bounded by the request's own
    `max_tokens`, and whoever owns the answer sets a deadline through `stalled`.
    """

    def __init__(
        self,
        choices: Sequence[ChoiceState],
        usage: Usage,
        ended: Callable[[], None],
        encoder: StreamEncoder,
        sink: Sink,
        stalled: Callable[[bool], None],
        counted: Iterable[int] = (),
    ) -> None:
        super().__init__(choices, usage, ended, counted)
        self._encoder = encoder
        self._sink = sink
        self._stalled = stalled
        self._held: dict[int, Delta] = {}
        self.deltas = 0
        self.cut = False
        """The body ends without its terminating chunk."""

    def begin(self) -> None:
        """The head is out: send what the family sends with it. Called before the sink takes deltas."""
        if isinstance(self._encoder, OpeningEncoder):
            self._sink.write(self._encoder.opening())

    def _emit(self, delta: Delta) -> None:
        self.deltas += 1
        if self._held or self._sink.blocked:
            self._hold(delta)
            return
        frames = self._encoder.delta(delta, self.usage)
        if self._unfinished:
            self._sink.write(frames)
        else:
            self._sink.write(frames + self._encoder.close(self.usage))
            self._end()

    def lane(self, choice: ChoiceState) -> Lane | None:
        if not choice.plain or self._held or self._sink.blocked or not self.open:
            return None
        around = self._encoder.plain(choice.index)
        return None if around is None else self._sink.lane(*around)

    def fail(self, error: WireError) -> None:
        if self.open:
            frames, last = self._release_frames(), self._encoder.error(error)
            self.cut = last is None
            self._sink.write(frames + (last or b""))
            super().fail(error)

    def keep_alive(self, frame: bytes) -> None:
        """A comment frame between two deltas."""
        if self.open and not self._sink.blocked:
            self._sink.write(frame)

    def _hold(self, delta: Delta) -> None:
        if not self._held:
            self._sink.on_writable(self._release)
            self._stalled(True)
        earlier = self._held.get(delta.index)
        self._held[delta.index] = delta if earlier is None else merge(earlier, delta)

    def _release(self) -> None:
        if not self._held:
            return
        self._stalled(False)
        frames = self._release_frames()
        if self._ended is None:
            return
        if self._unfinished:
            self._sink.write(frames)
        else:
            self._sink.write(frames + self._encoder.close(self.usage))
            self._end()

    def _release_frames(self) -> bytes:
        held, self._held = self._held, {}
        if self._ended is None:
            return b""
        return b"".join([self._encoder.delta(delta, self.usage) for delta in held.values()])
