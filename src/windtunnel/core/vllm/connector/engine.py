"""The vLLM engine with a KV connector: an `Engine` that others can read from and that reads from others (`connector.seam`)."""

from collections.abc import Sequence
from typing import Any

from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import EngineError, FinishReason, StepOutput, StepStats, TokenOutput
from windtunnel.core.pacing import Pacing
from windtunnel.core.vllm.completion import Completion
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.connector.base import Connector
from windtunnel.core.vllm.connector.config import KvTransferConfig
from windtunnel.core.vllm.connector.loads import LOAD_FAILED, Fatal, Freed, Loaded, LoadFailed, Outcome, Overwrote
from windtunnel.core.vllm.connector.mooncake.connector import MooncakeConnector
from windtunnel.core.vllm.connector.nixl import NixlConnector
from windtunnel.core.vllm.connector.scheduler import ConnectorCompletion, ConnectorScheduler
from windtunnel.core.vllm.connector.seam import Arrived, Ask, Handshake, Report
from windtunnel.core.vllm.control import DEATH
from windtunnel.core.vllm.engine import VllmEngine
from windtunnel.core.vllm.scheduler import VllmScheduler
from windtunnel.core.vllm.sequence import VllmSequence
from windtunnel.core.vllm.step import Step

MAX_TURNS = 1000
"""Of the connector's timers at one instant."""
MAX_UNREAD = 65536
"""Words of others that a frozen engine keeps; answers to its own asks are as many as these."""


class ConnectorEngine(VllmEngine):
    """Implements `windtunnel.core.engine.Engine` and `windtunnel.core.vllm.connector.seam.KvEngine`."""

    scheduler_type: type[VllmScheduler] = ConnectorScheduler
    completion_type: type[Completion] = ConnectorCompletion
    _scheduler: ConnectorScheduler

    def __init__(self, config: VllmEngineConfig, pacing: Pacing, kv: KvTransferConfig, **more: Any) -> None:
        """Raises ValueError for a host tier beside the connector (vLLM would need a MultiConnector).

        `more` is for an engine class that is mixed in.
        """
        if config.host_blocks:
            raise ValueError(f"host_blocks is {config.host_blocks}: must be 0 with {kv.connector}")
        super().__init__(config, pacing, **more)
        pool = self._scheduler.pool
        kind = MooncakeConnector if kv.mooncake else NixlConnector
        self.connector: Connector = kind(kv, pool, block_size=config.block_size, num_blocks=config.num_blocks)
        self._scheduler.connector = self.connector
        self._unread: list[Report] = []
        """What came in while the engine was frozen."""

    # Requests

    def _enter(self, sequence: VllmSequence, now_ns: int) -> None:
        if sequence.request.kv_transfer:
            self.connector.arrived(sequence.request, now_ns)
        super()._enter(sequence, now_ns)

    def _forget(self, sequence: VllmSequence) -> None:
        super()._forget(sequence)
        if sequence.request.kv_transfer:
            self.connector.ended(sequence.request_id, self._clock_ns)

    def kill(self, now_ns: int, message: str = DEATH) -> int:
        """Whoever waits for our blocks, or we for theirs: all is forgotten, and nobody is told."""
        failed = super().kill(now_ns, message)
        self._apply(self.connector.clear(), now_ns)
        self._unread.clear()
        self._publish_due = False
        return failed

    # Time

    def next_event_at(self) -> int | None:
        times = (self._next_step_at(), self._timer_at())
        return min((at for at in times if at is not None), default=None)

    def _timer_at(self) -> int | None:
        """Leases and heartbeats live in the engine's loop: a frozen engine has neither. Nothing is due before its clock."""
        at_ns = 0 if self._unread else self.connector.next_event_at()
        if at_ns is None or self.control.death is not None:
            return None
        return max(at_ns, self.control.frozen_until_ns, self._clock_ns)

    def advance(self, now_ns: int) -> list[StepOutput]:
        """Raises RuntimeError for timers that stay due whatever is done about them."""
        done: list[StepOutput] = []
        turns, turned_ns = 0, -1
        while (at_ns := self._timer_at()) is not None and at_ns <= now_ns:
            turns, turned_ns = turns + 1 if at_ns == turned_ns else 1, at_ns
            if turns > MAX_TURNS:
                kind = self.connector.config.connector
                raise RuntimeError(f"{kind} at {at_ns} ns: timers are due after {MAX_TURNS} turns, too; {self.outstanding()}")
            done += super().advance(at_ns)
            self._wake(at_ns)
            unread, self._unread = self._unread, []
            for report in unread:
                self._apply(self.connector.receive(report, at_ns), at_ns)
            self._apply(self.connector.run(at_ns), at_ns)
        return done + super().advance(now_ns)

    def _start(self, due_ns: int, now_ns: int) -> bool:
        instant = super()._start(due_ns, now_ns)
        failed, self._scheduler.outcomes = self._scheduler.outcomes, []
        self._apply(failed, self._clock_ns)
        return instant

    def _stats(self, step: Step) -> StepStats:
        scheduler, stats = self._scheduler, super()._stats(step)
        gauges = {
            "kv_fetch_waiting_to_start": self.connector.waiting_to_start,
            "kv_fetch_in_progress": len(scheduler.transferring),
            "kv_fetch_completed_waiting": len(scheduler.loaded),
        }
        return stats._replace(
            waiting=stats.waiting + len(scheduler.loaded),
            deferred=stats.deferred + len(scheduler.transferring),
            extra={**self.connector.counters, **gauges},
        )

    # The other end

    def take_outgoing(self) -> list[Ask]:
        return self.connector.take_outgoing()

    def receive(self, report: Report, now_ns: int) -> None:
        if self.control.death is not None:
            return
        if now_ns < self.control.frozen_until_ns:
            if len(self._unread) < MAX_UNREAD or not isinstance(report, Arrived):
                self._unread.append(report)
            return
        self._wake(now_ns)
        self._publish_due = True
        self._apply(self.connector.receive(report, now_ns), now_ns)

    def release_remote(self, kv_transfer: object, now_ns: int) -> bool:
        self._wake(now_ns)
        return self.connector.release_remote(kv_transfer, now_ns)

    @property
    def handshake(self) -> Handshake:
        return self.connector.handshake

    def overwritten(self, request_id: str, blocks: Sequence[int]) -> tuple[int, ...]:
        return self.connector.holds.overwritten(request_id, blocks)

    def take_observations(self) -> list[tuple[str, float]]:
        taken, self.connector.observations = self.connector.observations, []
        return taken

    def take_warnings(self) -> list[str]:
        """Lines for the log."""
        taken, self.connector.warnings = self.connector.warnings, []
        return taken

    def outstanding(self) -> dict[str, int]:
        """What is held for somebody else, or on its way: all 0 when both sides have come to rest."""
        return self.connector.outstanding()

    def _apply(self, outcomes: Sequence[Outcome], now_ns: int) -> None:
        for outcome in outcomes:
            self._publish_due = True
            if isinstance(outcome, Freed):
                self._scheduler.pool.free(outcome.blocks)
            elif isinstance(outcome, Overwrote):
                self._scheduler.contaminate(outcome.blocks)
            elif isinstance(outcome, Fatal):
                self.kill(now_ns)
            elif isinstance(outcome, Loaded) or self.connector.config.load_failure_policy == "recompute":
                self._scheduler.end_load(outcome, now_ns)
            else:
                self._fail(outcome, now_ns)

    def _fail(self, outcome: LoadFailed, now_ns: int, error: EngineError = LOAD_FAILED) -> None:
        sequence = self._scheduler.fail_load(outcome)
        self._log.record(sequence, Event.FAIL, now_ns, {"reason": "kv_load_failure", "cause": outcome.reason})
        self._forget(sequence)
        self._notices.append(TokenOutput(sequence.request_id, (), FinishReason.ERROR, error=error))

    # Looking in

    def loading_prompt(self, request_id: str) -> Sequence[int] | None:
        """The token ids of a request whose KV is being loaded."""
        found = self._scheduler.transferring.get(request_id)
        return None if found is None else found[0].request.prompt_token_ids

    def _owners(self) -> list[tuple[str, Sequence[int]]]:
        return [*super()._owners(), *self.connector.owners()]

    def _may_hold(self, sequence: VllmSequence) -> bool:
        return sequence.request_id in self._scheduler.transferring or sequence.request_id in self._scheduler.loaded

    def check_integrity(self) -> None:
        super().check_integrity()
        loads = {load.number for _sequence, load in self._scheduler.transferring.values()}
        assert loads == {load.number for load in self.connector.loads.values() if not load.orphaned}, "a load has no request"
