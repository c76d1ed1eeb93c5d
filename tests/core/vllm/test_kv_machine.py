"""Two engines with connectors under random aborts, losses and delays: what must hold whatever happens.

* Every sequence ends exactly once, with at most one last output, and an abort ends it for good.
* No block has two owners (`check_integrity` after every event), and at rest, when all leases have run out, every block is free.
* A good answer is the single server's, word for word, unless its KV was read too late.
* The same run twice says the same.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.rig import request
from tests.core.vllm.kv_rig import NULLS, Pair, answer
from tests.core.vllm.legs import LegMachine

from windtunnel.core.outputs import FinishReason
from windtunnel.core.pacing import Duration, Pacing, RequestPacing, StepPacing
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.foreign import ForeignSource
from windtunnel.core.vllm.connector.runs import RunConnectorEngine
from windtunnel.core.vllm.connector.seam import Arrived, Consumed, Heartbeat, Notify

LEASE_NS = 60_000
PATIENCE_NS = 40 * LEASE_NS


@dataclass(frozen=True)
class Leg:
    """What happens to one request: where it is aborted, if at all, and how its wires behave."""

    at_ns: int
    prompt: int
    shared: int
    max_tokens: int
    children: int
    gap_ns: int
    """Between the end of the prefill leg and the decode leg; the router may be slow."""
    abort_prefill_ns: int | None
    abort_decode_ns: int | None
    refuse: bool
    """The decode's front end refuses it."""
    never: bool
    """The client leaves between the legs: the decode hears of nothing."""


legs = st.builds(
    Leg,
    at_ns=st.integers(0, 40_000),
    prompt=st.integers(1, 100),
    shared=st.integers(0, 64),
    max_tokens=st.integers(1, 30),
    children=st.sampled_from([1, 1, 1, 2, 3]),
    gap_ns=st.sampled_from([0, 0, 1_000, 30_000, 70_000, 150_000]),
    abort_prefill_ns=st.none() | st.integers(0, 12_000),
    abort_decode_ns=st.none() | st.none() | st.integers(0, 80_000),
    refuse=st.sampled_from([False] * 7 + [True]),
    never=st.sampled_from([False] * 7 + [True]),
)


@dataclass(frozen=True)
class Setting:
    push: bool
    policy: str
    blocks: tuple[int, int]
    seqs: int
    budget: int
    caching: bool
    late_aborts: bool
    """Asynchronous scheduling."""
    own_pace: bool
    old_timeout: bool
    bidirectional: bool
    fates: tuple[str, ...]
    lost: tuple[bool, ...]
    delays: tuple[int, ...]
    doubled: bool
    """Every word arrives twice."""


def allowed(setting: Setting) -> bool:
    return not (setting.push and setting.bidirectional)


worlds = st.builds(
    Setting,
    push=st.booleans(),
    policy=st.sampled_from(["fail", "recompute"]),
    blocks=st.tuples(st.integers(12, 40), st.integers(12, 40)),
    seqs=st.integers(1, 6),
    budget=st.sampled_from([7, 40, 2048]),
    caching=st.booleans(),
    late_aborts=st.booleans(),
    own_pace=st.booleans(),
    old_timeout=st.booleans(),
    bidirectional=st.booleans(),
    fates=st.lists(st.sampled_from(["ok", "ok", "ok", "fail", "lost"]), min_size=1, max_size=8).map(tuple),
    lost=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=8).map(tuple),
    delays=st.lists(st.sampled_from([0, 500, 500, 5_000, 40_000]), min_size=1, max_size=8).map(tuple),
    doubled=st.booleans(),
).filter(allowed)


class Machine(LegMachine):
    """The router asks the decode when the prefill has answered."""

    def __init__(self, setting: Setting, all_legs: list[Leg], engine_type: type[ConnectorEngine] = ConnectorEngine) -> None:
        super().__init__(setting, all_legs)
        self.setting, self.legs = setting, all_legs
        self.engine_type = engine_type
        self.pair = self._pair()

    def _pair(self) -> Pair:
        setting = self.setting
        pair = Pair(
            kv={
                "connector": "NixlPushConnector" if setting.push else "NixlConnector",
                "load_failure_policy": setting.policy,
                "lease_ns": LEASE_NS,
                "abort_timeout_ns": 3 * LEASE_NS if setting.old_timeout else None,
                "bidirectional_kv_xfer": setting.bidirectional,
                "decoder_kv_blocks_ttl_ns": LEASE_NS,
                "expiry_margin_ns": 1_000,
            },
            pacing=self._pacing,
            prefill={**self.engine_config, "num_blocks": setting.blocks[0]},
            decode={**self.engine_config, "num_blocks": setting.blocks[1]},
            fate=self.fate,
            engine_type=self.engine_type,
        )
        pair.p.backend._dead_peer_ns = pair.d.backend._dead_peer_ns = 90_000
        pair.drop = lambda _notification: self.turn("lost")
        pair.delay_ns = self._delay
        return pair

    def _pacing(self) -> Pacing:
        if not self.setting.own_pace:
            return StepPacing(1_000, 10, 10)
        return RequestPacing(random.Random(3), Duration(4_000, 2_000, "lognormal"), Duration(900, 500, "normal"))

    def _delay(self, ask: Any) -> int:
        if self.setting.doubled and isinstance(ask, Notify) and isinstance(ask.notification, Consumed | Heartbeat):
            other = self.pair.d if self.pair.p.address.startswith(ask.peer.host) is False else self.pair.p
            self.pair._post(250, lambda: self.pair.tell(other, Arrived(ask.notification)))
        told: int = self.turn("delays")
        return told

    # The legs

    def run(self) -> list[Any]:
        for at, leg in enumerate(self.legs):
            self.later(leg.at_ns, lambda at=at, leg=leg: self._prefill(at, leg))
        self._drain()
        return self.story()

    def _prefill(self, at: int, leg: Leg) -> None:
        requests = self.requests(f"r{at}", leg, "p", NULLS, 1)
        self.pair.submit(self.pair.p, *requests)
        ids = [one.request_id for one in requests]
        if leg.abort_prefill_ns is not None:
            self.later(self.pair.now_ns + leg.abort_prefill_ns, lambda: self.abort(self.pair.p, ids))
        self._watch(at, leg, ids)

    def _watch(self, at: int, leg: Leg, ids: list[str]) -> None:
        """The router waits for the prefill's answer."""
        if all(one in self.pair.p.finish or one in self.aborted for one in ids):
            params = next((self.pair.p.params[one] for one in reversed(ids) if self.pair.p.params.get(one)), None)
            if not leg.never and not self.aborted.intersection(ids):
                self.later(self.pair.now_ns + leg.gap_ns, lambda: self._decode(at, leg, params))
            return
        if self.pair.now_ns >= PATIENCE_NS:
            # A decode that waits for a failed push renews its hold for ever, and so it starves the prefill too.
            assert self.setting.push, f"the prefill leg never ends: {self.pair.p.engine.live()}"
            self.abort(self.pair.p, ids)
            return
        self.later(self.pair.now_ns + 700, lambda: self._watch(at, leg, ids))

    def _decode(self, at: int, leg: Leg, params: Mapping[str, Any] | None) -> None:
        requests = self.requests(f"r{at}", leg, "d", params, leg.max_tokens)
        ids = [one.request_id for one in requests]
        if leg.refuse:
            self.pair.d.engine.release_remote(params, self.pair.now_ns)
            self.pair.pump(self.pair.d)
            return
        self.pair.submit(self.pair.d, *requests)
        if leg.abort_decode_ns is not None:
            self.later(self.pair.now_ns + leg.abort_decode_ns, lambda: self.abort(self.pair.d, ids))

    def _drain(self) -> None:
        """Run to rest. After a push that failed a decode waits, its heart beats and its blocks starve others: clients leave."""
        self.pair.run(limit_ns=PATIENCE_NS)
        stuck = self.pair.d.engine.live()
        assert not stuck or self.setting.push, "somebody waits for ever"
        self.abort(self.pair.d, [view.request_id for view in stuck])
        self.pair.run(limit_ns=2 * PATIENCE_NS)
        assert self.pair.next_at() is None, "something is always due"


def check(machine: Machine) -> None:
    machine.check_ends()
    for node in machine.nodes:
        orphans = node.engine.outstanding()["orphaned_loads"]
        assert not node.engine.outstanding()["holds"]
        assert orphans == 0 or machine.setting.push, "a load was never ended"
        assert node.used_blocks == len({block for load in node.engine.connector.loads.values() for block in load.blocks})
    check_answers(machine)


def check_answers(machine: Machine) -> None:
    """Wrong words only where a read came too late, and then the prefill has counted it."""
    node, wrong = machine.pair.d, 0
    for request_id, reason in node.finish.items():
        if reason is FinishReason.ERROR:
            assert machine.setting.policy == "fail" and not node.tokens[request_id]
            continue
        said, wanted = node.tokens[request_id], answer(*machine.wanted(request_id))
        assert len(said) == len(wanted)
        wrong += said != wanted
    if wrong:
        counters = machine.pair.p.counters
        assert counters["nixl_num_kv_expired_reqs"] or any(leg.children > 1 for leg in machine.legs) or machine.setting.doubled


@given(worlds, st.lists(legs, min_size=1, max_size=7))
@settings(max_examples=40, deadline=None)
def test_whatever_happens(setting: Setting, all_legs: list[Leg]) -> None:
    machine = Machine(setting, all_legs)
    story = machine.run()
    check(machine)
    again = Machine(setting, all_legs).run()
    assert again == story


@given(worlds.map(lambda setting: replace(setting, late_aborts=False, own_pace=False)), st.lists(legs, min_size=1, max_size=7))
@settings(max_examples=25, deadline=None)
def test_the_engine_for_virtual_time_does_the_same(setting: Setting, all_legs: list[Leg]) -> None:
    """`RunConnectorEngine`: the same steps, transitions, statistics and asks; its tokens leave in runs."""
    plain, in_runs = Machine(setting, all_legs), Machine(setting, all_legs, RunConnectorEngine)
    plain.run()
    in_runs.run()
    assert plain.bones() == in_runs.bones()
    assert plain.pair.asked == in_runs.pair.asked


CALM = Setting(
    push=False, policy="fail", blocks=(40, 40), seqs=4, budget=2048, caching=True, late_aborts=False, own_pace=False,
    old_timeout=False, bidirectional=False, fates=("ok",), lost=(False,), delays=(500,), doubled=False,
)  # fmt: skip


@given(st.lists(legs, min_size=1, max_size=7), st.booleans())
@settings(max_examples=40, deadline=None)
def test_in_calm_weather_every_answer_is_the_single_server_s(all_legs: list[Leg], push: bool) -> None:
    """Without faults, with a prompt router and one choice each: nobody errs, and no lease is lost but for clients that left."""

    prompt = [replace(leg, gap_ns=0, children=1) for leg in all_legs]
    machine = Machine(replace(CALM, push=push), prompt)
    machine.run()
    check(machine)
    pair = machine.pair
    for request_id, said in pair.d.tokens.items():
        if request_id in pair.d.finish:
            assert said == answer(request_id.removesuffix("-d"), len(said))
    assert not any(pair.d.counters.values())
    assert not pair.p.counters["nixl_num_notifications_after_expiry"] and not pair.p.counters["nixl_num_failed_transfers"]


@pytest.mark.parametrize("push", [False, True])
def test_nothing_stays_behind_when_each_client_leaves_at_each_moment(push: bool) -> None:
    """One request, its client gone at every 500 ns of its life."""

    leg = Leg(0, 60, 0, 6, 1, 0, None, None, False, False)
    for after_ns in range(0, 40_000, 500):
        machine = Machine(replace(CALM, push=push), [replace(leg, abort_decode_ns=after_ns)])
        machine.run()
        check(machine)
        pair = machine.pair
        # A decode that leaves before it has registered its blocks tells nobody (push).
        untold = push and after_ns == 0
        assert pair.p.counters["nixl_num_kv_expired_reqs"] == untold, f"aborted after {after_ns} ns"


def test_foreign_words_are_what_a_late_read_gives() -> None:
    assert ForeignSource(request("x").source).token_ids(0, 5) != answer("x", 5)
