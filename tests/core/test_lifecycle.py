"""The lifecycle table as a graph."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.core.lifecycle import TABLE, TERMINAL, Event, IllegalTransition, State, next_state
from windtunnel.core.transitions import TransitionLog


@given(st.sampled_from(State), st.lists(st.sampled_from(Event), max_size=12))
def test_no_path_leaves_a_terminal_state(state: State, events: list[Event]) -> None:
    for event in events:
        was_terminal = state.terminal
        try:
            state = next_state(state, event)
        except IllegalTransition:
            continue
        assert not was_terminal


def test_every_state_is_reached_and_every_live_one_can_end() -> None:
    reached = {State.NEW} | set(TABLE.values())
    assert reached == set(State)
    for state in set(State) - TERMINAL - {State.NEW}:
        assert TABLE[state, Event.ABORT] is State.ABORTED
        assert TABLE[state, Event.FAIL] is State.FAILED


def test_every_event_is_used() -> None:
    assert {event for _state, event in TABLE} == set(Event)


def test_nothing_returns_to_new() -> None:
    assert State.NEW not in TABLE.values()


def test_an_illegal_pair_names_itself() -> None:
    with pytest.raises(IllegalTransition, match="no transition for FINISH in QUEUED"):
        next_state(State.QUEUED, Event.FINISH)


class _Sequence:
    request_id = "a"

    def __init__(self) -> None:
        self.state = State.NEW
        self.since_ns = 0


def test_the_log_changes_states_by_the_table_and_never_goes_back_in_time() -> None:
    log, sequence = TransitionLog(), _Sequence()
    log.record(sequence, Event.SUBMIT, 50)
    log.record(sequence, Event.SCHEDULE, 40, {"prompt_tokens": 3})
    assert (sequence.state, sequence.since_ns) == (State.PREFILL, 50)
    with pytest.raises(IllegalTransition):
        log.record(sequence, Event.SUBMIT, 60)
    assert [(row.at_ns, row.before, row.after) for row in log.take()] == [
        (50, State.NEW, State.QUEUED),
        (50, State.QUEUED, State.PREFILL),
    ]
    assert log.take() == []
