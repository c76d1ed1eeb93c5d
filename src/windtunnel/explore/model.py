"""A model of concurrent processes, written as one class.

    class LastSeat(Model):
        free: int = 1                                   # an annotated attribute is shared state
        sold: tuple[str, ...] = ()
        locked: bool = parameter(False)                 # a parameter is chosen before the run

        @process("ann", "bob")                          # two processes with the same program
        def clerk(self, name: str) -> Steps:
            yield "look"                                # from here to the next yield is one atomic step, "look"
            seen = self.free
            if seen:
                yield "sell"
                self.free = seen - 1
                self.sold += (name,)

        @always(Invariant(10, "no seat is sold twice"))
        def once(self) -> bool:
            return len(self.sold) <= 1

The rules:

* Every step is atomic; between two steps anybody else may run. Choosing where the yields stand is the art of the model.
* A step may wait: `yield "sell", lambda: self.free > 0` is taken only in states in which the condition holds.
* Shared values are immutable and hashable: numbers, strings, enums, tuples, frozensets, frozen dataclasses. Local variables
  of a process may be anything. A process learns of the world only by reading shared state: no clock, no chance, no globals.
* `@process(fault=True)` marks what need not happen: a crash, a time-out, an impatient client. It may run at any time or never.
* `@always` holds in every state. `@eventually` holds once the faults have stopped and everybody else has had turn after turn:
  in the state where nothing can move any more, or again and again in the loop that goes on for ever.
* An `assert` in a step is an invariant too (number 0).

So a step is a pure function of where its process stands and of what it reads. That is what makes a model a finite table
(`windtunnel.explore.machine`), and a violation a list of names that anybody can replay.
"""

import inspect
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar, overload

from windtunnel.explore.invariants import Invariant

Guard = Callable[[], object]
Step = str | tuple[str, Guard]
Steps = Iterator[Step]
"""What a process returns: it is a generator of step names, each with a condition if the step may wait."""

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
Program = TypeVar("Program", bound=Callable[..., Steps])

PROCESSES_MAX = 64
VARIABLES_MAX = 512


class ModelError(Exception):
    """A model breaks the rules of this page. The message says which rule, and where."""


def told(error: BaseException) -> str:
    """An error of the user's own code, with the place where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


class Tape:
    """What one step, condition or invariant reads and writes. `values` is the shared state before it."""

    __slots__ = ("_values", "reads", "writes")

    def __init__(self, values: Sequence[Any] | Mapping[int, Any]) -> None:
        self._values = values
        self.reads: dict[int, Any] = {}
        self.writes: dict[int, Any] = {}

    def read(self, index: int) -> Any:
        if index in self.writes:
            return self.writes[index]
        value = self.reads[index] = self._values[index]
        return value

    def write(self, index: int, value: Any) -> None:
        self.writes[index] = value


@dataclass(frozen=True)
class Variable:
    """A shared variable, as a descriptor over the tape."""

    name: str
    index: int
    initial: Any

    def __get__(self, model: "Model | None", owner: type) -> Any:
        return self if model is None else model._tape.read(self.index)

    def __set__(self, model: "Model", value: Any) -> None:
        try:
            hash(value)
        except TypeError:
            raise ModelError(f"{self.name} = {value!r}: a shared value must be hashable (a tuple, not a list)") from None
        model._tape.write(self.index, value)


class Parameter(NamedTuple):
    """Chosen before the run. Its type is that of the default."""

    default: Any
    choices: tuple[Any, ...]
    help: str


def parameter(default: T, *, choices: Sequence[T] = (), help: str = "") -> T:  # noqa: A002
    """A class attribute that `Model(name=value)` and `explore run --set name=value` choose."""
    return typing.cast(T, Parameter(default, tuple(choices), help))


class ProcessMark(NamedTuple):
    names: tuple[str, ...]
    fault: bool


class Process(NamedTuple):
    """One lane. `start` makes a new generator, standing before its first step."""

    name: str
    fault: bool
    start: Callable[["Model"], Steps]


class Check(NamedTuple):
    """An invariant and the method that tells whether it holds."""

    invariant: Invariant
    holds: Callable[["Model"], object]


@overload
def process(method: Program, /) -> Program: ...
@overload
def process(*names: str, fault: bool = False) -> Callable[[Program], Program]: ...
def process(*names: Any, fault: bool = False) -> Any:
    """Mark a generator method as a process; with names, as one process for each name, which the method gets as argument."""
    if len(names) == 1 and callable(names[0]):
        return _mark(names[0], process=ProcessMark((), fault))
    return lambda method: _mark(method, process=ProcessMark(names, fault))


def always(invariant: Invariant) -> Callable[[Method], Method]:
    """The method returns whether `invariant` holds in this state."""
    return lambda method: _mark(method, always=invariant)


def eventually(invariant: Invariant) -> Callable[[Method], Method]:
    """The method returns whether the end is good: see the rules above."""
    return lambda method: _mark(method, eventually=invariant)


def _mark(method: Any, **marks: object) -> Any:
    for name, value in marks.items():
        setattr(method, f"_explore_{name}", value)
    return method


class Model:
    """Shared state, processes and invariants. Owned by one `Machine`, which runs its methods over tapes."""

    variables: ClassVar[Mapping[str, Variable]] = MappingProxyType({})
    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({})
    _tape: Tape

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        parameters, variables = dict(cls.parameters), dict(cls.variables)
        for name, annotation in inspect.get_annotations(cls).items():
            default = _MISSING if "ClassVar" in str(annotation) else cls.__dict__.get(name, _MISSING)
            if isinstance(default, Parameter):
                parameters[name] = default
            elif default is not _MISSING:
                index = variables[name].index if name in variables else len(variables)
                variables[name] = Variable(name, index, default)
                setattr(cls, name, variables[name])
        if len(variables) > VARIABLES_MAX:
            raise ModelError(f"{cls.__name__} has {len(variables)} shared variables; the limit is {VARIABLES_MAX}")
        cls.parameters, cls.variables = MappingProxyType(parameters), MappingProxyType(variables)

    def __init__(self, **chosen: Any) -> None:
        for name, spec in self.parameters.items():
            value = chosen.pop(name, spec.default)
            if spec.choices and value not in spec.choices:
                raise ModelError(f"parameter {name}: {value!r} is not one of {', '.join(map(str, spec.choices))}")
            self.__dict__[name] = value
        if chosen:
            raise ModelError(f"{type(self).__name__} has no parameter {', '.join(chosen)}; it has: {_listed(self.parameters)}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "_tape" and name not in self.variables:
            raise ModelError(f"{name} is not a shared variable of {type(self).__name__}: annotate it and give it a value")
        object.__setattr__(self, name, value)

    def begin(self) -> None:
        """Override to set shared variables before the first step, from the parameters."""

    def processes(self) -> tuple[Process, ...]:
        """In the order of the class body."""
        found = [lane for method, mark in self._marked("process") for lane in _lanes(method, mark)]
        if not 0 < len(found) <= PROCESSES_MAX:
            raise ModelError(f"{type(self).__name__} has {len(found)} processes; it takes 1 to {PROCESSES_MAX}")
        return tuple(found)

    def checks(self, kind: str) -> tuple[Check, ...]:
        """The invariants of a kind, `always` or `eventually`, by number."""
        return tuple(sorted((Check(mark, method) for method, mark in self._marked(kind)), key=lambda check: check.invariant))

    def _marked(self, mark: str) -> Iterator[tuple[Any, Any]]:
        names = dict.fromkeys(name for cls in reversed(type(self).__mro__) for name in cls.__dict__)
        for name in names:
            method = inspect.getattr_static(self, name)
            if (value := getattr(method, f"_explore_{mark}", None)) is not None:
                yield method, value


_MISSING = object()


def _lanes(method: Callable[..., Steps], mark: ProcessMark) -> Iterator[Process]:
    if not mark.names:
        yield Process(method.__name__.replace("_", " "), mark.fault, method)
    for name in mark.names:
        yield Process(name, mark.fault, lambda model, name=name: method(model, name))  # type: ignore[misc]


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names) or "none"
