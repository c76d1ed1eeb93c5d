"""The two investigations as proofs, and the worked examples: each finding is there, and goes with its fix."""

import pytest

from windtunnel.core.transfer import status
from windtunnel.explore import TERMINAL_STICKS, always
from windtunnel.explore.catalogue import chosen, find
from windtunnel.explore.machine import Machine
from windtunnel.explore.model import Model
from windtunnel.explore.scenarios.kv_status import KVStatus
from windtunnel.explore.searches import Limits, Result, exhaustive
from windtunnel.explore.shrink import shrink


def found(model: Model) -> dict[int, int]:
    """Number of each broken invariant → steps of its shortest schedule, after a complete search."""
    machine = Machine(model)
    result = exhaustive(machine, Limits())
    assert result.complete
    short = {invariant: shrink(machine, violation, Limits()) for invariant, violation in result.violations.items()}
    return {invariant.number: len(violation.schedule) for invariant, violation in sorted(short.items())}


def broken(model: Model) -> set[int]:
    """The numbers only."""
    result = exhaustive(Machine(model), Limits())
    assert result.complete
    return {invariant.number for invariant in result.violations}


KV_STATUS = {
    "a": {6: 8, 12: 6, 15: 6},
    "b": {1: 5, 6: 8, 10: 5, 11: 4, 12: 6, 15: 6},
    "c": {1: 5, 6: 8, 10: 5, 11: 4, 12: 6, 15: 6},
    "d": {10: 5, 11: 4, 12: 6, 13: 10},
    "e": {10: 5, 12: 6, 13: 10},
}


@pytest.mark.parametrize("rule", "abcde")
def test_what_each_rule_allows(rule: str) -> None:
    assert found(KVStatus(rule=rule)) == KV_STATUS[rule]


@pytest.mark.parametrize("rule", "bc")
def test_the_resurrection_has_the_five_steps_of_the_report(rule: str) -> None:
    machine = Machine(KVStatus(rule=rule))
    violation = shrink(machine, exhaustive(machine, Limits()).violations[TERMINAL_STICKS], Limits())
    state, story = machine.initial, []
    for lane in violation.schedule:
        story.append((machine.lanes[lane].name, machine.label(state, lane)))
        state = machine.after(state, lane, machine.outcome(state, lane))
    assert story == [
        ("transfer worker", "pops a chunk of room 7, looks at its status"),
        ("scheduler", "AbortReq: records the reason, writes Failed"),
        ("transfer worker", "writes Transferring"),
        ("transfer worker", "posts the writes to the decode's pages"),
        ("transfer worker", "last chunk done: writes Success"),
    ]


@pytest.mark.parametrize("rule", "de")
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_no_resurrection_under_a_sticky_rule_with_atomic_updates(rule: str, chunks: int) -> None:
    assert not {1, 3, 5, 6, 14, 15} & broken(KVStatus(rule=rule, chunks=chunks))


def test_without_a_lock_the_window_of_rule_e_is_open() -> None:
    split = found(KVStatus(rule="e", atomic=False))
    assert split[14] == 5
    assert split[1] == 8


def test_the_shields_of_0_5_22_close_the_answers_but_not_the_window() -> None:
    shielded = broken(KVStatus(rule="e", atomic=False, shields=True))
    assert {1, 14} <= shielded
    assert not {6, 15} & shielded


def test_an_invariant_that_cannot_fail_finds_nothing() -> None:
    class Blind(KVStatus):
        @always(TERMINAL_STICKS)
        def terminal_sticks(self) -> bool:
            return True

    assert 1 not in broken(Blind(rule="c"))


def test_the_proof_is_about_the_real_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "RULES", {**status.RULES, "terminal-failed": status.RULES["nores"]})
    assert found(KVStatus(rule="e"))[1] == 5


def test_without_deferred_release_every_rule_writes_into_freed_pages() -> None:
    assert {rule: 3 in broken(KVStatus(rule=rule, deferred=False)) for rule in "abcde"} == dict.fromkeys("abcde", True)


@pytest.mark.parametrize(("rule", "goes_on"), [("b", True), ("c", True), ("d", False), ("e", False)])
def test_a_promoted_room_goes_on_sending_chunks(rule: str, goes_on: bool) -> None:
    assert ({3, 5} <= broken(KVStatus(rule=rule, chunks=2))) is goes_on


def test_three_paths_lead_to_the_recycled_object_and_none_if_the_task_owns_its_inputs() -> None:
    pooled = find("pooled-response")
    assert found(chosen(pooled, {"frames": "1"})) == {10: 7, 11: 7, 12: 8, 13: 9}
    assert found(chosen(pooled, {"frames": "1", "owned": "true"})) == {}


@pytest.mark.parametrize(
    ("name", "before", "after", "numbers"),
    [
        ("lease-reaper", "fixed=false", "fixed=true", {6}),
        ("metadata-slots", "fix=before", "fix=after", {6}),
        ("n-admission", "fixed=false", "fixed=true", {10}),
        ("remote-load", "waits=false", "waits=true", {0, 10}),
    ],
)
def test_the_examples_break_before_their_fix_only(name: str, before: str, after: str, numbers: set[int]) -> None:
    def run(setting: str) -> Result:
        return exhaustive(Machine(chosen(find(name), dict([setting.split("=")]))), Limits())  # type: ignore[arg-type]

    assert {invariant.number for invariant in run(before).violations} == numbers
    assert run(after).complete
    assert not run(after).violations


def test_blocks_that_wait_for_a_report_taken_already_are_never_freed() -> None:
    assert broken(chosen(find("remote-load"), {"waits": "true", "looks": "false"})) == {6}


def test_a_hasty_fix_of_the_slot_leak_releases_twice() -> None:
    assert 2 in broken(chosen(find("metadata-slots"), {"fix": "hasty"}))
