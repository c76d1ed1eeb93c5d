"""`SubscribeKvEvents`: what the engine does to its prefix cache, step by step, and its load in between.

The contract is that of smg-grpc-servicer 0.14.1: live only, so a start sequence number is out of range; the sequence numbers of
each rank are those of its ZMQ publisher; every batch carries a load record; while no batch flows, a record without events goes
out as the load changes, or every second, or every five once the engine is idle. A subscriber that falls too far behind is
told to come back: a gap would leave it with blocks that are gone.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from smg_grpc_proto.generated import common_pb2 as pb

from windtunnel.core.outputs import KvEvent, StepOutput
from windtunnel.wire import grpc_events as wire
from windtunnel.wire.family import WireError

if TYPE_CHECKING:
    from windtunnel.serve.state import Server

log = logging.getLogger("windtunnel.serve")

SUBSCRIBERS_MAX = 64
BACKLOG_MAX = 4096
"""Batches that wait for one subscriber."""
TICK_S = 0.1
HEARTBEAT_S = 1.0
IDLE_HEARTBEAT_S = 5.0
_IDLE_AFTER = 2
"""Heartbeats without a change, after which they come less often."""

LoadOf = Callable[[int], pb.EngineLoad]


class Batch(NamedTuple):
    sequence: int
    timestamp_s: float
    events: Sequence[KvEvent]
    rank: int


class EventFeed:
    """Observes the steps of all ranks; hands their events to every subscriber. `load_of` gives a rank's load."""

    def __init__(self, load_of: LoadOf) -> None:
        self.load_of = load_of
        self._sequences: defaultdict[int, int] = defaultdict(int)
        self._subscribers: set[Subscriber] = set()

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        if not step.kv_events:
            return
        sequence = self._sequences[rank]
        self._sequences[rank] += 1
        batch = Batch(sequence, time.time(), step.kv_events, rank)
        for subscriber in self._subscribers:
            subscriber.push(batch)

    async def subscribe(self, server: "Server", request: pb.SubscribeKvEventsRequest, call: Any) -> None:
        """Runs until the subscriber leaves. Raises WireError."""
        if not server.config.kv_events.publishes:
            told = "KV cache events are off: start the server with --kv-events-config '{\"enable_kv_cache_events\": true}'"
            raise WireError(told, 501, "NotImplementedError")
        if request.start_sequence_number:
            raise WireError("The stream is live only: subscribe with start_sequence_number 0 and rebuild", 416)
        if len(self._subscribers) >= SUBSCRIBERS_MAX:
            raise WireError(f"The stream already has {SUBSCRIBERS_MAX} subscribers", 429)
        subscriber = Subscriber(self.load_of, len(server.engines), early=request.load_records_before_first_batch)
        self._subscribers.add(subscriber)
        log.info("KV events: %s subscribes", call.peer())
        try:
            await call.send_initial_metadata(())
            while True:
                for message in await subscriber.next():
                    await call.write(message)
        finally:
            self._subscribers.discard(subscriber)


class Subscriber:
    """One stream: batches that wait, and what it was last told of each rank's load."""

    def __init__(self, load_of: LoadOf, ranks: int, *, early: bool) -> None:
        """`early`: load records may come before a rank's first batch, numbered 0."""
        self._queue: asyncio.Queue[Batch] = asyncio.Queue(BACKLOG_MAX)
        self._lost = False
        self._load_of = load_of
        self._next_id = 1
        self._samples = 0
        self._beats = {rank: Beat(0 if early else None) for rank in range(ranks)}

    def push(self, batch: Batch) -> None:
        if self._queue.full():
            self._lost = True
        else:
            self._queue.put_nowait(batch)

    async def next(self) -> list[pb.KvEventBatch]:
        """The next batch or, when there is none for a tick, the load records that are due. Raises WireError."""
        if self._lost:
            raise WireError(f"The subscriber is more than {BACKLOG_MAX} batches behind: subscribe again", 503)
        try:
            batch = await asyncio.wait_for(self._queue.get(), TICK_S)
        except TimeoutError:
            now_s = time.monotonic()
            return [message for rank, beat in self._beats.items() if (message := self._heartbeat(rank, beat, now_s))]
        return [self._message(batch)]

    def _message(self, batch: Batch) -> pb.KvEventBatch:
        message = wire.batch(*batch, first_id=self._next_id)
        self._next_id += len(batch.events)
        load = self._load(batch.rank)
        message.load.CopyFrom(load)
        self._beats[batch.rank].told(load, time.monotonic(), batch.sequence)
        return message

    def _heartbeat(self, rank: int, beat: "Beat", now_s: float) -> pb.KvEventBatch | None:
        if beat.sequence is None:
            return None
        load = self._load_of(rank)
        if not beat.due(load, now_s):
            return None
        beat.told(load, now_s, beat.sequence)
        self._samples += 1
        load.sample = self._samples
        return wire.load_only(beat.sequence, time.time(), rank, load)

    def _load(self, rank: int) -> pb.EngineLoad:
        self._samples += 1
        load = self._load_of(rank)
        load.sample = self._samples
        return load


class Beat:
    """What a subscriber knows of one rank. `sequence` None: nothing may be sent before the first batch."""

    def __init__(self, sequence: int | None) -> None:
        self.sequence = sequence
        self._known: tuple[int, int, float] | None = None
        self._told_s = 0.0
        self._unchanged = 0

    def due(self, load: pb.EngineLoad, now_s: float) -> bool:
        silence_s = IDLE_HEARTBEAT_S if self._unchanged >= _IDLE_AFTER else HEARTBEAT_S
        return _core(load) != self._known or now_s - self._told_s >= silence_s

    def told(self, load: pb.EngineLoad, now_s: float, sequence: int) -> None:
        core = _core(load)
        self._unchanged = self._unchanged + 1 if core == self._known else 0
        self._known, self._told_s, self.sequence = core, now_s, sequence


def _core(load: pb.EngineLoad) -> tuple[int, int, float]:
    """A change of these is told at once; KV usage by hundredths."""
    return load.running_requests, load.waiting_requests, round(load.token_usage, 2)
