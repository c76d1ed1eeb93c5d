"""Seeds repeat, limits hold, shrinking is minimal, the liveness phase sees rests and loops."""

import pytest
from tests.explore.seats import SOLD_ONCE, LastSeat

from windtunnel.explore import PROGRESS, Model, Steps, eventually, process
from windtunnel.explore.catalogue import chosen, find
from windtunnel.explore.machine import Machine
from windtunnel.explore.searches import Limits, Result, exhaustive, pct_walks, random_walks
from windtunnel.explore.shrink import ONE_MINIMAL, SHORTEST, Attempts, minimal, shrink


def test_the_double_sale_is_found_and_goes_with_the_lock() -> None:
    found = exhaustive(Machine(LastSeat()), Limits())
    assert found.violations[SOLD_ONCE].schedule == (0, 1, 0, 1)
    safe = exhaustive(Machine(LastSeat(locked=True)), Limits())
    assert safe.complete
    assert not safe.violations


@pytest.mark.parametrize("walk", [random_walks, pct_walks])
def test_a_seed_repeats_exactly(walk) -> None:  # type: ignore[no-untyped-def]
    def run(seed: int) -> Result:
        return walk(Machine(chosen(find("kv-status"), {"rule": "c"})), Limits(schedules=40), seed)  # type: ignore[no-any-return]

    assert run(7) == run(7)
    assert run(7).transitions != run(8).transitions


@pytest.mark.parametrize("walk", [random_walks, pct_walks])
def test_seeded_searches_find_the_double_sale(walk) -> None:  # type: ignore[no-untyped-def]
    assert SOLD_ONCE in walk(Machine(LastSeat()), Limits(schedules=50), 1).violations
    assert not walk(Machine(LastSeat(locked=True)), Limits(schedules=50), 1).violations


@pytest.mark.parametrize(
    ("limits", "reason"), [(Limits(states=100), "states"), (Limits(steps=5), "steps"), (Limits(seconds=0), "seconds")]
)
def test_a_search_that_met_a_limit_is_not_complete(limits: Limits, reason: str) -> None:
    result = exhaustive(Machine(chosen(find("kv-status"), {})), limits)
    assert not result.complete
    assert result.stopped_by == reason


def test_the_limit_of_states_holds_beside_that_of_steps() -> None:
    result = exhaustive(Machine(chosen(find("kv-status"), {})), Limits(steps=8, states=300))
    assert result.stopped_by == "states"
    assert result.states < 320


@pytest.mark.parametrize("seed", range(3))
def test_shrinking_takes_every_needless_step_away(seed: int) -> None:
    machine = Machine(chosen(find("pooled-response"), {}))
    for violation in random_walks(machine, Limits(schedules=300), seed).violations.values():
        attempt = Attempts(machine, violation.invariant, Limits())
        small = minimal(violation.before_healing, attempt)
        steps = small.before_healing
        assert all(attempt(steps[:at] + steps[at + 1 :]) is None for at in range(len(steps)))


def test_shrinking_reaches_the_shortest_whatever_search_found_it() -> None:
    machine = Machine(chosen(find("kv-status"), {"rule": "c"}))
    nearest = exhaustive(machine, Limits(), reduce=False).violations
    for violation in random_walks(machine, Limits(schedules=500), 3).violations.values():
        short = shrink(machine, violation, Limits())
        assert short.minimal == SHORTEST
        assert len(short.before_healing) == len(nearest[violation.invariant].before_healing)


def test_without_room_for_the_search_a_schedule_is_only_called_1_minimal() -> None:
    machine = Machine(chosen(find("kv-status"), {"rule": "c"}))
    violation = exhaustive(machine, Limits()).violations[PROGRESS]
    assert shrink(machine, violation, Limits(states=1)).minimal == ONE_MINIMAL


class Pair(Model):
    """Two processes that pass a token for ever; a fault may take it away."""

    token: str = "left"
    seen_right: bool = False

    @process("left", "right")
    def player(self, name: str) -> Steps:
        while True:
            yield "pass on", lambda: self.token == name
            self.token = "right" if name == "left" else "left"

    @process(fault=True)
    def thief(self) -> Steps:
        yield "steals the token"
        self.token = ""

    @eventually(PROGRESS)
    def right_has_it(self) -> bool:
        return self.token == "right"


def test_a_loop_is_good_if_the_good_state_comes_again_and_a_rest_if_it_stays() -> None:
    violation = exhaustive(Machine(Pair()), Limits()).violations[PROGRESS]
    assert violation.schedule == (2,)
    assert violation.healed_at == 1


def test_a_fault_need_not_happen() -> None:
    class Honest(Pair):
        @process(fault=True)
        def thief(self) -> Steps:
            yield "thinks better of it"

    assert not exhaustive(Machine(Honest()), Limits()).violations
