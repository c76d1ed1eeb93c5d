"""What a forward pass computes: prefill first, else decode; retraction when pages run out (SGLang reference §9)."""

from collections.abc import Iterable
from heapq import heappop, heappush

from windtunnel.core.lifecycle import Event, State
from windtunnel.core.pacing import Pacing, begun_at
from windtunnel.core.request import UNTIL_RELEASED
from windtunnel.core.sglang.admission import PrefillBudget, Verdict, expected_output
from windtunnel.core.sglang.batch import Batch, Entry
from windtunnel.core.sglang.config import SglangEngineConfig
from windtunnel.core.sglang.memory import KvMemory
from windtunnel.core.sglang.policy import ORDERS, Chance, Scene
from windtunnel.core.sglang.sequence import SglangSequence
from windtunnel.core.transitions import TransitionLog

RETRACT_DECODE_STEPS = 20
"""Retraction goes on until so many more steps fit."""
_INIT_RATIO, _MIN_RATIO_SHARE, _DECAY_STEPS = 0.7, 0.2, 600


class NewTokenRatio:
    """The share of its allowed output that admission expects of a running request: decays while all goes well."""

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(1.0, _INIT_RATIO * conservativeness)
        self.least = self.initial * _MIN_RATIO_SHARE
        self.value = self.initial

    def decay(self) -> None:
        self.value = max(self.least, self.value - (self.initial - self.least) / _DECAY_STEPS)

    def raise_after_retraction(self, running: Iterable[SglangSequence]) -> None:
        """To what the remaining ones have used, with room for the steps that retraction made."""
        made = allowed = 0
        for sequence in running:
            made += len(sequence.output) + RETRACT_DECODE_STEPS
            allowed += sequence.output_limit
        if allowed:
            self.value = min(1.0, made / allowed)

    def reset(self) -> None:
        self.value = self.initial


class SglangScheduler:
    """Owns the waiting queue, the chunk in progress, the running batch and the memory of one engine."""

    def __init__(self, config: SglangEngineConfig, pacing: Pacing, log: TransitionLog, chance: Chance) -> None:
        self.config = config
        self.pacing = pacing
        self.log = log
        self.memory = KvMemory(config)
        self.ratio = NewTokenRatio(config.schedule_conservativeness)
        self.waiting: dict[SglangSequence, None] = {}
        self.running: dict[SglangSequence, None] = {}
        self.chunked: SglangSequence | None = None
        self._retracted: list[SglangSequence] = []
        self.unplaceable: list[SglangSequence] = []
        """Alone and still without a page: to be failed by the owner."""
        self.decodes = True
        """False on a prefill worker: finished prompts are handed over, nothing decodes."""
        self.places_taken = 0
        """Request-pool rows held outside the running batch (prefill worker)."""
        self.grammar_waits: dict[SglangSequence, None] = {}
        self._grammar: list[tuple[int, int, SglangSequence]] = []
        self._chance = chance
        self._ready: list[tuple[int, int, SglangSequence]] = []
        self._pushes = 0
        self._looked_ns = -1
        """When the waiting queue was last looked at."""

    # Queues

    def add(self, sequence: SglangSequence, now_ns: int) -> None:
        """Queue a sequence, or set it aside while its grammar compiles."""
        until_ns = sequence.request.deferred_until_ns
        if until_ns == UNTIL_RELEASED:
            self.log.record(sequence, Event.DEFER, now_ns, {"reason": "front_end"})
            self.grammar_waits[sequence] = None
        elif until_ns > now_ns:
            self.log.record(sequence, Event.DEFER, now_ns, {"reason": "grammar", "until_ns": until_ns})
            self.grammar_waits[sequence] = None
            heappush(self._grammar, (until_ns, sequence.arrived, sequence))
        else:
            self.enqueue(sequence, now_ns)

    def enqueue(self, sequence: SglangSequence, now_ns: int) -> None:
        sequence.queued_ns = now_ns
        self.waiting[sequence] = None

    def release(self, sequence: SglangSequence, now_ns: int) -> None:
        """Queue a sequence that a front end has held; no other one notices."""
        if sequence.request.deferred_until_ns == UNTIL_RELEASED and sequence in self.grammar_waits:
            del self.grammar_waits[sequence]
            self.log.record(sequence, Event.RESUME, now_ns)
            self.enqueue(sequence, now_ns)

    def next_grammar_at(self) -> int | None:
        while self._grammar and self._grammar[0][2] not in self.grammar_waits:
            heappop(self._grammar)
        return self._grammar[0][0] if self._grammar else None

    def resume_grammars(self, now_ns: int) -> None:
        while (at := self.next_grammar_at()) is not None and at <= now_ns:
            sequence = heappop(self._grammar)[2]
            del self.grammar_waits[sequence]
            self.log.record(sequence, Event.RESUME, now_ns)
            self.enqueue(sequence, now_ns)

    def remove(self, sequence: SglangSequence, keep_tokens: int = 0) -> None:
        """Take a sequence out of wherever it is and release what it holds; whole pages of `keep_tokens` stay cached."""
        self.waiting.pop(sequence, None)
        self.grammar_waits.pop(sequence, None)
        self.running.pop(sequence, None)
        if self.chunked is sequence:
            self.chunked = None
        sequence.epoch += 1
        self.memory.publish(sequence, keep_tokens)
        self.memory.release(sequence)

    # Prefill

    def plan_prefill(self, now_ns: int) -> Batch | None:
        """The chunk in progress and as many waiting sequences as fit. None: there is nothing to prefill."""
        batch = self._plan_prefill(now_ns)
        self._looked_ns = now_ns
        return batch

    def _plan_prefill(self, now_ns: int) -> Batch | None:
        if self.chunked is None and (not self.waiting or self._full(0)):
            return None
        before = len(self.running)
        budget = PrefillBudget(self.config, self.memory, self._reserve())
        if self.chunked is not None and budget.add_chunked(self.chunked):
            self._enter_running(self.chunked)
            self.chunked = None
        if self.chunked is None:
            self._admit(budget, now_ns)
        if not budget.taken:
            return None
        batch = Batch(True, now_ns, now_ns, cached_tokens=budget.cached_tokens, running_before=before)
        batch.entries = [_entry(sequence, tokens) for sequence, tokens in budget.taken]
        return batch

    def _full(self, taken: int) -> bool:
        return len(self.running) + self.places_taken + taken >= self.config.max_running_requests

    def _reserve(self) -> float:
        return self.ratio.value * sum(expected_output(sequence) for sequence in self.running)

    def _admit(self, budget: PrefillBudget, now_ns: int) -> None:
        order = ORDERS[self.config.schedule_policy]
        scene = Scene(list(self.waiting), self.running, self.memory, now_ns, self._chance, self.config.low_priority_first)
        admitted = 0
        for sequence in order(scene):
            if self._full(0 if self.decodes else admitted):
                return
            verdict, taken = budget.add(sequence)
            if taken:
                admitted += 1
                self._admitted(sequence, now_ns)
            if verdict is not Verdict.GOES_ON:
                return

    def _admitted(self, sequence: SglangSequence, now_ns: int) -> None:
        del self.waiting[sequence]
        begun_ns = begun_at(sequence.since_ns, self._looked_ns, now_ns)
        detail: dict[str, int | str] = {"prompt_tokens": sequence.num_tokens, "cached_tokens": sequence.cached_tokens}
        self.log.record(sequence, Event.SCHEDULE, now_ns, detail)
        sequence.started_ns = now_ns
        sequence.ready_at_ns = begun_ns + self.pacing.first_token_ns(sequence.num_tokens, sequence.cached_tokens, self.load)
        if sequence.computed < sequence.num_tokens:
            self.chunked = sequence
        else:
            self._enter_running(sequence)

    def _enter_running(self, sequence: SglangSequence) -> None:
        if self.decodes:
            self.running[sequence] = None

    @property
    def load(self) -> float:
        """0 for a lone sequence, 1 when all places are taken."""
        places = self.config.max_running_requests - 1
        return min(1.0, (len(self.running) - 1) / places) if places and self.running else 0.0

    # Decode

    def plan_decode(self, now_ns: int) -> Batch | None:
        """One more token for each running sequence that is due. None: nobody is."""
        due = self._due(now_ns)
        if not due:
            return None
        if self._make_room(due, now_ns):
            self.ratio.decay()
            decoding = due
        else:
            decoding = [sequence for sequence in due if sequence in self.running]
        self.memory.grow_by_one(decoding)
        batch = Batch(False, now_ns, now_ns, running_before=len(self.running), decoding=decoding)
        batch.epochs = [sequence.epoch for sequence in decoding]
        return batch if decoding else None

    def _due(self, now_ns: int) -> list[SglangSequence]:
        if self.pacing.lock_step:
            return list(self.running)
        decoding = (sequence for sequence in self.running if sequence.state is State.DECODE)
        return [sequence for sequence in decoding if sequence.ready_at_ns <= now_ns]

    def _make_room(self, due: list[SglangSequence], now_ns: int) -> bool:
        """Retract until the next step fits, and then until twenty fit. True: nobody had to go."""
        if self.memory.reclaim(self.memory.full_ones(due)):
            return True
        order = sorted(due, key=lambda sequence: (-len(sequence.output), sequence.prompt_len))
        while len(order) > 1 and not self._fits(order, RETRACT_DECODE_STEPS):
            self.retract(order.pop(), now_ns)
        if not self._fits(order, 1):
            self.unplaceable.append(order[0])
            del self.running[order[0]]
        self.ratio.raise_after_retraction(self.running)
        return False

    def _fits(self, sequences: list[SglangSequence], steps: int) -> bool:
        missing = sum(self.memory.missing_pages(sequence, sequence.computed + steps) for sequence in sequences)
        return self.memory.reclaim(missing)

    def retract(self, sequence: SglangSequence, now_ns: int) -> None:
        """Give up the KV, keep the output. The owner queues it again."""
        self.remove(sequence)
        sequence.retractions += 1
        self.log.record(sequence, Event.PREEMPT, now_ns, {"output_tokens": len(sequence.output)})
        self._retracted.append(sequence)

    def take_retracted(self) -> list[SglangSequence]:
        """Those retracted since the last call, in no queue yet."""
        taken, self._retracted = self._retracted, []
        return taken

    # Pacing by sequence

    def repace(self, pacing: Pacing) -> None:
        """Take a new pace; what has been drawn already stands."""
        self.pacing = pacing
        self._ready = []
        for sequence in self.running:
            self.await_turn(sequence)

    def delay_until(self, now_ns: int) -> None:
        """Let no deadline lie in the past: a pause is not made up for."""
        self._looked_ns = max(self._looked_ns, now_ns)
        for sequence in self.running:
            if sequence.ready_at_ns < now_ns:
                sequence.ready_at_ns = now_ns
                self.await_turn(sequence)

    def await_turn(self, sequence: SglangSequence) -> None:
        """Note when a running sequence is next due (pacing by sequence only)."""
        if not self.pacing.lock_step:
            self._pushes += 1
            heappush(self._ready, (sequence.ready_at_ns, self._pushes, sequence))

    def next_turn_at(self) -> int | None:
        """When the first running sequence is due; stale notes are dropped."""
        heap = self._ready
        while heap and (heap[0][2] not in self.running or heap[0][2].ready_at_ns != heap[0][0]):
            heappop(heap)
        return heap[0][0] if heap else None


def _entry(sequence: SglangSequence, tokens: int) -> Entry:
    return Entry(sequence, sequence.epoch, tokens, sequence.computed, last=sequence.computed == sequence.num_tokens)
