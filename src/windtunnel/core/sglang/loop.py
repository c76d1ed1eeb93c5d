"""What the three kinds of SGLang workers have in common: a scheduler loop over batches, as a sans-IO engine.

Time. A batch starts, occupies the loop for `pacing.step_ns`, and its results are processed at its end. With *overlap* the
next batch is planned first, so it does not know what the results say: a sequence that has ended takes part once more, and an
abort takes effect one step late. Under pacing by sequence batches take no time and happen when the driver calls.

A loop that finds nothing to run sleeps until an input (`_wake`) or one of its own times. Queues are looked at when an
iteration begins, never while a batch runs.
"""

from collections.abc import Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Literal

from windtunnel.core.lifecycle import Event
from windtunnel.core.outputs import EngineError, FinishReason, StepOutput, StepStats, TokenOutput
from windtunnel.core.pacing import Pacing
from windtunnel.core.sglang.batch import Batch, Entry
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.live import LiveSequences
from windtunnel.core.sglang.policy import Chance
from windtunnel.core.sglang.sequence import SglangSequence

PauseMode = Literal["abort", "retract", "in_place"]
MAX_STEPS_PER_ADVANCE = 256
OUT_OF_MEMORY = "Out of memory even after retracting all other requests in the decode batch."
_new_output = partial(tuple.__new__, TokenOutput)


class SglangLoop(LiveSequences):
    """Base of the workers; see the module. Not thread-safe, `now_ns` never goes back."""

    def __init__(self, config: SglangEngineConfig, pacing: Pacing, chance: Chance) -> None:
        super().__init__(config, pacing, chance)
        self.clock_ns = 0
        self.paused: PauseMode | None = None
        self.frozen_until_ns = 0
        self._awake = False
        self._first_due: list[tuple[int, int, Entry]] = []
        """Prompts that are computed and whose first token is not due yet (pacing by sequence)."""
        self._pushes = 0

    # Time

    def delay_step(self, by_ns: int) -> None:
        """See `Engine.delay_step`."""
        if self.batch is not None:
            self.batch.end_ns += by_ns

    def wake(self, now_ns: int) -> None:
        """An input has come: the loop looks at everything again."""
        if self.batch is None:
            self.clock_ns = max(self.clock_ns, now_ns)
        self._awake = True
        self.reports.changed()

    def next_event_at(self) -> int | None:
        times = [self._loop_next_at(), self.background_next_at()]
        return min((at for at in times if at is not None), default=None)

    def _loop_next_at(self) -> int | None:
        at = self.batch.end_ns if self.batch is not None else self._next_start_at()
        return None if at is None else max(at, self.frozen_until_ns)

    def _next_start_at(self) -> int | None:
        if self._awake or self.notices or len(self.log):
            return self.clock_ns
        times = [self.scheduler.next_grammar_at(), None if self.halted or self.dead else self.timer_next_at()]
        if self.paused is None:
            times += [self.scheduler.next_turn_at(), self._first_due[0][0] if self._first_due else None]
        if self.quiet:
            times.append(self.reports.idle_due_ns(self.clock_ns, len(self.scheduler.running)))
        due = [at for at in times if at is not None]
        return max(self.clock_ns, min(due)) if due else None

    def advance(self, now_ns: int) -> list[StepOutput]:
        """Run what is due, at most `MAX_STEPS_PER_ADVANCE` turns and at most one batch that takes no time.

        More may be due afterwards: `next_event_at` says so. Thus a driver that is as fast as possible still reads its inputs.
        """
        done: list[StepOutput] = []
        for _ in range(MAX_STEPS_PER_ADVANCE):
            due_ns = self.next_event_at()
            if due_ns is None or due_ns > now_ns or self._turn(due_ns, now_ns, done):
                break
        return done

    def _turn(self, due_ns: int, now_ns: int, done: list[StepOutput]) -> bool:
        """Everything due at one instant. True: a batch has passed without taking time."""
        self.run_background(due_ns)
        loop_at = self._loop_next_at()
        if loop_at is None or loop_at > due_ns:
            return False
        self.clock_ns = max(self.clock_ns, due_ns if self.scheduler.pacing.lock_step else now_ns)
        if self.batch is None:
            self._begin(self.clock_ns)
        if self.batch is None:
            self._emit(done, [], self._idle_stats())
            return False
        if self.batch.end_ns > self.clock_ns:
            self._emit(done, [], None)
            return False
        instant = self.batch.start_ns == self.batch.end_ns
        self._end(self.batch, self.clock_ns, done)
        return instant

    def _begin(self, now_ns: int) -> None:
        """One iteration of the loop: poll the queues, then start a batch if there is one."""
        self._awake = False
        if self.dead:
            return
        before = len(self.log)
        self.scheduler.resume_grammars(now_ns)
        if self.paused is not None or not self.scheduler.pacing.lock_step:
            self._apply_aborts(now_ns, self._batches + 1)
        if not self.halted:
            self.poll(now_ns)
        if self.paused is None:
            self._first_tokens(now_ns)
            self._start(self._plan(now_ns))
        if self.batch is None:
            self._apply_aborts(now_ns, self._batches + 1)
            # The real loop spins: what this iteration freed or moved, the next one finds.
            self._awake = self._awake or len(self.log) > before

    def _plan(self, now_ns: int) -> Batch | None:
        batch = self.plan(now_ns)
        scheduler = self.scheduler
        for sequence in scheduler.unplaceable:
            self.fail(sequence, EngineError(OUT_OF_MEMORY), now_ns)
        scheduler.unplaceable.clear()
        if retracted := scheduler.take_retracted():
            self.reports.retracted(len(retracted))
            self.requeue_retracted(retracted, now_ns)
        return batch

    def _start(self, batch: Batch | None) -> None:
        if batch is not None:
            self._batches += 1
            batch.end_ns = batch.start_ns + self.scheduler.pacing.step_ns(batch.plan)
            batch.queue_gauges = self.queue_gauges() if batch.prefill else None
            self.batch = batch

    def _end(self, batch: Batch, at_ns: int, done: list[StepOutput]) -> None:
        self.batch = None
        batches = self._batches
        if self.config.overlap and self.scheduler.pacing.lock_step:
            self._begin(at_ns)
        outputs = self.process(batch, at_ns)
        self._apply_aborts(at_ns, batches)
        stats = self._stats(batch) if self.reports.note(batch) else None
        self._awake = True
        self._emit(done, outputs, stats)

    def _stats(self, batch: Batch | None) -> StepStats:
        planned = batch.queue_gauges if batch is not None else None
        return self.reports.make(self.clock_ns, self.queue_gauges() if planned is None else planned, batch)

    def _idle_stats(self) -> StepStats | None:
        if not self.quiet:
            return None
        if self.idle:
            self.scheduler.ratio.reset()
        due_ns = self.reports.idle_due_ns(self.clock_ns, len(self.scheduler.running))
        return self._stats(None) if due_ns is not None and due_ns <= self.clock_ns else None

    def _emit(self, done: list[StepOutput], outputs: list[TokenOutput], stats: StepStats | None) -> None:
        notices, self.notices = self.notices, []
        transitions = self.log.take()
        events = self.scheduler.memory.tree.take_events() if stats is not None else ()
        if notices or outputs or transitions or stats is not None:
            done.append(StepOutput(self.clock_ns, notices + outputs, transitions, stats, events))

    # Results

    def process(self, batch: Batch, at_ns: int) -> list[TokenOutput]:
        """The results of a batch, for the sequences that are still what they were when it was planned."""
        outputs: list[TokenOutput] = []
        self._decoded(batch, at_ns, outputs)
        for entry in batch.entries:
            if not entry.valid:
                continue
            if not entry.last:
                self.chunk_done(entry, at_ns)
            elif entry.sequence.ready_at_ns > at_ns:
                self._pushes += 1
                heappush(self._first_due, (entry.sequence.ready_at_ns, self._pushes, entry))
            else:
                self.prefill_done(entry, at_ns, outputs)
        return outputs

    def _decoded(self, batch: Batch, at_ns: int, outputs: list[TokenOutput]) -> None:
        """One token each. This runs for every running sequence in every step: what ends nothing takes the short way."""
        lock_step = self.scheduler.pacing.lock_step
        append = outputs.append
        for sequence, epoch in zip(batch.decoding, batch.epochs, strict=True):
            if sequence.epoch != epoch:
                continue
            if sequence.ahead and lock_step:
                token = sequence.ahead.pop()
                sequence.output.append(token)
                append(_new_output((sequence.request_id, (token,), None, None, sequence.cached_tokens, None, None)))
            else:
                self.next_token(sequence, at_ns, outputs)

    def _first_tokens(self, now_ns: int) -> None:
        """First tokens whose time has come (pacing by sequence)."""
        while self._first_due and (self._first_due[0][0] <= now_ns or not self._first_due[0][2].valid):
            entry = heappop(self._first_due)[2]
            if entry.valid:
                self.prefill_done(entry, now_ns, self.notices)

    def chunk_done(self, entry: Entry, at_ns: int) -> None:
        """A part of a prompt is computed; more follows."""
        self.scheduler.memory.publish(entry.sequence, entry.upto)

    def prefill_done(self, entry: Entry, at_ns: int, outputs: list[TokenOutput]) -> None:
        """A prompt is computed: its first token, and then it decodes."""
        sequence = entry.sequence
        self.scheduler.memory.publish(sequence, entry.upto)
        self.log.record(sequence, Event.FIRST_TOKEN, at_ns)
        self.next_token(sequence, at_ns, outputs)

    def next_token(self, sequence: SglangSequence, at_ns: int, outputs: list[TokenOutput]) -> None:
        """Append a token; end the sequence, or note when it is due again."""
        self.emit(sequence, sequence.next_token(self.config.eos_token_id), at_ns, outputs)

    def emit(self, sequence: SglangSequence, output: TokenOutput, at_ns: int, outputs: list[TokenOutput]) -> None:
        outputs.append(output)
        if output.finish_reason is not None:
            self.finish(sequence, output.finish_reason, at_ns)
        elif self.scheduler.pacing.lock_step:
            sequence.look_ahead()
        else:
            sequence.ahead = []
            sequence.ready_at_ns = max(sequence.ready_at_ns, sequence.started_ns)
            sequence.ready_at_ns += self.scheduler.pacing.next_token_ns(self.scheduler.load)
            self.scheduler.await_turn(sequence)

    def finish(self, sequence: SglangSequence, reason: FinishReason, at_ns: int) -> None:
        """A sequence has come to its end: its tokens stay cached, except for the last one, whose KV nobody computed."""
        self.scheduler.remove(sequence, sequence.num_tokens - 1 if sequence.output else 0)
        self.log.record(sequence, Event.FINISH, at_ns, {"reason": reason.value, "output_tokens": len(sequence.output)})
        self.forget(sequence)

    # What a kind of worker adds

    def poll(self, now_ns: int) -> None:
        """Look at the queues of this kind of worker, before a batch is planned."""

    def plan(self, now_ns: int) -> Batch | None:
        """The next batch, or None."""
        return self.scheduler.plan_prefill(now_ns) or self.scheduler.plan_decode(now_ns)

    def requeue_retracted(self, retracted: Sequence[SglangSequence], now_ns: int) -> None:
        """Where sequences go that had to give up their memory."""
        for sequence in retracted:
            self.scheduler.enqueue(sequence, now_ns)

    def timer_next_at(self) -> int | None:
        """When the loop must look at its queues although nothing has come in."""
        return None

    def background_next_at(self) -> int | None:
        """When something besides the loop (a transfer worker) next does something."""
        return None

    def run_background(self, now_ns: int) -> None:
        """Let whatever runs besides the loop catch up to `now_ns`."""

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is under way."""
        return not self.sequences and self.batch is None

    @property
    def quiet(self) -> bool:
        """Idle enough for gauges to be written without a batch."""
        return self.idle

    @property
    def halted(self) -> bool:
        """The loop looks at nothing; paused by `abort` it still sees its queues off."""
        return self.paused in ("retract", "in_place")
