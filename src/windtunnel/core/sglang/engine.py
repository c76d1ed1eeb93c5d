"""Unified SGLang: one worker that prefills and decodes. Implements `windtunnel.core.engine.Engine`."""

from collections.abc import Sequence

from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import EngineError, Refusal
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.operated import OperatedLoop
from windtunnel.core.sglang.policy import Chance
from windtunnel.core.sglang.sequence import SglangSequence

QUEUE_FULL = "The request queue is full."
WAITING_TIMEOUT = EngineError("Request waiting timeout reached.", 503, "ServiceUnavailable")
RUNNING_TIMEOUT = EngineError("Request running timeout reached.", 503, "ServiceUnavailable")


class SglangEngine(OperatedLoop):
    """One data-parallel rank."""

    pause_modes = ("abort", "retract", "in_place")

    def __init__(self, config: SglangEngineConfig, pacing: Pacing, chance: Chance) -> None:
        """`chance` orders the waiting queue under the policy `random`; no other policy draws."""
        super().__init__(config, pacing, chance)

    def submit(self, requests: Sequence[EngineRequest], now_ns: int) -> Refusal | None:
        """Admit all or none. Raises ValueError for a live or repeated id."""
        self.check(requests)
        self.wake(now_ns)
        refusal = self.refusal_of(requests) or self._overflow(len(requests))
        if refusal is not None:
            self.record_refusals(requests, refusal, now_ns)
            return refusal
        for request in requests:
            sequence = self.new_sequence(request, now_ns)
            self.sequences[sequence.request_id] = sequence
            self.log.record(sequence, Event.SUBMIT, now_ns, {"prompt_tokens": sequence.prompt_len})
            self.scheduler.add(sequence, now_ns)
        return None

    def _overflow(self, arriving: int) -> Refusal | None:
        limit = self.config.max_queued_requests
        if limit is not None and len(self.scheduler.waiting) + arriving > limit:
            return Refusal("queue_full", QUEUE_FULL, 503, "ServiceUnavailable")
        return None

    # Request timeouts (reference §3.3: enforced here, not in the P/D loops)

    def poll(self, now_ns: int) -> None:
        for sequence, _at in self._overdue(now_ns):
            if sequence in self.scheduler.waiting:
                self.end_aborted(sequence, WAITING_TIMEOUT, now_ns)
            elif sequence.abort is None:
                self.abort_later(sequence, RUNNING_TIMEOUT)

    def timer_next_at(self) -> int | None:
        return min((at for sequence, at in self._deadlines() if sequence.abort is None), default=None)

    def _overdue(self, now_ns: int) -> list[tuple[SglangSequence, int]]:
        return [(sequence, at) for sequence, at in self._deadlines() if at <= now_ns]

    def _deadlines(self) -> list[tuple[SglangSequence, int]]:
        waiting_ns, running_ns = self.config.req_waiting_timeout_ns, self.config.req_running_timeout_ns
        waiting = self.scheduler.waiting if waiting_ns is not None else ()
        running = self.scheduler.running if running_ns is not None else ()
        return [(sequence, sequence.queued_ns + (waiting_ns or 0)) for sequence in waiting] + [
            (sequence, sequence.started_ns + (running_ns or 0)) for sequence in running
        ]
