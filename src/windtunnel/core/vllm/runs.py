"""The vLLM engine for virtual time: the same decisions, but tokens leave in runs.

`VllmEngine` touches every running sequence in every step, because somebody waits for each token. In virtual time nobody does,
so here a decoding sequence *dozes*: it takes part in every step (in the count, the step's length and the KV accounting), and
is touched only at a *block boundary* (one block is full and published, the next one is taken) and when it may end. Its tokens
are reported as one `TokenRun` when it ends, leaves the running list, sits a step out, reaches a watched token, or is asked for.

What stays exactly equal to `VllmEngine`: every step and its length, every transition, all statistics and KV events, first and
final outputs, and the time of every token. `tests/core/vllm/test_runs.py` compares the two.

It needs lock step (`StepPacing`) and refuses asynchronous scheduling, whose late aborts would wake everybody.
"""

from array import array
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, cast

from windtunnel.core.kv.hashing import BlockHasher, ExtraKeys
from windtunnel.core.lifecycle import State
from windtunnel.core.outputs import TokenOutput
from windtunnel.core.pacing import Pacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.transitions import TransitionLog
from windtunnel.core.vllm.completion import Completion
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.engine import VllmEngine
from windtunnel.core.vllm.scheduler import VllmScheduler
from windtunnel.core.vllm.sequence import VllmSequence
from windtunnel.core.vllm.step import Step

_KEEP_TIMES = 1 << 15
_PLAN = 256
"""Tokens that a sequence sleeps through at most."""


class TokenRun(NamedTuple):
    """Consecutive tokens of one sequence, one for each step, with the times at which these steps ended."""

    request_id: str
    token_ids: tuple[int, ...]
    times_ns: Sequence[int]


class StepClock:
    """The steps so far that computed something. Owned by one scheduler; its sequences read it."""

    __slots__ = ("dozing", "steps", "times_ns")

    def __init__(self) -> None:
        self.steps = 0
        self.dozing = 0
        """Running sequences that are asleep."""
        self.times_ns: array[int] = array("q")
        """When the latest steps ended; the last entry belongs to step `steps`."""


_STOPPED = StepClock()


class RunSequence(VllmSequence):
    """A sequence that knows at which step it wakes; `quiet` follows from that."""

    __slots__ = ("boundary", "clock", "sent", "wake_step", "watched")

    def __init__(self, request: EngineRequest, config: VllmEngineConfig, arrived: int, now_ns: int) -> None:
        self.clock = _STOPPED
        self.wake_step = 0
        self.boundary = 0
        """The step count at which its computed tokens next fill a block."""
        self.sent = 0
        """Output tokens that have been reported."""
        self.watched = 0
        """Report when there are so many output tokens."""
        super().__init__(request, config, arrived, now_ns)

    @property
    def roomy(self) -> bool:
        """Never: who is awake is looked at closely."""
        return False

    @roomy.setter
    def roomy(self, roomy: bool) -> None:
        return

    @property
    def quiet(self) -> int:
        left = self.wake_step - self.clock.steps
        return left if left > 0 else 0  # noqa: FURB136 (read for every sequence awake; max() takes twice as long)

    def _forget_plan(self) -> None:
        self.wake_step = self.clock.steps

    def plan(self, block_size: int) -> None:
        """Plan the tokens until it may end: none of them stops it. At most until a watched token."""
        made = len(self.output)
        count = min(_PLAN, self.output_limit - made - 1)
        if self.watched > made:
            count = min(count, self.watched - made)
        if count < 1 or self.request.repetition is not None:
            return
        planned = self.request.source.token_ids(made, count)
        if not self.stops.isdisjoint(planned):
            planned = planned[: next(at for at, token in enumerate(planned) if token in self.stops)]
        self.output += planned
        self.computed_at_end += len(planned)
        self.wake_step = self.clock.steps + len(planned)
        self.boundary = self.clock.steps - (self.computed_at_end - len(planned)) % -block_size

    def wake_after(self, tokens: int) -> None:
        """Shorten its sleep to so many further tokens."""
        given_up = self.quiet - tokens
        del self.output[-given_up:]
        self.computed_at_end -= given_up
        self.wake_step -= given_up


class RunStep(Step):
    __slots__ = ("dozing", "scheduled")

    def __init__(self, number: int, start_ns: int, budget: int) -> None:
        super().__init__(number, start_ns, budget)
        self.dozing = 0
        self.scheduled = False

    @property
    def decode_tokens(self) -> int:
        return len(self.decoding) + self.dozing

    @property
    def empty(self) -> bool:
        return not self.dozing and super().empty

    def drop(self, sequence: VllmSequence) -> None:
        if sequence.quiet:
            self.dozing -= 1
            self.budget += 1
        else:
            super().drop(sequence)


class RunScheduler(VllmScheduler):
    """Keeps the running sequences that are awake apart, and when the others wake."""

    def __init__(self, config: VllmEngineConfig, pacing: Pacing, log: TransitionLog) -> None:
        super().__init__(config, pacing, log)
        self.clock = StepClock()
        self.runs: list[TokenRun] = []
        self.in_runs = 0
        """Tokens so far that are not among the outputs of their steps."""
        self._awake: dict[int, RunSequence] = {}
        self._wakes: dict[int, list[RunSequence]] = {}
        self._boundaries: dict[int, list[RunSequence]] = {}

    def add(self, sequence: VllmSequence, now_ns: int) -> None:
        cast(RunSequence, sequence).clock = self.clock
        super().add(sequence, now_ns)

    # Sleep

    def doze(self, sequence: RunSequence) -> None:
        """It has just planned quiet tokens: leave it alone until they are over."""
        self.clock.dozing += 1
        del self._awake[sequence.run_order]
        self.wake_later(sequence)
        self._boundaries.setdefault(sequence.boundary, []).append(sequence)

    def wake_later(self, sequence: RunSequence) -> None:
        self._wakes.setdefault(sequence.wake_step, []).append(sequence)

    def _rouse(self, sequence: RunSequence) -> None:
        self.clock.dozing -= 1
        self._awake[sequence.run_order] = sequence

    def _wake_due(self) -> None:
        for sequence in self._wakes.pop(self.clock.steps, ()):
            if sequence.run_order >= 0 and sequence.wake_step == self.clock.steps and sequence.run_order not in self._awake:
                self._rouse(sequence)

    def is_awake(self, sequence: RunSequence) -> bool:
        return sequence.run_order in self._awake

    def at_boundary(self) -> list[RunSequence]:
        """The sleepers whose computed tokens fill their blocks, in the order of the running list."""
        steps, awake = self.clock.steps, self._awake
        entries = self._boundaries.get(steps)
        if not entries:
            return []
        # A sequence that was roused and sleeps again may be entered twice.
        due = {entry.run_order: entry for entry in entries if entry.boundary == steps and entry.run_order not in awake}
        due.pop(-1, None)
        return [due[order] for order in sorted(due)]

    def rouse_early(self, sequence: RunSequence) -> None:
        """Give up its planned rest."""
        if sequence.quiet:
            sequence.settle()
            self._rouse(sequence)

    def publish_next(self, sequence: RunSequence) -> None:
        """At a boundary exactly one more block is full."""
        if not self.config.enable_prefix_caching:
            return
        first = sequence.published
        full = sequence.published = first + 1
        self.pool.enter(sequence.blocks, sequence.block_hashes(self.hasher, full), first, full)
        if self.pool.collects_events:
            self.report(sequence, first, full)

    # Runs

    def flush(self, sequence: RunSequence, *, tokens_behind: int = 0, steps_behind: int = 0) -> None:
        """Report the tokens not yet reported, except the last `tokens_behind`; they end `steps_behind` steps ago."""
        made = sequence.output_tokens
        count = made - sequence.sent - tokens_behind
        if count > 0:
            times = self.clock.times_ns
            stop = len(times) - steps_behind
            tokens = tuple(sequence.output[sequence.sent : sequence.sent + count])
            self.runs.append(TokenRun(sequence.request_id, tokens, times[stop - count : stop]))
        sequence.sent = made

    def tick(self, at_ns: int) -> None:
        """A step has ended at `at_ns`: every sleeper has one more token; who is awake gets it from the completion."""
        clock = self.clock
        clock.steps += 1
        clock.times_ns.append(at_ns)
        self.kv_tokens += clock.dozing
        self.in_runs += clock.dozing
        for sequence in self._wakes.get(clock.steps, ()):
            if sequence.output_tokens == sequence.watched and sequence.run_order >= 0:
                self.flush(sequence)
        if len(clock.times_ns) > 2 * _KEEP_TIMES:
            for sequence in cast(list[RunSequence], list(self.running.values())):
                self.flush(sequence, steps_behind=int(sequence.run_order in self._awake))
            del clock.times_ns[:_KEEP_TIMES]

    # Overrides

    def schedule(self, step: Step, now_ns: int) -> None:
        cast(RunStep, step).scheduled = True
        super().schedule(step, now_ns)

    def _schedule_running(self, step: Step, now_ns: int) -> None:
        self._wake_due()
        due, orders = self.at_boundary(), sorted(self._awake)
        self._boundaries.pop(self.clock.steps, None)
        if not self._ample(step, orders):
            for sequence in cast(list[RunSequence], list(self.running.values())):
                self.rouse_early(sequence)
            super()._schedule_running(step, now_ns)
            return
        cast(RunStep, step).dozing = self.clock.dozing
        step.budget -= self.clock.dozing
        if not orders and len(due) <= self.pool.free_blocks:
            self._cross(due)
            return
        crossing = {sequence.run_order: sequence for sequence in due}
        for order in sorted((*orders, *crossing)):
            if not self._visit(order, crossing, cast(RunStep, step), now_ns):
                return

    def _cross(self, crossing: list[RunSequence]) -> None:
        """Each takes its next block; there are enough."""
        size = self.config.block_size
        for sequence, block in zip(crossing, self.pool.allocate(len(crossing)), strict=True):
            sequence.blocks.append(block)
            self._set_boundary(sequence, sequence.boundary + size)

    def _visit(self, order: int, crossing: dict[int, RunSequence], step: RunStep, now_ns: int) -> bool:
        """Plan for one sequence. False ends the traversal."""
        sequence = crossing.get(order)
        if sequence is not None:
            if sequence.run_order < 0:
                return True
            if not self._make_room(sequence, 1, step, now_ns):
                self._end_traversal(order, step, now_ns)
                return False
            self._set_boundary(sequence, sequence.boundary + self.config.block_size)
            return True
        awake = self._awake.get(order)
        if awake is None:
            return True
        if not step.budget:
            self._skip([self._awake[later] for later in sorted(self._awake) if later >= order], step, now_ns)
            return False
        if not self._plan(awake, step, now_ns):
            self._end_traversal(order, step, now_ns)
            return False
        return True

    def _set_boundary(self, sequence: RunSequence, steps: int) -> None:
        sequence.boundary = steps
        if steps <= sequence.wake_step:
            self._boundaries.setdefault(steps, []).append(sequence)

    def _end_traversal(self, order: int, step: RunStep, now_ns: int) -> None:
        """A sequence has preempted itself: whoever stands behind it sits this step out."""
        behind = cast(list[RunSequence], [sequence for place, sequence in self.running.items() if place > order])
        for sequence in behind:
            if sequence.quiet:
                step.drop(sequence)
                self.rouse_early(sequence)
        self._skip(list(behind), step, now_ns)

    def _ample(self, step: Step, orders: Sequence[int]) -> bool:
        """Whether the budget reaches every decoding sequence wherever it stands, so that their order does not matter."""
        prefilling = [order for order in orders if self._awake[order].state is State.PREFILL]
        decoding = len(self.running) - len(prefilling)
        if decoding > step.budget:
            return False
        if not prefilling:
            return True
        last = list(islice(reversed(self.running), len(prefilling)))
        if last == prefilling[::-1]:
            return decoding < step.budget
        needed = sum(self._awake[order].num_tokens - self._awake[order].computed for order in prefilling)
        return decoding + needed <= step.budget

    def _skip(self, skipped: list[VllmSequence], step: Step, now_ns: int) -> None:
        super()._skip(skipped, step, now_ns)
        for sequence in cast(list[RunSequence], skipped):
            if sequence.run_order >= 0:
                self.flush(sequence)

    def _enter_running(self, sequence: VllmSequence, hit_blocks: int) -> None:
        super()._enter_running(sequence, hit_blocks)
        self._awake[sequence.run_order] = cast(RunSequence, sequence)

    def _leave_running(self, sequence: VllmSequence) -> None:
        run_sequence = cast(RunSequence, sequence)
        self.flush(run_sequence)
        if sequence.run_order in self._awake:
            del self._awake[sequence.run_order]
        else:
            self.clock.dozing -= 1
        super()._leave_running(sequence)


class RunCompletion(Completion):
    """Touches only who is awake."""

    def run(self) -> list[TokenOutput]:
        if cast(RunStep, self._step).scheduled:
            cast(RunScheduler, self._scheduler).tick(self._now_ns)
        return super().run()

    def _decode(self) -> None:
        scheduler = cast(RunScheduler, self._scheduler)
        crossing = scheduler.at_boundary() if cast(RunStep, self._step).scheduled else []
        decoding = cast(list[RunSequence], self._step.decoding)
        if not decoding:
            for sequence in crossing:
                scheduler.publish_next(sequence)
            return
        for sequence in sorted((*decoding, *crossing), key=_run_order) if crossing else decoding:
            if sequence.run_order < 0:
                continue
            if scheduler.is_awake(sequence):
                sequence.computed_at_end += 1
                scheduler.kv_tokens += 1
                scheduler.publish(sequence)
                output = self._emit(sequence)
                if output is not None:
                    self._outputs.append(output)
            else:
                scheduler.publish_next(sequence)

    def _emit(self, sequence: VllmSequence) -> TokenOutput | None:
        """None where the token leaves in a run."""
        scheduler, run_sequence = cast(RunScheduler, self._scheduler), cast(RunSequence, sequence)
        config = scheduler.config
        output = sequence.next_token(config.eos_token_id)
        made = len(sequence.output)
        if output.finish_reason is not None:
            return self._finish(run_sequence, output)
        if made == 1:
            run_sequence.sent = 1
        else:
            scheduler.in_runs += 1
            if made == run_sequence.watched:
                scheduler.flush(run_sequence)
        sequence.plan(config.block_size)
        if sequence.quiet:
            scheduler.doze(run_sequence)
        return output if made == 1 else None

    def _finish(self, sequence: VllmSequence, output: TokenOutput) -> TokenOutput:
        """The run before the last token, and then the last token as an output of its own."""
        scheduler = cast(RunScheduler, self._scheduler)
        scheduler.flush(cast(RunSequence, sequence), tokens_behind=len(output.token_ids), steps_behind=1)
        return super()._finish(sequence, output)


class QuickHasher(BlockHasher):
    """Block hashes that never leave the engine: Python's own 64-bit hash of the chain instead of pickle and SHA-256."""

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], keys: ExtraKeys, blocks: int) -> None:
        size, at = self.block_size, 0
        while len(hashes) < blocks:
            parent, extra = hashes[-1] if hashes else b"", keys.of(len(hashes), size)
            digest = hash((parent, tuple(token_ids[at : at + size]), extra or ()))
            hashes.append(digest.to_bytes(8, "little", signed=True))
            at += size


class RunVllmEngine(VllmEngine):
    """One data-parallel rank in virtual time. Implements `windtunnel.core.engine.Engine`, with `take_runs` beside it."""

    scheduler_type = RunScheduler
    sequence_type = RunSequence
    step_type = RunStep
    completion_type = RunCompletion

    def __init__(self, config: VllmEngineConfig, pacing: Pacing, *, quick_hashes: bool = False) -> None:
        """`quick_hashes`: nobody outside reads block hashes. Raises ValueError for pacing by sequence, for asynchronous
        scheduling, and for quick hashes in KV events.
        """
        if not pacing.lock_step or config.async_scheduling:
            raise ValueError("tokens leave in runs only under lock step and without async_scheduling: use VllmEngine")
        if quick_hashes and config.collect_kv_events:
            raise ValueError("quick_hashes is set: must be off where KV events are collected")
        super().__init__(config, pacing)
        if quick_hashes:
            self._scheduler.hasher = QuickHasher("sha256", config.block_size)

    def reconfigure(self, config: VllmEngineConfig, pacing: Pacing | None = None, *, now_ns: int = 0) -> None:
        if pacing is not None and not pacing.lock_step:
            raise ValueError("pacing must stay in lock step")
        super().reconfigure(config, pacing, now_ns=now_ns)

    def take_runs(self) -> list[TokenRun]:
        """The runs since the last call. A sequence's first output comes before its runs, its final one after them."""
        scheduler = cast(RunScheduler, self._scheduler)
        taken, scheduler.runs = scheduler.runs, []
        return taken

    @property
    def tokens_in_runs(self) -> int:
        """Tokens so far that were not among the outputs of their steps, whether their run has been reported or not."""
        return cast(RunScheduler, self._scheduler).in_runs

    def report_now(self, request_id: str) -> None:
        """Put the tokens so far of this sequence into the runs; unknown ids have none."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            cast(RunScheduler, self._scheduler).flush(cast(RunSequence, sequence))

    def watch(self, request_id: str, tokens: int) -> None:
        """Report this sequence as soon as it has so many output tokens. Raises ValueError if it has them already."""
        sequence = cast(RunSequence, self._live[request_id])
        if tokens <= sequence.output_tokens:
            raise ValueError(f"tokens is {tokens}: {request_id} has {sequence.output_tokens} already")
        sequence.watched = tokens
        if sequence.quiet > tokens - sequence.output_tokens:
            sequence.wake_after(tokens - sequence.output_tokens)
            cast(RunScheduler, self._scheduler).wake_later(sequence)


def _run_order(sequence: VllmSequence) -> int:
    return sequence.run_order
