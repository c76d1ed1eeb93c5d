"""The vLLM V1 scheduler: what the next step computes (reference §5.2).

Running sequences come first, in list order. If memory runs out, the last of the list (fcfs) or the worst (priority) is
preempted: its blocks go, its tokens stay, and it waits in front. A step that preempted admits nobody. Otherwise the queue's
head is admitted while places and budget last; the first that does not fit ends admission.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple

from windtunnel.core.kv.blocks import NULL_BLOCK, BlockPool
from windtunnel.core.kv.hashing import BlockHasher
from windtunnel.core.kv.tiers import runs_of
from windtunnel.core.lifecycle import Event, State
from windtunnel.core.pacing import Pacing, begun_at
from windtunnel.core.request import UNTIL_RELEASED
from windtunnel.core.transitions import TransitionLog
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.queues import DeferredSet, ReadyTimes, WaitingQueue, fcfs_rank, priority_rank
from windtunnel.core.vllm.sequence import VllmSequence
from windtunnel.core.vllm.step import Step


class VllmScheduler:
    """Owns the queues, the running list and the block pool of one engine."""

    def __init__(self, config: VllmEngineConfig, pacing: Pacing, log: TransitionLog) -> None:
        self.config = config
        self.pacing = pacing
        self.log = log
        self.pool = BlockPool(
            config.num_blocks,
            config.block_size,
            collect_events=config.collect_kv_events,
            host_blocks=config.host_blocks,
            disk_blocks=config.disk_blocks,
        )
        self.hasher = BlockHasher(config.prefix_caching_hash_algo, config.block_size, config.hash_seed)
        self.waiting = WaitingQueue(fcfs_rank if config.policy == "fcfs" else priority_rank)
        self.deferred = DeferredSet()
        self.running: dict[int, VllmSequence] = {}
        """By place, in list order."""
        self.kv_tokens = 0
        """Computed tokens of all running sequences."""
        self._ready = ReadyTimes()
        self._places = count()
        self._front = count(-1, -1)
        self._running_loras: Counter[int] = Counter()
        self._lora_slot_freed = False
        self._blocked: tuple[int, int] | None = None
        """(pool version, running) when the head last did not fit: the same again is no reason for a step."""
        self._looked_ns = -1
        """When the waiting queue was last looked at."""

    # What is due

    def next_event_at(self, clock_ns: int) -> int | None:
        """When the next step can do something; None while only an arrival or an abort could change anything."""
        if self._admission_open() or (self.running and self.pacing.lock_step) or (self._lora_slot_freed and self.deferred):
            return clock_ns
        times = [self.deferred.next_at(), self._ready.next_at(self.running)]
        due = [at for at in times if at is not None]
        return max(clock_ns, min(due)) if due else None

    def _admission_open(self) -> bool:
        """The head might be admitted, as far as one can tell without trying."""
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return False
        return self._blocked != (self.pool.version, len(self.running))

    def _note_blocked(self) -> None:
        self._blocked = (self.pool.version, len(self.running))

    @property
    def load(self) -> float:
        """0 for a lone sequence, 1 when all places are taken."""
        places = self.config.max_num_seqs - 1
        return min(1.0, (len(self.running) - 1) / places) if places and self.running else 0.0

    def lora_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Adapters of running and of waiting sequences, in name order."""
        waits = (*self.waiting.members(), *self.deferred.members())
        return _lora_names(self.running.values()), _lora_names(waits)

    def queues(self) -> tuple[Iterable[VllmSequence], ...]:
        """All live sequences, by where they are."""
        return self.running.values(), self.waiting.in_order(), self.deferred.in_order()

    # Arrivals and departures

    def add(self, sequence: VllmSequence, now_ns: int) -> None:
        """Queue a new sequence, or set it aside while it cannot run."""
        until_ns = sequence.request.deferred_until_ns
        if until_ns == UNTIL_RELEASED:
            self.log.record(sequence, Event.DEFER, now_ns, {"reason": "front_end"})
            self.deferred.hold(sequence)
        elif until_ns > now_ns:
            self.log.record(sequence, Event.DEFER, now_ns, {"reason": "not_before", "until_ns": until_ns})
            self.deferred.add_until(sequence, until_ns)
        else:
            self._enqueue(sequence)

    def release(self, sequence: VllmSequence, arrived: int, now_ns: int) -> None:
        """Queue a held sequence as the `arrived`th; no other one notices."""
        if self.deferred.take_held(sequence):
            sequence.arrived = arrived
            self.log.record(sequence, Event.RESUME, now_ns)
            self._enqueue(sequence)

    def remove(self, sequence: VllmSequence) -> None:
        """Take a live sequence out of wherever it is and give back what it holds. Its state is still the old one."""
        if sequence.run_order >= 0:
            self._leave_running(sequence)
        elif sequence.state is State.DEFERRED:
            self.deferred.remove(sequence)
        else:
            self.waiting.remove(sequence)
            self._blocked = None

    def preempt(self, sequence: VllmSequence, now_ns: int) -> None:
        """Recompute later: free the blocks, keep the output, wait in front (under priority: at its rank)."""
        self._leave_running(sequence)
        if self.config.policy == "fcfs":
            sequence.arrived = next(self._front)
        self.log.record(sequence, Event.PREEMPT, now_ns, {"output_tokens": len(sequence.output)})
        self._enqueue(sequence)

    def _enqueue(self, sequence: VllmSequence) -> None:
        self.waiting.push(sequence)
        self._blocked = None

    def _leave_running(self, sequence: VllmSequence) -> None:
        sequence.settle()
        sequence.roomy = False
        del self.running[sequence.run_order]
        sequence.run_order = -1
        self.kv_tokens -= sequence.computed_at_end
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.computed_at_end = sequence.published = 0
        if sequence.request.lora is not None:
            self._leave_lora(sequence.request.lora.lora_id)

    def _leave_lora(self, lora_id: int) -> None:
        self._running_loras[lora_id] -= 1
        if not self._running_loras[lora_id]:
            del self._running_loras[lora_id]
            self._lora_slot_freed = True

    # One step

    def schedule(self, step: Step, now_ns: int) -> None:
        """Fill `step` with what the engine computes from `now_ns` on."""
        self._resume(now_ns)
        self._schedule_running(step, now_ns)
        if not step.preemptions:
            self._admit(step, now_ns)
        elif not self.pacing.lock_step:
            # No time passes between steps: who was preempted must not come back before something else has changed.
            self._note_blocked()
        self._looked_ns = now_ns
        step.context_tokens += self.kv_tokens + step.prefill_tokens + step.decode_tokens

    def _schedule_running(self, step: Step, now_ns: int) -> None:
        due = list(self.running.values()) if self.pacing.lock_step else self._ready.take_due(now_ns, self.running)
        if self._all_decode(due, step):
            return
        decoding = step.decoding
        for at, sequence in enumerate(due):
            if not step.budget:
                self._skip(due[at:], step, now_ns)
                return
            if sequence.roomy:
                step.budget -= 1
                decoding.append(sequence)
            elif not self._plan(sequence, step, now_ns):
                self._skip(due[at:], step, now_ns)
                return

    def _all_decode(self, due: list[VllmSequence], step: Step) -> bool:
        """The usual step: everybody decodes, budget and memory suffice for all, so nobody needs a look of his own."""
        closer = [sequence for sequence in due if not sequence.roomy]
        if len(due) > step.budget or len(closer) > self.pool.free_blocks:
            return False
        if any(sequence.state is not State.DECODE for sequence in closer):
            return False
        size = self.config.block_size
        full = [sequence for sequence in closer if sequence.computed >= len(sequence.blocks) * size]
        for sequence, block in zip(full, self.pool.allocate(len(full)), strict=True):
            sequence.blocks.append(block)
        for sequence in closer:
            sequence.roomy = True
        step.decoding = due
        step.budget -= len(due)
        return True

    def _plan(self, sequence: VllmSequence, step: Step, now_ns: int) -> bool:
        """Plan a running sequence. False ends the traversal: it has preempted itself."""
        if sequence.run_order < 0:
            return True
        tokens = self._chunk(sequence.num_tokens - sequence.computed, step.budget)
        if not self._make_room(sequence, tokens, step, now_ns):
            return False
        if sequence.state is State.DECODE:
            sequence.roomy = True
            step.budget -= 1
            step.decoding.append(sequence)
        else:
            self._prefill(sequence, tokens, step, now_ns)
        return True

    def _chunk(self, needed: int, budget: int) -> int:
        tokens = min(needed, budget)
        threshold = self.config.long_prefill_token_threshold
        return min(tokens, threshold) if threshold else tokens

    def _prefill(self, sequence: VllmSequence, tokens: int, step: Step, now_ns: int) -> None:
        """The last token of a prompt is not computed before the first token is due."""
        if sequence.computed + tokens == sequence.num_tokens and sequence.ready_at_ns > now_ns:
            tokens -= 1
        step.budget -= tokens
        step.prefilling.append((sequence, tokens))

    def _make_room(self, sequence: VllmSequence, tokens: int, step: Step, now_ns: int) -> bool:
        missing = self._blocks_for(sequence.computed + tokens) - len(sequence.blocks)
        while missing > self.pool.free_blocks:
            victim = self._victim()
            step.drop(victim)
            self.preempt(victim, now_ns)
            step.preemptions += 1
            if victim is sequence:
                return False
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)
        return True

    def _victim(self) -> VllmSequence:
        if self.config.policy == "fcfs":
            return next(reversed(self.running.values()))
        return max(self.running.values(), key=priority_rank)

    def _skip(self, skipped: list[VllmSequence], step: Step, now_ns: int) -> None:
        """The budget is spent: these take no part, and the step's attention does not read them."""
        for sequence in skipped:
            if sequence.run_order >= 0:
                step.context_tokens -= sequence.computed
                self.await_turn(sequence, now_ns)

    def await_turn(self, sequence: VllmSequence, now_ns: int) -> None:
        """Note when a running sequence next takes part (pacing by sequence only)."""
        if not self.pacing.lock_step:
            decoding = sequence.state is State.DECODE
            whole = decoding or sequence.num_tokens - sequence.computed <= 1
            self._ready.push(sequence.ready_at_ns if whole else now_ns, sequence.run_order, now_ns)

    def await_next_tokens(self, sequences: Sequence[VllmSequence], now_ns: int) -> None:
        """The same for decoding ones. Deadlines are absolute, the previous one plus a draw, so lateness never adds up."""
        load, push, next_token_ns = self.load, self._ready.push, self.pacing.next_token_ns
        for sequence in sequences:
            if sequence.run_order >= 0:
                sequence.ready_at_ns += next_token_ns(load)
                push(sequence.ready_at_ns, sequence.run_order, now_ns)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    # Admission

    def _resume(self, now_ns: int) -> None:
        resumed = self.deferred.take_due(now_ns) if self.deferred else []
        if self.deferred and self.config.max_loras:
            resumed += self.deferred.take_for_loras(set(self._running_loras), self.config.max_loras)
        self._lora_slot_freed = False
        for sequence in resumed:
            self.log.record(sequence, Event.RESUME, now_ns)
            self._enqueue(sequence)

    def _admit(self, step: Step, now_ns: int) -> None:
        if not self._admission_open() and (self.config.reserve_full_isl or not self.pacing.lock_step):
            return
        while step.budget and self.waiting and len(self.running) < self.config.max_num_seqs:
            sequence = self.waiting.peek()
            if self._defer_for_lora(sequence, now_ns):
                continue
            if not self._try_admit(sequence, step, now_ns):
                self._note_blocked()
                return

    def _defer_for_lora(self, sequence: VllmSequence, now_ns: int) -> bool:
        lora = sequence.request.lora
        if lora is None or self._lora_fits(lora.lora_id):
            return False
        self.waiting.remove(sequence)
        self.log.record(sequence, Event.DEFER, now_ns, {"reason": "lora_slots"})
        self.deferred.add_for_lora(sequence, lora.lora_id)
        return True

    def _lora_fits(self, lora_id: int) -> bool:
        slots = self.config.max_loras
        return not slots or lora_id in self._running_loras or len(self._running_loras) < slots

    def _try_admit(self, sequence: VllmSequence, step: Step, now_ns: int) -> bool:
        prefix = self._cached_prefix(sequence)
        hits = prefix if self.pool.tier is None else [block for block in prefix if block != NULL_BLOCK]
        cached = len(prefix) * self.config.block_size
        tokens = self._chunk(sequence.num_tokens - cached, step.budget)
        wanted = self._blocks_for(cached + tokens) - len(hits)
        if not self._fits(sequence, hits, wanted):
            return False
        self.pool.touch(hits)
        loaded = _NOTHING_LOADED
        if len(hits) == len(prefix):
            sequence.blocks = hits + self.pool.allocate(wanted)
        else:
            loaded = self._bring_back(sequence, prefix, wanted)
        self._enter_running(sequence, len(prefix))
        begun_ns = begun_at(sequence.since_ns, self._looked_ns, now_ns)
        sequence.ready_at_ns = begun_ns + self.pacing.first_token_ns(sequence.num_tokens, cached, self.load)
        self._add_load_time(sequence, loaded, step)
        self._count_admission(sequence, cached, loaded, step, now_ns)
        self._prefill(sequence, tokens, step, now_ns)
        return True

    def _bring_back(self, sequence: VllmSequence, prefix: list[int], wanted: int) -> "Loaded":
        """Give the sequence its blocks, and enter those that the tiers had: the null blocks in `prefix`."""
        places = [at for at, block in enumerate(prefix) if block == NULL_BLOCK]
        tier, hashes = self.pool.tier, sequence.hashes
        assert tier is not None, "a hit in a tier that does not exist"
        # First of all: the allocation may push other blocks into the tier, and these out of it.
        digests = [hashes[at] for at in places]
        on_disk = tier.count_behind(digests)
        tier.drop(digests)
        fresh = self.pool.allocate(wanted)
        for at, block in zip(places, fresh, strict=False):
            prefix[at] = block
        sequence.blocks = prefix + fresh[len(places) :]
        for first, stop in runs_of(places):
            self.pool.enter(sequence.blocks, hashes, first, stop)
            if self.pool.collects_events:
                self.report(sequence, first, stop)
        return Loaded(len(places) - on_disk, on_disk)

    def _add_load_time(self, sequence: VllmSequence, loaded: "Loaded", step: Step) -> None:
        """The step waits for blocks from the tiers; where each sequence has its own pace, its first token does."""
        load_ns = loaded.host * self.config.host_block_ns + loaded.disk * self.config.disk_block_ns
        if self.pacing.lock_step:
            step.load_ns += load_ns
        else:
            sequence.ready_at_ns += load_ns

    def _cached_prefix(self, sequence: VllmSequence) -> list[int]:
        """The blocks of the longest cached prefix (null: in the host tier); at least one token is always computed."""
        if not self.config.enable_prefix_caching:
            return []
        limit = (sequence.num_tokens - 1) // self.config.block_size
        find = self.pool.lookup if self.pool.tier is None else self.pool.lookup_tiers
        return find(sequence.block_hashes(self.hasher, limit), limit, sequence.request.prompt_blocks)

    def _fits(self, sequence: VllmSequence, hits: list[int], wanted: int) -> bool:
        """The gate for the whole prompt, the watermark, and the blocks of this chunk."""
        whole = self._blocks_for(sequence.num_tokens)
        if whole > self.pool.usable_blocks:
            return False
        needed = wanted + (self.config.watermark_blocks if self.running else 0)
        if self.config.reserve_full_isl:
            needed = max(needed, whole - len(hits))
        free = self.pool.free_blocks
        return needed <= free - len(hits) or needed <= free - self.pool.idle_among(hits)

    def _enter_running(self, sequence: VllmSequence, hit_blocks: int) -> None:
        self.waiting.remove(sequence)
        sequence.run_order = next(self._places)
        self.running[sequence.run_order] = sequence
        sequence.published = hit_blocks
        sequence.computed_at_end = hit_blocks * self.config.block_size
        self.kv_tokens += sequence.computed_at_end
        if sequence.request.lora is not None:
            self._running_loras[sequence.request.lora.lora_id] += 1

    def _count_admission(self, sequence: VllmSequence, cached: int, loaded: "Loaded", step: Step, now_ns: int) -> None:
        """Prefix statistics count the first admission only (vLLM #25787)."""
        size = self.config.block_size
        external = (loaded.host + loaded.disk) * size
        detail = {"prompt_tokens": sequence.num_tokens, "cached_tokens": cached}
        if external:
            detail |= {"host_tokens": loaded.host * size} | ({"disk_tokens": loaded.disk * size} if loaded.disk else {})
        self.log.record(sequence, Event.SCHEDULE, now_ns, detail)
        if sequence.admitted:
            return
        sequence.admitted = True
        sequence.cached_tokens = cached
        if self.config.enable_prefix_caching:
            step.prefix_queries += sequence.num_tokens
            step.prefix_hits += cached - external
        if self.pool.tier is not None:
            step.external_queries += sequence.num_tokens - (cached - external)
            step.external_hits += external
            step.disk_hits += loaded.disk * size
        if sequence.request.report_cached_blocks and cached:
            self.report(sequence, 0, sequence.published)

    def reconfigure(self, config: VllmEngineConfig, pacing: Pacing, now_ns: int) -> None:
        """Take new limits and a new pace between two steps; deadlines that have been drawn stand."""
        was_lock_step = self.pacing.lock_step
        self.config, self.pacing = config, pacing
        self._blocked, self._lora_slot_freed = None, True
        if was_lock_step == pacing.lock_step:
            return
        self._ready = ReadyTimes()
        for sequence in self.running.values():
            sequence.ready_at_ns = now_ns
            self.await_turn(sequence, now_ns)

    def delay_until(self, now_ns: int) -> None:
        """Let no deadline lie in the past: a pause is not made up for."""
        self._looked_ns = max(self._looked_ns, now_ns)
        for sequence in self.running.values():
            sequence.ready_at_ns = max(sequence.ready_at_ns, now_ns)

    # Publishing

    def publish(self, sequence: VllmSequence) -> None:
        """Enter the blocks that are full and computed into the prefix cache."""
        first, full = sequence.published, sequence.computed // self.config.block_size
        if full <= first or not self.config.enable_prefix_caching:
            return
        self.pool.enter(sequence.blocks, sequence.block_hashes(self.hasher, full), first, full)
        sequence.published = full
        if self.pool.collects_events:
            self.report(sequence, first, full)

    def report(self, sequence: VllmSequence, first: int, stop: int) -> None:
        """Publish BlockStored for blocks first … stop - 1 of a sequence."""
        size, hashes, lora = self.config.block_size, sequence.hashes, sequence.request.lora
        self.pool.stored(
            hashes[first:stop],
            hashes[first - 1] if first else None,
            sequence.token_slice(first * size, stop * size),
            (lora.lora_id, lora.name) if lora else None,
            sequence.keys.shown(first, stop - first, size),
            sequence.request.session_id,
        )


class Loaded(NamedTuple):
    """Blocks brought back from behind the pool."""

    host: int = 0
    disk: int = 0


_NOTHING_LOADED = Loaded()


def _lora_names(sequences: Iterable[VllmSequence]) -> tuple[str, ...]:
    return tuple(sorted({sequence.request.lora.name for sequence in sequences if sequence.request.lora}))
