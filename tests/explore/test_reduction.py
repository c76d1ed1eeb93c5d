"""The reduction leaves out steps, never a state or a finding: compared with the search without it, and with a plain one."""

import random

import pytest
from tests.explore.random_models import Random, plain_search, random_programs

from windtunnel.explore.machine import Machine, Outcome
from windtunnel.explore.searches import Limits, Result, exhaustive

SEEDS = range(200)


def search(seed: int, reduce: bool) -> Result:
    """Every fourth model has a process that never ends, so that there are loops."""
    plan = random_programs(random.Random(seed))
    return exhaustive(Machine(Random(plan, loops=seed % 4 == 0)), Limits(), reduce)


def test_every_state_and_every_finding_survive_the_reduction() -> None:
    saved = 0
    for seed in SEEDS:
        full, reduced = search(seed, reduce=False), search(seed, reduce=True)
        assert full.complete, seed
        assert reduced.complete, seed
        assert reduced.states == full.states, seed
        assert reduced.violations.keys() == full.violations.keys(), seed
        assert reduced.transitions <= full.transitions, seed
        saved += full.transitions - reduced.transitions
    assert saved > 1000


def test_the_states_are_those_of_the_running_generators() -> None:
    for seed in range(30):
        plan = random_programs(random.Random(seed), steps_max=2)
        machine = Machine(Random(plan))
        seen = {machine.initial.shared}
        frontier, known = [machine.initial], {machine.initial}
        while frontier:
            state = frontier.pop()
            for lane, outcome in machine.enabled(state):
                after = machine.after(state, lane, outcome)
                seen.add(after.shared)
                if after not in known:
                    known.add(after)
                    frontier.append(after)
        assert seen == plain_search(plan), seed


def test_all_findings_occur_in_the_random_models() -> None:
    found = {invariant.number for seed in SEEDS for invariant in search(seed, reduce=True).violations}
    assert found == {0, 6, 10, 11, 12}


def test_a_wrong_independence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    full = [search(seed, reduce=False).states for seed in range(50)]
    monkeypatch.setattr(Outcome, "independent_of", lambda self, other: not self.writes & other.writes)
    assert [search(seed, reduce=True).states for seed in range(50)] != full
