"""Small random models, and a searcher so plain that it can be believed: it runs the generators themselves, every order."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from windtunnel.explore import PROGRESS, Invariant, Model, Steps, always, eventually, process
from windtunnel.explore.model import Tape

NAMES = ("p0", "p1", "p2")
VALUES = 3


class Op(NamedTuple):
    kind: str
    variable: str
    value: int


Programs = dict[str, tuple[Op, ...]]


def random_programs(chance: random.Random, steps_max: int = 4) -> Programs:
    """Two or three programs over five variables, so that some steps are independent."""
    names = NAMES[: chance.choice((2, 3, 3))]
    kinds = ("read", "write", "copy", "add", "wait", "both", "assert")
    return {
        name: tuple(
            Op(chance.choice(kinds), chance.choice("abcde"), chance.randrange(VALUES))
            for _ in range(chance.randint(1, steps_max))
        )
        for name in names
    }


class Random(Model):
    """Runs the programs of `plan`."""

    a: int = 0
    b: int = 0
    c: int = 0
    d: int = 0
    e: int = 0

    def __init__(self, plan: Programs, loops: bool = False) -> None:
        """`loops`: the first program begins again when it ends."""
        super().__init__()
        self.__dict__["plan"] = plan
        self.__dict__["loops"] = loops

    @process(*NAMES)
    def run(self, name: str) -> Steps:
        local, at, ops = 0, 0, self.__dict__["plan"].get(name, ())
        while at < len(ops):
            op = ops[at]
            if op.kind == "wait":
                yield f"{name}.{at} waits", lambda op=op: getattr(self, op.variable) != op.value
            else:
                yield f"{name}.{at} {op.kind}"
            local = self._do(op, local)
            at += 1
            if self.__dict__["loops"] and name == NAMES[0]:
                at %= len(ops)

    def _do(self, op: Op, local: int) -> int:
        match op.kind:
            case "read":
                return int(getattr(self, op.variable))
            case "write":
                setattr(self, op.variable, op.value)
            case "copy":
                setattr(self, op.variable, local)
            case "add":
                setattr(self, op.variable, (getattr(self, op.variable) + 1) % VALUES)
            case "both":
                self.a = (self.b + op.value) % VALUES
            case "assert":
                assert getattr(self, op.variable) != 2, "two"
        return local

    @always(Invariant(10, "a and b are never both 2"))
    def first(self) -> bool:
        return not (self.a == 2 and self.b == 2)

    @always(Invariant(11, "c, d and e are never 1, 0, 2"))
    def second(self) -> bool:
        return (self.c, self.d, self.e) != (1, 0, 2)

    @always(Invariant(12, "the sum stays under 7"))
    def third(self) -> bool:
        return self.a + self.b + self.c + self.d + self.e < 7

    @eventually(PROGRESS)
    def ends_even(self) -> bool:
        return (self.a + self.c) % 2 == 0


Values = tuple[int, ...]


def plain_search(plan: Programs) -> set[Values]:
    """All values that the five variables can have, by running every interleaving from the start."""
    seen: set[Values] = set()
    open_ends: list[tuple[int, ...]] = [()]
    while open_ends:
        schedule = open_ends.pop()
        values, able = _run(plan, schedule)
        seen.add(values)
        open_ends.extend((*schedule, lane) for lane in able)
    return seen


def _run(plan: Programs, schedule: Sequence[int]) -> tuple[Values, list[int]]:
    model = Random(plan)
    values: list[int] = [0] * 5
    steps, generators = [], [lane.start(model) for lane in model.processes()]
    for generator in generators:
        steps.append(next(generator, None))
    for lane in schedule:
        model._tape = tape = Tape(tuple(values))
        try:
            steps[lane] = next(generators[lane], None)
        except AssertionError:
            steps[lane] = None
        for index, value in tape.writes.items():
            values[index] = value
    return tuple(values), list(_able(model, steps, values))


def _able(model: Model, steps: Sequence[object], values: Sequence[int]) -> Iterator[int]:
    model._tape = Tape(tuple(values))
    for lane, step in enumerate(steps):
        if step is not None and (not isinstance(step, tuple) or step[1]()):
            yield lane
