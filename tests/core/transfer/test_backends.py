"""The simulated transport and the transfer worker, action by action."""

import pytest

from windtunnel.core.sglang.disagg.config import DisaggConfig
from windtunnel.core.sglang.disagg.prefill_rank import PrefillRank
from windtunnel.core.sglang.profiles import profile
from windtunnel.core.transfer.backends import Fate, HandleState, SimBackend, Write
from windtunnel.core.transfer.frames import Abort, Aux, KvChunk, Metadata
from windtunnel.core.transfer.status import KVPoll
from windtunnel.core.transfer.worker import Action
from windtunnel.core.units import MS, S

PEER = "10.0.0.2:7000"


def write(room: int = 1, size_bytes: int = 10**7, peer: str = PEER) -> Write:
    return Write(peer, KvChunk(room, 0, True, 0, (0,), 1, 0), size_bytes)


def test_a_write_takes_latency_and_bandwidth_and_lands_when_it_is_done() -> None:
    backend = SimBackend(bandwidth_gb_s=1.0, latency_ns=MS)
    handle = backend.post(write(), 0)
    assert backend.next_event_at() == 11 * MS
    assert backend.run(11 * MS - 1) == []
    assert backend.state(handle) is HandleState.IN_PROGRESS
    assert backend.run(11 * MS) == [write()]
    assert backend.state(handle) is HandleState.DONE
    backend.release(handle)
    assert backend.open_handles == 0


@pytest.mark.parametrize(
    ("fate", "settles_ns"), [(Fate("stall"), None), (Fate("fail", 5 * MS), 5 * MS), (Fate("lost"), 30 * S)]
)
def test_misfortunes(fate: Fate, settles_ns: int | None) -> None:
    backend = SimBackend(fate=lambda _write: fate)
    handle = backend.post(write(), 0)
    assert backend.next_event_at() == settles_ns
    assert backend.run(1000 * S) == []
    assert backend.state(handle) is (HandleState.IN_PROGRESS if settles_ns is None else HandleState.ERROR)


def test_an_unknown_fate_is_refused() -> None:
    backend = SimBackend(fate=lambda _write: Fate("late"))
    with pytest.raises(ValueError, match="stall"):
        backend.post(write(), 0)


def test_a_lost_peer_is_reported_late_and_nothing_lands() -> None:
    backend = SimBackend(bandwidth_gb_s=0.001, dead_peer_ns=30 * S)
    lost, other = backend.post(write(), 0), backend.post(write(peer="10.0.0.3:1"), 0)
    backend.lose_peer(PEER, S)
    after = backend.post(write(), 2 * S)
    assert [item.peer for item in backend.run(31 * S)] == ["10.0.0.3:1"]
    assert [backend.state(handle) for handle in (lost, other, after)] == [
        HandleState.ERROR,
        HandleState.DONE,
        HandleState.IN_PROGRESS,
    ]
    backend.run(32 * S)
    assert backend.state(after) is HandleState.ERROR
    backend.find_peer(PEER)
    back = backend.post(write(size_bytes=0), 33 * S)
    backend.run(34 * S)
    assert backend.state(back) is HandleState.DONE


def test_a_write_nobody_looks_at_any_more_still_lands() -> None:
    backend = SimBackend()
    handle = backend.post(write(), 0)
    backend.release(handle)
    assert len(backend.run(S)) == 1
    assert backend.next_event_at() is None


# The worker


def make_rank(version: str = "0.5.23", **settings: object) -> PrefillRank:
    config = DisaggConfig(profile=profile(version), **settings)  # type: ignore[arg-type]
    rank = PrefillRank(config, 0, 4, SimBackend())
    rank.open(1)
    rank.receive(Metadata(1, PEER, tuple(range(8)), 5, 3, 1), 0)
    return rank


def test_one_chunk_in_atomic_actions() -> None:
    rank = make_rank()
    worker = rank.workers[7000 % 4]
    rank.send(1, 0, 8, Aux(1, 42, 0), 0)
    seen = []
    now_ns = 0
    while worker.runnable:
        seen.append(worker.step(now_ns))
        if worker.action is Action.WAIT:
            now_ns = rank.backend.next_event_at() or now_ns
            rank.backend.run(now_ns)
    assert seen == [Action.POP, Action.READ, Action.WRITE, Action.POST, Action.WAIT, Action.CONCLUDE]
    assert rank.table.get(1) is KVPoll.SUCCESS


@pytest.mark.parametrize("spoil", ["clear", "fail"])
def test_a_chunk_of_a_cleared_or_failed_room_is_skipped_in_silence(spoil: str) -> None:
    rank = make_rank()
    worker = rank.workers[7000 % 4]
    rank.send(1, 0, 8, Aux(1, 42, 0), 0)
    if spoil == "clear":
        rank.clear(1)
    else:
        rank.fail(1, "no")
    assert worker.step(0) is Action.POP
    assert worker.action is Action.POP
    assert rank.outgoing == []


@pytest.mark.parametrize(
    ("version", "left"), [("0.5.12", KVPoll.TRANSFERRING), ("0.5.16", KVPoll.TRANSFERRING), ("0.5.20", None)]
)
def test_a_room_cleared_after_the_check_is_born_again_as_transferring(version: str, left: KVPoll | None) -> None:
    """Ending 3 of SGLang reference §1.6; rules (c) and (d) let it, rule (e) does not."""
    rank = make_rank(version)
    worker = rank.workers[7000 % 4]
    rank.send(1, 0, 8, None, 0)
    worker.step(0)
    rank.fail(1, "aborted")
    rank.clear(1)
    worker.step(0)
    worker.step(0)
    assert rank.table.get(1) is left


def test_the_acknowledgement_waits_for_the_chunk_under_way() -> None:
    rank = make_rank()
    worker = rank.workers[7000 % 4]
    rank.send(1, 0, 8, Aux(1, 42, 0), 0)
    for _ in range(4):
        worker.step(0)
    rank.receive(Abort(1, PEER, 9), 0)
    assert rank.outgoing == []
    rank.run(S)
    assert [(type(item.frame).__name__, item.to) for item in rank.outgoing] == [
        ("KvChunk", PEER),
        ("KvStatus", PEER),
        ("AbortAck", PEER),
    ]


def test_the_queue_is_the_sum_of_the_destination_ports() -> None:
    rank = PrefillRank(DisaggConfig(transfer_queues=4), 0, 4, SimBackend())
    rank.open(1)
    for port in (7001, 7005):
        rank.receive(Metadata(1, f"10.0.0.2:{port}", (0,), 1, 0, 2), 0)
    assert rank.table.get(1) is KVPoll.WAITING_FOR_INPUT
    rank.send(1, 0, 1, None, 0)
    assert [len(worker.queue) for worker in rank.workers] == [0, 0, 1, 0]


def test_a_frame_for_the_other_side_is_an_error() -> None:
    with pytest.raises(ValueError, match="KvChunk"):
        make_rank().receive(write().chunk, 0)
