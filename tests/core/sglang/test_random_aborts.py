"""Random abort schedules: what is left behind when everything has ended (SGLang reference §11.3)."""

from random import Random
from typing import Any

import pytest
from tests.core.sglang.driving import MS, PACING, S
from tests.core.sglang.pair import Pair

from windtunnel.core.lifecycle import State
from windtunnel.core.pacing import Duration, RequestPacing
from windtunnel.core.transfer.backends import SimBackend
from windtunnel.core.transfer.status import KVPoll

SCHEDULES = 1000


def _schedule(version: str, seed: int, switches: dict[str, Any] | None = None, **settings: Any) -> Pair:
    """Up to six requests, most of them aborted on one leg or both at any moment; then everything runs to its end."""
    chance = Random(seed)
    speed = chance.choice([10.0, 0.1, 0.01])
    pair = Pair(
        version,
        switches=switches,
        make_backend=lambda _rank: SimBackend(bandwidth_gb_s=speed, dead_peer_ns=S),
        bootstrap_timeout_ns=2 * S,
        waiting_timeout_ns=3 * S,
        deferred_release_timeout_ns=S,
        metadata_slots=4,
        max_total_num_tokens=512,
        max_running_requests=3,
        **settings,
    )
    for at_ns, _order, action, arguments in sorted(_actions(chance), key=lambda item: item[:2]):
        pair.run(at_ns)
        action(pair, **arguments)
    pair.run()
    return pair


def _actions(chance: Random) -> list[tuple[int, int, Any, dict[str, Any]]]:
    actions: list[tuple[int, int, Any, dict[str, Any]]] = []
    for index in range(chance.randrange(1, 7)):
        name, room = f"r{index}", 100 + index
        prompt, tokens = chance.randrange(1, 200), chance.randrange(1, 20)
        start_ns = chance.randrange(80) * MS
        lag_ns = chance.choice([0, 0, 3, 20]) * MS
        for leg in chance.sample("pd", 2):
            leg_ns = start_ns if leg == "p" else start_ns + lag_ns
            fields = {"name": name, "prompt": prompt, "tokens": tokens, "room": room, "legs": leg}
            actions.append((leg_ns, len(actions), Pair.submit, fields))
        if chance.random() < 0.8:
            abort_ns = start_ns + lag_ns + chance.randrange(120) * MS
            legs = chance.choice(["p", "d", "pd", "pd"])
            actions.append((abort_ns, len(actions), Pair.abort, {"name": name, "legs": legs, "notify": False}))
    return actions


def _assert_each_leg_ended_once(pair: Pair) -> None:
    for side, steps in pair.steps.items():
        rows = [row for step in steps for row in step.transitions]
        born = [row.request_id for row in rows if row.before is State.NEW]
        ended = [row.request_id for row in rows if row.after.terminal]
        assert sorted(born) == sorted(ended), side
        assert len(ended) == len(set(ended)), side


def _held(pair: Pair) -> dict[str, int]:
    return {
        f"{name}_{key}": count for name, worker in pair.workers.items() for key, count in worker.outstanding().items() if count
    }


@pytest.mark.slow
def test_under_the_terminal_rule_nothing_is_left_but_rooms_born_after_their_end() -> None:
    zombies = 0
    for seed in range(SCHEDULES):
        pair = _schedule("0.5.23", seed)
        (rank,) = pair.prefill.ranks
        strays = rank.stray_rooms()
        assert _held(pair) in ({}, {"prefill_rooms": len(strays), "prefill_stray_rooms": len(strays)}), seed
        assert {rank.table.get(room) for room in strays} <= {KVPoll.FAILED, KVPoll.WAITING_FOR_INPUT}
        assert not pair.late_writes, seed
        _assert_each_leg_ended_once(pair)
        zombies += len(strays)
    assert zombies, "no schedule gives birth to a zombie: the test looks at nothing"


def test_with_tombstones_as_well_nothing_at_all_is_left() -> None:
    for seed in range(SCHEDULES // 10):
        pair = _schedule("0.5.23", seed, {"tombstones": True})
        assert _held(pair) == {}, seed
        _assert_each_leg_ended_once(pair)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lock_step", [False, True])
@pytest.mark.parametrize("version", ["0.5.20", "0.5.23"])
def test_neither_overlap_nor_pacing_by_sequence_leaves_anything(version: str, overlap: bool, lock_step: bool) -> None:
    for seed in range(25):
        by_sequence = RequestPacing(Random(seed), ttft=Duration(20 * MS), itl=Duration(5 * MS))
        pair = _schedule(
            version, seed, {"tombstones": True}, overlap=overlap, pacing=PACING if lock_step else by_sequence, ranks=(2, 1)
        )
        assert _held(pair) == {}, seed


@pytest.mark.parametrize(
    ("version", "leaks", "never"),
    [
        ("0.5.9", {"prefill_metadata_slots"}, set()),
        ("0.5.12", {"prefill_rooms"}, {"prefill_metadata_slots", "decode_pages"}),
        ("0.5.15", {"prefill_rooms"}, {"decode_pages", "decode_metadata_slots"}),
        ("0.5.18", {"prefill_rooms"}, {"prefill_metadata_slots", "prefill_rows", "prefill_locked_pages", "decode_pages"}),
    ],
)
def test_older_rules_leave_behind_what_they_are_known_for(version: str, leaks: set[str], never: set[str]) -> None:
    seen: set[str] = set()
    for seed in range(60):
        seen |= _held(_schedule(version, seed)).keys()
    assert leaks <= seen
    assert not never & seen


@pytest.mark.parametrize("version", ["0.5.12", "0.5.18"])
def test_without_deferred_release_some_schedule_writes_into_freed_pages(version: str) -> None:
    assert any(_schedule(version, seed).late_writes for seed in range(60))


def test_the_same_schedule_gives_the_same_record() -> None:
    for seed in range(10):
        first, second = (_schedule("0.5.15", seed, promote_gap_ns=3 * MS) for _ in range(2))
        assert repr(first.steps) == repr(second.steps)
        assert first.frames == second.frames
