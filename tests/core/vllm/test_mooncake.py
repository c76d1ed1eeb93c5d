"""Mooncake between two engines: every path of the connector of vLLM 0.33.0 (`mooncake_connector.py`)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.core.rig import request
from tests.core.vllm.kv_rig import NULLS, READ_NS, Node, Pair, answer, decode_leg, prefill_leg

from windtunnel.core.lifecycle import State
from windtunnel.core.outputs import FinishReason
from windtunnel.core.request import EngineRequest
from windtunnel.core.transfer.backends import Fate
from windtunnel.core.units import MS
from windtunnel.core.vllm.connector.config import MOONCAKE, KvTransferConfig
from windtunnel.core.vllm.connector.engine import MAX_TURNS
from windtunnel.core.vllm.connector.mooncake import sender as sender_module
from windtunnel.core.vllm.connector.mooncake.connector import MooncakeConnector
from windtunnel.core.vllm.connector.mooncake.pulls import MAX_PULLS
from windtunnel.core.vllm.connector.params import ID_LIMIT_BYTES
from windtunnel.core.vllm.connector.seam import Arrived, AskHandshake, Peer, Pull, Pulled, Pulls, StartWrite

PATIENCE_NS = 50 * MS
MARGIN_NS = 5 * MS
LATE_NS = 100 * PATIENCE_NS
"""A clock that has run for long."""
KV: dict[str, Any] = {"connector": MOONCAKE, "abort_timeout_ns": PATIENCE_NS, "pull_margin_ns": MARGIN_NS}
PRODUCER, CONSUMER = {"role": "kv_producer"}, {"role": "kv_consumer"}


def to_p(name: str) -> Mapping[str, Any]:
    return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{name}"}


def to_d(name: str, **more: Any) -> Mapping[str, Any]:
    told = {"remote_bootstrap_addr": "http://p:5600", "remote_engine_id": "engine-p", "transfer_id": f"xfer-{name}"}
    return {"do_remote_decode": False, "do_remote_prefill": True, **told, **more}


class Mooncake(Pair):
    """A prefill, a decode, and a router that makes the transfer's id up."""

    def __init__(self, **more: Any) -> None:
        kv = {**KV, **more.pop("kv", {})}
        producer, consumer = PRODUCER | more.pop("prefill_kv", {}), CONSUMER | more.pop("decode_kv", {})
        super().__init__(kv=kv, prefill_kv=producer, decode_kv=consumer, **more)

    def ask_p(self, name: str, prompt: int = 100, **more: Any) -> None:
        self.submit(self.p, prefill_leg(name, prompt, **{"kv_transfer": to_p(name), **more}))

    def ask_d(self, name: str, prompt: int = 100, **more: Any) -> None:
        self.submit(self.d, decode_leg(name, to_d(name), prompt, **more))

    def done(self, *names: str) -> None:
        self.run(lambda: all(f"{name}-d" in self.d.finish for name in names))

    def words(self, kind: type) -> list[Any]:
        return [notification for _sender, notification in self.said if isinstance(notification, kind)]

    def writes(self) -> list[StartWrite]:
        return [ask for _name, ask in self.asked if isinstance(ask, StartWrite)]


def mooncake_of(node: Node) -> MooncakeConnector:
    connector = node.engine.connector
    assert isinstance(connector, MooncakeConnector)
    return connector


def children(leg: EngineRequest, *numbers: int) -> list[EngineRequest]:
    return [replace(leg, request_id=f"{number}_{leg.request_id}") for number in numbers]


SLOW = {"max_num_batched_tokens": 40}
"""A prefill whose long prompt takes many steps."""


def waiting(pair: Mooncake, name: str) -> bool:
    return any(view.request_id == f"{name}-d" and view.state is State.TRANSFERRING for view in pair.d.engine.live())


@pytest.mark.parametrize("first", ["prefill", "decode", "both"])
def test_the_whole_way_whichever_leg_comes_first(first: str) -> None:
    pair = Mooncake()
    if first != "decode":
        pair.ask_p("a")
    if first == "prefill":
        pair.run(lambda: "a-p" in pair.p.finish)
        assert pair.p.used_blocks == 7 and pair.p.params["a-p"] is None
    pair.ask_d("a")
    if first == "decode":
        pair.run(lambda: bool(pair.p.engine.outstanding()["pulls"]))
        assert waiting(pair, "a") and pair.p.used_blocks == 0
        pair.ask_p("a")
    pair.done("a")
    assert pair.d.tokens["a-d"] == answer("a") and pair.d.finish["a-d"] is FinishReason.LENGTH
    pair.rest()
    (pull,) = pair.words(Pulls)
    assert [one.transfer_id for one in pull.pulls] == ["xfer-a"] and len(pull.pulls[0].blocks) == 7
    (said,) = pair.words(Pulled)
    assert (said.request_id, said.reason, said.last) == ("a-d", None, True)
    assert not any(pair.p.counters.values()) and not any(pair.d.counters.values())
    assert pair.now_ns < PATIENCE_NS, "somebody had to wait for a time-out"


def test_what_the_numbers_say() -> None:
    """The prefill observes, and the whole prompt counts as loaded although its last token is computed again."""
    pair = Mooncake()
    pair.ask_p("a")
    pair.ask_d("a")
    pair.done("a")
    assert sum(step.stats.external_hits for step in pair.d.steps if step.stats) == 100
    assert sum(step.stats.prefill_tokens for step in pair.d.steps if step.stats) == 1
    seen = dict(pair.p.engine.take_observations())
    assert seen["mooncake_bytes_transferred"] == 7 * 16 and seen["mooncake_num_descriptors"] == 32
    assert seen["mooncake_xfer_time_seconds"] * 1e9 >= READ_NS
    assert pair.d.engine.take_observations() == []
    assert pair.p.stats is not None and set(pair.p.stats.extra) >= {
        "mooncake_num_failed_transfers", "mooncake_num_failed_recvs", "mooncake_num_kv_expired_reqs"
    }  # fmt: skip


def test_blocks_that_are_scattered_need_more_descriptors() -> None:
    pair = Mooncake()
    ask = StartWrite(1, "a", Peer("d", "d", 1), "b", (1, 2, 3, 7, 8), (4, 5, 9, 10, 11), 0)
    assert mooncake_of(pair.p).sender.descriptors(ask) == 3 * 32


def test_the_bootstrap_server_is_asked_once() -> None:
    pair = Mooncake()
    for name in ("a", "b"):
        pair.ask_p(name)
        pair.ask_d(name)
        pair.done(name)
    assert sum(isinstance(ask, AskHandshake) for _name, ask in pair.asked) == 1
    pair.rest()


def test_pulls_of_one_step_go_together() -> None:
    pair = Mooncake()
    pair.submit(pair.d, decode_leg("a", to_d("a"), 40), decode_leg("b", to_d("b"), 40))
    pair.ask_p("b", 40)
    pair.done("b")
    assert waiting(pair, "a")
    pair.ask_p("a", 40)
    pair.done("a")
    (pulls,) = pair.words(Pulls)
    assert [one.request_id for one in pulls.pulls] == ["a-d", "b-d"]
    assert [(said.request_id, said.last) for said in pair.words(Pulled)] == [("b-d", False), ("a-d", True)]
    pair.rest()


def test_what_the_decode_has_cached_is_not_written() -> None:
    pair = Mooncake()
    for _ in range(2):
        pair.submit(pair.p, *children(prefill_leg("a", kv_transfer=to_p("a")), pair.now_ns))
        pair.submit(pair.d, *children(decode_leg("a", to_d("a")), pair.now_ns))
        pair.run()
    first, second = pair.writes()
    assert (len(first.local_blocks), len(second.local_blocks)) == (7, 1)
    assert second.local_blocks != first.local_blocks[:1], "the prompt's first block is cached on both sides"
    pair.rest()


# Clients that leave


def test_a_decode_that_leaves_before_it_is_scheduled_lets_go_of_the_prefills_blocks() -> None:
    pair = Mooncake()
    pair.ask_p("a")
    pair.run(lambda: "a-p" in pair.p.finish)
    assert pair.p.used_blocks == 7
    pair.d.engine.submit([decode_leg("a", to_d("a"))], pair.now_ns)
    pair.abort(pair.d, "a-d")
    pair.run()
    assert [one.pulls for one in pair.words(Pulls)] == [(Pull("a-d", "xfer-a", ()),)]
    assert pair.writes() == []
    pair.rest()
    assert pair.now_ns < PATIENCE_NS


def test_refused_twice_under_one_id() -> None:
    """Whoever was forgotten among the pulls would be overdue for ever, and the engine would look at nothing else."""
    pair = Mooncake()
    for _ in range(2):
        assert pair.d.engine.release_remote(to_d("a"), pair.now_ns)
        pair.pump(pair.d)
        pair.run(lambda: bool(pair.words(Pulls)))
    pulls = mooncake_of(pair.d).pulls
    assert len(pulls) == 2
    pair.run(lambda: not pulls)
    assert not pulls._asked
    pair.rest()


def test_an_id_that_is_too_long_for_a_pull_fails_alone() -> None:
    pair, long = Mooncake(), "x" * 1024
    pair.ask_p("a")
    legs = [decode_leg("a", to_d("a")), decode_leg(long, to_d("b"))]
    pair.submit(pair.d, *legs)
    pair.done("a", long)
    assert pair.d.finish["a-d"] is FinishReason.LENGTH and pair.d.finish[f"{long}-d"] is FinishReason.ERROR
    pair.rest()


def test_a_decode_that_is_refused_lets_go_too() -> None:
    pair = Mooncake()
    pair.ask_p("a")
    pair.run(lambda: "a-p" in pair.p.finish)
    assert pair.d.engine.release_remote(to_d("a"), pair.now_ns)
    assert not pair.d.engine.release_remote({**to_d("a"), "transfer_id": 3}, pair.now_ns)
    pair.pump(pair.d)
    pair.rest()
    assert pair.now_ns < PATIENCE_NS and not any(pair.p.counters.values())


def test_the_same_refused_twice_is_asked_for_twice_and_both_are_answered() -> None:
    pair = Mooncake()
    for name in "aa":
        assert pair.d.engine.release_remote(to_d(name), pair.now_ns)
        pair.pump(pair.d)
    pair.rest()
    assert len({pull.request_id for pulls in pair.words(Pulls) for pull in pulls.pulls}) == 2
    assert [said.reason for said in pair.words(Pulled)] == ["Timeout waiting for P side ready."] * 2


def test_an_id_that_is_too_long_to_be_sent_fails_alone() -> None:
    pair = Mooncake()
    pair.now_ns = LATE_NS
    long = "a" * ID_LIMIT_BYTES
    pair.submit(pair.d, decode_leg(long, to_d("a"), 40), decode_leg("b", to_d("b"), 40))
    pair.run(lambda: f"{long}-d" in pair.d.finish)
    assert waiting(pair, "b")
    pair.ask_p("b", 40)
    pair.done("b")
    assert pair.d.finish[f"{long}-d"] is FinishReason.ERROR and pair.d.tokens["b-d"] == answer("b")
    pair.rest()


def test_who_gets_a_place_in_the_end_has_all_the_time_that_there_is() -> None:
    """The place is that of a pull which only lets go of blocks: nothing is written, so it is free at once."""
    pair = Mooncake(kv={"num_workers": 1})
    pair.now_ns = LATE_NS
    assert pair.d.engine.release_remote(to_d("x"), pair.now_ns)
    pair.pump(pair.d)
    for name in ("y", "b"):
        pair.ask_d(name)
        pair.run(lambda name=name: waiting(pair, name))
    pair.run(lambda: pair.p.engine.outstanding()["pulls"] == 3)
    pair.ask_p("x")
    pair.run(lambda: pair.p.engine.outstanding()["pulls"] == 2)
    pair.ask_p("b")
    pair.done("b")
    assert pair.d.tokens["b-d"] == answer("b")


def test_more_pulls_than_a_message_takes_go_in_two() -> None:
    pair = Mooncake()
    for number in range(MAX_PULLS + 1):
        assert pair.d.engine.release_remote(to_d(str(number)), pair.now_ns)
    pair.pump(pair.d)
    pair.run(lambda: bool(pair.words(Pulls)))
    assert [len(pulls.pulls) for pulls in pair.words(Pulls)] == [MAX_PULLS, 1]


def test_a_decode_that_leaves_while_it_is_written_to_keeps_its_blocks_until_the_write_has_ended() -> None:
    pair = Mooncake()
    pair.ask_p("a")
    pair.ask_d("a")
    pair.run(lambda: bool(pair.writes()))
    pair.abort(pair.d, "a-d")
    assert pair.d.used_blocks == 7 and pair.d.engine.outstanding()["orphaned_loads"] == 1
    pair.rest()
    assert not any(pair.p.counters.values()) and pair.now_ns < PATIENCE_NS


def test_when_both_legs_leave_while_the_decode_waits_its_blocks_stay_until_the_prefill_s_patience_is_over() -> None:
    """Nobody tells the decode: `reqs_not_processed` drops the entry, and its event is never set."""
    pair = Mooncake(prefill=SLOW)
    pair.ask_p("a", 1000)
    pair.ask_d("a", 1000)
    pair.run(lambda: bool(pair.p.engine.outstanding()["pulls"]))
    pair.abort(pair.p, "a-p")
    pair.abort(pair.d, "a-d")
    pair.run(limit_ns=PATIENCE_NS - 1)
    assert pair.p.used_blocks == 0
    assert pair.d.used_blocks == 63
    pair.rest()
    assert pair.d.counters["mooncake_num_failed_recvs"] == 1
    assert [said.reason for said in pair.words(Pulled)] == ["Timeout waiting for P side ready."]


def test_a_prefill_that_leaves_alone_fails_the_decode_after_that_time() -> None:
    pair = Mooncake(prefill=SLOW)
    pair.ask_p("a", 1000)
    pair.ask_d("a", 1000)
    pair.run(lambda: bool(pair.p.engine.outstanding()["pulls"]))
    pair.abort(pair.p, "a-p")
    pair.done("a")
    assert pair.d.finish["a-d"] is FinishReason.ERROR and pair.now_ns >= PATIENCE_NS
    pair.rest()


def test_a_prefill_that_ends_by_a_stop_is_not_held() -> None:
    pair = Mooncake()
    pair.ask_p("a", max_tokens=50, stop_token_ids=frozenset({answer("a", 1)[0]}))
    pair.run(lambda: "a-p" in pair.p.finish)
    assert pair.p.finish["a-p"] is FinishReason.STOP and pair.p.used_blocks == 0
    pair.rest()


# Time


def test_blocks_that_nobody_pulls_are_given_back_in_the_end_and_a_late_pull_fails() -> None:
    pair = Mooncake(kv={"load_failure_policy": "fail"})
    pair.ask_p("a")
    pair.run(limit_ns=PATIENCE_NS // 2)
    assert pair.p.used_blocks == 7
    pair.run(limit_ns=2 * PATIENCE_NS)
    assert pair.p.used_blocks == 0 and pair.p.counters["mooncake_num_kv_expired_reqs"] == 1
    pair.ask_d("a")
    pair.done("a")
    assert pair.d.finish["a-d"] is FinishReason.ERROR, "a late pull got somebody's blocks"
    assert pair.now_ns >= 3 * PATIENCE_NS
    pair.rest()


def test_a_write_under_way_keeps_blocks_from_expiring() -> None:
    pair = Mooncake(fate=lambda _write: Fate("fail", 3 * PATIENCE_NS))
    pair.ask_p("a")
    pair.ask_d("a")
    pair.run(limit_ns=pair.now_ns + 2 * PATIENCE_NS - MARGIN_NS)
    assert pair.p.used_blocks == 7
    pair.rest()
    assert pair.p.counters["mooncake_num_failed_transfers"] == pair.p.counters["mooncake_num_kv_expired_reqs"] == 1


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_write_that_fails(policy: str) -> None:
    """The decode fails or computes it; the prefill keeps its blocks until their time is over."""
    pair = Mooncake(kv={"load_failure_policy": policy}, fate=lambda _write: Fate("fail", 1000))
    pair.ask_p("a")
    pair.ask_d("a")
    pair.done("a")
    assert (pair.d.finish["a-d"] is FinishReason.ERROR) == (policy == "fail")
    if policy == "recompute":
        assert pair.d.tokens["a-d"] == answer("a")
    assert pair.p.used_blocks == 7 and pair.now_ns < PATIENCE_NS
    pair.rest()
    assert pair.p.counters["mooncake_num_kv_expired_reqs"] == 1


def test_a_prefill_that_dies_is_not_noticed_until_the_decode_s_own_patience_is_over() -> None:
    """A DEALER socket reconnects in silence: `RCVTIMEO` is the abort time-out and a minute."""
    pair = Mooncake(prefill=SLOW)
    pair.ask_p("a", 1000)
    pair.ask_d("a", 1000)
    pair.run(lambda: bool(pair.p.engine.outstanding()["pulls"]))
    pair.p.up = False
    pair.done("a")
    assert pair.d.finish["a-d"] is FinishReason.ERROR
    assert PATIENCE_NS + MARGIN_NS <= pair.now_ns < PATIENCE_NS + 2 * MARGIN_NS
    pair.run()
    assert pair.d.used_blocks == 0


def test_twice_as_many_pulls_as_workers_fill_a_prefill_and_a_good_one_waits_behind_them() -> None:
    """Those that wait for a prefill that will never come have a place, too."""
    pair = Mooncake(kv={"num_workers": 1}, decode={"num_blocks": 400})
    for name in ("x", "y"):
        pair.ask_d(name)
        pair.run(lambda: False, limit_ns=pair.now_ns + MS)
    pair.ask_p("a")
    pair.ask_d("a")
    pair.run(limit_ns=PATIENCE_NS // 2)
    assert waiting(pair, "a") and pair.p.used_blocks == 7
    pair.done("a")
    assert pair.d.tokens["a-d"] == answer("a") and pair.now_ns >= PATIENCE_NS
    pair.rest()


def test_a_place_that_a_refused_pull_gives_back_is_taken_at_once() -> None:
    """Whoever waits for it does not wait for what is held to run out."""
    pair = Mooncake(kv={"num_workers": 1}, prefill=SLOW | {"num_blocks": 400}, decode={"num_blocks": 400})
    for name in ("x", "y", "a"):
        pair.ask_d(name, 200)
        pair.run(lambda name=name: waiting(pair, name))
    pair.run(lambda: bool(mooncake_of(pair.p).sender._queue))
    pair.ask_p("x", 40)
    pair.run(lambda: "x-d" in pair.d.finish)
    pair.run(limit_ns=pair.now_ns + MS)
    assert pair.d.finish["x-d"] is FinishReason.ERROR and not mooncake_of(pair.p).sender._queue
    pair.ask_p("a", 200)
    pair.done("a")
    assert pair.now_ns < PATIENCE_NS
    pair.rest()


def test_what_waits_for_a_place_is_limited_by_its_size_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Mooncake(kv={"num_workers": 1}, decode={"num_blocks": 400})
    sender = mooncake_of(pair.p).sender
    for name in ("x", "y", "a"):
        pair.ask_d(name)
        pair.run(lambda name=name: waiting(pair, name))
    pair.run(lambda: bool(sender._queue))
    monkeypatch.setattr(sender_module, "MAX_QUEUED_BYTES", sender._queued_bytes + 300)
    pair.ask_d("b")
    pair.done("b")
    assert pair.d.finish["b-d"] is FinishReason.ERROR and pair.now_ns < PATIENCE_NS
    for name in ("x", "y", "a"):
        pair.ask_p(name)
    pair.done("x", "y", "a")
    assert not sender._queued_bytes and pair.d.tokens["a-d"] == answer("a")
    pair.rest()


# The bootstrap server, and bad parameters


@pytest.mark.parametrize(
    "told", [{"remote_engine_id": "another"}, {"remote_bootstrap_addr": "http://q:1"}, {"remote_bootstrap_addr": "p:5600"}]
)
def test_a_prefill_that_is_not_found_fails_the_request(told: dict[str, str]) -> None:
    pair = Mooncake()
    pair.submit(pair.d, decode_leg("a", to_d("a", **told)))
    pair.done("a")
    assert pair.d.finish["a-d"] is FinishReason.ERROR and pair.now_ns < PATIENCE_NS
    assert pair.d.counters["mooncake_num_failed_recvs"] == 1
    pair.rest()


def test_a_false_address_fails_its_own_request_alone() -> None:
    """In the same turn, with a good engine's id: nobody answers there."""
    pair = Mooncake()
    pair.ask_p("b", 40)
    false = decode_leg("a", to_d("a", remote_bootstrap_addr="http://q:1"), 40)
    pair.submit(pair.d, false, decode_leg("b", to_d("b"), 40))
    pair.done("a", "b")
    assert pair.d.finish["a-d"] is FinishReason.ERROR and pair.d.tokens["b-d"] == answer("b")
    pair.rest()


@pytest.mark.parametrize("missing", ["transfer_id", "remote_engine_id", "remote_bootstrap_addr"])
def test_a_decode_without_whole_parameters_waits_for_ever(missing: str) -> None:
    """It counts the prompt as loaded elsewhere before it looks at the rest, and asks nobody."""
    pair = Mooncake()
    pair.submit(pair.d, decode_leg("a", {key: value for key, value in to_d("a").items() if key != missing}))
    pair.run()
    assert waiting(pair, "a") and pair.next_at() is None
    assert any("invalid KVTransferParams" in line for line in pair.d.engine.take_warnings())
    pair.abort(pair.d, "a-d")
    pair.run()
    assert pair.d.used_blocks == 7 and pair.d.engine.outstanding()["orphaned_loads"] == 1


def test_a_prefill_without_a_transfer_id_holds_nothing() -> None:
    pair = Mooncake()
    pair.ask_p("a", kv_transfer=NULLS)
    pair.run(lambda: "a-p" in pair.p.finish)
    assert pair.p.engine.take_warnings() == ["Missing transfer_id in kv_transfer_params from router!"]
    pair.rest()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_request_for_the_other_role_kills_the_engine(side: str) -> None:
    """`assert not self.is_kv_producer`, `assert not self.is_kv_consumer`."""
    pair = Mooncake()
    pair.ask_p("other", 40)
    pair.run()
    node = pair.p if side == "prefill" else pair.d
    leg = decode_leg("a", to_d("a")) if side == "prefill" else prefill_leg("a", kv_transfer=to_p("a"))
    pair.submit(node, request("b", 20, 50), leg)
    pair.run()
    assert node.engine.control.death is not None
    assert node.finish[leg.request_id] is FinishReason.ERROR and node.finish["b"] is FinishReason.ERROR
    assert node.used_blocks == 0


def test_an_engine_of_both_roles_takes_both() -> None:
    pair = Mooncake(prefill_kv={"role": "kv_both"})
    pair.ask_p("a")
    pair.submit(pair.p, decode_leg("a", to_d("a")))
    pair.run(lambda: "a-d" in pair.p.finish)
    assert pair.p.tokens["a-d"] == answer("a")
    pair.rest()


def test_patience_starts_again_with_every_answer() -> None:
    pair = Mooncake()
    pair.submit(pair.d, decode_leg("a", to_d("a"), 40), decode_leg("b", to_d("b"), 40))
    pair.run(limit_ns=PATIENCE_NS * 8 // 10)
    pair.ask_p("a", 40)
    pair.run(limit_ns=PATIENCE_NS * 15 // 10 - MARGIN_NS)
    assert "a-d" in pair.d.finish and waiting(pair, "b")
    pair.ask_p("b", 40)
    pair.done("b")
    assert pair.d.tokens["b-d"] == answer("b", 8)


def test_nobody_is_impatient_while_a_write_for_the_same_pulls_is_under_way() -> None:
    pair = Mooncake(kv={"pull_margin_ns": 9 * PATIENCE_NS}, fate=lambda _write: Fate("fail", 2 * PATIENCE_NS))
    pair.submit(pair.d, decode_leg("a", to_d("a"), 40), decode_leg("b", to_d("b"), 40))
    pair.ask_p("a", 40)
    pair.run(limit_ns=2 * PATIENCE_NS)
    assert waiting(pair, "a") and waiting(pair, "b")
    pair.done("a", "b")
    assert pair.now_ns > 3 * PATIENCE_NS


def test_what_waited_for_nothing_leaves_nothing_behind() -> None:
    pair = Mooncake()
    pair.ask_d("a")
    pair.rest()
    sender = mooncake_of(pair.p).sender
    assert not sender._transfers and not sender._batches


def test_a_pull_that_waited_for_an_aborted_prefill_is_not_served_by_another_one_with_its_id() -> None:
    """The event that it waits for went with the entry."""
    pair = Mooncake(prefill=SLOW)
    pair.ask_p("a", 1000)
    pair.ask_d("a", 1000)
    pair.run(lambda: bool(pair.p.engine.outstanding()["pulls"]))
    pair.abort(pair.p, "a-p")
    pair.submit(pair.p, *children(prefill_leg("a", 1000, kv_transfer=to_p("a")), 2))
    pair.done("a")
    assert pair.d.finish["a-d"] is FinishReason.ERROR and pair.writes() == []
    pair.rest()


# Caches of another shape


def test_blocks_of_another_size_are_refused_at_once() -> None:
    """Of another block size or model: whatever was written would be somebody else's KV. The prefill's wait for their time."""
    pair = Mooncake(decode={"block_size": 32})
    pair.ask_p("a")
    pair.ask_d("a")
    pair.done("a")
    assert pair.d.finish["a-d"] is FinishReason.ERROR and pair.now_ns < PATIENCE_NS and pair.writes() == []
    assert [said.reason for said in pair.words(Pulled)] == ["Mooncake KV region length mismatch: local=16, remote=32."]
    pair.rest()
    assert pair.p.counters["mooncake_num_kv_expired_reqs"] == 1


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 4), (4, 2), (2, 4)])
def test_ranks_that_divide_one_another_are_paired(prefill: int, decode: int) -> None:
    pair = Mooncake(prefill_kv={"tp_size": prefill}, decode_kv={"tp_size": decode})
    pair.ask_p("a")
    pair.ask_d("a")
    pair.done("a")
    assert pair.d.tokens["a-d"] == answer("a")
    pair.rest()


@pytest.mark.parametrize(("prefill", "decode"), [(2, 3), (3, 2), (4, 6)])
def test_ranks_that_do_not_fail_the_request(prefill: int, decode: int) -> None:
    pair = Mooncake(prefill_kv={"tp_size": prefill}, decode_kv={"tp_size": decode})
    pair.ask_p("a")
    pair.ask_d("a")
    pair.done("a")
    assert pair.d.finish["a-d"] is FinishReason.ERROR and pair.words(Pulls) == []
    assert any("is not divisible by" in line for line in pair.d.engine.take_warnings())
    pair.rest()


def test_a_pull_of_ranks_that_cannot_be_paired_is_refused_by_the_prefill_too() -> None:
    """A decode that did not look."""
    pair = Mooncake(prefill_kv={"tp_size": 2})
    pulls = Pulls(Peer("engine-d", "d", 5700, 3), (Pull("a-d", "xfer-a", (1,)), Pull("b-d", "xfer-b", ())), 16)
    pair.tell(pair.p, Arrived(pulls))
    reason = "Remote tensor parallel size 3 is not divisible by local tensor parallel size 2."
    assert pair.words(Pulled) == [Pulled("a-d", reason, last=False), Pulled("b-d", reason)]
    pair.rest()


# One id, several requests


def test_a_second_request_with_the_same_id_strands_the_first_one_s_blocks() -> None:
    """`n` above 1: the children share the parameters. The decode gets what it asks for; the prefill never gets all back."""
    pair = Mooncake(prefill={"enable_prefix_caching": False})
    pair.submit(pair.p, *children(prefill_leg("a", kv_transfer=to_p("a")), 0, 1))
    pair.run(lambda: len(pair.p.finish) == 2)
    pair.submit(pair.d, *children(decode_leg("a", to_d("a")), 0, 1))
    pair.run()
    assert all(pair.d.tokens[f"{child}_a-d"] == answer("a") for child in range(2))
    assert pair.p.engine.outstanding() == {"holds": 0, "loads": 0, "orphaned_loads": 0, "stranded": 1, "pulls": 0}
    assert pair.p.used_blocks == 7 and pair.d.used_blocks == 0


def test_a_sibling_that_is_aborted_strands_what_the_other_one_holds() -> None:
    pair = Mooncake(prefill=SLOW)
    pair.submit(pair.p, *children(prefill_leg("a", 30, kv_transfer=to_p("a")), 0))
    pair.submit(pair.p, *children(prefill_leg("b", 1000, kv_transfer=to_p("a")), 1))
    pair.run(lambda: "0_a-p" in pair.p.finish)
    pair.abort(pair.p, "1_b-p")
    pair.run()
    assert pair.p.engine.outstanding()["stranded"] == 1 and pair.p.used_blocks == 2


def test_who_waited_for_an_aborted_sibling_takes_nothing_along_when_its_patience_ends() -> None:
    """The id came back with a pull that found too few blocks, and what is held under it runs out on its own."""
    pair = Mooncake(prefill=SLOW | {"num_blocks": 400}, decode={"num_blocks": 400})
    pair.submit(pair.p, *children(prefill_leg("a", 800, kv_transfer=to_p("a")), 0))
    pair.submit(pair.p, *children(prefill_leg("b", 800, kv_transfer=to_p("a")), 1))
    pair.ask_d("a", 800)
    pair.run(lambda: bool(pair.p.engine.outstanding()["pulls"]))
    pair.abort(pair.p, "1_b-p")
    pair.submit(pair.d, decode_leg("c", to_d("a"), 1000))
    pair.done("a", "c")
    assert [said.reason for said in pair.words(Pulled)] == ["P num blocks less than D", "Timeout waiting for P side ready."]
    pair.rest()
    assert pair.p.counters["mooncake_num_kv_expired_reqs"] == 1


def test_two_prompts_under_one_id_get_the_same_blocks_and_one_answer_is_wrong() -> None:
    pair = Mooncake()
    for name in ("a", "b"):
        pair.submit(pair.p, prefill_leg(name, 40, kv_transfer=to_p("ab")))
    pair.run(lambda: len(pair.p.finish) == 2)
    pair.submit(pair.d, *(decode_leg(name, to_d("ab"), 40) for name in ("a", "b")))
    pair.done("a", "b")
    assert pair.d.tokens["b-d"] == answer("b") and pair.d.tokens["a-d"] != answer("a")


def test_a_longer_prompt_under_the_same_id_is_refused() -> None:
    pair = Mooncake()
    pair.ask_p("a", 40)
    pair.run(lambda: "a-p" in pair.p.finish)
    pair.ask_d("a", 100)
    pair.done("a")
    assert pair.d.finish["a-d"] is FinishReason.ERROR
    assert [said.reason for said in pair.words(Pulled)] == ["P num blocks less than D"]
    pair.rest()


# Death


def test_timers_that_stay_due_are_an_error_and_not_a_loop_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10 * MAX_TURNS))

    def due() -> int:
        assert next(calls, None) is not None, "for ever"
        return 0

    pair = Mooncake()
    monkeypatch.setattr(mooncake_of(pair.p), "next_event_at", due)
    with pytest.raises(RuntimeError, match=r"MooncakeConnector at 0 ns: timers are due after 1000 turns, too; .*holds"):
        pair.p.engine.advance(7)


def test_a_dead_engine_forgets_everything() -> None:
    pair = Mooncake(prefill={"enable_prefix_caching": False})
    pair.submit(pair.p, *children(prefill_leg("a", kv_transfer=to_p("a")), 0, 1))
    pair.ask_d("other")
    pair.run(lambda: len(pair.p.finish) == 2)
    pair.p.engine.kill(pair.now_ns)
    assert pair.p.used_blocks == 0 and not any(pair.p.engine.outstanding().values())
    pair.p.engine.check_integrity()


@pytest.mark.parametrize("switch", ["free_on_abort", "forget_on_abort"])
def test_planted_defects_of_loads_are_mooncakes_too(switch: str) -> None:
    pair = Mooncake(kv={switch: True})
    pair.ask_p("a")
    pair.ask_d("a")
    pair.run(lambda: bool(pair.writes()))
    pair.abort(pair.d, "a-d")
    assert (pair.d.used_blocks == 0) == (switch == "free_on_abort")
    pair.run()
    assert (pair.d.used_blocks == 7) == (switch == "forget_on_abort")


def test_there_is_no_lease() -> None:
    with pytest.raises(ValueError, match="abort_timeout_ns is None: MooncakeConnector has no leases"):
        KvTransferConfig("e", connector=MOONCAKE)


@pytest.mark.parametrize("name", ["bidirectional_kv_xfer", "ordered_reaper", "ignore_heartbeats", "notify_own_id"])
def test_what_only_nixl_has_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not supported by MooncakeConnector"):
        KvTransferConfig("e", **KV, **{name: True})
