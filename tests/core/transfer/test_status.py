"""The truth table of SGLang reference §1.3, and the table's split update."""

import pytest

from windtunnel.core.transfer.status import (
    RULES,
    KVPoll,
    MissingRoom,
    StatusTable,
    combine_pipeline,
    reduce_polls,
)

_LETTER = {
    "F": KVPoll.FAILED,
    "B": KVPoll.BOOTSTRAPPING,
    "W": KVPoll.WAITING_FOR_INPUT,
    "T": KVPoll.TRANSFERRING,
    "S": KVPoll.SUCCESS,
    "absent": None,
}

# "cleared" and stale rooms start from a table that already has, or no longer has, the room: `C` clears.
_TRUTH = [
    ("B W F", "W F F F F"),
    ("B W F T", "T T T F F"),
    ("B W F T S", "S S S F F"),
    ("B W T F T", "T T T F F"),
    ("B W S F", "S F F F F"),
    ("W B", "W W W W W"),
    ("B C T", "T T T T absent"),
    ("B C F", "F F absent absent absent"),
    ("B C W", "W W W W W"),
    ("B T B", "T T T T T"),
    ("B F B", "B B B F F"),
]
_CASES = [(rule, writes, want) for writes, wants in _TRUTH for rule, want in zip(RULES, wants.split(), strict=True)]


@pytest.mark.parametrize(("rule", "writes", "want"), _CASES)
def test_truth_table(rule: str, writes: str, want: str) -> None:
    table = StatusTable(rule)
    for letter in writes.split():
        if letter == "C":
            table.clear(7)
        else:
            status = _LETTER[letter]
            assert status is not None
            table.update(7, status)
    assert table.get(7) is _LETTER[want]


def test_a_worker_that_read_before_the_abort_overwrites_it_even_under_the_sticky_rule() -> None:
    table = StatusTable("terminal-failed")
    table.update(7, KVPoll.WAITING_FOR_INPUT)
    worker = table.begin_update(7, KVPoll.TRANSFERRING)
    table.update(7, KVPoll.FAILED)
    table.commit(worker)
    assert table.get(7) is KVPoll.TRANSFERRING


def test_a_split_write_recreates_a_room_cleared_in_between() -> None:
    table = StatusTable("terminal-failed")
    table.update(7, KVPoll.WAITING_FOR_INPUT)
    worker = table.begin_update(7, KVPoll.TRANSFERRING)
    table.clear(7)
    table.commit(worker)
    assert table.get(7) is KVPoll.TRANSFERRING


def test_a_dropped_update_writes_nothing_at_commit() -> None:
    table = StatusTable("terminal-failed")
    late = table.begin_update(7, KVPoll.FAILED)
    table.update(7, KVPoll.BOOTSTRAPPING)
    table.commit(late)
    assert table.get(7) is KVPoll.BOOTSTRAPPING
    assert not late.creates


def test_birth_is_visible_to_the_caller() -> None:
    table = StatusTable("terminal-failed")
    assert table.update(7, KVPoll.BOOTSTRAPPING).creates
    assert not table.update(7, KVPoll.WAITING_FOR_INPUT).creates


def test_missing_rooms_by_era() -> None:
    assert StatusTable("max", MissingRoom.WAITING).check_status(9) is KVPoll.WAITING_FOR_INPUT
    assert StatusTable("max", MissingRoom.FAILED).check_status(9) is KVPoll.FAILED
    with pytest.raises(KeyError):
        StatusTable("max", MissingRoom.RAISE).check_status(9)


def test_an_unknown_rule_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="terminal-failed"):
        StatusTable("sticky")


def test_ranks_reduce_with_min() -> None:
    failed, waiting, success = KVPoll.FAILED, KVPoll.WAITING_FOR_INPUT, KVPoll.SUCCESS
    assert reduce_polls([[success, success, waiting], [success, failed, success]]) == [success, failed, waiting]
    assert reduce_polls([]) == []


def test_a_pipeline_stage_without_the_room_counts_as_bootstrapping() -> None:
    assert combine_pipeline([None, KVPoll.SUCCESS], [KVPoll.SUCCESS, KVPoll.TRANSFERRING]) == [
        KVPoll.BOOTSTRAPPING,
        KVPoll.TRANSFERRING,
    ]


def test_a_snapshot_brings_the_table_back() -> None:
    table = StatusTable()
    table.update(2, KVPoll.WAITING_FOR_INPUT)
    table.update(1, KVPoll.BOOTSTRAPPING)
    before = table.snapshot()
    table.clear(1)
    table.update(2, KVPoll.FAILED)
    table.restore(before)
    assert table.snapshot() == before == ((1, KVPoll.BOOTSTRAPPING), (2, KVPoll.WAITING_FOR_INPUT))
