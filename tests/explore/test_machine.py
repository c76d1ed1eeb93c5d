"""What a model may and may not do, and that the table of a model is true to its generators."""

import itertools
import types
from typing import Any, ClassVar

import pytest
from tests.explore.seats import LastSeat

from windtunnel.explore import Invariant, Model, Steps, always, parameter, process
from windtunnel.explore.machine import Machine
from windtunnel.explore.model import ModelError
from windtunnel.explore.searches import Limits, exhaustive


def states_of(model: Model) -> int:
    return exhaustive(Machine(model), Limits(states=5000)).states


def test_each_step_runs_as_python_once_for_what_it_reads() -> None:
    machine = Machine(LastSeat())
    exhaustive(machine, Limits())
    runs = machine.python_steps
    exhaustive(machine, Limits(), reduce=False)
    assert machine.python_steps == runs == 8


def test_a_polling_loop_comes_back_to_where_it_was() -> None:
    class Poller(Model):
        lit: bool = False

        @process
        def lamp(self) -> Steps:
            yield "light"
            self.lit = True

        @process
        def watcher(self) -> Steps:
            while not self.seen():
                yield "look again"

        def seen(self) -> bool:
            return False

    assert states_of(Poller()) == 2


def test_yields_within_for_keep_histories_apart() -> None:
    class Counter(Model):
        total: int = 0

        @process
        def adder(self) -> Steps:
            for amount in (1, 1, 2):
                yield "add"
                self.total += amount

    machine = Machine(Counter())
    state = machine.initial
    for _ in range(3):
        state = machine.after(state, 0, machine.outcome(state, 0))
    assert state.shared == (4,)
    assert not list(machine.enabled(state))


def test_a_condition_keeps_the_locals_of_its_own_point() -> None:
    class Tickets(Model):
        turn: int = 0

        @process
        def guest(self) -> Steps:
            mine = 0
            while mine < 3:
                yield "enter", lambda: self.turn == mine  # noqa: B023
                mine += 1

        @process
        def host(self) -> Steps:
            while self.turn_is_left():
                yield "next"
                self.turn = (self.turn + 1) % 3

        def turn_is_left(self) -> bool:
            return True

    machine = Machine(Tickets())
    state = machine.initial
    for lane in (0, 1, 0, 1, 0):
        outcome = machine.outcome(state, lane)
        assert outcome.enabled
        state = machine.after(state, lane, outcome)
    assert machine.label(state, 0) == ""


def _model(program: Any, initial: Any = 0) -> type[Model]:
    def set_up(namespace: dict[str, Any]) -> None:
        namespace.update(__annotations__={"x": Any}, x=initial, run=process(program))

    return types.new_class("Bad", (Model,), exec_body=set_up)


def _list_value(self: Any) -> Steps:
    yield "write"
    self.x = [1]


def _early_read(self: Any) -> Steps:
    if self.x == 0:
        yield "go"


def _early_write(self: Any) -> Steps:
    self.x = 1
    yield "go"


def _bare_yield(self: Any) -> Steps:
    yield  # type: ignore[misc]


def _unknown_variable(self: Any) -> Steps:
    yield "write"
    self.y = 1


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (_list_value, "must be hashable"),
        (_early_read, "before its first yield"),
        (_early_write, "before its first yield"),
        (_bare_yield, "yielded None"),
        (_unknown_variable, "y is not a shared variable"),
    ],
)
def test_a_broken_rule_is_named(program: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        exhaustive(Machine(_model(program)()), Limits())


def test_an_error_in_a_model_names_step_and_line() -> None:
    class Broken(Model):
        x: tuple[int, ...] = ()

        @process
        def run(self) -> Steps:
            yield "look inside"
            self.x = (self.x[3],)

    with pytest.raises(ModelError, match=r"step 'look inside' of run raised IndexError: .*test_machine.py:\d+"):
        exhaustive(Machine(Broken()), Limits())


def test_a_class_variable_is_not_shared_state() -> None:
    class Fixed(Model):
        LIMIT: ClassVar[int] = 3
        x: int = 0

    assert list(Fixed.variables) == ["x"]


def test_a_step_that_depends_on_more_than_it_reads_is_refused() -> None:
    coin = itertools.count()

    class Moody(Model):
        x: int = 0
        y: int = 0

        @process
        def a(self) -> Steps:
            yield "toss"
            self.x = 1 + (self.x if next(coin) % 2 else self.y)

        @process
        def b(self) -> Steps:
            yield "write"
            self.x, self.y = 5, 6

    with pytest.raises(ModelError, match="not a function of what it reads"):
        exhaustive(Machine(Moody()), Limits())


def test_an_invariant_may_not_write() -> None:
    class Writer(Model):
        x: int = 0

        @process
        def run(self) -> Steps:
            yield "go"

        @always(Invariant(10, "writes"))
        def check(self) -> bool:
            self.x = 1
            return True

    with pytest.raises(ModelError, match="an invariant writes"):
        exhaustive(Machine(Writer()), Limits())


def test_parameters_are_checked() -> None:
    class Chosen(Model):
        kind: str = parameter("a", choices="ab")
        x: int = 0

    assert Chosen(kind="b").kind == "b"
    with pytest.raises(ModelError, match="not one of a, b"):
        Chosen(kind="c")
    with pytest.raises(ModelError, match="no parameter size"):
        Chosen(size=1)
