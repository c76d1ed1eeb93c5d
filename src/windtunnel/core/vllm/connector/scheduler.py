"""The vLLM scheduler with a KV connector: external tokens, loads, and requests that come back with their KV (§5.2, §7.2).

A request whose KV lies elsewhere gets blocks for its whole prompt and leaves the queue (TRANSFERRING, vLLM's
WAITING_FOR_REMOTE_KVS). When the load has ended it waits in `loaded`, which admission serves first. The prompt's last token is
always computed here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from windtunnel.core.lifecycle import Event, State
from windtunnel.core.outputs import FinishReason, TokenOutput
from windtunnel.core.pacing import Pacing
from windtunnel.core.transitions import TransitionLog
from windtunnel.core.vllm.completion import Completion
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.connector.base import Connector
from windtunnel.core.vllm.connector.foreign import ForeignSource
from windtunnel.core.vllm.connector.loads import Fatal, Load, Loaded, LoadFailed, Outcome
from windtunnel.core.vllm.scheduler import VllmScheduler
from windtunnel.core.vllm.sequence import VllmSequence
from windtunnel.core.vllm.step import Step


class ConnectorScheduler(VllmScheduler):
    """Owned by a `ConnectorEngine`, which gives it its connector."""

    connector: Connector

    def __init__(self, config: VllmEngineConfig, pacing: Pacing, log: TransitionLog) -> None:
        super().__init__(config, pacing, log)
        self.transferring: dict[str, tuple[VllmSequence, Load]] = {}
        self.loaded: dict[str, tuple[VllmSequence, Load]] = {}
        """Requests whose load has ended, in the order in which that happened."""
        self.outcomes: list[Outcome] = []
        """What has come of asking already: loads that failed at once."""
        self._foreign: dict[int, int] = {}
        """Blocks in the cache with somebody else's content, and their generation then."""

    # What is due

    def next_event_at(self, clock_ns: int) -> int | None:
        return clock_ns if self._next_loaded() is not None else super().next_event_at(clock_ns)

    def _next_loaded(self) -> str | None:
        """The first that may go on: there is a place, and one for its adapter."""
        if not self.loaded or len(self.running) >= self.config.max_num_seqs:
            return None
        for request_id, (sequence, _load) in self.loaded.items():
            lora = sequence.request.lora
            if lora is None or self._lora_fits(lora.lora_id):
                return request_id
        return None

    def queues(self) -> tuple[Iterable[VllmSequence], ...]:
        away = (sequence for sequence, _load in self.transferring.values())
        back = (sequence for sequence, _load in self.loaded.values())
        return (*super().queues(), back, away)

    def remove(self, sequence: VllmSequence) -> None:
        if sequence.state is State.TRANSFERRING:
            _sequence, load = self.transferring.pop(sequence.request_id)
            if self.connector.orphan(load):
                sequence.blocks = []
            else:
                self._give_back(sequence)
        elif sequence.request_id in self.loaded:
            del self.loaded[sequence.request_id]
            self._give_back(sequence)
        else:
            super().remove(sequence)

    def _give_back(self, sequence: VllmSequence) -> None:
        self.pool.free(sequence.blocks)
        sequence.blocks = []
        sequence.computed_at_end = sequence.published = 0

    # Admission

    def _admit(self, step: Step, now_ns: int) -> None:
        while step.budget and (request_id := self._next_loaded()) is not None:
            self._admit_loaded(request_id, step, now_ns)
        super()._admit(step, now_ns)

    def _admit_loaded(self, request_id: str, step: Step, now_ns: int) -> None:
        sequence, load = self.loaded.pop(request_id)
        computed, published = sequence.computed_at_end, sequence.published
        # `_enter_running` takes a sequence from the queue, and knows whole blocks only.
        self.waiting.push(sequence)
        self._enter_running(sequence, published)
        self.kv_tokens += computed - sequence.computed_at_end
        sequence.computed_at_end = computed
        sequence.ready_at_ns = now_ns + self.pacing.first_token_ns(sequence.num_tokens, computed, self.load)
        self._count_loaded(sequence, load, computed, step, now_ns)
        self._prefill(sequence, self._chunk(sequence.num_tokens - computed, step.budget), step, now_ns)

    def _count_loaded(self, sequence: VllmSequence, load: Load, computed: int, step: Step, now_ns: int) -> None:
        local = min(computed, load.first * self.config.block_size)
        loaded = computed - local
        detail = {"prompt_tokens": sequence.num_tokens, "cached_tokens": computed, "external_tokens": loaded}
        self.log.record(sequence, Event.SCHEDULE, now_ns, detail)
        sequence.admitted = True
        sequence.cached_tokens = computed
        if self.config.enable_prefix_caching:
            step.prefix_queries += sequence.num_tokens
            step.prefix_hits += local
        step.external_queries += sequence.num_tokens - local
        step.external_hits += loaded + (load.again if computed == load.tokens else 0)
        if sequence.request.report_cached_blocks and load.first:
            self.report(sequence, 0, load.first)

    def _try_admit(self, sequence: VllmSequence, step: Step, now_ns: int) -> bool:
        if self.connector.forbids(sequence.request):
            self.outcomes.append(Fatal(sequence.request_id))
            return False
        if self.connector.wants(sequence.request_id):
            hits = self._cached_prefix(sequence)
            local = len(hits) * self.config.block_size
            external = self.connector.external_tokens(sequence.request, local)
            if external:
                return self._begin_load(sequence, hits, local + external, now_ns)
        first = not sequence.admitted
        if not super()._try_admit(sequence, step, now_ns):
            return False
        if first:
            # Whatever the pool has not is looked up through the connector.
            step.external_queries += sequence.num_tokens - sequence.cached_tokens
        if self.connector.wants(sequence.request_id):
            self.connector.skip(sequence.request_id, now_ns)
        if self._foreign:
            self._taint(sequence)
        return True

    def _begin_load(self, sequence: VllmSequence, hits: list[int], tokens: int, now_ns: int) -> bool:
        """Allocate for the whole prompt, so that who comes back finds place for its last token."""
        wanted = self._blocks_for(sequence.num_tokens) - len(hits)
        if not self._fits(sequence, hits, wanted):
            return False
        self.pool.touch(hits)
        sequence.blocks = hits + self.pool.allocate(wanted)
        sequence.published = len(hits)
        self.waiting.remove(sequence)
        load = self.connector.load(sequence.request, sequence.blocks, len(hits), tokens, now_ns)
        detail = {"prompt_tokens": sequence.num_tokens, "cached_tokens": len(hits) * self.config.block_size}
        self.log.record(sequence, Event.FETCH, now_ns, detail | {"external_tokens": tokens - detail["cached_tokens"]})
        self.transferring[sequence.request_id] = (sequence, load)
        self.outcomes += self.connector.start(load, now_ns)
        return True

    # The end of a load

    def end_load(self, outcome: Loaded | LoadFailed, now_ns: int) -> None:
        """The request may go on: with everything, or by recomputing what is missing."""
        load = outcome.load
        sequence, _load = self.transferring.pop(load.request_id)
        foreign: tuple[int, ...] = ()
        if isinstance(outcome, Loaded):
            sequence.computed_at_end, foreign = load.tokens, outcome.foreign
        else:
            sequence.computed_at_end = min(load.tokens, outcome.missing * self.config.block_size)
        self.log.record(sequence, Event.FETCHED, now_ns, {"computed_tokens": sequence.computed_at_end})
        self.publish(sequence)
        self.loaded[sequence.request_id] = (sequence, load)
        if foreign:
            self._mark_foreign([sequence.blocks[at] for at in foreign])
        if self._foreign:
            self._taint(sequence)

    def fail_load(self, outcome: LoadFailed) -> VllmSequence:
        """The request is to end: its blocks are free, for nothing moves any more."""
        sequence, _load = self.transferring.pop(outcome.load.request_id)
        self._give_back(sequence)
        return sequence

    def _mark_foreign(self, blocks: Sequence[int]) -> None:
        self._foreign |= zip(blocks, self.pool.watch(blocks), strict=True)

    def contaminate(self, blocks: Sequence[int]) -> None:
        """Somebody's transfer has written into these. Tokens that a sequence has prepared already stay what they are."""
        self._mark_foreign(blocks)
        for queue in self.queues():
            for sequence in queue:
                self._taint(sequence)

    def _taint(self, sequence: VllmSequence) -> None:
        """Who computes on somebody else's KV answers wrongly, and so does everybody who finds it in the cache."""
        generations = self.pool.generations
        self._foreign = {block: at for block, at in self._foreign.items() if generations[block] == at}
        if self._foreign.keys().isdisjoint(sequence.blocks) or isinstance(sequence.request.source, ForeignSource):
            return
        sequence.request = replace(sequence.request, source=ForeignSource(sequence.request.source))


class ConnectorCompletion(Completion):
    """Keeps the blocks of requests that somebody else goes on with."""

    def _finish(self, sequence: VllmSequence, output: TokenOutput) -> TokenOutput:
        scheduler = self._scheduler
        assert isinstance(scheduler, ConnectorScheduler), "a completion of another engine"
        reason = output.finish_reason
        if sequence.request.kv_transfer and reason in (FinishReason.STOP, FinishReason.LENGTH):
            kept = scheduler.connector.finishing(
                sequence.request, reason, sequence.blocks, sequence.computed, sequence.cached_tokens, self._now_ns
            )
            if kept is not None:
                sequence.blocks = []
                output = output._replace(kv_transfer=kept.params)
        return super()._finish(sequence, output)
