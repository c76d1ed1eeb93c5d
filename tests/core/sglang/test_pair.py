"""A request's life through both workers (SGLang reference §3)."""

from random import Random

import pytest
from tests.core.sglang.driving import MS, PACING, S, request, run, tokens
from tests.core.sglang.pair import Pair

from windtunnel.core.outputs import FinishReason
from windtunnel.core.sglang.disagg.config import DisaggConfig
from windtunnel.core.sglang.disagg.decode import DecodeWorker
from windtunnel.core.transfer.backends import Fate, SimBackend
from windtunnel.core.transfer.frames import KvChunk, KvStatus, Metadata
from windtunnel.core.transfer.status import KVPoll

RELEASES = ("0.4.10", "0.5.5", "0.5.9", "0.5.11", "0.5.12", "0.5.15", "0.5.18", "0.5.20", "0.5.22", "0.5.23")
WANTED = [1000 + index % 7 for index in range(6)]


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 2), (4, 2)])
def test_a_request_goes_through_on_every_release_and_tp_size(version: str, ranks: tuple[int, int]) -> None:
    pair = Pair(version, ranks=ranks)
    pair.submit("a", 150, 6)
    pair.submit("b", 30, 6)
    pair.run()
    for name in ("a", "b"):
        assert pair.status_of("prefill", name) == ("length", 200)
        assert pair.tokens("prefill", name) == WANTED[:1]
        assert pair.tokens("decode", name) == WANTED
        assert pair.ending("decode", name).finish_reason is FinishReason.LENGTH
    pair.assert_empty()


def test_chunks_are_sent_as_they_are_computed_whole_pages_only() -> None:
    pair = Pair(chunked_prefill_size=50)
    pair.submit("a", 150)
    pair.run()
    chunks = pair.frames_of(KvChunk)
    assert [(chunk.chunk, chunk.is_last, len(chunk.pages)) for chunk in chunks] == [
        (0, False, 12),
        (1, False, 12),
        (2, False, 12),
        (3, True, 2),
    ]
    (metadata,) = pair.frames_of(Metadata)
    assert sum((chunk.pages for chunk in chunks), ()) == metadata.pages
    assert chunks[-1].notification == f"{metadata.room}_kv_3_1_0"
    assert len(pair.frames_of(KvStatus)) == 1


def test_transfers_are_told_in_binary_units_and_the_handshake_with_them() -> None:
    """As SGLang 0.5.23 has them: MiB and GiB/s though the names say mb and gb; on both sides bootstrap and allocation."""
    pair = Pair(kv_bytes_per_token=1 << 20)
    pair.submit("a", 32)
    pair.run()
    told = dict(pair.prefill.take_observations())
    assert told["kv_transfer_total_mb"] == 32
    assert told["kv_transfer_speed_gb_s"] == pytest.approx(32 / 1024 / (told["kv_transfer_latency_ms"] / 1000))
    assert (told["kv_transfer_bootstrap_ms"] > 0, told["kv_transfer_alloc_ms"]) == (True, 0)
    assert [name for name, _ in pair.decode.take_observations()] == ["kv_transfer_bootstrap_ms", "kv_transfer_alloc_ms"]


def test_until_0_5_22_completion_travels_with_the_writes() -> None:
    pair = Pair("0.5.22")
    pair.submit("a")
    pair.run()
    assert pair.frames_of(KvStatus) == []
    assert pair.tokens("decode", "a") == WANTED[:4]


def test_one_failed_rank_fails_the_request_on_all() -> None:
    fates = {0: Fate(), 1: Fate("fail", MS)}
    pair = Pair(ranks=(2, 2), make_backend=lambda rank: SimBackend(fate=lambda _write: fates[rank]))
    pair.submit("a")
    pair.run()
    error = pair.ending("prefill", "a").error
    assert error is not None
    assert error.message.startswith("Prefill transfer failed for request rank=1 ")
    assert [pair.prefill.counters(rank)["num_transfer_failed_reqs_total"] for rank in range(2)] == [1, 1]
    assert pair.status_of("decode", "a") == ("abort", 500)
    pair.assert_empty()


def test_a_decode_with_the_fake_backend_needs_no_prefill() -> None:
    pair = Pair(transfer_backend="sim")
    decode = DecodeWorker(pair.decode.config, DisaggConfig(transfer_backend="fake"), PACING, Random(1))
    assert decode.submit([request("a", 50, 6)], 0) is None
    assert tokens(run(decode), "a") == WANTED
    with pytest.raises(ValueError, match="prefill worker takes only 'sim'"):
        Pair(transfer_backend="fake")


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_paused_worker_looks_at_nothing_until_it_goes_on(side: str) -> None:
    pair = Pair()
    pair.workers[side].pause("in_place", 0)
    pair.submit("a")
    pair.run(5 * S)
    assert not pair.tokens("decode", "a")
    pair.workers[side].resume(5 * S)
    pair.run()
    assert pair.tokens("decode", "a") == WANTED[:4]
    with pytest.raises(ValueError, match="retract"):
        pair.workers[side].pause("retract", pair.now_ns)


def test_pause_by_abort_ends_everything_and_keeps_new_requests_waiting() -> None:
    pair = Pair()
    pair.submit("a", 100, 50)
    pair.run(stop=lambda: bool(pair.decode.scheduler.running))
    for worker in pair.workers.values():
        worker.pause("abort", pair.now_ns)
    pair.submit("b")
    pair.run(pair.now_ns + 5 * S)
    assert pair.status_of("decode", "a") == ("abort", 200)
    assert not pair.tokens("decode", "b")
    for worker in pair.workers.values():
        worker.resume(pair.now_ns)
    pair.run()
    assert pair.tokens("decode", "b") == WANTED[:4]


def test_a_decode_radix_cache_saves_the_prefix_from_being_sent() -> None:
    pair = Pair(decode_radix_cache=True)
    pair.submit("a", range(100), 4)
    pair.run()
    pair.submit("b", [*range(80), *range(500, 520)], 4)
    pair.run()
    second = pair.frames_of(Metadata)[-1]
    assert second.prefix_tokens == 80
    assert len(second.pages) == 5
    assert sum(len(chunk.pages) for chunk in pair.frames_of(KvChunk) if chunk.room == second.room) == 5
    assert pair.tokens("decode", "b") == WANTED[:4]


def test_loads_move_while_the_gauges_stand_still() -> None:
    pair = Pair()
    pair.submit("a", legs="p")
    pair.run(10 * S)
    assert pair.stats("prefill") == []
    loads = pair.prefill.loads()
    assert (loads["num_waiting_reqs"], loads["num_prefill_bootstrap_queue_reqs"]) == (1, 1)


def test_a_killed_worker_fails_everything_and_takes_nothing_more() -> None:
    pair = Pair()
    pair.submit("a")
    pair.run(5 * MS)
    assert pair.prefill.kill(pair.now_ns) == 1
    pair.run(pair.now_ns + S)
    assert pair.status_of("prefill", "a") == ("abort", 500)
    refusal = pair.prefill.submit([pair.leg("b", 8, 1, 9)], pair.now_ns)
    assert refusal is not None
    assert refusal.reason == "dead"


def test_a_dead_worker_has_nothing_more_to_do() -> None:
    pair = Pair(make_backend=lambda _rank: SimBackend(bandwidth_gb_s=0.001))
    pair.submit("a")
    pair.run(30 * MS)
    pair.abort("a", legs="d")
    pair.run(pair.now_ns + S)
    assert pair.decode.outstanding()["deferred_releases"] == 1
    pair.decode.kill(pair.now_ns)
    pair.run()
    assert pair.decode.next_event_at() is None


def test_a_stale_transferring_kills_the_scheduler_that_meets_it_in_the_bootstrap_queue() -> None:
    pair = Pair("0.5.12")
    (rank,) = pair.prefill.ranks
    rank.table.update(1001, KVPoll.TRANSFERRING)
    pair.submit("a")
    pair.run(S)
    error = pair.ending("prefill", "a").error
    assert error is not None
    assert "TRANSFERRING" in error.message
    assert pair.prefill.dead is not None


def test_the_decode_metadata_may_come_before_the_request() -> None:
    pair = Pair()
    pair.submit("a", room=7, legs="d")
    pair.run(S)
    assert pair.prefill.ranks[0].table.get(7) is KVPoll.WAITING_FOR_INPUT
    pair.submit("a", room=7, legs="p")
    pair.run()
    assert pair.tokens("decode", "a") == WANTED[:4]
    pair.assert_empty()


@pytest.mark.parametrize("version", ["0.5.12", "0.5.23"])
def test_a_room_used_twice_at_a_time_ends_both_requests_somehow(version: str) -> None:
    """P55, P64 of the reference: what happens is nobody's contract, but nothing is left over or lost."""
    pair = Pair(version, bootstrap_timeout_ns=S, waiting_timeout_ns=S)
    pair.submit("a", room=5)
    pair.submit("b", room=5)
    pair.run(10 * S)
    for name in ("a", "b"):
        pair.abort(name, notify=False)
    pair.run()
    assert pair.tokens("decode", "a") == WANTED[:4] or pair.tokens("decode", "b") == WANTED[:4]
    held = {key: count for worker in pair.workers.values() for key, count in worker.outstanding().items() if count}
    assert held.keys() <= {"rooms", "stray_rooms"}
