"""vLLM's prefill/decode disaggregation between two engines: every path of the reference's §7.2."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.core.rig import VOCABULARY, lora, request
from tests.core.vllm.kv_rig import LATENCY_NS, NULLS, READ_NS, Node, Pair, answer, decode_leg, prefill_leg

from windtunnel.core.lifecycle import Event, State
from windtunnel.core.outputs import FinishReason
from windtunnel.core.pacing import StepPacing
from windtunnel.core.sources import OracleSource
from windtunnel.core.transfer.backends import Fate
from windtunnel.core.units import MS, S
from windtunnel.core.vllm import VllmEngineConfig
from windtunnel.core.vllm.connector.config import KvTransferConfig, compatibility_hash
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.foreign import ForeignSource
from windtunnel.core.vllm.connector.params import remote_of
from windtunnel.core.vllm.connector.seam import (
    Arrived,
    AskHandshake,
    Consumed,
    Heartbeat,
    MoveDone,
    MoveFailed,
    Pushed,
    Registration,
    StartRead,
    StartWrite,
)

FIELDS = (
    "do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host",
    "remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens", "remote_blocks_expiry_time",
    "remote_registration_generation", "transfer_mode", "remote_prefill_cached_tokens",
)  # fmt: skip


def events(node: Node, request_id: str) -> list[Event]:
    return [one.event for step in node.steps for one in step.transitions if one.request_id == request_id]


def state(node: Node, request_id: str) -> State:
    return next(view.state for view in node.engine.live() if view.request_id == request_id)


def test_the_whole_way() -> None:
    pair = Pair()
    params = pair.prefill("a")
    assert params is not None and set(params) == set(FIELDS)
    assert pair.p.finish["a-p"] is FinishReason.LENGTH and pair.p.used_blocks == 7
    pair.decode("a", params)
    pair.run(lambda: "a-d" in pair.d.finish)
    assert pair.d.tokens["a-d"] == answer("a") and pair.d.finish["a-d"] is FinishReason.LENGTH
    assert events(pair.d, "a-d") == [
        Event.SUBMIT, Event.FETCH, Event.FETCHED, Event.SCHEDULE, Event.FIRST_TOKEN, Event.FINISH
    ]  # fmt: skip
    pair.rest()
    assert pair.consumed() == [Consumed("a-p", 1)]
    assert pair.d.stats is not None and pair.p.stats is not None
    assert sum(step.stats.external_hits for step in pair.d.steps if step.stats) == 99
    assert sum(step.stats.external_queries for step in pair.d.steps if step.stats) == 100
    assert sum(step.stats.prefill_tokens for step in pair.d.steps if step.stats) == 1
    assert not any(pair.p.counters.values()) and not any(pair.d.counters.values())
    assert dict(pair.d.engine.take_observations())["nixl_bytes_transferred"] == 7 * 16


def test_the_answer_of_a_prefill() -> None:
    pair = Pair(prefill_kv={"tp_size": 2})
    pair.prefill("a", 40)
    pair.run(limit_ns=pair.now_ns + 1)
    pair.submit(pair.p, replace(prefill_leg("a", 40), request_id="again"))
    pair.run(lambda: "again" in pair.p.finish)
    told = pair.p.params["again"]
    assert told is not None
    blocks = told["remote_block_ids"]
    assert len(blocks) == 1 and len(blocks[0]) == 3
    assert {name: value for name, value in told.items() if name != "remote_block_ids"} == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "engine-p",
        "remote_request_id": "again",
        "remote_host": "p",
        "remote_port": 5600,
        "tp_size": 2,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 40,
        "remote_blocks_expiry_time": None,
        "remote_registration_generation": 0,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 32,
    }


def test_blocks_are_allocated_before_the_load_and_the_request_counts_as_deferred() -> None:
    pair = Pair()
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: pair.d.engine.outstanding()["loads"] == 1)
    assert state(pair.d, "a-d") is State.TRANSFERRING
    assert pair.d.used_blocks == 7
    assert pair.d.stats is not None
    pair.run(limit_ns=pair.now_ns + READ_NS // 2)
    assert (pair.d.stats.running, pair.d.stats.waiting, pair.d.stats.deferred) == (0, 0, 1)
    assert pair.d.stats.extra["kv_fetch_in_progress"] == 1
    pair.run(lambda: "a-d" in pair.d.finish)
    pair.rest()


def test_others_run_while_a_request_loads() -> None:
    pair = Pair()
    pair.decode("a", pair.prefill("a"))
    pair.submit(pair.d, request("other", 20, 5))
    pair.run(lambda: "other" in pair.d.finish)
    assert state(pair.d, "a-d") is State.TRANSFERRING
    pair.run(lambda: "a-d" in pair.d.finish)
    assert pair.d.tokens["a-d"] == answer("a") and pair.d.tokens["other"] == answer("other", 5)
    pair.rest()


def test_a_partly_cached_prompt_loads_only_the_rest() -> None:
    pair = Pair()
    pair.both("a")
    pair.submit(pair.d, replace(decode_leg("a", None, 100, 1), request_id="warm"))
    pair.run(lambda: "warm" in pair.d.finish)
    longer = request("a", 100).prompt_token_ids + tuple(range(50))
    pair.submit(pair.p, replace(prefill_leg("a"), prompt_token_ids=longer, request_id="b-p"))
    pair.run(lambda: "b-p" in pair.p.finish)
    pair.submit(pair.d, replace(decode_leg("a", pair.p.params["b-p"]), prompt_token_ids=longer, request_id="b-d"))
    pair.run(lambda: "b-d" in pair.d.finish)
    read = [ask for _name, ask in pair.asked if isinstance(ask, StartRead)][-1]
    assert len(read.local_blocks) == len(read.remote_blocks) == 10 - 6
    assert pair.d.tokens["b-d"] == answer("a")
    pair.rest()


def test_a_fully_cached_prompt_notifies_without_a_read() -> None:
    pair = Pair()
    pair.both("a", 97)
    params = pair.prefill("b", prompt=97, source=request("a").source)
    tokens = request("a", 97).prompt_token_ids
    pair.submit(pair.d, replace(decode_leg("a", params, 97), prompt_token_ids=tokens, request_id="b-d"))
    pair.run(lambda: "b-d" in pair.d.finish)
    assert len([ask for _name, ask in pair.asked if isinstance(ask, StartRead)]) == 1
    assert pair.consumed() == [Consumed("a-p", 1), Consumed("b-p", 1)]
    assert pair.d.tokens["b-d"] == answer("a")
    pair.rest()
    assert not pair.p.counters["nixl_num_kv_expired_reqs"]


BROKEN: dict[str, dict[str, Any]] = {
    "no engine": {"remote_engine_id": None},
    "no id": {"remote_request_id": None},
    "no host": {"remote_host": ""},
    "no port": {"remote_port": None},
    "no blocks": {"remote_block_ids": None},
    "empty blocks": {"remote_block_ids": [[]]},
    "port of another kind": {"remote_port": "5600"},
    "port too large": {"remote_port": 70000},
    "blocks of another kind": {"remote_block_ids": [["x"]]},
    "negative block": {"remote_block_ids": [[-1]]},
    "two cache groups": {"remote_block_ids": [[1], [2]]},
    "a word for blocks": {"remote_block_ids": "1234567"},
    "a boolean for a block": {"remote_block_ids": [[True]]},
    "no tp": {"tp_size": 0},
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_incomplete_parameters_warn_and_compute_here(broken: Mapping[str, Any]) -> None:
    pair = Pair()
    params = pair.prefill("a")
    assert params is not None
    pair.decode("a", {**params, **broken})
    pair.run(lambda: "a-d" in pair.d.finish)
    assert pair.d.tokens["a-d"] == answer("a")
    assert not pair.said
    (warning,) = pair.d.engine.take_warnings()
    assert warning.startswith("Got invalid KVTransferParams") and warning.endswith("will not utilize KVTransfer")
    pair.rest()
    assert pair.p.counters["nixl_num_kv_expired_reqs"] == 1


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, dict(NULLS, do_remote_decode=False)])
def test_without_a_prefill_it_is_an_ordinary_request(params: Mapping[str, Any] | None) -> None:
    pair = Pair()
    pair.decode("a", params)
    pair.run()
    assert pair.d.tokens["a-d"] == answer("a") and pair.d.params["a-d"] is None
    assert not pair.d.engine.take_warnings()


def test_an_older_flat_list_of_blocks_is_read_too() -> None:
    pair = Pair()
    params = pair.prefill("a")
    assert params is not None
    pair.decode("a", {**params, "remote_block_ids": params["remote_block_ids"][0]})
    pair.rest()
    assert pair.consumed() == [Consumed("a-p", 1)]


def test_an_abort_before_it_was_scheduled_tells_the_prefill() -> None:
    pair = Pair(decode={"max_num_seqs": 1})
    pair.submit(pair.d, request("first", 16, 400))
    params = pair.prefill("a")
    pair.decode("a", params)
    pair.run(limit_ns=pair.now_ns + 5_000)
    assert state(pair.d, "a-d") is State.QUEUED
    pair.abort(pair.d, "a-d")
    pair.run(lambda: pair.p.used_blocks == 0)
    assert pair.now_ns < 1 * MS and pair.consumed() == [Consumed("a-p", 1)]
    assert not [ask for _name, ask in pair.asked if isinstance(ask, StartRead)]
    pair.rest()
    assert not pair.p.counters["nixl_num_kv_expired_reqs"]


def test_a_rejection_before_admission_releases_the_prefill() -> None:
    pair = Pair(decode={"max_num_queued_reqs": 1})
    pair.submit(pair.d, request("first", 16, 50))
    params = pair.prefill("a")
    assert pair.decode("a", params) is not None
    assert pair.d.engine.release_remote(params, pair.now_ns)
    pair.pump(pair.d)
    pair.run(lambda: pair.p.used_blocks == 0)
    assert pair.consumed() == [Consumed("a-p", 1)]
    pair.rest()
    assert not pair.p.counters["nixl_num_kv_expired_reqs"]


@pytest.mark.parametrize("params", [None, "text", {}, NULLS, {"do_remote_prefill": True}])
def test_nothing_is_released_for_parameters_without_a_prefill(params: object) -> None:
    pair = Pair()
    assert not pair.d.engine.release_remote(params, 0)
    assert not pair.d.engine.take_outgoing()


def test_an_abort_while_it_reads_keeps_the_blocks_until_the_read_ends() -> None:
    """vLLM #32255: freed at once, they would be written into for somebody else."""
    pair = Pair()
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: len(pair.d.mover) == 1)
    pair.abort(pair.d, "a-d")
    assert pair.d.used_blocks == 7 and not pair.d.engine.live()
    assert pair.d.engine.outstanding() == {"holds": 0, "loads": 1, "orphaned_loads": 1}
    pair.run(limit_ns=pair.now_ns + READ_NS // 2)
    assert pair.d.used_blocks == 7
    pair.run(lambda: pair.d.used_blocks == 0)
    pair.run(lambda: pair.p.used_blocks == 0)
    assert pair.consumed() == [Consumed("a-p", 1)] and pair.now_ns < 1 * MS
    assert "a-d" not in pair.d.tokens
    pair.rest()


@pytest.mark.parametrize("push", [False, True])
def test_a_false_address_fails_its_own_request_alone(push: bool) -> None:
    """A client names a good engine, and a host where it is not; vLLM goes by the engine id, and fails both."""
    pair = Pair(kv={"connector": "NixlPushConnector" if push else "NixlConnector"})
    told = {name: pair.prefill(name) or {} for name in ("a", "b")}
    pair.submit(pair.d, decode_leg("a", {**told["a"], "remote_host": "q"}), decode_leg("b", told["b"]))
    pair.run(lambda: all(f"{name}-d" in pair.d.finish for name in ("a", "b")))
    assert pair.d.finish["a-d"] is FinishReason.ERROR and pair.d.tokens["b-d"] == answer("b")


def test_an_abort_during_the_handshake_keeps_them_too() -> None:
    pair = Pair()
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: any(isinstance(ask, AskHandshake) for _name, ask in pair.asked))
    pair.run(lambda: pair.d.engine.outstanding()["loads"] == 1)
    pair.abort(pair.d, "a-d")
    assert pair.d.used_blocks == 7
    pair.run(lambda: pair.p.used_blocks == 0)
    pair.rest()


def test_an_abort_after_the_load_frees_at_once() -> None:
    pair = Pair(decode={"max_num_seqs": 2})
    pair.submit(pair.d, request("first", 16, 900))
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: pair.d.engine.outstanding()["loads"] == 1)
    pair.submit(pair.d, request("second", 16, 900))
    pair.run(lambda: pair.d.engine.outstanding()["loads"] == 0)
    pair.run(limit_ns=pair.now_ns + 5_000)
    assert state(pair.d, "a-d") is State.QUEUED and pair.d.stats is not None
    assert pair.d.stats.extra["kv_fetch_completed_waiting"] == 1 and pair.d.stats.waiting == 1
    before = pair.d.used_blocks
    pair.abort(pair.d, "a-d")
    assert pair.d.used_blocks == before - 7
    pair.rest()


def test_who_has_its_kv_already_goes_first() -> None:
    pair = Pair(decode={"max_num_seqs": 1})
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: pair.d.engine.outstanding()["loads"] == 1)
    for name in ("x", "y"):
        pair.submit(pair.d, request(name, 16, 30))
    pair.run(lambda: "a-d" in pair.d.finish)
    assert "x" in pair.d.finish and "y" not in pair.d.tokens
    pair.rest()


def test_a_loaded_request_waits_for_a_place_for_its_adapter() -> None:
    pair = Pair(decode={"max_loras": 1})
    pair.decode("a", pair.prefill("a", lora=lora("x")), lora=lora("x"))
    pair.run(lambda: len(pair.d.mover) == 1)
    pair.submit(pair.d, request("other", 20, 60, lora=lora("y")))
    pair.run(lambda: pair.d.engine.outstanding()["loads"] == 0)
    pair.run(limit_ns=pair.now_ns + 5_000)
    assert state(pair.d, "a-d") is State.QUEUED and "other" not in pair.d.finish
    pair.run(lambda: "a-d" in pair.d.finish)
    assert "other" in pair.d.finish and pair.d.tokens["a-d"] == answer("a")
    pair.rest()


def test_an_abort_on_the_prefill_frees_at_once_and_answers_null() -> None:
    pair = Pair(pacing=lambda: StepPacing(10_000, 100, 0))
    pair.submit(pair.p, prefill_leg("a"))
    pair.run(limit_ns=5_000)
    pair.p.engine.abort(["a-p"], pair.now_ns, notify=True)
    pair.run()
    assert pair.p.finish["a-p"] is FinishReason.ABORT and pair.p.params["a-p"] is None
    assert pair.p.used_blocks == 0 and not pair.p.engine.outstanding()["holds"]


def test_a_stop_keeps_the_blocks_as_well() -> None:
    pair = Pair()
    stop = answer("a", 1)[0]
    params = pair.prefill("a", max_tokens=50, stop_token_ids=frozenset({stop}))
    assert params is not None and pair.p.finish["a-p"] is FinishReason.STOP and pair.p.used_blocks == 7
    pair.decode("a", params)
    pair.rest()


def test_an_ordinary_request_on_a_prefill_holds_nothing() -> None:
    pair = Pair()
    pair.submit(pair.p, request("plain", 100, 3))
    pair.run()
    assert pair.p.params["plain"] is None and pair.p.used_blocks == 0


# Leases


def test_a_lease_runs_out() -> None:
    pair = Pair()
    pair.prefill("a")
    held_at_ns = pair.now_ns
    pair.run(limit_ns=held_at_ns + 30 * MS - 1)
    assert pair.p.used_blocks == 7
    pair.run()
    assert pair.p.used_blocks == 0 and pair.now_ns == held_at_ns + 30 * MS
    assert pair.p.counters["nixl_num_kv_expired_reqs"] == 1
    assert pair.p.stats is not None and pair.p.stats.kv_usage == 0
    assert pair.p.stats.extra["nixl_num_kv_expired_reqs"] == 1


def waiting_pair(**more: Any) -> Pair:
    """A decode request that waits for its turn."""
    pair = Pair(decode={"max_num_seqs": 1}, pacing=lambda: StepPacing(200_000, 0, 0), **more)
    pair.submit(pair.d, request("first", 16, 900))
    pair.decode("a", pair.prefill("a"))
    return pair


def test_heartbeats_go_out_every_sixth_of_the_lease_and_keep_it() -> None:
    pair = waiting_pair()
    since_ns = pair.now_ns
    pair.run(limit_ns=since_ns + 100 * MS)
    beats = [notification for _sender, notification in pair.said if isinstance(notification, Heartbeat)]
    assert beats[0] == Heartbeat(("a-p",))
    # The first is spent on the handshake.
    assert len(beats) == 100 // 5
    assert pair.p.used_blocks == 7
    pair.run(lambda: "a-d" in pair.d.finish)
    assert pair.d.tokens["a-d"] == answer("a") and pair.now_ns > 170 * MS
    assert not pair.p.counters["nixl_num_kv_expired_reqs"]
    pair.rest()


def test_a_heartbeat_extends_by_two_thirds_and_never_shortens() -> None:
    pair = Pair()
    pair.prefill("a")
    held_at_ns = pair.now_ns
    pair.tell(pair.p, Arrived(Heartbeat(("a-p", "unknown"))))
    pair.run(limit_ns=held_at_ns + 25 * MS)
    pair.tell(pair.p, Arrived(Heartbeat(("a-p",))))
    pair.run()
    assert pair.now_ns == held_at_ns + 25 * MS + 20 * MS


def test_an_expired_lease_is_reaped_behind_a_heartbeated_one() -> None:
    """vLLM #58222."""
    pair = Pair()
    pair.prefill("old")
    pair.prefill("new")
    started_ns = pair.now_ns
    pair.run(limit_ns=started_ns + 20 * MS)
    pair.tell(pair.p, Arrived(Heartbeat(("old-p",))))
    pair.run(limit_ns=started_ns + 31 * MS)
    assert [hold.request_id for hold in pair.p.engine.connector.holds.all()] == ["old-p"]


def test_heartbeats_stop_with_the_load() -> None:
    pair = Pair()
    pair.both("a")
    pair.run()
    said = len(pair.said)
    pair.run(limit_ns=pair.now_ns + 100 * MS)
    assert len(pair.said) == said


def test_a_frozen_decode_sends_no_heartbeats() -> None:
    pair = waiting_pair()
    pair.d.engine.freeze(pair.now_ns + 80 * MS)
    pair.run(limit_ns=pair.now_ns + 60 * MS)
    assert pair.p.counters["nixl_num_kv_expired_reqs"] == 1 and pair.p.used_blocks == 0


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_frozen_engine_reads_nothing_until_it_thaws(side: str) -> None:
    """The bytes move without it; what is said to it waits, and on waking it is heard before any lease is looked at."""
    pair = Pair()
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: len(pair.d.mover) == 1)
    thaw_ns = pair.now_ns + 60 * MS
    (pair.p if side == "p" else pair.d).engine.freeze(thaw_ns)
    pair.run(limit_ns=thaw_ns - 1)
    assert pair.p.used_blocks == (7 if side == "p" else 0)
    assert ("a-d" in pair.d.finish) == (side == "p")
    pair.rest()
    assert pair.d.tokens["a-d"] == answer("a")
    # A frozen decode has no heart, so the lease runs out before its word comes.
    assert pair.p.counters["nixl_num_kv_expired_reqs"] == (side == "d")


def test_a_notification_after_expiry_is_counted_and_the_decode_keeps_what_it_read() -> None:
    """vLLM reference §9.4, entry 42, harmless: nobody has taken the blocks yet."""
    pair = Pair(decode={"max_num_seqs": 1})
    params = pair.prefill("a")
    pair.run()
    assert pair.p.used_blocks == 0
    pair.decode("a", params)
    pair.run(lambda: "a-d" in pair.d.finish)
    pair.rest()
    assert pair.d.tokens["a-d"] == answer("a")
    assert pair.p.counters["nixl_num_notifications_after_expiry"] == 1
    assert any("may have expired" in line for line in pair.p.engine.take_warnings())
    assert not any(pair.d.counters.values())


def test_a_late_read_of_blocks_that_somebody_else_has_answers_wrongly() -> None:
    """Entry 42 as it hurts: status good, metrics good, words of somebody else. And whoever hits those blocks inherits them."""
    pair = Pair(prefill={"num_blocks": 33, "max_model_len": 512})
    params = pair.prefill("a")
    pair.run()
    pair.submit(pair.p, request("squatter", 512 - 8, 4))
    pair.run(lambda: "squatter" in pair.p.finish)
    pair.decode("a", params)
    pair.run(lambda: "a-d" in pair.d.finish)
    assert pair.d.finish["a-d"] is FinishReason.LENGTH and len(pair.d.tokens["a-d"]) == 8
    assert pair.d.tokens["a-d"] != answer("a")
    assert not any(pair.d.counters.values())
    pair.submit(pair.d, replace(decode_leg("a", None), request_id="heir"))
    pair.run(lambda: "heir" in pair.d.finish)
    assert pair.d.tokens["heir"] == pair.d.tokens["a-d"]
    pair.rest()
    assert pair.p.counters["nixl_num_notifications_after_expiry"] == 1


def test_the_older_timeout_has_no_heartbeats() -> None:
    pair = waiting_pair(kv={"abort_timeout_ns": 480 * MS})
    pair.run(limit_ns=pair.now_ns + 100 * MS)
    assert not pair.said and pair.p.used_blocks == 7
    pair.p.engine.connector.holds.extend(["a-p"], 10 * S)
    pair.d.up = False
    pair.run()
    assert 480 * MS < pair.now_ns < 481 * MS and pair.p.counters["nixl_num_kv_expired_reqs"] == 1


# Failures


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_failed_read(policy: str) -> None:
    pair = Pair(kv={"load_failure_policy": policy}, fate=lambda _write: Fate("fail", 3_000))
    pair.both("a")
    assert pair.d.counters["nixl_num_failed_transfers"] == 1
    if policy == "fail":
        assert pair.d.finish["a-d"] is FinishReason.ERROR and pair.d.errors["a-d"].status == 500
        assert events(pair.d, "a-d")[-1] is Event.FAIL and not pair.d.tokens["a-d"]
    else:
        assert pair.d.tokens["a-d"] == answer("a")
        assert sum(step.stats.prefill_tokens for step in pair.d.steps if step.stats) == 100
    assert not pair.consumed()
    pair.rest()
    assert pair.p.counters["nixl_num_kv_expired_reqs"] == 1


def test_only_what_did_not_arrive_is_recomputed() -> None:
    pair = Pair(kv={"load_failure_policy": "recompute"}, fate=lambda _write: Fate("stall"))
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: len(pair.d.mover) == 1, limit_ns=1 * MS)
    pair.tell(pair.d, MoveFailed(1, "two blocks", (5, 3)))
    pair.run(lambda: "a-d" in pair.d.finish)
    assert pair.d.tokens["a-d"] == answer("a")
    assert sum(step.stats.prefill_tokens for step in pair.d.steps if step.stats) == 100 - 3 * 16
    pair.rest()


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("what", ["hash", "engine", "nobody"])
def test_a_failed_handshake(policy: str, what: str) -> None:
    hashes = {"compatibility_hash": "other"} if what == "hash" else {}
    pair = Pair(kv={"load_failure_policy": policy}, decode_kv=hashes)
    params = dict(pair.prefill("a") or {})
    if what == "engine":
        params["remote_engine_id"] = "the-one-before"
    if what == "nobody":
        params["remote_port"] = 9
    pair.decode("a", params)
    pair.run(lambda: "a-d" in pair.d.finish)
    assert (pair.d.finish["a-d"] is FinishReason.ERROR) == (policy == "fail")
    assert policy == "fail" or pair.d.tokens["a-d"] == answer("a")
    assert pair.d.counters["nixl_num_failed_transfers"] >= 1 and not pair.d.counters["nixl_num_failed_notifications"]
    assert any("handshake_failed" in line for line in pair.d.engine.take_warnings())
    pair.rest()


def test_another_hash_is_let_through_on_demand() -> None:
    pair = Pair(decode_kv={"compatibility_hash": "other", "enforce_handshake_compat": False})
    pair.both("a")
    assert pair.d.tokens["a-d"] == answer("a")
    pair.rest()


@pytest.mark.parametrize("push", [False, True])
def test_ranks_that_do_not_divide_one_another_fail_the_handshake(push: bool) -> None:
    connector = {"connector": "NixlPushConnector" if push else "NixlConnector"}
    pair = Pair(kv=connector, prefill_kv={"tp_size": 3}, decode_kv={"tp_size": 2})
    pair.both("a")
    assert pair.d.finish["a-d"] is FinishReason.ERROR and pair.d.counters["nixl_num_failed_transfers"] == 1
    assert any("Remote tensor parallel size 3 is not divisible" in line for line in pair.d.engine.take_warnings())


def test_a_handshake_happens_once_for_each_engine() -> None:
    pair = Pair()
    for name in "abc":
        pair.both(name)
    assert len([ask for _name, ask in pair.asked if isinstance(ask, AskHandshake)]) == 1
    pair.rest()


def test_a_notification_that_cannot_be_sent_counts_twice() -> None:
    pair = Pair()
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: len(pair.d.mover) == 1)
    pair.p.up = False
    pair.run(lambda: "a-d" in pair.d.finish)
    pair.run()
    assert pair.d.tokens["a-d"] == answer("a")
    assert pair.d.counters["nixl_num_failed_notifications"] == 1 == pair.d.counters["nixl_num_failed_transfers"]


def test_fewer_remote_blocks_than_the_prompt_needs_is_a_failed_transfer() -> None:
    pair = Pair()
    params = dict(pair.prefill("a") or {})
    params["remote_block_ids"] = [params["remote_block_ids"][0][:2]]
    pair.decode("a", params)
    pair.run(lambda: "a-d" in pair.d.finish)
    assert pair.d.finish["a-d"] is FinishReason.ERROR
    pair.rest()


def test_an_engine_that_dies_forgets_everything() -> None:
    pair = Pair()
    for name in "ab":
        pair.decode(name, pair.prefill(name))
    pair.run(lambda: len(pair.d.mover) == 2)
    pair.abort(pair.d, "b-d")
    pair.d.engine.kill(pair.now_ns)
    pair.d.engine.check_integrity()
    assert pair.d.used_blocks == 0 and not pair.d.engine.take_outgoing()
    pair.run()
    assert pair.d.errors["a-d"].status == 500 and pair.p.counters["nixl_num_kv_expired_reqs"] == 2


def test_a_report_about_nothing_is_ignored() -> None:
    pair = Pair()
    for report in (MoveDone(7), MoveFailed(7, "x"), Arrived(Pushed("x")), Arrived(Heartbeat(("x",)))):
        pair.tell(pair.d, report)
    pair.rest()
    assert not any(pair.d.counters.values())


# n > 1, tensor parallelism


def children(leg: Any, count: int) -> list[Any]:
    return [replace(leg, request_id=f"{at}_{leg.request_id}", parent_id=leg.request_id) for at in range(count)]


def test_n_children_leak_all_holds_but_one_until_they_expire() -> None:
    """vLLM #43509: the prefill holds for each child, and the router learns of the last one."""
    pair = Pair()
    pair.submit(pair.p, *children(prefill_leg("a"), 3))
    pair.run(lambda: len(pair.p.finish) == 3)
    assert pair.p.engine.outstanding()["holds"] == 3
    pair.submit(pair.d, *children(decode_leg("a", pair.p.params["2_a-p"]), 2))
    pair.run(lambda: len(pair.d.finish) == 2)
    assert [pair.d.tokens[f"{at}_a-d"] for at in range(2)] == [answer("a")] * 2
    pair.rest()
    assert pair.p.counters["nixl_num_kv_expired_reqs"] == 2
    assert pair.p.counters["nixl_num_notifications_after_expiry"] == 1


def test_a_hold_waits_for_all_its_consumers() -> None:
    pair = Pair(decode_kv={"tp_size": 2})
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: "a-d" in pair.d.finish)
    pair.run(lambda: pair.p.used_blocks == 0)
    assert pair.consumed() == [Consumed("a-p", 2)] * 2
    pair.rest()
    assert not pair.p.counters["nixl_num_notifications_after_expiry"]


def test_one_of_two_consumers_is_not_enough() -> None:
    pair = Pair()
    pair.prefill("a")
    pair.tell(pair.p, Arrived(Consumed("a-p", 2)))
    assert pair.p.used_blocks == 7
    pair.tell(pair.p, Arrived(Consumed("a-p", 2)))
    assert pair.p.used_blocks == 0


def test_a_preemption_after_a_load_recomputes_here() -> None:
    """vLLM #18631: the connector is asked once for each request."""
    pair = Pair(decode={"num_blocks": 17, "max_model_len": 256})
    pair.submit(pair.d, request("other", 100, 60))
    pair.decode("a", pair.prefill("a"), max_tokens=100)
    pair.run(lambda: "a-d" in pair.d.finish)
    assert Event.PREEMPT in events(pair.d, "a-d")
    assert pair.d.tokens["a-d"] == answer("a", 100)
    assert len([ask for _name, ask in pair.asked if isinstance(ask, StartRead)]) == 1
    pair.rest()


# Push


def push_pair(**more: Any) -> Pair:
    return Pair(kv={"connector": "NixlPushConnector", **more.pop("kv", {})}, **more)


def test_push() -> None:
    pair = push_pair()
    params = pair.prefill("a")
    assert params is not None and params["transfer_mode"] == "push"
    pair.decode("a", params)
    pair.run(lambda: "a-d" in pair.d.finish)
    assert pair.d.tokens["a-d"] == answer("a")
    said = [notification for _sender, notification in pair.said if not isinstance(notification, Heartbeat)]
    assert isinstance(said[0], Registration) and said[1:] == [Pushed("a-d")]
    write = next(ask for name, ask in pair.asked if isinstance(ask, StartWrite) and name == "p")
    assert len(write.local_blocks) == len(write.remote_blocks) == 7
    pair.rest()
    assert not any(pair.p.counters.values()) and dict(pair.p.engine.take_observations())["nixl_num_descriptors"] == 7 * 32


def test_a_registration_may_come_before_the_prefill_has_finished() -> None:
    pair = push_pair(pacing=lambda: StepPacing(10_000, 100, 0))
    pair.submit(pair.p, replace(prefill_leg("a"), request_id="cmpl-1-0-aaaaaaaa"))
    early = {"do_remote_prefill": True, "remote_engine_id": "engine-p", "remote_host": "p", "remote_port": 5600}
    early |= {"remote_request_id": "cmpl-1-0-00000000", "tp_size": 1}
    pair.submit(pair.d, replace(decode_leg("a", early), request_id="cmpl-1-0-bbbbbbbb"))
    pair.run(lambda: "cmpl-1-0-bbbbbbbb" in pair.d.finish)
    assert pair.d.tokens["cmpl-1-0-bbbbbbbb"] == answer("a")
    pair.rest()


def test_a_write_that_fails_leaves_the_decode_waiting() -> None:
    """vLLM #50754: the failure stays with the prefill, whose lease runs out; the decode's stream says nothing."""
    pair = push_pair(fate=lambda _write: Fate("fail", 2_000))
    pair.decode("a", pair.prefill("a"))
    pair.run(limit_ns=200 * MS)
    assert pair.p.counters["nixl_num_failed_transfers"] == 1
    assert state(pair.d, "a-d") is State.TRANSFERRING
    pair.abort(pair.d, "a-d")
    pair.run(limit_ns=pair.now_ns + 100 * MS)
    assert pair.p.used_blocks == 0 and pair.p.counters["nixl_num_kv_expired_reqs"] == 1
    assert pair.d.used_blocks == 7 and pair.d.engine.outstanding()["orphaned_loads"] == 1


def test_a_decode_that_leaves_during_a_push_keeps_its_blocks_until_the_write_has_landed() -> None:
    pair = push_pair()
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: len(pair.p.mover) == 1)
    pair.abort(pair.d, "a-d")
    assert pair.d.used_blocks == 7
    pair.rest()


def test_a_full_cache_hit_under_push_tells_nobody() -> None:
    pair = push_pair()
    pair.both("a", 97)
    params = pair.prefill("b", prompt=97)
    pair.submit(pair.d, replace(decode_leg("a", params, 97), request_id="b-d"))
    pair.run(lambda: "b-d" in pair.d.finish)
    assert pair.d.tokens["b-d"] == answer("a")
    pair.rest()
    assert pair.p.counters["nixl_num_kv_expired_reqs"] == 1


def test_a_lease_does_not_run_out_under_a_write() -> None:
    pair = push_pair(fate=lambda _write: Fate("stall"))
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: len(pair.p.mover) == 1)
    pair.abort(pair.d, "a-d")
    pair.run(limit_ns=200 * MS)
    assert pair.p.used_blocks == 7
    pair.tell(pair.p, MoveFailed(1, "at last"))
    pair.run(limit_ns=201 * MS)
    assert pair.p.used_blocks == 0


# Both directions


def two_turns(threshold: int = 64, wait_ns: int = 0, **kv: Any) -> Pair:
    """A first turn, then a longer prompt whose beginning the decode has."""
    pair = Pair(
        kv={"bidirectional_kv_xfer": True, "kv_recompute_threshold": threshold, **kv},
        prefill={"num_blocks": 40, "max_model_len": 512},
    )
    pair.both("a", 100, 40)
    params = pair.d.params["a-d"]
    assert params is not None and params["do_remote_decode"] and not params["do_remote_prefill"]
    assert params["remote_num_tokens"] == 139 and params["remote_blocks_expiry_time"] is not None
    pair.run(limit_ns=pair.now_ns + wait_ns)
    for filler in ("x", "y"):  # the prefill forgets the first turn
        pair.submit(pair.p, request(filler, 400, 2))
    pair.run(lambda: {"x", "y"} <= pair.p.finish.keys())
    longer = request("a", 100).prompt_token_ids + tuple(answer("a", 40)) + tuple(range(60))
    pair.submit(pair.p, replace(prefill_leg("a", kv_transfer=params), prompt_token_ids=longer, request_id="b-p"))
    pair.run(lambda: "b-p" in pair.p.finish)
    return pair


def test_the_next_turn_reads_from_the_decode() -> None:
    pair = two_turns()
    reads = [(name, ask) for name, ask in pair.asked if isinstance(ask, StartRead)]
    assert [name for name, _ask in reads] == ["d", "p"]
    assert pair.p.params["b-p"] is not None
    assert Consumed("a-d", 1) in pair.consumed()
    pair.rest()


def test_too_few_tokens_are_recomputed_and_the_decode_is_told() -> None:
    pair = two_turns(threshold=200)
    assert [name for name, ask in pair.asked if isinstance(ask, StartRead)] == ["d"]
    assert Consumed("a-d", 1) in pair.consumed()
    pair.rest()


def test_what_is_about_to_expire_is_not_read() -> None:
    pair = two_turns(
        decoder_kv_blocks_ttl_ns=2 * MS, expiry_margin_ns=1 * MS, wait_ns=MS + MS // 2, load_failure_policy="recompute"
    )
    assert pair.p.counters["nixl_num_kv_expired_reqs"] == 1
    assert [name for name, ask in pair.asked if isinstance(ask, StartRead)] == ["d"]
    assert pair.p.params["b-p"] is not None
    pair.rest()


# What earlier releases did


def leaving_pair(**more: Any) -> Pair:
    """A client leaves while its decode reads; a bystander takes what is free and computes its prompt in many small steps."""
    pair = Pair(decode={"num_blocks": 12, "max_model_len": 128, "max_num_batched_tokens": 4}, **more)
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: len(pair.d.mover) == 1)
    pair.submit(pair.d, request("bystander", 120, 8, ignore_eos=True))
    pair.abort(pair.d, "a-d")
    pair.run()
    return pair


def test_blocks_freed_on_abort_are_written_into_for_somebody_else() -> None:
    """vLLM #32255 as it was; nothing in the metrics."""
    pair = leaving_pair(decode_kv={"free_on_abort": True})
    assert len(pair.d.tokens["bystander"]) == 8 and pair.d.tokens["bystander"] != answer("bystander")
    assert pair.d.finish["bystander"] is FinishReason.LENGTH and not any(pair.d.counters.values())
    pair.rest()


def test_kept_until_the_transfer_ends_they_are_nobody_s() -> None:
    pair = leaving_pair()
    assert pair.d.tokens["bystander"] == answer("bystander")
    pair.rest()


def test_a_transfer_into_freed_blocks_that_fails_harms_nobody() -> None:
    pair = leaving_pair(decode_kv={"free_on_abort": True}, fate=lambda _write: Fate("fail", 20_000))
    assert pair.d.tokens["bystander"] == answer("bystander")
    pair.rest()


def test_an_end_that_is_not_noticed_keeps_the_blocks_for_good() -> None:
    """vllm-ascend #16662."""
    pair = Pair(decode_kv={"forget_on_abort": True})
    pair.decode("a", pair.prefill("a"))
    pair.run(lambda: len(pair.d.mover) == 1)
    pair.abort(pair.d, "a-d")
    pair.run()
    assert pair.d.used_blocks == 7 and pair.p.used_blocks == 0
    pair.both("b")
    assert pair.d.tokens["b-d"] == answer("b")


def test_an_ordered_reaper_waits_for_the_oldest() -> None:
    """vLLM #58222: the expiry counter moves in bursts."""
    pair = Pair(prefill_kv={"ordered_reaper": True})
    pair.prefill("old")
    pair.prefill("new")
    started_ns = pair.now_ns
    pair.run(limit_ns=started_ns + 29 * MS)
    pair.tell(pair.p, Arrived(Heartbeat(("old-p",))))
    pair.run(limit_ns=started_ns + 48 * MS)
    assert pair.p.engine.outstanding()["holds"] == 2 and not pair.p.counters["nixl_num_kv_expired_reqs"]
    pair.run()
    assert pair.now_ns == started_ns + 49 * MS and pair.p.counters["nixl_num_kv_expired_reqs"] == 2
    pair.rest()


# Configuration


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ({"engine_id": ""}, "engine_id"),
        ({"connector": "LMCacheConnectorV1"}, "connector is 'LMCacheConnectorV1': must be one of NixlConnector"),
        ({"role": "both"}, "role is 'both'"),
        ({"load_failure_policy": "retry"}, "load_failure_policy"),
        ({"lease_ns": 0}, "lease_ns is 0: must be at least 1"),
        ({"side_channel_port": 0}, "side_channel_port"),
        ({"connector": "NixlPushConnector", "bidirectional_kv_xfer": True}, "bidirectional_kv_xfer"),
    ],
)
def test_a_bad_configuration_names_the_field(told: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        KvTransferConfig(**{"engine_id": "e", **told})


def test_times_scale_together() -> None:
    config = KvTransferConfig("e").scaled(10)
    assert (config.lease_ns, config.beat_ns, config.extension_ns) == (3 * S, S // 2, 2 * S)
    assert config.decoder_kv_blocks_ttl_ns == 48 * S and config.expiry_margin_ns == S // 2 and config.abort_timeout_ns is None


def test_a_host_tier_beside_a_connector_is_refused() -> None:
    with pytest.raises(ValueError, match="host_blocks"):
        ConnectorEngine(VllmEngineConfig(host_blocks=10), StepPacing(1, 0, 0), KvTransferConfig("e"))


def test_the_hash_covers_every_fact() -> None:
    facts: dict[str, Any] = {"model": "m", "version": "1", "block_size": 16, "kv_bytes_per_token": 4, "mode": "pull"}
    changes: dict[str, Any] = {"model": "n", "version": "2", "block_size": 32, "kv_bytes_per_token": 5, "mode": "push"}
    hashes = {compatibility_hash(**facts)} | {compatibility_hash(**{**facts, name: changes[name]}) for name in facts}
    assert len(hashes) == 6


def test_parameters_that_are_complete() -> None:
    remote = remote_of(
        {"remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h", "remote_port": 1, "remote_block_ids": [[3, 4]]}
    )
    assert remote is not None and remote.blocks == (3, 4) and remote.peer.tp_size == 1 and remote.tokens is None


@pytest.mark.parametrize("length", [1, 2, 40, None])
def test_foreign_words_are_as_many_and_others(length: int | None) -> None:
    true = OracleSource(77, VOCABULARY, length)
    foreign = ForeignSource(true)
    count = length or 50
    whole = list(foreign.token_ids(0, count + 5))[:count]
    assert len(whole) == count and (length is None or list(foreign.token_ids(0, count + 5)) == whole)
    assert whole == [foreign.token_ids(at, 1)[0] for at in range(count)]
    assert count == 1 or whole != list(true.token_ids(0, count))


def test_timing_of_a_load() -> None:
    """Submitted, handshake there and back, the read, one step for the last prompt token."""
    pair = Pair()
    params = pair.prefill("a")
    started_ns = pair.now_ns
    pair.decode("a", params, max_tokens=1)
    pair.run(lambda: "a-d" in pair.d.finish)
    assert pair.now_ns - started_ns == 2 * LATENCY_NS + READ_NS + 1_000
    pair.rest()
