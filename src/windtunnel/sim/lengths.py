"""Numbers of tokens: a number, or a distribution of numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from windtunnel.core.pacing import lognormal

FORMS = "a number, uniform:LOW:HIGH, normal:MEAN:STD, lognormal:MEAN:STD or choice:A,B,…"
LIMIT = 10_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers from 1 on."""

    kind: str
    numbers: tuple[float, ...]

    def draw(self, draws: Random) -> int:
        return max(1, min(LIMIT, round(_DRAWS[self.kind](draws, *self.numbers))))

    def __str__(self) -> str:
        numbers = [f"{number:g}" for number in self.numbers]
        if self.kind == "constant":
            return numbers[0]
        return f"{self.kind}:{(',' if self.kind == 'choice' else ':').join(numbers)}"


def parse_lengths(value: Any) -> Lengths:
    """Raises ValueError with the right forms in the message."""
    if isinstance(value, Lengths):
        return value
    try:
        if isinstance(value, int) and not isinstance(value, bool):
            return _checked("constant", [float(value)])
        kind, _, rest = str(value).partition(":")
        if not rest:
            return _checked("constant", [float(int(kind))])
        return _checked(kind, [float(number) for number in rest.split("," if kind == "choice" else ":")])
    except ValueError as error:
        raise ValueError(f"{value!r} is not a number of tokens: write {FORMS} ({error})") from None


def _checked(kind: str, numbers: list[float]) -> Lengths:
    wanted = {"constant": 1, "uniform": 2, "normal": 2, "lognormal": 2}
    if kind not in _DRAWS:
        raise ValueError(f"unknown distribution {kind!r}")
    if kind in wanted and len(numbers) != wanted[kind]:
        raise ValueError(f"{kind} takes {wanted[kind]} numbers")
    if not all(0 <= number <= LIMIT for number in numbers) or numbers[0] < 1:
        raise ValueError(f"numbers must be from 1 (a deviation from 0) to {LIMIT}")
    if kind == "uniform" and numbers[1] < numbers[0]:
        raise ValueError("LOW is above HIGH")
    return Lengths(kind, tuple(numbers))


_DRAWS: dict[str, Callable[..., float]] = {
    "constant": lambda _draws, value: value,
    "uniform": lambda draws, low, high: draws.randint(int(low), int(high)),
    "normal": lambda draws, mean, std: draws.gauss(mean, std),
    "lognormal": lambda draws, mean, std: lognormal(mean, std, draws),
    "choice": lambda draws, *values: draws.choice(values),
}
