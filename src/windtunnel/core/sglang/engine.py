"""Unified SGLang: one worker that prefills and decodes. Implements `windtunnel.core.engine.Engine`."""

from collections.abc import Mapping, Sequence
from typing import Literal

from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import EngineError, Refusal
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang.config import LIVE_FIELDS, SglangEngineConfig
from windtunnel.core.sglang.loop import SglangLoop
from windtunnel.core.sglang.policy import Chance
from windtunnel.core.sglang.sequence import SglangSequence

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")
QUEUE_FULL = "The request queue is full."
WAITING_TIMEOUT = EngineError("Request waiting timeout reached.", 503, "ServiceUnavailable")
RUNNING_TIMEOUT = EngineError("Request running timeout reached.", 503, "ServiceUnavailable")


class SglangEngine(SglangLoop):
    """One data-parallel rank."""

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

    # Operator

    def reconfigure(self, config: SglangEngineConfig, pacing: Pacing | None = None, *, now_ns: int = 0) -> None:
        """Change limits and pace together, from the next batch on. Raises ValueError if `config` differs in a fixed field."""
        changed = [name for name in config.__slots__ if getattr(config, name) != getattr(self.config, name)]
        fixed = [name for name in changed if name not in LIVE_FIELDS]
        if fixed:
            raise ValueError(f"{', '.join(fixed)} cannot change while the engine runs; {', '.join(sorted(LIVE_FIELDS))} can")
        self.wake(now_ns)
        self.config = self.scheduler.config = config
        if pacing is not None:
            self.scheduler.repace(pacing)

    def pause(self, mode: PauseMode, now_ns: int) -> int:
        """`abort`: end all with notice. `retract`: running ones give up their KV and wait. `in_place`: all stop as they are.

        New requests are taken and wait. Returns how many were ended.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode is {mode!r}: must be one of {', '.join(PAUSE_MODES)}")
        self.wake(now_ns)
        self.paused = mode
        if mode == "abort":
            return self.abort_matching("", now_ns, abort_all=True)
        if mode == "retract":
            self._retract_all(now_ns)
        return 0

    def _retract_all(self, now_ns: int) -> None:
        """Those that an abort has already reached end with the pause instead."""
        chunked = [self.scheduler.chunked] if self.scheduler.chunked is not None else []
        for sequence in [*self.scheduler.running, *chunked]:
            if sequence.abort is None:
                self.scheduler.retract(sequence, now_ns)
        self.requeue_retracted(self.scheduler.take_retracted(), now_ns)

    def resume(self, now_ns: int) -> None:
        self.paused = None
        self.scheduler.delay_until(now_ns)
        self.wake(now_ns)

    def flush_cache(self, now_ns: int) -> bool:
        """Forget the radix cache; False while anything is live (reference §7.3: the refusal is a 400)."""
        if not self.idle:
            return False
        self.wake(now_ns)
        self.scheduler.memory.tree.reset()
        return True

    def queue_gauges(self) -> Mapping[str, float]:
        return {
            "num_paused_reqs": len(self.sequences) if self.paused is not None else 0,
            "num_retracted_reqs": sum(sequence.retractions > 0 for sequence in self.scheduler.waiting),
            "utilization": len(self.scheduler.running) / self.config.max_running_requests,
        }
