"""Each row of the timeout table (SGLang reference §3.3), in virtual time."""

import itertools

import pytest
from tests.core.sglang.driving import MS, S, request
from tests.core.sglang.pair import ADDRESS, Pair
from tests.core.sglang.test_abort_table import reach, slow_pair

from windtunnel.core.sglang.disagg.config import FAKE_HOST, FAKE_ROOM
from windtunnel.core.transfer.backends import FakeReceiver, FakeSender, Fate, SimBackend
from windtunnel.core.transfer.frames import Abort, DpRankQuery, KvStatus, Metadata, TopologyQuery
from windtunnel.core.transfer.status import KVPoll


def test_bootstrap_timeout_fails_the_prefill_and_the_decode_is_not_told() -> None:
    pair = Pair()
    pair.submit("a", legs="p")
    pair.run()
    error = pair.ending("prefill", "a").error
    assert error is not None
    assert error.message.endswith("Request 1001 timed out after 300.0s in KVPoll.Bootstrapping")
    assert pair.ended_at("prefill", "a") == 300 * S
    assert pair.prefill.counters() == {"num_bootstrap_failed_reqs_total": 1}
    assert [outgoing for _at, outgoing in pair.frames] == []
    pair.assert_empty()


def test_a_bootstrap_timeout_of_one_s_can_be_set() -> None:
    pair = Pair(bootstrap_timeout_ns=S)
    pair.submit("a", legs="p")
    pair.run()
    assert pair.ended_at("prefill", "a") == S


def test_late_metadata_is_born_a_zombie_that_outlives_everything() -> None:
    pair = Pair(bootstrap_timeout_ns=S)
    pair.submit("a", legs="p")
    pair.run()
    pair.submit("b", room=1001, legs="d")
    pair.run()
    assert pair.status_of("decode", "b") == ("abort", 500)
    assert pair.prefill.ranks[0].table.get(1001) is KVPoll.FAILED
    pair.assert_empty(prefill_rooms=1, prefill_stray_rooms=1)
    pair.submit("c", room=1001)
    pair.run()
    assert pair.status_of("prefill", "c") == ("abort", 500)


def test_waiting_timeout_fails_the_decode_tells_the_prefill_and_drops_the_cache() -> None:
    pair = slow_pair(waiting_timeout_ns=2 * S, settle_timeout_ns=0)
    pair.submit("a")
    pair.run(stop=lambda: "a" not in pair.decode.sequences)
    error = pair.ending("decode", "a").error
    assert error is not None
    assert error.message.endswith("Request 1001 timed out after 2.0s in KVPoll.WaitingForInput")
    assert pair.decode.counters()["num_transfer_failed_reqs_total"] == 1
    assert [frame.room for frame in pair.frames_of(Abort)] == [1001]
    assert pair.decode.prefills.addresses == ()
    pair.run()
    assert pair.status_of("prefill", "a") == ("abort", 500)
    pair.assert_empty()


@pytest.mark.parametrize(("clock", "waited_s"), [("metadata", 2.0), ("arrival", 1.0)])
def test_the_waiting_clock_starts_with_the_metadata(clock: str, waited_s: float) -> None:
    pair = slow_pair(waiting_timeout_ns=2 * S, waiting_clock=clock)
    topology, pair.topology = pair.topology, None
    pair.submit("a")
    pair.run(900 * MS)
    pair.topology = topology
    pair.run(stop=lambda: "a" not in pair.decode.sequences)
    sent_ns = next(at for at, outgoing in pair.frames if isinstance(outgoing.frame, Metadata))
    assert pair.ended_at("decode", "a") - sent_ns == pytest.approx(waited_s * S, abs=10 * MS)


def test_a_completion_is_read_before_the_deadline_is_looked_at_from_0_5_17_on() -> None:
    ends = {}
    for version in ("0.5.16", "0.5.17"):
        pair = Pair(version, waiting_timeout_ns=2 * S)
        pair.submit("a")
        reach(pair, "decode", "a", "transfer")
        pair.decode.freeze(3 * S)
        pair.run()
        ends[version] = pair.status_of("decode", "a")
    assert ends == {"0.5.16": ("abort", 500), "0.5.17": ("length", 200)}


def test_the_fake_sender_has_a_waiting_timeout_from_its_first_poll() -> None:
    sender = FakeSender(300 * S)
    assert sender.poll(0) is KVPoll.WAITING_FOR_INPUT
    sender.init()
    assert sender.poll(5 * S) is KVPoll.WAITING_FOR_INPUT
    assert sender.deadline_ns() == 305 * S
    assert sender.poll(304 * S) is KVPoll.WAITING_FOR_INPUT
    assert sender.poll(305 * S) is KVPoll.FAILED


def test_the_fake_sender_concludes_after_its_first_chunk_and_never_without_one() -> None:
    sender = FakeSender(300 * S)
    sender.init()
    sender.send(0, 1, None, 0)
    assert sender.poll(0) is KVPoll.SUCCESS
    sender.abort()
    assert sender.poll(0) is KVPoll.FAILED


def test_the_fake_receiver_follows_its_calls() -> None:
    receiver = FakeReceiver()
    seen = [receiver.poll(0)]
    receiver.init()
    seen.append(receiver.poll(0))
    receiver.send_metadata((), 0, 0, 0, 0)
    seen.append(receiver.poll(0))
    receiver.abort()
    seen.append(receiver.poll(0))
    assert seen == [KVPoll.BOOTSTRAPPING, KVPoll.WAITING_FOR_INPUT, KVPoll.SUCCESS, KVPoll.FAILED]


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_health_probe_runs_through_the_fake_peer(side: str) -> None:
    pair = Pair()
    worker = pair.workers[side]
    worker.submit([request("HEALTH_CHECK1", [0], 1, bootstrap=(FAKE_HOST, None, FAKE_ROOM))], 0)
    pair.run()
    assert pair.tokens(side, "HEALTH_CHECK1") == [1000]
    pair.assert_empty()


def test_two_missed_heartbeats_fail_all_rooms_of_the_prefill() -> None:
    pair = slow_pair()
    pair.submit("a")
    reach(pair, "decode", "a", "transfer")
    assert not pair.decode.heartbeat(ADDRESS, pair.now_ns, alive=False)
    assert not pair.decode.heartbeat(ADDRESS, pair.now_ns, alive=True)
    assert not pair.decode.heartbeat(ADDRESS, pair.now_ns, alive=False)
    assert pair.decode.heartbeat(ADDRESS, pair.now_ns, alive=False)
    pair.run(pair.now_ns + S)
    error = pair.ending("decode", "a").error
    assert error is not None
    assert error.message.endswith(f"Lost connection with prefill instance (bootstrap_addr: {ADDRESS})")
    assert pair.decode.prefills.addresses == ()


def test_a_room_that_has_succeeded_survives_the_lost_prefill() -> None:
    pair = Pair()
    pair.submit("a")
    reach(pair, "decode", "a", "transfer")
    pair.run(stop=lambda: bool(pair.frames_of(KvStatus)))
    pair.decode.freeze(pair.now_ns + 100 * MS)
    pair.run(pair.now_ns + 50 * MS)
    for _ in range(2):
        pair.decode.heartbeat(ADDRESS, pair.now_ns, alive=False)
    pair.run()
    assert pair.status_of("decode", "a") == ("length", 200)


@pytest.mark.parametrize(("version", "blocked"), [("0.5.15", True), ("0.5.16", False)])
def test_a_send_that_fails_costs_the_room_or_the_whole_scheduler(version: str, blocked: bool) -> None:
    pair = Pair(version)
    pair.deliver = lambda frame: not isinstance(frame, Metadata)
    pair.submit("a")
    pair.run(stop=lambda: bool(pair.frames_of(Metadata)))
    outgoing = pair.frames[-1][1]
    pair.decode.send_failed(outgoing, pair.now_ns + S)
    pair.run(400 * S)
    if blocked:
        assert "a" in pair.decode.sequences
        return
    error = pair.ending("decode", "a").error
    assert error is not None
    assert error.message.endswith("send_metadata to prefill 10.0.0.1:9000 failed")


def test_the_topology_is_asked_for_once_a_second_and_fifteen_times() -> None:
    pair = Pair()
    pair.topology = None
    pair.submit("a", legs="d")
    pair.run()
    asked = [at for at, outgoing in pair.frames if isinstance(outgoing.frame, TopologyQuery)]
    assert len(asked) == 15
    assert {later - earlier for earlier, later in itertools.pairwise(asked)} == {S + MS}
    error = pair.ending("decode", "a").error
    assert error is not None
    assert error.status == 500
    assert error.message.endswith(f"Could not fetch bootstrap info for: {ADDRESS}")


def test_the_dp_rank_is_asked_for_without_a_limit() -> None:
    pair = Pair(follow_bootstrap_room=False)
    assert pair.topology is not None
    pair.topology = pair.topology._replace(
        dp_size=2, follow_bootstrap_room=False, endpoints={(rank, 0): "10.0.0.1:9000" for rank in range(2)}
    )
    pair.submit("a", legs="d")
    pair.run(2 * S)
    assert len(pair.frames_of(DpRankQuery)) == pytest.approx(200, abs=2)
    pair.prefill.submit([pair.leg("a", 100, 4, 1001)], pair.now_ns)
    pair.run()
    assert pair.registered == {1001: 0}
    assert pair.status_of("decode", "a") == ("length", 200)


def test_request_timeouts_are_not_enforced_in_pd() -> None:
    pair = Pair(req_waiting_timeout_ns=MS, req_running_timeout_ns=MS)
    pair.submit("a", 300, 50)
    pair.run()
    assert len(pair.tokens("decode", "a")) == 50


@pytest.mark.parametrize(("limit_ns", "ends"), [(None, False), (10 * S, True)])
def test_transferring_has_no_limit_unless_one_is_asked_for(limit_ns: int | None, ends: bool) -> None:
    pair = Pair(transferring_timeout_ns=limit_ns, make_backend=lambda _rank: SimBackend(fate=lambda _write: Fate("stall")))
    pair.submit("a")
    pair.run(200 * S)
    assert ("a" not in pair.prefill.sequences) is ends


def test_an_unsettled_error_poisons_the_room_and_no_acknowledgement_comes() -> None:
    fates = [Fate("fail", 10 * MS), Fate("stall")]
    pair = Pair(ranks=(1, 2), make_backend=lambda _rank: SimBackend(fate=lambda _write: fates.pop(0)))
    pair.submit("a", 50)
    pair.run(stop=lambda: "a" not in pair.prefill.sequences)
    failed_ns = pair.now_ns
    assert 5 * S < failed_ns < 6 * S
    assert pair.frames_of(KvStatus) == []
    pair.run()
    assert 299 * S < pair.ended_at("decode", "a") < 301 * S
    assert pair.prefill.ranks[0].poisoned == {1001}


def test_a_failed_transfer_is_told_to_the_decode_from_0_5_20_on() -> None:
    ends = {}
    for version in ("0.5.19", "0.5.20"):
        pair = Pair(version, make_backend=lambda _rank: SimBackend(fate=lambda _write: Fate("fail", MS)))
        pair.submit("a", 50)
        pair.run()
        ends[version] = pair.ended_at("decode", "a") // S
    assert ends == {"0.5.19": 300, "0.5.20": 0}


def test_a_dead_decode_is_reported_by_the_transport_after_30_s() -> None:
    pair = slow_pair("0.5.12")
    pair.submit("a")
    reach(pair, "prefill", "a", "inflight")
    lost_ns = pair.now_ns
    pair.prefill.lose_peer("10.0.0.2:7000", lost_ns)
    pair.run()
    assert pair.ended_at("prefill", "a") == lost_ns + 30 * S


def test_gauges_stand_still_while_requests_only_sit_in_queues() -> None:
    frozen, written = (Pair(report_while_stalled=stalled) for stalled in (False, True))
    for pair in (frozen, written):
        pair.submit("a", legs="p")
        pair.run(100 * S)
    assert frozen.stats("prefill") == []
    assert written.gauge("prefill", "num_prefill_bootstrap_queue_reqs") == 1


def test_a_request_without_a_room_is_refused() -> None:
    pair = Pair()
    refusal = pair.prefill.submit([request("a")], 0)
    assert refusal is not None
    assert refusal.status == 400
    assert refusal.message.startswith("Invalid request: Disaggregated request received without bootstrap room id.")


@pytest.mark.parametrize(
    ("version", "bootstrap", "inflight"),
    [
        ("0.4.10", "num_prefill_prealloc_queue_reqs", "num_prefill_infight_queue_reqs"),
        ("0.5.9", "num_prefill_prealloc_queue_reqs", "num_prefill_inflight_queue_reqs"),
        ("0.5.23", "num_prefill_bootstrap_queue_reqs", "num_prefill_inflight_queue_reqs"),
    ],
)
def test_gauge_names_by_release(version: str, bootstrap: str, inflight: str) -> None:
    pair = Pair(version)
    pair.submit("a")
    pair.run()
    assert {bootstrap, inflight} <= set(pair.stats("prefill")[0].extra)


def test_the_aux_room_is_checked() -> None:
    pair = Pair()
    pair.submit("a")
    reach(pair, "decode", "a", "transfer")
    pair.run(stop=lambda: bool(pair.frames_of(KvStatus)))
    (rank,) = pair.decode.ranks
    pair.decode.freeze(pair.now_ns + 100 * MS)
    pair.run(pair.now_ns + 50 * MS)
    slot = pair.decode.entries[pair.decode.sequences["a"]].slot
    assert slot is not None
    rank.buffers[slot] = rank.buffers[slot]._replace(room=77)
    pair.run()
    error = pair.ending("decode", "a").error
    assert error is not None
    assert (error.status, error.message) == (500, "Metadata corruption detected - bootstrap_room mismatch")
    pair.assert_empty()


def test_preallocation_keeps_a_reserve_for_each_active_request() -> None:
    pair = slow_pair(decode_max_total_num_tokens=128)
    pair.submit("a", 40)
    pair.submit("b", 80)
    pair.run(S)
    assert len(pair.decode.transfer_queue) == 1
    assert pair.decode.scheduler.memory.available_tokens == 88
    pair.submit("c", 8)
    pair.run(2 * S)
    assert len(pair.decode.prealloc_queue) == 2
    pair.abort("b", legs="d")
    pair.run(pair.now_ns + S)
    assert len(pair.decode.transfer_queue) == 2


def test_request_pool_rows_are_three_times_the_running_requests_up_to_32() -> None:
    assert Pair(decode_max_running_requests=32).decode.rows.count == 96
    assert Pair(decode_max_running_requests=33).decode.rows.count == 33
