"""Workloads: when users ask, and what.

A workload gives timed arrivals, and after each answer says what that user does next. It is lazy: memory does not grow with
the length of the run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from windtunnel.core.units import S
from windtunnel.sim.scenario import WorkloadSpec
from windtunnel.sim.tokens import Answer, random_tokens

Draw = Callable[[str], Random]


@dataclass(frozen=True, slots=True)
class Question:
    """One thing a user wants answered."""

    number: int
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    session: str | None = None
    turn: int = 0
    turns: int = 1


class Workload(Protocol):
    def arrivals(self) -> Iterator[tuple[int, Question]]:
        """Questions that come by themselves, times never falling."""
        ...

    def after(self, question: Question, ended_ns: int, answer_tokens: int | None) -> tuple[int, Question] | None:
        """What the user does after that; `answer_tokens` is None for a question that was not answered in full."""
        ...


class Writer:
    """Makes the questions of one workload: lengths, contents, shared prefixes."""

    def __init__(self, spec: WorkloadSpec, stream: Draw) -> None:
        self._spec = spec
        self._lengths = stream("workload.lengths")
        self._contents = stream("workload.contents")
        self._made = 0
        prefixes = stream("workload.prefixes")
        count = spec.prefix_groups if spec.shared_prefix_tokens else 0
        self._prefixes = [random_tokens(prefixes, spec.shared_prefix_tokens) for _ in range(count)]

    @property
    def exhausted(self) -> bool:
        return self._spec.requests is not None and self._made >= self._spec.requests

    def next_number(self) -> int:
        self._made += 1
        return self._made - 1

    def question(self, session: str | None = None, turns: int = 1) -> Question:
        """A first question. Its prompt is the group's prefix and then tokens of its own."""
        number = self.next_number()
        own = random_tokens(self._contents, self._spec.prompt_tokens.draw(self._lengths))
        prefix = self._contents.choice(self._prefixes) if self._prefixes else ()
        return Question(number, prefix + own, self._spec.output_tokens.draw(self._lengths), session, turns=turns)

    def follow_up(self, question: Question, answer_tokens: int) -> Question:
        """The conversation so far, the answer, and something new."""
        answer = tuple(Answer(question.number).token_ids(0, answer_tokens))
        new = random_tokens(self._contents, self._spec.prompt_tokens.draw(self._lengths))
        output = self._spec.output_tokens.draw(self._lengths)
        prompt = question.prompt_token_ids + answer + new
        return Question(self.next_number(), prompt, output, question.session, question.turn + 1, question.turns)


class OpenLoop:
    """Users that do not wait for each other: the gaps between arrivals come from one generator."""

    def __init__(self, spec: WorkloadSpec, stream: Draw, until_ns: int) -> None:
        self._writer = Writer(spec, stream)
        self._gaps = GAPS[spec.kind](spec, stream("workload.gaps"))
        self._until_ns = until_ns

    def arrivals(self) -> Iterator[tuple[int, Question]]:
        at_ns = 0.0
        for gap_ns in self._gaps:
            at_ns += gap_ns
            if at_ns >= self._until_ns or self._writer.exhausted:
                return
            yield round(at_ns), self._writer.question()

    def after(self, question: Question, ended_ns: int, answer_tokens: int | None) -> tuple[int, Question] | None:
        return None


class ClosedLoop:
    """`users` of them, each with one question at a time and a pause after each answer."""

    def __init__(self, spec: WorkloadSpec, stream: Draw, until_ns: int) -> None:
        self._spec, self._until_ns = spec, until_ns
        self._writer = Writer(spec, stream)
        self._pauses = stream("workload.pauses")

    def arrivals(self) -> Iterator[tuple[int, Question]]:
        for user in range(self._spec.users):
            if self._writer.exhausted:
                return
            yield 0, self._writer.question(session=f"user-{user}")

    def after(self, question: Question, ended_ns: int, answer_tokens: int | None) -> tuple[int, Question] | None:
        at_ns = ended_ns + _pause_ns(self._spec, self._pauses)
        if at_ns >= self._until_ns or self._writer.exhausted:
            return None
        return at_ns, self._writer.question(session=question.session)


class MultiTurn:
    """Conversations begin as a Poisson process; each turn's prompt is all that was said before and something new."""

    def __init__(self, spec: WorkloadSpec, stream: Draw, until_ns: int) -> None:
        self._spec, self._until_ns = spec, until_ns
        self._writer = Writer(spec, stream)
        self._gaps = _poisson(spec, stream("workload.gaps"))
        self._pauses = stream("workload.pauses")
        self._turns = stream("workload.turns")

    def arrivals(self) -> Iterator[tuple[int, Question]]:
        at_ns = 0.0
        for conversation, gap_ns in enumerate(self._gaps):
            at_ns += gap_ns
            if at_ns >= self._until_ns or self._writer.exhausted:
                return
            turns = self._spec.turns.draw(self._turns)
            yield round(at_ns), self._writer.question(f"conversation-{conversation}", turns)

    def after(self, question: Question, ended_ns: int, answer_tokens: int | None) -> tuple[int, Question] | None:
        """An unanswered question ends its conversation."""
        if answer_tokens is None or question.turn + 1 >= question.turns or self._writer.exhausted:
            return None
        at_ns = ended_ns + _pause_ns(self._spec, self._pauses)
        return None if at_ns >= self._until_ns else (at_ns, self._writer.follow_up(question, answer_tokens))


def _pause_ns(spec: WorkloadSpec, draws: Random) -> int:
    return round(draws.expovariate(1 / spec.think)) if spec.think else 0


def _constant(spec: WorkloadSpec, _draws: Random) -> Iterator[float]:
    while True:
        yield S / spec.rate


def _poisson(spec: WorkloadSpec, draws: Random) -> Iterator[float]:
    while True:
        yield draws.expovariate(spec.rate) * S


def _gamma(spec: WorkloadSpec, draws: Random) -> Iterator[float]:
    """Gamma-distributed gaps with mean 1 / rate (as `vllm bench serve --burstiness`)."""
    while True:
        yield draws.gammavariate(spec.shape, 1 / (spec.rate * spec.shape)) * S


def _on_off(spec: WorkloadSpec, draws: Random) -> Iterator[float]:
    """Poisson while on, nothing while off."""
    left_ns, skipped_ns = float(spec.on), 0.0
    while True:
        gap_ns = draws.expovariate(spec.rate) * S
        while gap_ns > left_ns:
            gap_ns -= left_ns
            skipped_ns += left_ns + spec.off
            left_ns = float(max(spec.on, 1))
        left_ns -= gap_ns
        yield skipped_ns + gap_ns
        skipped_ns = 0.0


GAPS: Mapping[str, Callable[[WorkloadSpec, Random], Iterator[float]]] = {
    "constant": _constant,
    "poisson": _poisson,
    "gamma": _gamma,
    "onoff": _on_off,
}
