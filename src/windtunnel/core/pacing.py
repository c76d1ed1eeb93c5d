"""How long things take: a choice behind one small interface.

*Step model* (`StepPacing`): the engine works in lock step, and one step costs a base plus so much per prefill token and
per running sequence. *Per-request model* (`RequestPacing`): each sequence has its own time to first token and
inter-token latencies, drawn from seeded distributions; zero means as fast as possible.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log, log1p, sqrt
from typing import ClassVar, NamedTuple, Protocol


class StepPlan(NamedTuple):
    """What one step computes."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    """Tokens of KV that the step's attention reads."""
    prefill_pairs: int = 0
    """Pairs of a prefill token and a token that its attention sees, of all prompts: the quadratic part of attention."""


class Pacing(Protocol):
    """`load` is the share of the engine's places that are taken: 0 for a lone sequence, 1 when it is full."""

    @property
    def lock_step(self) -> bool:
        """True: all running sequences move together, one step after another. False: each when its own deadline comes."""
        ...

    def step_ns(self, plan: StepPlan) -> int:
        """How long this step occupies the engine."""
        ...

    def first_token_ns(self, prompt_tokens: int, cached_tokens: int, load: float = 0.0) -> int:
        """From scheduling to the first token of one sequence, at least."""
        ...

    def next_token_ns(self, load: float = 0.0) -> int:
        """From one token of a sequence to its next, at least."""
        ...


def begun_at(waits_since_ns: int, looked_ns: int, now_ns: int) -> int:
    """From when on the time to first token of a sequence counts that is admitted at `now_ns`.

    Whoever came after the queue was last looked at has waited for nothing but a late driver, which costs it nothing.
    """
    return waits_since_ns if waits_since_ns > looked_ns else now_ns


@dataclass(frozen=True, slots=True)
class StepPacing:
    """step = base + prefill_token x tokens + decode_seq x sequences; all in nanoseconds."""

    base_ns: int
    prefill_token_ns: int
    decode_seq_ns: int
    lock_step: ClassVar[bool] = True

    def step_ns(self, plan: StepPlan) -> int:
        return self.base_ns + self.prefill_token_ns * plan.prefill_tokens + self.decode_seq_ns * plan.decode_seqs

    def first_token_ns(self, prompt_tokens: int, cached_tokens: int, load: float = 0.0) -> int:
        return 0

    def next_token_ns(self, load: float = 0.0) -> int:
        return 0


class Draws(Protocol):
    """What pacing needs of a seeded generator; `random.Random(seed)` is one."""

    def random(self) -> float: ...

    def gauss(self, mu: float, sigma: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Duration:
    """A distribution of durations, in nanoseconds. A draw is never negative; tails are kept."""

    mean_ns: int
    std_ns: int = 0
    kind: str = "constant"
    """`constant`; `normal` (truncated at 0); `lognormal` (with this mean and deviation); `uniform` (mean ± √3 std)."""

    def __post_init__(self) -> None:
        if self.kind not in _DRAW:
            raise ValueError(f"kind is {self.kind!r}: must be one of {', '.join(_DRAW)}")
        if self.mean_ns < 0 or self.std_ns < 0:
            raise ValueError(f"mean_ns is {self.mean_ns} and std_ns is {self.std_ns}: both must be at least 0")

    def draw_ns(self, draws: Draws) -> int:
        if not self.std_ns or not self.mean_ns:
            return self.mean_ns
        return max(0, round(_DRAW[self.kind](self.mean_ns, self.std_ns, draws)))


def _constant(mean: float, _std: float, _draws: Draws) -> float:
    return mean


def _normal(mean: float, std: float, draws: Draws) -> float:
    return draws.gauss(mean, std)


def lognormal(mean: float, std: float, draws: Draws) -> float:
    """A draw from the distribution of that mean and that standard deviation."""
    variance = log1p((std / mean) ** 2)
    return exp(draws.gauss(log(mean) - variance / 2, sqrt(variance)))


def _uniform(mean: float, std: float, draws: Draws) -> float:
    return mean + std * sqrt(3) * (2 * draws.random() - 1)


_DRAW: dict[str, Callable[[float, float, Draws], float]] = {
    "constant": _constant,
    "normal": _normal,
    "lognormal": lognormal,
    "uniform": _uniform,
}


@dataclass(frozen=True, slots=True)
class RequestPacing:
    """Each sequence at its own pace; steps themselves take no time. All zero: as fast as possible.

    time to first token = ttft + prefill_token x (prompt - cached), then one inter-token latency for each token; both are
    multiplied by `time_scale` and by 1…`load_factor`, in proportion to the load.
    """

    draws: Draws
    ttft: Duration = Duration(0)
    itl: Duration = Duration(0)
    prefill_token_ns: int = 0
    load_factor: float = 1.0
    """The slow-down at full load (as many running sequences as the engine takes); 1: none."""
    time_scale: float = 1.0
    lock_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.load_factor < 1:
            raise ValueError(f"load_factor is {self.load_factor}: must be at least 1")
        if self.time_scale < 0 or self.prefill_token_ns < 0:
            raise ValueError(
                f"time_scale is {self.time_scale} and prefill_token_ns {self.prefill_token_ns}: must be at least 0"
            )

    def step_ns(self, plan: StepPlan) -> int:
        return 0

    def first_token_ns(self, prompt_tokens: int, cached_tokens: int, load: float = 0.0) -> int:
        base_ns = self.ttft.draw_ns(self.draws) + self.prefill_token_ns * (prompt_tokens - cached_tokens)
        return self._scaled_ns(base_ns, load)

    def next_token_ns(self, load: float = 0.0) -> int:
        return self._scaled_ns(self.itl.draw_ns(self.draws), load)

    def _scaled_ns(self, base_ns: int, load: float) -> int:
        factor = self.time_scale * (1 + (self.load_factor - 1) * load)
        return base_ns if factor == 1 else round(base_ns * factor)


def is_instant(pacing: Pacing) -> bool:
    """No time passes from one token of a sequence to its next: a server is as fast as it can."""
    if isinstance(pacing, StepPacing):
        return pacing.step_ns(StepPlan(0, 1, 1)) == 0
    return isinstance(pacing, RequestPacing) and not pacing.itl.mean_ns * pacing.time_scale
