"""Two engines with Mooncake under random orders, aborts, losses and delays: what must hold whatever happens.

* Every sequence ends exactly once, and an abort ends it for good. Nobody waits longer than the patience of both sides.
* No block has two owners (`check_integrity` after every event). At rest every block is free but those that a second request
  with the same transfer id has stranded.
* A good answer is the single server's, word for word.
* The same run twice says the same; in calm weather nobody has to be patient.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.vllm.kv_rig import Node, answer
from tests.core.vllm.legs import LegMachine
from tests.core.vllm.test_mooncake import Mooncake, mooncake_of, to_d, to_p

from windtunnel.core.outputs import FinishReason
from windtunnel.core.pacing import StepPacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.runs import RunConnectorEngine

PATIENCE_NS = 200_000
END_NS = 60 * PATIENCE_NS


@dataclass(frozen=True)
class Leg:
    """One request: when its legs come, in whatever order, and where they are aborted."""

    at_ns: int
    gap_ns: int
    """From the prefill's leg to the decode's; below 0 the decode comes first."""
    prompt: int
    shared: int
    max_tokens: int
    children: int
    abort_prefill_ns: int | None
    abort_decode_ns: int | None
    refuse: bool
    missing: str
    """The leg that never comes."""


legs = st.builds(
    Leg,
    at_ns=st.integers(0, 40_000),
    gap_ns=st.sampled_from([-30_000, -1_000, 0, 0, 1_000, 30_000, 300_000]),
    prompt=st.integers(1, 100),
    shared=st.integers(0, 64),
    max_tokens=st.integers(1, 30),
    children=st.sampled_from([1, 1, 1, 1, 2]),
    abort_prefill_ns=st.none() | st.integers(0, 12_000),
    abort_decode_ns=st.none() | st.none() | st.integers(0, 80_000),
    refuse=st.sampled_from([False] * 7 + [True]),
    missing=st.sampled_from([""] * 8 + ["p", "d"]),
)


@dataclass(frozen=True)
class Setting:
    policy: str
    blocks: tuple[int, int]
    seqs: int
    budget: int
    workers: int
    caching: bool
    late_aborts: bool
    """Asynchronous scheduling."""
    fates: tuple[str, ...]
    lost: tuple[bool, ...]
    delays: tuple[int, ...]


worlds = st.builds(
    Setting,
    policy=st.sampled_from(["fail", "recompute"]),
    blocks=st.tuples(st.integers(12, 40), st.integers(12, 40)),
    seqs=st.integers(1, 6),
    budget=st.sampled_from([7, 40, 2048]),
    workers=st.sampled_from([1, 1, 10]),
    caching=st.booleans(),
    late_aborts=st.booleans(),
    fates=st.lists(st.sampled_from(["ok", "ok", "ok", "fail", "lost"]), min_size=1, max_size=8).map(tuple),
    lost=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=8).map(tuple),
    delays=st.lists(st.sampled_from([0, 500, 500, 5_000, 40_000]), min_size=1, max_size=8).map(tuple),
)


class Machine(LegMachine):
    """The router sends the legs in whatever order."""

    def __init__(self, setting: Setting, all_legs: list[Leg], engine_type: type[ConnectorEngine] = ConnectorEngine) -> None:
        super().__init__(setting, all_legs)
        self.setting, self.legs = setting, all_legs
        self.pair = Mooncake(
            kv={
                "load_failure_policy": setting.policy,
                "abort_timeout_ns": PATIENCE_NS,
                "pull_margin_ns": PATIENCE_NS // 8,
                "num_workers": setting.workers,
            },
            pacing=lambda: StepPacing(1_000, 10, 10),
            prefill={**self.engine_config, "num_blocks": setting.blocks[0]},
            decode={**self.engine_config, "num_blocks": setting.blocks[1]},
            fate=self.fate,
            engine_type=engine_type,
        )
        self.pair.p.backend._dead_peer_ns = 90_000
        self.pair.drop = lambda _notification: self.turn("lost")
        self.pair.delay_ns = lambda _ask: self.turn("delays")

    def run(self) -> list[Any]:
        for at, leg in enumerate(self.legs):
            first, second = (0, leg.gap_ns) if leg.gap_ns >= 0 else (-leg.gap_ns, 0)
            self.later(leg.at_ns + first, lambda at=at, leg=leg: self._prefill(f"r{at}", leg))
            self.later(leg.at_ns + second, lambda at=at, leg=leg: self._decode(f"r{at}", leg))
        self.pair.run(limit_ns=END_NS)
        assert self.pair.next_at() is None, "something is always due"
        return self.story()

    def _prefill(self, name: str, leg: Leg) -> None:
        if leg.missing != "p":
            self._submit(self.pair.p, self.requests(name, leg, "p", to_p(name), 1), leg.abort_prefill_ns)

    def _decode(self, name: str, leg: Leg) -> None:
        if leg.missing == "d":
            return
        if leg.refuse:
            self.pair.d.engine.release_remote(to_d(name), self.pair.now_ns)
            self.pair.pump(self.pair.d)
            return
        self._submit(self.pair.d, self.requests(name, leg, "d", to_d(name), leg.max_tokens), leg.abort_decode_ns)

    def _submit(self, node: Node, requests: list[EngineRequest], abort_ns: int | None) -> None:
        self.pair.submit(node, *requests)
        if abort_ns is not None:
            self.later(self.pair.now_ns + abort_ns, lambda: self.abort(node, [one.request_id for one in requests]))


def check(machine: Machine) -> None:
    machine.check_ends()
    for node in machine.nodes:
        outstanding = node.engine.outstanding()
        stranded = outstanding.pop("stranded")
        assert not any(outstanding.values())
        assert stranded == 0 or (node is machine.pair.p and any(leg.children > 1 for leg in machine.legs))
        connector = mooncake_of(node)
        pulls, sender = connector.pulls, connector.sender
        assert node.used_blocks == len({block for hold in sender.stranded for block in hold.blocks})
        for book in (connector._wanted, pulls._pulling, pulls._asked, sender._sending, sender._transfers, sender._held_as,
                     sender._batches, sender._queue, sender._writes, sender._done):  # fmt: skip
            assert not book, "something is remembered of a request that is over"
        assert not sender._queued_bytes
    check_answers(machine)


def check_answers(machine: Machine) -> None:
    node = machine.pair.d
    for request_id, reason in node.finish.items():
        if reason is FinishReason.ERROR:
            assert machine.setting.policy == "fail" and not node.tokens[request_id]
        else:
            assert node.tokens[request_id] == answer(*machine.wanted(request_id))


@given(worlds, st.lists(legs, min_size=1, max_size=7))
@settings(max_examples=60, deadline=None)
def test_whatever_happens(setting: Setting, all_legs: list[Leg]) -> None:
    machine = Machine(setting, all_legs)
    story = machine.run()
    check(machine)
    assert Machine(setting, all_legs).run() == story


@given(worlds.map(lambda setting: replace(setting, late_aborts=False)), st.lists(legs, min_size=1, max_size=7))
@settings(max_examples=25, deadline=None)
def test_the_engine_for_virtual_time_does_the_same(setting: Setting, all_legs: list[Leg]) -> None:
    plain, in_runs = Machine(setting, all_legs), Machine(setting, all_legs, RunConnectorEngine)
    plain.run()
    in_runs.run()
    assert plain.bones() == in_runs.bones()
    assert plain.pair.asked == in_runs.pair.asked


CALM = Setting(
    policy="fail", blocks=(100, 100), seqs=8, budget=2048, workers=10, caching=True, late_aborts=False,
    fates=("ok",), lost=(False,), delays=(500,),
)  # fmt: skip


@given(st.lists(legs, min_size=1, max_size=7))
@settings(max_examples=40, deadline=None)
def test_in_calm_weather_every_answer_is_the_single_server_s_and_nobody_has_to_be_patient(all_legs: list[Leg]) -> None:
    """Both legs come, soon, and no prefill's client leaves."""
    calm = [
        replace(leg, gap_ns=min(leg.gap_ns, 30_000), children=1, abort_prefill_ns=None, missing="", refuse=False)
        for leg in all_legs
    ]
    machine = Machine(CALM, calm)
    machine.run()
    check(machine)
    assert FinishReason.ERROR not in machine.pair.d.finish.values()
    assert not any(machine.pair.d.counters.values()) and not any(machine.pair.p.counters.values())


@pytest.mark.parametrize("leaves", ["the decode", "the prefill", "both"])
@pytest.mark.parametrize("gap_ns", [-4_000, 0, 20_000], ids=["decode first", "at once", "prefill first"])
def test_nothing_stays_behind_when_a_client_leaves_at_each_moment(gap_ns: int, leaves: str) -> None:
    """One request, with its client gone at every 500 ns of the life of one leg or of each."""
    leg = Leg(0, gap_ns, 60, 0, 6, 1, None, None, False, "")
    ends: Counter[FinishReason | None] = Counter()
    for after_ns in range(0, 30_000, 500):
        prefill_ns = None if leaves == "the decode" else after_ns
        decode_ns = None if leaves == "the prefill" else after_ns
        machine = Machine(CALM, [replace(leg, abort_prefill_ns=prefill_ns, abort_decode_ns=decode_ns)])
        machine.run()
        check(machine)
        ends[machine.pair.d.finish.get("r0-d")] += 1
        if leaves == "the decode":
            assert not any(machine.pair.p.counters.values()), f"aborted after {after_ns} ns"
    assert (FinishReason.ERROR in ends) == (leaves == "the prefill")
