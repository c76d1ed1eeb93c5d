"""The vLLM flavour of the engine: a sans-IO `Engine` over scheduler, completion and control state.

Time. A step starts, occupies the engine for `pacing.step_ns`, and becomes visible at its end. Under lock step the next one
starts where the last one ended, however late the driver calls. Under pacing by sequence steps take no time and happen when
the driver calls, for everyone who is due.

What the outside sees, it sees with a step: gauges, KV events and transitions leave in the `StepOutput` of the step that
follows them. So an arrival, an abort and a refusal each make `next_event_at` due at once, unless a step is under way.
"""

from collections.abc import Sequence

from windtunnel.core.engine import SequenceView
from windtunnel.core.kv.hashing import BlockHasher
from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import EngineError, FinishReason, Refusal, StepOutput, StepStats, TokenOutput
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.transitions import TransitionLog
from windtunnel.core.vllm.completion import Completion
from windtunnel.core.vllm.config import LIVE_FIELDS, VllmEngineConfig
from windtunnel.core.vllm.control import BUSY, DEATH, PAUSE_MODES, ControlState, PauseMode
from windtunnel.core.vllm.scheduler import VllmScheduler
from windtunnel.core.vllm.sequence import VllmSequence
from windtunnel.core.vllm.step import Step

MAX_STEPS_PER_ADVANCE = 256


class VllmEngine:
    """One data-parallel rank. Implements `windtunnel.core.engine.Engine`."""

    scheduler_type: type[VllmScheduler] = VllmScheduler
    sequence_type: type[VllmSequence] = VllmSequence
    step_type: type[Step] = Step
    completion_type: type[Completion] = Completion

    def __init__(self, config: VllmEngineConfig, pacing: Pacing) -> None:
        self.config = config
        self.control = ControlState()
        self._pacing = pacing
        self._log = TransitionLog()
        self._scheduler = self.scheduler_type(config, pacing, self._log)
        self._live: dict[str, VllmSequence] = {}
        self._clock_ns = 0
        self._step: Step | None = None
        self._steps = 0
        self._arrivals = 0
        self._prefill_prompt_tokens = 0
        """Prompt tokens of the sequences without an output token."""
        self._publish_due = False
        """A step must come, if only to publish gauges."""
        self._late_aborts: list[VllmSequence] = []
        self._notices: list[TokenOutput] = []

    @property
    def hasher(self) -> BlockHasher:
        """Makes `EngineRequest.prompt_hashes`."""
        return self._scheduler.hasher

    def foresee(self, hashes: list[bytes]) -> list[int]:
        """`EngineRequest.prompt_blocks` for these (`BlockPool.foresee`). The only method that another thread may call."""
        return self._scheduler.pool.foresee(hashes)

    # Requests

    def submit(self, requests: Sequence[EngineRequest], now_ns: int) -> Refusal | None:
        """Admit all or none. Raises ValueError for a live or repeated id and for a request that no engine could run."""
        self._check(requests)
        self._wake(now_ns)
        refusal = self.control.refusal() or self._overflow(len(requests))
        for request in requests:
            sequence = self.sequence_type(request, self.config, self._arrivals, now_ns)
            self._arrivals += 1
            if refusal is not None:
                self._log.record(sequence, Event.REFUSE, now_ns, {"reason": refusal.reason})
            else:
                self._enter(sequence, now_ns)
        return refusal

    def _check(self, requests: Sequence[EngineRequest]) -> None:
        seen: set[str] = set()
        for request in requests:
            if request.request_id in self._live or request.request_id in seen:
                raise ValueError(f"request_id {request.request_id!r} is already live")
            seen.add(request.request_id)
            if not 1 <= len(request.prompt_token_ids) <= self.config.max_model_len:
                raise ValueError(
                    f"prompt_token_ids has {len(request.prompt_token_ids)} tokens: must be 1 to {self.config.max_model_len}"
                )
            if request.max_tokens < 1:
                raise ValueError(f"max_tokens is {request.max_tokens}: must be at least 1")

    def _overflow(self, arriving: int) -> Refusal | None:
        reqs, tokens = self.config.max_num_queued_reqs, self.config.max_num_queued_tokens
        if reqs is not None and len(self._live) + arriving > reqs:
            return Refusal("max_num_queued_reqs", BUSY)
        if tokens is not None and self._prefill_prompt_tokens >= tokens:
            return Refusal("max_num_queued_tokens", BUSY)
        return None

    def _enter(self, sequence: VllmSequence, now_ns: int) -> None:
        self._live[sequence.request_id] = sequence
        self._prefill_prompt_tokens += sequence.prompt_len
        self._log.record(sequence, Event.SUBMIT, now_ns, {"prompt_tokens": sequence.prompt_len})
        self._scheduler.add(sequence, now_ns)
        self._publish_due = True

    def release(self, request_ids: Sequence[str], now_ns: int) -> None:
        """See `Engine.release`; under fcfs they queue in the order of their release."""
        self._wake(now_ns)
        for request_id in request_ids:
            if request_id in self._live:
                self._scheduler.release(self._live[request_id], self._arrivals, now_ns)
                self._arrivals += 1

    def abort(self, request_ids: Sequence[str], now_ns: int, *, notify: bool = False) -> int:
        """End these; see `Engine.abort`. Under asynchronous scheduling a running one keeps its blocks for one step more."""
        self._wake(now_ns)
        aborted = 0
        for request_id in request_ids:
            sequence = self._live.get(request_id)
            if sequence is not None and sequence.abort_step < 0:
                self._abort(sequence, now_ns, notify=notify)
                aborted += 1
        self._publish_due = self._publish_due or aborted > 0
        return aborted

    def _abort(self, sequence: VllmSequence, now_ns: int, *, notify: bool) -> None:
        if self.config.async_scheduling and sequence.run_order >= 0:
            sequence.settle()
            sequence.abort_step = self._steps + 1
            sequence.notify_abort = notify
            self._late_aborts.append(sequence)
        else:
            self._end_aborted(sequence, now_ns, notify=notify)

    def _end_aborted(self, sequence: VllmSequence, now_ns: int, *, notify: bool) -> None:
        output_tokens = sequence.output_tokens
        self._scheduler.remove(sequence)
        self._log.record(sequence, Event.ABORT, now_ns, {"output_tokens": output_tokens})
        self._forget(sequence)
        if notify:
            self._notices.append(TokenOutput(sequence.request_id, (), FinishReason.ABORT, None, sequence.cached_tokens))

    def _forget(self, sequence: VllmSequence) -> None:
        del self._live[sequence.request_id]
        if sequence.prefilling:
            self._prefill_prompt_tokens -= sequence.prompt_len

    # Time

    def delay_step(self, by_ns: int) -> None:
        """See `Engine.delay_step`."""
        if self._step is not None:
            self._step.end_ns += by_ns

    def _wake(self, now_ns: int) -> None:
        if self._step is None:
            self._clock_ns = max(self._clock_ns, now_ns)

    def next_event_at(self) -> int | None:
        return self._next_step_at()

    def _next_step_at(self) -> int | None:
        due_ns = self._step.end_ns if self._step is not None else self._next_start_at()
        return None if due_ns is None else max(due_ns, self.control.frozen_until_ns)

    def _next_start_at(self) -> int | None:
        if self._publish_due or self._notices or len(self._log):
            return self._clock_ns
        return self._scheduler.next_event_at(self._clock_ns) if self.control.scheduling else None

    def advance(self, now_ns: int) -> list[StepOutput]:
        """Run what is due, at most `MAX_STEPS_PER_ADVANCE` steps and at most one that takes no time.

        More may be due afterwards: `next_event_at` says so. Thus a driver that is as fast as possible still reads its inputs.
        """
        done: list[StepOutput] = []
        for _ in range(MAX_STEPS_PER_ADVANCE):
            due_ns = self._next_step_at()
            if due_ns is None or due_ns > now_ns:
                break
            if self._step is None and self._start(due_ns, now_ns):
                done.append(self._finish(self._clock_ns))
                break
            if self._step is not None and max(self._step.end_ns, self.control.frozen_until_ns) <= now_ns:
                done.append(self._finish(max(self._step.end_ns, self.control.frozen_until_ns)))
        return done

    def _start(self, due_ns: int, now_ns: int) -> bool:
        """Begin a step (or a bare report). True if it ends at the instant at which it starts."""
        self._clock_ns = due_ns if self._scheduler.pacing.lock_step else max(due_ns, now_ns)
        if self.control.thawing:
            self.control.thawing = False
            self._scheduler.delay_until(self._clock_ns)
        stepping = self._publish_due or (self.control.scheduling and self._is_due())
        if not stepping:
            return True
        self._steps += 1
        step = self.step_type(self._steps, self._clock_ns, self.config.max_num_batched_tokens)
        if self.control.scheduling:
            self._scheduler.schedule(step, self._clock_ns)
        if not step.empty:
            step.end_ns += self._scheduler.pacing.step_ns(step.plan) + step.load_ns
        self._publish_due = False
        self._step = step
        return step.end_ns == step.start_ns

    def _is_due(self) -> bool:
        due_ns = self._scheduler.next_event_at(self._clock_ns)
        return due_ns is not None and due_ns <= self._clock_ns

    def _finish(self, at_ns: int) -> StepOutput:
        """End the step under way, or report what happened without one."""
        self._clock_ns = at_ns
        step, self._step = self._step, None
        if step is None:
            return StepOutput(at_ns, self._take_notices(), self._log.take())
        self._apply_late_aborts(step, at_ns)
        completion = self.completion_type(self._scheduler, step, at_ns)
        outputs = completion.run()
        for sequence in completion.first_tokens:
            self._prefill_prompt_tokens -= sequence.prompt_len
        for sequence in completion.ended:
            self._forget(sequence)
        if self._scheduler.config is not self.config or self._scheduler.pacing is not self._pacing:
            self._scheduler.reconfigure(self.config, self._pacing, at_ns)
        stats = self._stats(step)
        self._publish_due = bool(self._late_aborts)
        return StepOutput(at_ns, self._take_notices() + outputs, self._log.take(), stats, self._scheduler.pool.take_events())

    def _apply_late_aborts(self, step: Step, at_ns: int) -> None:
        if not self._late_aborts:
            return
        due = [sequence for sequence in self._late_aborts if sequence.abort_step <= step.number]
        self._late_aborts = [sequence for sequence in self._late_aborts if sequence.abort_step > step.number]
        for sequence in due:
            self._end_aborted(sequence, at_ns, notify=sequence.notify_abort)

    def _take_notices(self) -> list[TokenOutput]:
        taken, self._notices = self._notices, []
        return taken

    def _stats(self, step: Step) -> StepStats:
        scheduler = self._scheduler
        running_loras, waiting_loras = scheduler.lora_names() if self.config.max_loras else ((), ())
        return StepStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            deferred=len(scheduler.deferred),
            kv_usage=scheduler.pool.usage,
            prefill_tokens=step.prefill_tokens,
            decode_tokens=step.decode_tokens,
            preemptions=step.preemptions,
            prefix_queries=step.prefix_queries,
            prefix_hits=step.prefix_hits,
            running_loras=running_loras,
            waiting_loras=waiting_loras,
            external_queries=step.external_queries,
            external_hits=step.external_hits,
            disk_hits=step.disk_hits,
        )

    # Operator

    def reconfigure(self, config: VllmEngineConfig, pacing: Pacing | None = None, *, now_ns: int = 0) -> None:
        """Change limits and pace together, from the next step on. Raises ValueError if `config` differs in a fixed field."""
        changed = [name for name in config.__slots__ if getattr(config, name) != getattr(self.config, name)]
        fixed = [name for name in changed if name not in LIVE_FIELDS]
        if fixed:
            raise ValueError(f"{', '.join(fixed)} cannot change while the engine runs; {', '.join(sorted(LIVE_FIELDS))} can")
        self._wake(now_ns)
        self.config = config
        self._pacing = pacing or self._pacing
        if self._step is None:
            self._scheduler.reconfigure(config, self._pacing, self._clock_ns)

    def pause(self, mode: PauseMode, now_ns: int) -> int:
        """`abort`: end all with notice, refuse new ones. `wait`: let them end, refuse new ones. `keep`: freeze, accept.

        Returns how many were ended. `drained` tells when `wait` is over.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode is {mode!r}: must be one of {', '.join(PAUSE_MODES)}")
        self._wake(now_ns)
        self.control.paused = mode
        return self.abort(list(self._live), now_ns, notify=True) if mode == "abort" else 0

    def resume(self, now_ns: int) -> None:
        self._wake(now_ns)
        self._scheduler.delay_until(now_ns)
        self.control.paused = None

    @property
    def drained(self) -> bool:
        """Nothing is live and nothing waits to be published."""
        return not self._live and self._step is None and not self._publish_due

    def sleep(self, level: int, now_ns: int, mode: PauseMode = "abort") -> int:
        """Pause by `mode` and note the level; from level 1 on the KV cache is lost. Returns how many were ended."""
        ended = self.pause(mode, now_ns)
        self.control.sleep_level = level
        if level:
            self.reset_prefix_cache(now_ns, reset_running=mode == "keep")
        return ended

    def wake(self, now_ns: int) -> None:
        self.control.sleep_level = None
        self.resume(now_ns)

    def reset_prefix_cache(self, now_ns: int, *, reset_running: bool = False) -> bool:
        """Forget all cached blocks; False while any is in use. The event leaves with the next step (reference §6.2)."""
        self._wake(now_ns)
        if reset_running:
            for sequence in reversed(list(self._scheduler.running.values())):
                self._scheduler.preempt(sequence, now_ns)
        return self._scheduler.pool.reset()

    def kill(self, now_ns: int, message: str = DEATH) -> int:
        """The engine core dies: everything live fails, nothing more is taken. Returns how many failed."""
        error = EngineError(message)
        self._step = None
        self._wake(now_ns)
        self.control.death = error
        self._publish_due = False
        self._late_aborts.clear()
        victims = list(self._live.values())
        for sequence in victims:
            self._scheduler.remove(sequence)
            self._log.record(sequence, Event.FAIL, now_ns, {"reason": "engine_death"})
            self._forget(sequence)
            self._notices.append(TokenOutput(sequence.request_id, (), FinishReason.ERROR, error=error))
        return len(victims)

    def freeze(self, until_ns: int) -> None:
        """Neither start nor end a step before `until_ns`, as a hung engine with green health (vLLM #39863). 0 thaws."""
        self.control.frozen_until_ns = until_ns
        self.control.thawing = True

    # Looking in

    def live(self) -> list[SequenceView]:
        return [_view(sequence) for queue in self._scheduler.queues() for sequence in queue]

    @property
    def cached_hashes(self) -> frozenset[bytes]:
        """What the prefix cache holds; a replay of all KV events (with a host tier: of those of the GPU) gives the same set."""
        return self._scheduler.pool.cached_hashes

    @property
    def host_hashes(self) -> frozenset[bytes]:
        """What the host tier holds; the events with the medium `CPU` give the same set."""
        tier = self._scheduler.pool.tier
        return frozenset() if tier is None else tier.hashes

    @property
    def disk_hashes(self) -> frozenset[bytes]:
        """What the disk tier holds; the events with the medium `STORAGE` give the same set."""
        tier = self._scheduler.pool.tier
        return frozenset() if tier is None or tier.behind is None else tier.behind.hashes

    def check_integrity(self) -> None:
        scheduler = self._scheduler
        assert sorted(self._live) == sorted(seq.request_id for queue in scheduler.queues() for seq in queue), (
            "a sequence is lost"
        )
        scheduler.pool.check_integrity(self._owners())
        assert all(not seq.state.terminal for seq in self._live.values()), "an ended sequence is live"
        outside = (seq for seq in self._live.values() if seq.run_order < 0)
        assert not any(seq.blocks for seq in outside if not self._may_hold(seq)), "a sequence outside holds blocks"
        assert scheduler.kv_tokens == sum(seq.computed for seq in scheduler.running.values()), "computed tokens miscounted"
        waiting = sum(seq.prompt_len for seq in self._live.values() if seq.prefilling)
        assert self._prefill_prompt_tokens == waiting, "queued tokens miscounted"

    def _owners(self) -> list[tuple[str, Sequence[int]]]:
        """Whoever holds blocks, and which."""
        return [(sequence.request_id, sequence.blocks) for sequence in self._live.values()]

    def _may_hold(self, sequence: VllmSequence) -> bool:
        """Whether a sequence outside the running list may have blocks."""
        return False


def _view(sequence: VllmSequence) -> SequenceView:
    return SequenceView(
        request_id=sequence.request_id,
        state=sequence.state,
        since_ns=sequence.since_ns,
        arrival_ns=sequence.request.arrival_ns,
        prompt_tokens=sequence.prompt_len,
        computed_tokens=sequence.computed,
        output_tokens=sequence.output_tokens,
        resources={"blocks": tuple(sequence.blocks)} if sequence.blocks else {},
        tags=sequence.request.tags,
    )
