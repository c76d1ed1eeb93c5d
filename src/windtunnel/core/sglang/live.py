"""Everything live in one SGLang engine: how it comes, how it is aborted and ends, and what can be seen of it.

An abort does what the place of its sequence allows (SGLang reference §5): what waits ends at once, what runs ends with a batch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from windtunnel.core.engine import SequenceView
from windtunnel.core.lifecycle import Event, State
from windtunnel.core.outputs import EngineError, FinishReason, Refusal, TokenOutput
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.batch import Batch
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.memory import Holder
from windtunnel.core.sglang.policy import Chance
from windtunnel.core.sglang.reports import Reports
from windtunnel.core.sglang.scheduler import SglangScheduler
from windtunnel.core.sglang.sequence import RUNNING_ABORT, WAITING_ABORT, SglangSequence
from windtunnel.core.transitions import TransitionLog

GRAMMAR_ABORT = EngineError("Aborted while its grammar was compiled.", 400, "BadRequestError")


class LiveSequences:
    """Base of the loop, which adds time."""

    waiting_holds_pages: ClassVar[bool] = False

    def __init__(self, config: SglangEngineConfig, pacing: Pacing, chance: Chance) -> None:
        self.config = config
        self.log = TransitionLog()
        self.scheduler = SglangScheduler(config, pacing, self.log, chance)
        self.reports = Reports(self.scheduler)
        self.sequences: dict[str, SglangSequence] = {}
        """Everything live, in order of arrival."""
        self.batch: Batch | None = None
        self.dead: EngineError | None = None
        self.notices: list[TokenOutput] = []
        """Outputs that leave with the next `StepOutput`."""
        self._arrivals = 0
        self._batches = 0
        """Started so far."""
        self._aborts: list[tuple[int, SglangSequence]] = []
        """(batch with whose end it takes effect, sequence)."""

    def wake(self, now_ns: int) -> None:
        """An input has come."""
        raise NotImplementedError

    # Arrivals

    def check(self, requests: Sequence[EngineRequest]) -> None:
        """Raise ValueError for a live or repeated id, an empty prompt, or no output allowed."""
        seen: set[str] = set()
        for request in requests:
            if request.request_id in self.sequences or request.request_id in seen:
                raise ValueError(f"request_id {request.request_id!r} is already live")
            seen.add(request.request_id)
            if not request.prompt_token_ids:
                raise ValueError("prompt_token_ids is empty: must have at least 1 token")
            if request.max_tokens < 1:
                raise ValueError(f"max_tokens is {request.max_tokens}: must be at least 1")

    def too_long(self, request: EngineRequest) -> Refusal | None:
        tokens, limit = len(request.prompt_token_ids), self.config.input_bound
        if tokens < limit:
            return None
        message = (
            f"Input length ({tokens} tokens) exceeds the maximum allowed length ({limit} tokens). Use a shorter input or enable"
            " --allow-auto-truncate."
        )
        return Refusal("too_long", message, 400, "BadRequestError")

    def refusal_of(self, requests: Sequence[EngineRequest]) -> Refusal | None:
        """Why these cannot be taken, or None."""
        if self.dead is not None:
            return Refusal("dead", self.dead.message, self.dead.status)
        refusals = (self.too_long(request) for request in requests)
        return next((refusal for refusal in refusals if refusal is not None), None)

    def new_sequence(self, request: EngineRequest, now_ns: int) -> SglangSequence:
        sequence = SglangSequence(request, self.config, self._arrivals, now_ns)
        self._arrivals += 1
        return sequence

    def record_refusals(self, requests: Sequence[EngineRequest], refusal: Refusal, now_ns: int) -> None:
        for request in requests:
            self.log.record(self.new_sequence(request, now_ns), Event.REFUSE, now_ns, {"reason": refusal.reason})

    def release(self, request_ids: Sequence[str], now_ns: int) -> None:
        """See `Engine.release`. P/D workers hold nothing back."""
        self.wake(now_ns)
        for request_id in request_ids:
            if request_id in self.sequences:
                self.scheduler.release(self.sequences[request_id], now_ns)

    # Aborts

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        """End these; see `Engine.abort`. SGLang itself matches by prefix: `abort_matching`."""
        found = [self.sequences[request_id] for request_id in request_ids if request_id in self.sequences]
        ended = sum(self._request_abort(sequence, now_ns, notify=notify) for sequence in found)
        if ended:
            self.wake(now_ns)
        return ended

    def abort_matching(self, prefix: str, now_ns: int, *, abort_all: bool = False, notify: bool = True) -> int:
        """`POST /abort_request`: all ids that start with `prefix`. An empty one matches nothing without `abort_all`."""
        if not prefix and not abort_all:
            return 0
        ids = [request_id for request_id in self.sequences if abort_all or request_id.startswith(prefix)]
        return self.abort(ids, now_ns, notify=notify)

    def _request_abort(self, sequence: SglangSequence, now_ns: int, *, notify: bool) -> bool:
        if sequence.abort is not None:
            sequence.notify_abort |= notify
            return False
        sequence.notify_abort = notify
        self.abort_in_place(sequence, now_ns)
        return True

    def abort_in_place(self, sequence: SglangSequence, now_ns: int) -> None:
        """What an abort does depends on where the sequence is (reference §5)."""
        if sequence in self.scheduler.waiting:
            self.end_aborted(sequence, WAITING_ABORT, now_ns)
        elif sequence in self.scheduler.grammar_waits:
            self.end_aborted(sequence, GRAMMAR_ABORT, now_ns)
        else:
            self.abort_later(sequence, RUNNING_ABORT)

    def abort_later(self, sequence: SglangSequence, reason: EngineError) -> None:
        """With the end of the next batch; with overlap the batch under way counts as the next one."""
        sequence.abort = reason
        under_way = self.config.overlap and self.batch is not None
        self._aborts.append((self._batches + (0 if under_way else 1), sequence))

    def _apply_aborts(self, now_ns: int, batches: int) -> None:
        due = [sequence for number, sequence in self._aborts if number <= batches and not sequence.state.terminal]
        self._aborts = [entry for entry in self._aborts if entry[0] > batches and not entry[1].state.terminal]
        for sequence in due:
            assert sequence.abort is not None, "an abort without a reason"
            self.end_aborted(sequence, sequence.abort, now_ns)

    def end_aborted(self, sequence: SglangSequence, reason: EngineError, now_ns: int) -> None:
        """Release and forget; tell whoever asked to be told."""
        known = sequence.num_tokens - 1
        keep = min(sequence.computed, known) if sequence.state is State.DECODE else 0
        output_tokens = len(sequence.output)
        self.scheduler.remove(sequence, keep)
        event = Event.FAIL if reason.status == 503 else Event.ABORT
        self.log.record(sequence, event, now_ns, {"output_tokens": output_tokens, "status": reason.status})
        self.forget(sequence)
        if sequence.notify_abort or event is Event.FAIL:
            self.notices.append(_ended(sequence, reason))

    def fail(self, sequence: SglangSequence, error: EngineError, now_ns: int) -> None:
        """End a sequence that cannot go on, and say so, unless its client has gone."""
        self.scheduler.remove(sequence)
        event = Event.FAIL if sequence.abort is None else Event.ABORT
        self.log.record(sequence, event, now_ns, {"status": error.status, "reason": error.message[:200]})
        self.forget(sequence)
        if sequence.abort is None or sequence.notify_abort:
            self.notices.append(_ended(sequence, error))

    def forget(self, sequence: SglangSequence) -> None:
        del self.sequences[sequence.request_id]

    # Looking in

    def queue_gauges(self) -> Mapping[str, float]:
        """Further gauges of a report, by stem. A prefill report shows the queues as they were when its batch was planned."""
        return {}

    def loads(self) -> dict[str, float]:
        """What `/v1/loads` shows, live (reference §7.5): it moves even while the gauges stand still."""
        scheduler, memory = self.scheduler, self.scheduler.memory
        return {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(self.sequences) - len(scheduler.running),
            "num_waiting_uncached_tokens": sum(sequence.num_tokens for sequence in scheduler.waiting),
            "num_used_tokens": memory.used_tokens,
            "max_total_num_tokens": memory.capacity,
            "max_running_requests": self.config.max_running_requests,
            "token_usage": memory.usage,
            **self.queue_gauges(),
        }

    def live(self) -> list[SequenceView]:
        return [self.view(sequence) for sequence in self.sequences.values()]

    def view(self, sequence: SglangSequence) -> SequenceView:
        return SequenceView(
            request_id=sequence.request_id,
            state=sequence.state,
            since_ns=sequence.since_ns,
            arrival_ns=sequence.request.arrival_ns,
            prompt_tokens=sequence.prompt_len,
            computed_tokens=sequence.computed,
            output_tokens=len(sequence.output),
            resources=self.resources(sequence),
            tags=sequence.request.tags,
        )

    def resources(self, sequence: SglangSequence) -> Mapping[str, Any]:
        """What a sequence holds, by name; empty for nothing."""
        held = {"pages": tuple(sequence.pages), "shared_pages": sequence.held}
        return held if sequence.pages else {}

    def holders(self) -> Iterable[Holder]:
        """Everybody who may hold pages."""
        return self.sequences.values()

    def check_integrity(self) -> None:
        scheduler = self.scheduler
        scheduler.memory.check_integrity(self.holders())
        assert all(not sequence.state.terminal for sequence in self.sequences.values()), "an ended sequence is live"
        places = (*scheduler.waiting, *scheduler.running, *scheduler.grammar_waits)
        assert len(set(places)) == len(places), "a sequence is in two places"
        assert all(sequence.request_id in self.sequences for sequence in places), "a forgotten sequence is queued"
        if not self.waiting_holds_pages:
            assert not any(sequence.pages for sequence in scheduler.waiting), "a waiting sequence holds pages"


def _ended(sequence: SglangSequence, reason: EngineError) -> TokenOutput:
    return TokenOutput(sequence.request_id, (), FinishReason.ABORT, None, sequence.cached_tokens, reason)
