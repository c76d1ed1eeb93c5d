"""What stands around NIXL, without NIXL: memory, messages, and the backend over an agent that does as it is told."""

from dataclasses import dataclass, field

import pytest

from windtunnel.core.transfer.backends import Fate, HandleState, SimBackend, Write
from windtunnel.core.transfer.frames import KvChunk
from windtunnel.core.units import MS
from windtunnel.serve.nixl.agent import Ended, KvAgent, Move
from windtunnel.serve.nixl.backend import RealBytesBackend
from windtunnel.serve.nixl.memory import SINK_LIMIT_BYTES, BlockMemory
from windtunnel.wire.real_bytes import MemoryMap, MessageError, Notice, Receipt, decode, decode_map, encode

PEER = "127.0.0.1:7"
WHERE = MemoryMap(b"agent", 1, 2, 64, 100)


def test_both_ends_know_what_a_block_contains() -> None:
    ours, theirs = BlockMemory(8, 16), BlockMemory(8, 16)
    assert (ours.source == theirs.source).all()
    ours.sink[[2, 5]] = theirs.source[theirs.slots_of("room", [2, 5])]
    assert ours.differing("room", [2, 5], [2, 5]) == ()
    assert ours.differing("another room", [2, 5], [2, 5]) == (0, 1)
    ours.sink[5, 15] ^= 1
    assert ours.differing("room", [2, 5], [2, 5]) == (1,)


def test_memory_is_bounded() -> None:
    with pytest.raises(ValueError, match=r"nixl-block-bytes is 0: must be between 1 and"):
        BlockMemory(1, 0)
    with pytest.raises(ValueError, match=r"at most 1073741824 are allowed \(here: 1024 bytes a block\)"):
        BlockMemory(SINK_LIMIT_BYTES // 1024, 1025)
    memory = BlockMemory(4, 1)
    assert memory.has([0, 3]) and not memory.has([4]) and not memory.has([-1])


@pytest.mark.parametrize("message", [Notice(1, b"agent", "5:6", (0, 9), (b"SIM_KV", b"x")), Receipt(3, 2)])
def test_messages_come_back(message: Notice | Receipt) -> None:
    assert decode(encode(message)) == message


def test_rubbish_is_named() -> None:
    for text in (b"", b"rubbish", encode(WHERE), encode(Receipt(1, 0))[:-1]):
        with pytest.raises(MessageError, match="neither a notice nor a receipt"):
            decode(text)
    with pytest.raises(MessageError, match="memory map"):
        decode_map(b"\x00")
    assert decode_map(encode(WHERE)) == WHERE


@dataclass
class Agent:
    """Takes moves, and says of them what a test says."""

    moves: list[Move] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    def learn(self, peer: str, where: MemoryMap) -> None:
        assert (peer, where) == ("decode", WHERE)

    def forget(self, peer: str) -> None:
        self.forgotten.append(peer)
        self.ended += [Ended(move.number, 0, "the peer has gone") for move in self.moves]

    def start(self, move: Move) -> None:
        self.moves.append(move)

    def ended_at(self) -> int | None:
        return self.ended[0].at_ns if self.ended else None

    def take_ended(self) -> list[Ended]:
        taken, self.ended = self.ended, []
        return taken


class Bench:
    def __init__(self, fate: Fate | None = None) -> None:
        self.agent = Agent()
        told = {} if fate is None else {"fate": lambda _write: fate}
        modelled = SimBackend(bandwidth_gb_s=1.0, latency_ns=MS, dead_peer_ns=100 * MS, **told)  # type: ignore[arg-type]
        agent: KvAgent = self.agent  # type: ignore[assignment]
        self.backend = RealBytesBackend(modelled, agent, lambda handle, name, write: Move(handle, name, "WRITE", "o", (), (1,)))
        self.backend.learn(PEER, "decode", WHERE)
        self.write = Write(PEER, KvChunk(5, 0, True, 0, (1,), 0, 0), 0)
        self.handle = self.backend.post(self.write, 0)

    def end(self, reason: str = "") -> HandleState:
        self.agent.ended.append(Ended(self.handle, 3 * MS, reason))
        assert self.backend.next_event_at() == 3 * MS
        self.backend.run(3 * MS)
        return self.backend.state(self.handle)


def test_bytes_move_when_the_modelled_time_is_over_and_the_receipt_ends_the_write() -> None:
    bench = Bench()
    assert bench.backend.run(MS - 1) == [] and bench.agent.moves == []
    assert bench.backend.run(MS) == [], "the peer hears of it by NIXL"
    assert [move.peer for move in bench.agent.moves] == ["decode"]
    assert bench.backend.state(bench.handle) is HandleState.IN_PROGRESS
    assert bench.backend.next_event_at() is None
    assert bench.end() is HandleState.DONE


def test_what_nixl_fails_is_an_error() -> None:
    bench = Bench()
    bench.backend.run(MS)
    assert bench.end("no") is HandleState.ERROR


@pytest.mark.parametrize("kind", ["stall", "fail", "lost"])
def test_misfortune_of_the_model_never_reaches_nixl(kind: str) -> None:
    bench = Bench(Fate(kind))
    bench.backend.run(1000 * MS)
    want = HandleState.IN_PROGRESS if kind == "stall" else HandleState.ERROR
    assert bench.backend.state(bench.handle) is want and bench.agent.moves == []


def test_a_peer_that_goes_fails_the_bytes_at_once_and_the_model_in_its_time() -> None:
    bench = Bench()
    bench.backend.run(MS)
    waiting = bench.backend.post(bench.write, MS)
    bench.backend.lose_peer(PEER, MS)
    bench.backend.run(MS)
    assert bench.agent.forgotten == ["decode"]
    states = [bench.backend.state(handle) for handle in (bench.handle, waiting)]
    assert states == [HandleState.ERROR, HandleState.IN_PROGRESS]
    bench.backend.run(101 * MS)
    assert bench.backend.state(waiting) is HandleState.ERROR


def test_a_released_write_goes_on_and_leaves_nothing() -> None:
    bench = Bench()
    bench.backend.release(bench.handle)
    bench.backend.run(MS)
    assert len(bench.agent.moves) == 1
    bench.agent.ended.append(Ended(bench.handle, MS, "too late"))
    bench.backend.run(MS)
    books = (bench.backend._waiting, bench.backend._moving, bench.backend._failed, bench.backend._released)
    assert not any(books)
