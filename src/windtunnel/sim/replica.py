"""One engine of the cluster, with the process and the wire around it: reachable or not, alive or not.

The replica owns its engine and gives it the time; it never lets the engine fall behind or run ahead.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

from windtunnel.core.engine import Engine
from windtunnel.core.lifecycle import Event, State, Transition
from windtunnel.core.outputs import FinishReason, KvEvent, Refusal, StepOutput, TokenOutput
from windtunnel.core.request import EngineRequest
from windtunnel.core.vllm.runs import TokenRun
from windtunnel.sim.calls import Attempt
from windtunnel.sim.kernel import Action, Kernel, Timer
from windtunnel.sim.scenario import FrontendSpec
from windtunnel.wire.sglang.metrics import SglangMetrics
from windtunnel.wire.vllm.metrics import VllmMetrics


@runtime_checkable
class RunEngine(Protocol):
    """An engine whose tokens leave in runs (`core.vllm.runs`)."""

    @property
    def tokens_in_runs(self) -> int: ...

    def take_runs(self) -> Sequence[TokenRun]: ...

    def report_now(self, request_id: str) -> None: ...

    def watch(self, request_id: str, tokens: int) -> None: ...


class Receiver(Protocol):
    """Where a replica's answers go. Called at the time at which the engine speaks; the network delay is the receiver's."""

    def on_trigger(self, attempt: Attempt, at_ns: int) -> None: ...

    def on_final(self, attempt: Attempt, output: TokenOutput, at_ns: int) -> None: ...

    def on_lost(self, attempt: Attempt, at_ns: int) -> None:
        """The connection was reset."""
        ...


class EngineLedger:
    """The engine's side of conservation: what was given to it, what ended, each once. A fold over transitions."""

    def __init__(self) -> None:
        self.submitted = 0
        self.ended: dict[State, int] = dict.fromkeys((State.FINISHED, State.ABORTED, State.FAILED), 0)
        self.refused = 0
        self.lost = 0
        """Live when their process crashed."""
        self._given: set[str] = set()
        """Taken by the engine, which has not told of it yet."""
        self._live: set[str] = set()

    def give(self, request_id: str) -> None:
        assert request_id not in self._given and request_id not in self._live, f"{request_id} entered twice"
        self.submitted += 1
        self._given.add(request_id)

    def fold(self, transitions: Sequence[Transition]) -> None:
        for transition in transitions:
            if transition.event is Event.REFUSE:
                continue
            request_id, after = transition.request_id, transition.after
            if transition.before is State.NEW:
                assert request_id in self._given, f"{request_id} began without having been given"
                self._given.remove(request_id)
                self._live.add(request_id)
            if after in self.ended:
                assert request_id in self._live, f"{request_id} ended twice"
                self._live.remove(request_id)
                self.ended[after] += 1

    def crash(self) -> None:
        self.lost += self.live
        self._given.clear()
        self._live.clear()

    @property
    def live(self) -> int:
        return len(self._live) + len(self._given)

    def counts(self) -> dict[str, int]:
        ended = {state.value: count for state, count in self.ended.items()}
        return {"submitted": self.submitted, **ended, "lost": self.lost, "in_flight": self.live, "refused": self.refused}

    def check(self) -> None:
        assert self.submitted == sum(self.ended.values()) + self.lost + self.live, f"engine ledger: {self.counts()}"


class Replica:
    """Index, engine, ledger, metrics and open streams of one server."""

    def __init__(
        self,
        index: int,
        kernel: Kernel,
        make_engine: Callable[[], Engine],
        receiver: Receiver,
        metrics: VllmMetrics | SglangMetrics | None = None,
        frontend: FrontendSpec = FrontendSpec(),  # noqa: B008 (frozen)
    ) -> None:
        self.index = index
        self.engine = make_engine()
        self.ledger = EngineLedger()
        self.metrics = metrics
        self.up = True
        self.reachable = True
        self.generation = 0
        """Counts crashes; a message to an earlier process finds nobody."""
        self.steps = 0
        self.busy_ns = 0
        self.peak_running = 0
        self.peak_waiting = 0
        self.on_kv_events: Callable[[int, Sequence[KvEvent]], None] | None = None
        self.on_transitions: Callable[[int, Sequence[Transition]], None] | None = None
        self.after_step: Callable[[Replica, StepOutput], None] | None = None
        self.on_submit: Callable[[Replica, Attempt, EngineRequest], None] | None = None
        self.on_turn: Callable[[Replica], None] | None = None
        """Called whenever something has happened at the engine."""
        self._kernel = kernel
        self._make_engine = make_engine
        self._receiver = receiver
        self._streams: dict[str, Attempt] = {}
        self._alarm: Timer | None = None
        self._held: list[Action] = []
        self._frontend = frontend
        self._read_until_ns = 0
        self._runs = self.engine if isinstance(self.engine, RunEngine) else None
        self._seen_in_runs = 0

    # What reaches it

    def deliver(self, action: Action) -> None:
        """A message arrives: done at once, held while nothing gets through."""
        if self.reachable:
            action()
        else:
            self._held.append(action)

    def read(self, attempt: Attempt, action: Action) -> None:
        """A request has come: the HTTP server reads one after the other, then does `action`."""
        frontend = self._frontend
        cost_ns = frontend.request + frontend.prompt_token * attempt.prompt_tokens
        if not cost_ns and not frontend.latency:
            action()
            return
        self._read_until_ns = max(self._read_until_ns, self._kernel.now_ns) + cost_ns
        at_ns = self._read_until_ns + frontend.latency
        self._kernel.at(at_ns, partial(self._has_read, attempt, action, self.generation))

    def _has_read(self, attempt: Attempt, action: Action, generation: int) -> None:
        if generation == self.generation:
            action()
        else:
            self._receiver.on_lost(attempt, self._kernel.now_ns)

    def submit(self, attempt: Attempt, request: EngineRequest) -> Refusal | None:
        """Admit or refuse. A request that no engine of this kind could run is refused with 400."""
        if self.on_submit is not None:
            self.on_submit(self, attempt, request)
        try:
            refusal = self.engine.submit([request], self._kernel.now_ns)
        except ValueError as error:
            self.ledger.refused += 1
            return Refusal("invalid", str(error), 400, "BadRequestError")
        if refusal is None:
            self.ledger.give(request.request_id)
            self._streams[request.request_id] = attempt
            self.watch(attempt)
            if self.metrics is not None:
                self.metrics.on_submitted(0, [request])
        else:
            self.ledger.refused += 1
            if self.metrics is not None:
                self.metrics.on_rejected(refusal.reason)
        self.wake()
        return refusal

    def abort(self, request_id: str) -> None:
        """The client has gone."""
        if self._streams.pop(request_id, None) is None or not self.up:
            return
        self.engine.abort([request_id], self._kernel.now_ns)
        self._take_runs()
        if self.metrics is not None:
            self.metrics.on_dropped([request_id])
        self.wake()

    def watch(self, attempt: Attempt) -> None:
        """Its trigger has been set: notice the token that pulls it, in the step that makes it."""
        if self._runs is not None and attempt.trigger > 1 and attempt.request_id in self._streams:
            self._runs.watch(attempt.request_id, attempt.trigger)

    def sync(self, attempt: Attempt) -> None:
        """Bring the times of its tokens up to the present."""
        if self._runs is not None and attempt.request_id in self._streams and self.reachable:
            self._runs.report_now(attempt.request_id)
            self._hear_runs(self._take_runs())

    def _take_runs(self) -> Sequence[TokenRun]:
        """Runs that come without a step."""
        runs = self._runs.take_runs() if self._runs is not None else ()
        if isinstance(self.metrics, VllmMetrics):
            for run in runs:
                self.metrics.on_run(0, run.request_id, run.times_ns)
        return runs

    # Time

    def wake(self) -> None:
        """Look at the engine again: something about it has changed."""
        if self.on_turn is not None:
            self.on_turn(self)
        at_ns = self.engine.next_event_at() if self.up else None
        alarm = self._alarm
        if alarm is not None:
            if alarm.at_ns == at_ns:
                return
            alarm.cancel()
        self._alarm = None if at_ns is None else self._kernel.at(at_ns, self._run)

    def _run(self) -> None:
        self._alarm = None
        steps = self.engine.advance(self._kernel.now_ns)
        for step in steps:
            self._handle(step)
        self.wake()
        if self.after_step is not None and steps:
            self.after_step(self, steps[-1])

    def _handle(self, step: StepOutput) -> None:
        if step.transitions:
            self.ledger.fold(step.transitions)
            if self.on_transitions is not None:
                self.on_transitions(self.index, step.transitions)
        if step.stats is not None:
            self.steps += 1
            self.peak_running = max(self.peak_running, step.stats.running)
            self.peak_waiting = max(self.peak_waiting, step.stats.waiting + step.stats.deferred)
        if self.on_kv_events is not None and step.kv_events:
            self.on_kv_events(self.index, step.kv_events)
        runs = self._runs.take_runs() if self._runs is not None else ()
        if self.metrics is not None:
            self._fold(self.metrics, step, runs)
        if self.reachable:
            self._speak(step.outputs, runs, step.at_ns)
        else:
            self._held.append(partial(self._speak_late, step.outputs, runs))

    def _fold(self, metrics: VllmMetrics | SglangMetrics, step: StepOutput, runs: Sequence[TokenRun]) -> None:
        """The runs first: a final output ends the timings that they need."""
        if self._runs is None or isinstance(metrics, SglangMetrics):
            metrics.on_step(0, step, step.at_ns)
            return
        seen, self._seen_in_runs = self._seen_in_runs, self._runs.tokens_in_runs
        for run in runs:
            metrics.on_run(0, run.request_id, run.times_ns)
        metrics.on_step(0, step, step.at_ns, in_runs=self._seen_in_runs - seen)

    def _speak_late(self, outputs: Sequence[TokenOutput], runs: Sequence[TokenRun]) -> None:
        """What was held gets through at once."""
        now_ns = self._kernel.now_ns
        late = [TokenRun(run.request_id, run.token_ids, array("q", [now_ns]) * len(run.token_ids)) for run in runs]
        self._speak(outputs, late, now_ns)

    def _speak(self, outputs: Sequence[TokenOutput], runs: Sequence[TokenRun], at_ns: int) -> None:
        """Pass on what a step has made. A first output comes before the runs of its sequence, a final one after them."""
        if not runs:
            self._hear(outputs, at_ns)
            return
        self._hear([output for output in outputs if output.finish_reason is None], at_ns)
        self._hear_runs(runs)
        self._hear([output for output in outputs if output.finish_reason is not None], at_ns)

    def _hear_runs(self, runs: Sequence[TokenRun]) -> None:
        for request_id, _token_ids, times_ns in runs:
            attempt = self._streams.get(request_id)
            if attempt is None:
                continue
            before = len(attempt.times_ns)
            attempt.times_ns.extend(times_ns)
            if before < attempt.trigger <= len(attempt.times_ns):
                self._receiver.on_trigger(attempt, attempt.times_ns[attempt.trigger - 1])

    def _hear(self, outputs: Sequence[TokenOutput], at_ns: int) -> None:
        for output in outputs:
            attempt = self._streams.get(output[0])
            if attempt is None:
                continue
            times = attempt.times_ns
            if output[1]:
                times.append(at_ns)
                if len(output[1]) > 1:
                    times.extend([at_ns] * (len(output[1]) - 1))
            if len(times) == attempt.trigger and output[1]:
                self._receiver.on_trigger(attempt, at_ns)
            if output[2] is not None:
                self._close(attempt, output, output[2], at_ns)

    def _close(self, attempt: Attempt, output: TokenOutput, reason: FinishReason, at_ns: int) -> None:
        del self._streams[attempt.request_id]
        attempt.cached_tokens = output.cached_tokens
        if self.metrics is not None:
            self.metrics.on_finished(attempt.request_id, reason, at_ns)
        self._receiver.on_final(attempt, output, at_ns)

    # What befalls it

    def crash(self) -> None:
        """The process is gone: memory lost, connections reset."""
        self.up = False
        self.generation += 1
        self.engine.check_integrity()
        self.ledger.crash()
        self.wake()
        lost, self._streams = list(self._streams.values()), {}
        if self.metrics is not None:
            self.metrics.on_dropped([attempt.request_id for attempt in lost])
        for attempt in lost:
            self._receiver.on_lost(attempt, self._kernel.now_ns)

    def restart(self) -> None:
        """A fresh process with an empty cache."""
        if self.up:
            self.crash()
        self.engine = self._make_engine()
        self._runs = self.engine if isinstance(self.engine, RunEngine) else None
        self._seen_in_runs = 0
        self._read_until_ns = 0
        self.up = True
        self.wake()

    def set_reachable(self, reachable: bool) -> None:
        """While False nothing gets through in either direction; afterwards everything that waited does, in order."""
        self.reachable = reachable
        if reachable:
            held, self._held = self._held, []
            for action in held:
                action()

    def check(self) -> None:
        """Raise AssertionError unless engine and ledger agree that nothing is lost."""
        self.engine.check_integrity()
        self.ledger.check()
