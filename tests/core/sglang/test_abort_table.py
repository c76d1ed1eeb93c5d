"""Each row of the abort table (SGLang reference §5), in virtual time, and its two asymmetries."""

import pytest
from tests.core.sglang.driving import MS, S
from tests.core.sglang.pair import Pair

from windtunnel.core.lifecycle import State
from windtunnel.core.transfer.backends import Fate, SimBackend
from windtunnel.core.transfer.frames import Abort, AbortAck, KvStatus, Metadata

SLOW = 0.001
"""A transport of 1 MB/s: transfers of a hundred tokens take seconds."""


def slow_pair(version: str = "0.5.23", **more: object) -> Pair:
    return Pair(version, make_backend=lambda _rank: SimBackend(bandwidth_gb_s=SLOW), **more)  # type: ignore[arg-type]


def reach(pair: Pair, side: str, name: str, queue: str) -> None:
    worker = pair.workers[side]

    def there() -> bool:
        views = {view.request_id: view.resources.get("queue") for view in worker.live()}
        return views.get(name) == queue

    pair.run(stop=there)
    assert there(), f"{name} never reaches {queue}"


# The prefill


def test_prefill_bootstrap_queue_answers_500_and_counts() -> None:
    pair = Pair()
    pair.submit("a", legs="p")
    reach(pair, "prefill", "a", "bootstrap")
    pair.abort("a")
    pair.run()
    end = pair.ending("prefill", "a")
    assert end.error is not None
    assert end.error.status == 500
    assert end.error.message.startswith("Prefill bootstrap failed for request rank=0 req.rid=a req.bootstrap_room=1001 with ")
    assert end.error.message.endswith("KVTransferError(bootstrap_room=1001): Aborted by AbortReq.")
    assert pair.prefill.counters()["num_bootstrap_failed_reqs_total"] == 1
    pair.assert_empty()


def test_prefill_waiting_queue_answers_200_and_frees_the_slot() -> None:
    pair = Pair()
    pair.submit("long", 400)
    pair.submit("a")
    reach(pair, "prefill", "a", "waiting")
    assert len(pair.prefill.slots.owners) == 2
    pair.abort("a", legs="p")
    assert len(pair.prefill.slots.owners) == 1
    pair.abort("a", legs="d")
    pair.run()
    end = pair.ending("prefill", "a")
    assert end.error is not None
    assert (end.error.message, end.error.status) == ("Abort in waiting queue", 200)
    assert not pair.prefill.counters()
    pair.assert_empty()


def test_prefill_chunk_in_progress_ends_with_the_next_iteration_and_200() -> None:
    pair = Pair()
    pair.submit("a", 400)
    pair.run(stop=lambda: pair.prefill.scheduler.chunked is not None)
    pair.abort("a", legs="p")
    assert "a" in pair.prefill.sequences
    pair.run(pair.now_ns + 25 * MS)
    assert pair.status_of("prefill", "a") == ("abort", 200)
    assert not pair.prefill.counters()
    pair.abort("a", legs="d")
    pair.run()
    pair.assert_empty()


def test_prefill_inflight_queue_answers_500_and_counts_as_a_failed_transfer() -> None:
    pair = slow_pair()
    pair.submit("a")
    reach(pair, "prefill", "a", "inflight")
    pair.abort("a", legs="p")
    pair.run(pair.now_ns + 10 * MS)
    end = pair.ending("prefill", "a")
    assert end.error is not None
    assert end.error.message.startswith("Prefill transfer failed for request rank=0 req.rid=a req.bootstrap_room=1001 with ")
    assert pair.prefill.counters() == {"num_transfer_failed_reqs_total": 1}


@pytest.mark.parametrize("version", ["0.5.9", "0.5.11"])
def test_before_0_5_12_an_abort_of_an_inflight_request_has_no_effect(version: str) -> None:
    pair = slow_pair(version)
    pair.submit("a")
    reach(pair, "prefill", "a", "inflight")
    pair.abort("a", legs="p")
    pair.run()
    assert pair.status_of("prefill", "a") == ("length", 200)
    assert not pair.prefill.counters()


def test_old_releases_lose_the_slot_of_an_abort_in_the_waiting_queue() -> None:
    pair = Pair("0.5.9", metadata_slots=2)
    pair.submit("long", 400)
    pair.submit("a")
    reach(pair, "prefill", "a", "waiting")
    pair.abort("a")
    pair.run(pair.now_ns + 10 * S)
    assert len(pair.prefill.slots.owners) == 1
    pair.submit("b", 400)
    pair.run(pair.now_ns + 10 * S)
    assert pair.tokens("decode", "b")
    assert pair.prefill.outstanding()["metadata_slots"] == 1


# The decode


def test_decode_prealloc_queue_answers_500_and_sends_abort() -> None:
    pair = Pair(decode_metadata_slots=1, make_backend=lambda _rank: SimBackend(bandwidth_gb_s=SLOW))
    pair.submit("first")
    pair.submit("a")
    reach(pair, "decode", "first", "transfer")
    reach(pair, "decode", "a", "prealloc")
    pair.abort("a", legs="d")
    pair.run(pair.now_ns + 20 * MS)
    end = pair.ending("decode", "a")
    assert end.error is not None
    assert end.error.message.startswith(
        "Decode handshake failed for request rank=0 decode_req.req.rid=a decode_req.req.bootstrap_room=1002 with exception "
    )
    assert pair.decode.counters()["num_bootstrap_failed_reqs_total"] == 1
    assert [frame.room for frame in pair.frames_of(Abort)] == [1002]
    assert pair.status_of("prefill", "a") == ("abort", 500)
    pair.run()
    pair.assert_empty()


def test_decode_pending_is_aborted_too_and_no_frame_can_be_sent() -> None:
    pair = Pair(switches={"topology_tries": None})
    pair.topology = None
    pair.submit("a", legs="d")
    pair.run(3 * S)
    pair.abort("a", legs="d")
    pair.run(4 * S)
    assert pair.status_of("decode", "a") == ("abort", 500)
    assert pair.frames_of(Abort) == []
    pair.assert_empty()


def test_decode_transfer_queue_answers_500_and_the_prefill_hears_of_it() -> None:
    pair = slow_pair()
    pair.submit("a")
    reach(pair, "decode", "a", "transfer")
    reach(pair, "prefill", "a", "inflight")
    pair.abort("a", legs="d")
    pair.run(pair.now_ns + 20 * MS)
    end = pair.ending("decode", "a")
    assert end.error is not None
    assert end.error.message.startswith("Decode transfer failed for request rank=0 decode_req.req.rid=a ")
    assert pair.decode.counters()["num_transfer_failed_reqs_total"] == 1
    prefill = pair.ending("prefill", "a").error
    assert prefill is not None
    assert prefill.message.endswith("Aborted by decode-side abort notification.")
    pair.run()
    pair.assert_empty()


def test_decode_waiting_queue_answers_200_and_frees_the_kv() -> None:
    pair = Pair(decode_max_running_requests=1)
    pair.submit("first", 50, 200)
    pair.submit("a", 50)
    reach(pair, "decode", "a", "waiting")
    used = pair.decode.scheduler.memory.used_tokens
    pair.abort("a", legs="d")
    assert pair.decode.scheduler.memory.used_tokens == used - 52
    pair.run()
    end = pair.ending("decode", "a")
    assert end.error is not None
    assert (end.error.message, end.error.status) == ("Abort in waiting queue", 200)
    pair.assert_empty()


def test_decode_running_answers_200_with_what_there_is() -> None:
    pair = Pair()
    pair.submit("a", 50, 100)
    pair.run(stop=lambda: len(pair.tokens("decode", "a")) >= 5)
    pair.abort("a", legs="d")
    pair.run()
    assert pair.status_of("decode", "a") == ("abort", 200)
    assert 5 <= len(pair.tokens("decode", "a")) <= 7
    pair.assert_empty()


def test_decode_retracted_is_dropped_with_its_backup() -> None:
    pair = _retracting_pair()
    (victim,) = [sequence.request_id for sequence in pair.decode.retracted_queue]
    pair.abort(victim, legs="d")
    pair.run()
    assert pair.status_of("decode", victim) == ("abort", 200)
    pair.assert_empty()


def _retracting_pair(**more: object) -> Pair:
    pair = Pair(decode_max_total_num_tokens=240, **more)  # type: ignore[arg-type]
    pair.submit("a", 60, 120)
    pair.submit("b", 60, 120)
    pair.run(stop=lambda: bool(pair.decode.retracted_queue))
    assert pair.decode.retracted_queue
    return pair


def test_a_retracted_request_comes_back_and_loses_no_token() -> None:
    pair = _retracting_pair()
    pair.run()
    for name in ("a", "b"):
        assert pair.tokens("decode", name) == [1000 + index % 7 for index in range(120)]
    pair.assert_empty()


def test_without_a_backup_the_victim_ends_with_503() -> None:
    pair = Pair(decode_max_total_num_tokens=240, retraction="none")
    pair.submit("a", 60, 120)
    pair.submit("b", 60, 120)
    pair.run()
    errors = [end.error for end in (pair.ending("decode", "a"), pair.ending("decode", "b")) if end.error is not None]
    assert [error.status for error in errors] == [503]
    assert errors[0].message.startswith("Retracted under decode memory pressure without a KV backup.")
    pair.assert_empty()


def test_while_anything_is_retracted_transfers_are_not_looked_at() -> None:
    pair = _retracting_pair()
    pair.submit("late", 8, 2)
    pair.run(pair.now_ns + 200 * MS)
    assert pair.decode.retracted_queue
    assert 1003 not in [frame.room for frame in pair.frames_of(Metadata)]
    pair.run()
    assert pair.tokens("decode", "late") == [1000, 1001]


# The asymmetries


def test_an_abort_of_the_prefill_leg_alone_leaves_the_decode_waiting_300_s() -> None:
    pair = Pair()
    pair.submit("long", 400)
    pair.submit("a")
    reach(pair, "prefill", "a", "waiting")
    started_ns = pair.now_ns
    pair.abort("a", legs="p")
    pair.run(250 * S)
    assert "a" in pair.decode.sequences
    pair.run()
    error = pair.ending("decode", "a").error
    assert error is not None
    assert "timed out after 300.0s in KVPoll.WaitingForInput" in error.message
    assert 299 * S < pair.ended_at("decode", "a") - started_ns < 301 * S
    pair.assert_empty()


def test_an_abort_inside_the_last_chunk_is_told_to_the_decode_from_0_5_23_on() -> None:
    pair = slow_pair(chunked_prefill_size=128)
    pair.submit("a", 100)
    reach(pair, "prefill", "a", "inflight")
    pair.prefill.freeze(pair.now_ns + 20 * S)
    pair.abort("a", legs="p")
    pair.run()
    (status,) = pair.frames_of(KvStatus)
    assert status.reason == "Aborted by AbortReq."
    assert pair.ended_at("decode", "a") < 60 * S


def test_before_that_the_decode_generates_for_a_client_that_has_left() -> None:
    pair = slow_pair("0.5.22", chunked_prefill_size=128)
    pair.submit("a", 100, 6)
    reach(pair, "prefill", "a", "inflight")
    pair.abort("a", legs="p")
    pair.run()
    assert pair.status_of("prefill", "a") == ("abort", 500)
    assert len(pair.tokens("decode", "a")) == 6


def test_a_client_that_has_left_hears_nothing() -> None:
    pair = slow_pair()
    pair.submit("a")
    reach(pair, "prefill", "a", "inflight")
    pair.abort("a", notify=False)
    pair.run()
    assert pair.outputs("prefill", "a") == pair.outputs("decode", "a") == []


# Deferred release


def _abort_mid_transfer(pair: Pair) -> None:
    pair.submit("a")
    reach(pair, "prefill", "a", "inflight")
    pair.run(pair.now_ns + 5 * MS)
    pair.abort("a", legs="d")


def test_pages_are_kept_until_the_prefill_acknowledges() -> None:
    pair = slow_pair(switches={"ack_survives_clear": True})
    _abort_mid_transfer(pair)
    pair.run(pair.now_ns + 100 * MS)
    assert pair.decode.outstanding()["deferred_releases"] == 1
    assert pair.decode.scheduler.memory.used_tokens > 0
    pair.run()
    assert len(pair.frames_of(AbortAck)) == 1
    assert pair.decode.counters()["decode_deferred_kv_release_total:drained"] == 1
    assert pair.late_writes == []
    pair.assert_empty()


def test_the_hole_of_0_5_23_the_acknowledgement_is_lost_and_30_s_pass() -> None:
    pair = slow_pair()
    _abort_mid_transfer(pair)
    aborted_ns = pair.now_ns
    pair.run(aborted_ns + 29 * S)
    assert pair.decode.outstanding()["deferred_releases"] == 1
    pair.run()
    assert pair.decode.counters()["decode_deferred_kv_release_total:timeout"] == 1
    assert pair.frames_of(AbortAck) == []
    assert pair.late_writes == []
    pair.assert_empty()


def test_without_it_a_late_write_lands_in_somebody_elses_pages() -> None:
    pair = slow_pair("0.5.18", decode_max_total_num_tokens=128)
    _abort_mid_transfer(pair)
    pair.submit("b", 100, 4)
    pair.run()
    (late,) = pair.late_writes
    assert late.room == 1001
    assert {owner.split("#")[0] for _page, owner in late.pages} == {"b"}


def test_a_write_that_lands_in_time_is_not_reported() -> None:
    pair = Pair("0.5.18")
    pair.submit("a")
    pair.run()
    assert pair.late_writes == []


# The dead receive thread (P1)


@pytest.mark.parametrize(("version", "received"), [("0.5.12", True), ("0.5.13", False), ("0.5.15", False), ("0.5.16", True)])
def test_the_first_decode_abort_kills_the_prefills_receive_thread(version: str, received: bool) -> None:
    pair = slow_pair(version)
    _abort_mid_transfer(pair)
    pair.run(pair.now_ns + 100 * MS)
    assert pair.prefill.ranks[0].receiving is received
    pair.submit("b")
    pair.run(pair.now_ns + 5 * S)
    assert (
        (pair.prefill.sequences["b"].state is State.BOOTSTRAPPING) is not received
        if "b" in pair.prefill.sequences
        else received
    )


@pytest.mark.parametrize(("version", "ends"), [("0.5.17", False), ("0.5.18", True)])
def test_without_a_bootstrap_timeout_such_a_room_stays_for_ever(version: str, ends: bool) -> None:
    pair = Pair(version)
    pair.submit("a", legs="p")
    pair.run(1000 * S)
    assert ("a" not in pair.prefill.sequences) is ends


def test_stalled_handles_keep_everything_behind_them_in_the_queue_waiting() -> None:
    fates: list[Fate] = [Fate("stall")]

    def choose(_write: object) -> Fate:
        return fates.pop() if fates else Fate()

    pair = Pair("0.5.12", transfer_queues=1, make_backend=lambda _rank: SimBackend(fate=choose))
    pair.submit("stuck")
    pair.submit("behind")
    pair.run(200 * S)
    assert set(pair.prefill.sequences) == {"stuck", "behind"}
    assert [view.resources["status"] for view in pair.prefill.live()] == [["TRANSFERRING"], ["WAITING_FOR_INPUT"]]
