"""The KV-event publisher of one data-parallel rank: a PUB socket for the stream, a ROUTER socket for what was missed.

Events leave with the step (SGLang: the report) that has them, on the event loop's thread, so an idle server says nothing (vLLM
reference §6.2).
A slow subscriber loses messages at the high-water mark and sees a gap in the sequence; the replay socket then sends the
batches that are still in the buffer, and an end marker.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from windtunnel.core.outputs import KvEvent, StepOutput
from windtunnel.serve.config import UsageError
from windtunnel.serve.kv_config import KvEventsConfig, binds, endpoint_of_rank
from windtunnel.wire.kv_events import END_SEQUENCE, SEQUENCE_BYTES, Codec

log = logging.getLogger("windtunnel.serve")

BUFFER_BYTES_MAX = 256 * 1024 * 1024
"""The replay buffer is bounded in bytes too; the oldest batches go first."""
REPLAYS_MAX = 64
"""Replays under way at once; further requests are dropped and the subscriber asks again."""
_MESSAGES_PER_TURN = 64
_REQUEST_FRAMES = 3

Batch = tuple[int, bytes]


class ReplayBuffer:
    """The last batches, bounded in number and bytes."""

    def __init__(self, steps_max: int, bytes_max: int = BUFFER_BYTES_MAX) -> None:
        self._steps_max = steps_max
        self._bytes_max = bytes_max
        self._batches: deque[Batch] = deque()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def append(self, sequence: int, payload: bytes) -> None:
        self._batches.append((sequence, payload))
        self.size_bytes += len(payload)
        while len(self._batches) > self._steps_max or self.size_bytes > self._bytes_max:
            self.size_bytes -= len(self._batches.popleft()[1])

    def since(self, sequence: int) -> list[Batch]:
        """All batches that are still here from this sequence number on."""
        return [batch for batch in self._batches if batch[0] >= sequence]


_BATCH_WAITS_S = 1.0


class KvPublisher:
    """Observes the steps of one rank. Owns both sockets; raises UsageError for an endpoint that cannot be had."""

    def __init__(
        self,
        config: KvEventsConfig,
        codec: Codec,
        rank: int,
        loop: asyncio.AbstractEventLoop,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.rank = rank
        self.sequence = 0
        """Of the next batch."""
        self.buffer = ReplayBuffer(config.buffer_steps)
        self._config = config
        self._loop = loop
        self._waiting: list[KvEvent] = []
        """Fewer than a whole batch, where batches are larger than steps; at most those of one step more."""
        self._flush: asyncio.TimerHandle | None = None
        self._codec = codec
        self._topic = config.topic.encode()
        self._clock_s = clock_s
        self._pub, self.endpoint = _open(zmq.PUB, endpoint_of_rank(config.endpoint, rank), config.hwm)
        self.replay: ReplayServer | None = None
        if config.replay_endpoint is not None:
            try:
                head = (self._topic,) if codec.topic_in_replay else ()
                self.replay = ReplayServer(endpoint_of_rank(config.replay_endpoint, rank), head, self.buffer, config, loop)
            except UsageError:
                self._pub.close(linger=0)
                raise

    @property
    def source(self) -> dict[str, object]:
        """This rank's entry of `/kv_event_sources`."""
        return self._config.source(self.endpoint, None if self.replay is None else self.replay.endpoint)

    def on_step(self, rank: int, step: StepOutput, now_ns: int) -> None:
        if not step.kv_events:
            return
        if self._config.batch_events == 1:
            self.publish(step.kv_events)
            return
        self._waiting += step.kv_events
        if len(self._waiting) >= self._config.batch_events:
            self._publish_waiting()
        elif self._flush is None:
            self._flush = self._loop.call_later(_BATCH_WAITS_S, self._publish_waiting)

    def _publish_waiting(self) -> None:
        self._stop_waiting()
        events, self._waiting = self._waiting, []
        self.publish(events)

    def _stop_waiting(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None

    def publish(self, events: Sequence[KvEvent]) -> None:
        sequence, self.sequence = self.sequence, self.sequence + 1
        payload = self._codec.encode(self._clock_s(), events, self.rank)
        self.buffer.append(sequence, payload)
        self._pub.send_multipart((self._topic, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload), zmq.NOBLOCK)

    def close(self) -> None:
        """Events that wait for their batch are lost."""
        self._stop_waiting()
        self._pub.close(linger=0)
        if self.replay is not None:
            self.replay.close()


class ReplayServer:
    """Answers `["", start sequence]` of a DEALER with every buffered batch from there on, a few in each turn of the loop.

    `head` are the frames before each sequence number; in the end marker they are empty.
    A client that does not read loses what is over the high-water mark, which holds a whole buffer.
    """

    def __init__(
        self,
        endpoint: str,
        head: tuple[bytes, ...],
        buffer: ReplayBuffer,
        config: KvEventsConfig,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._head = head
        self._buffer = buffer
        self._loop = loop
        self._pending: deque[tuple[bytes, deque[Batch]]] = deque()
        self._socket, self.endpoint = _open(zmq.ROUTER, endpoint, config.buffer_steps + 1)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._turn)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)

    def _turn(self) -> None:
        """ZMQ's descriptor speaks once for any number of messages, and sending may swallow its word: so look each time."""
        if self._socket.closed:
            return
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._accept(self._socket.recv_multipart(zmq.NOBLOCK))
        if self._pending:
            self._send_some()
            self._loop.call_soon(self._turn)

    def _accept(self, frames: list[bytes]) -> None:
        if len(frames) != _REQUEST_FRAMES or len(frames[2]) > SEQUENCE_BYTES:
            log.warning('KV-event replay: not a request ["", start sequence as 8 bytes]: %d frames', len(frames))
        elif len(self._pending) >= REPLAYS_MAX:
            log.warning("KV-event replay: %d replays are under way, request dropped", REPLAYS_MAX)
        else:
            self._pending.append((frames[0], deque(self._buffer.since(int.from_bytes(frames[2], "big")))))

    def _send_some(self) -> None:
        client, batches = self._pending[0]
        for _ in range(min(_MESSAGES_PER_TURN, len(batches))):
            sequence, payload = batches.popleft()
            self._send(client, *self._head, sequence.to_bytes(SEQUENCE_BYTES, "big"), payload)
        if not batches:
            self._send(client, *[b""] * len(self._head), END_SEQUENCE, b"")
            self._pending.popleft()

    def _send(self, client: bytes, *frames: bytes) -> None:
        """A ROUTER drops what a full or departed client cannot take."""
        self._socket.send_multipart((client, b"", *frames), zmq.NOBLOCK)


def _open(kind: int, endpoint: str, hwm: int) -> tuple["zmq.Socket[bytes]", str]:
    """A socket at `endpoint`, and the endpoint with the port that a 0 has become. Only a PUB socket ever connects."""
    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    try:
        sock.set_hwm(hwm)
        sock.setsockopt(zmq.IPV6, int("[" in endpoint or "//::" in endpoint))
        if kind != zmq.PUB or binds(endpoint):
            sock.bind(endpoint)
        else:
            sock.connect(endpoint)
    except zmq.ZMQError as error:
        sock.close(linger=0)
        raise UsageError(f"--kv-events-config: {endpoint}: {error}") from None
    return sock, _with_port(endpoint, sock)


def _with_port(endpoint: str, sock: "zmq.Socket[bytes]") -> str:
    if not endpoint.endswith(":0"):
        return endpoint
    bound = sock.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return endpoint.removesuffix("0") + bound.decode().rpartition(":")[2]


def open_publishers(
    config: KvEventsConfig, codec: Codec, ranks: int, loop: asyncio.AbstractEventLoop
) -> tuple[KvPublisher, ...]:
    """One for each rank: all or, with UsageError, none."""
    opened: list[KvPublisher] = []
    try:
        for rank in range(ranks):
            opened.append(KvPublisher(config, codec, rank, loop))
    except UsageError:
        for publisher in opened:
            publisher.close()
        raise
    return tuple(opened)
