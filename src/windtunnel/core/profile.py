"""A measured server as numbers: what `windtunnel calibrate` writes and `windtunnel serve --profile` plays back.

A step costs a base, so much for each prefill token, decoding sequence, context token and prefill attention pair, plus one draw
of the step noise. The noise is kept as quantiles of what was measured, extremes included: no law is assumed and no tail is cut.
It is added, not multiplied: what disturbs a step (an interrupt, another process) does not know how long the step is. What the
server's front end costs is `FrontendCosts`; `core.frontend` says how it is spent.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import erf, sqrt
from typing import Any, ClassVar

from windtunnel.core.machine import NO_OTHER_JOBS, Machine, OtherJobs
from windtunnel.core.pacing import Draws, StepPlan
from windtunnel.core.units import LONGEST_S, S

FORMAT = "windtunnel-profile-1"


class ProfileError(ValueError):
    """A profile that cannot be: names the field and the right form."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Nanoseconds to add, by their quantile function: `values_ns[i]` is the quantile at `shares[i]`, linear in between.

    `shares` rise from 0 to 1. Points close to 1 keep rare slow steps as rare, and as slow, as they were measured.
    """

    shares: tuple[float, ...] = (0.0, 1.0)
    values_ns: tuple[float, ...] = (0.0, 0.0)
    lasting: float = 0.0
    """Share (0 to 1) of the disturbance that lasts from draw to draw: slow times, not only slow steps."""
    memory: float = 0.0
    """How much of the lasting part the next draw keeps (0 to 1)."""

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.values_ns) or len(self.shares) < 2:
            raise ProfileError("noise: shares and values_ns must be of one length, at least 2")
        if self.shares[0] != 0 or self.shares[-1] != 1 or any(b <= a for a, b in pairwise(self.shares)):
            raise ProfileError("noise.shares: must rise from 0 to 1")
        if any(b < a for a, b in pairwise(self.values_ns)):
            raise ProfileError("noise.values_ns: must not fall")
        if not (0 <= self.lasting <= 1 and 0 <= self.memory < 1):
            raise ProfileError("noise: lasting must be 0 to 1 and memory at least 0 and below 1")

    def at(self, share: float) -> float:
        at = min(bisect_right(self.shares, share), len(self.shares) - 1) - 1
        low, high = self.shares[at], self.shares[at + 1]
        return self.values_ns[at] + (self.values_ns[at + 1] - self.values_ns[at]) * (share - low) / (high - low)


class NoiseStream:
    """Draws of one noise, one after another; owns the lasting part.

    A sum of two Gaussians, one that lasts and one that does not, is turned into a share and the share into its quantile. So the
    distribution is the measured one whatever lasts.
    """

    def __init__(self, noise: Noise, draws: Draws) -> None:
        self._noise = noise
        self._draws = draws
        self._lasting = draws.gauss(0, 1)

    def draw(self) -> float:
        noise, gauss = self._noise, self._draws.gauss
        self._lasting = noise.memory * self._lasting + sqrt(1 - noise.memory**2) * gauss(0, 1)
        mixed = sqrt(noise.lasting) * self._lasting + sqrt(1 - noise.lasting) * gauss(0, 1)
        return noise.at(0.5 * (1 + erf(mixed / sqrt(2))))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Nanoseconds, as floats: a context token costs less than one."""

    base_ns: float = 0.0
    prefill_token_ns: float = 0.0
    decode_seq_ns: float = 0.0
    context_token_ns: float = 0.0
    prefill_pair_ns: float = 0.0
    noise_growth: float = 0.0
    """Each decoding sequence beyond the first adds a disturbance of its own, independent, with this share of the variance."""

    def step_ns(self, plan: StepPlan) -> float:
        return (
            self.base_ns
            + self.prefill_token_ns * plan.prefill_tokens
            + self.decode_seq_ns * plan.decode_seqs
            + self.context_token_ns * plan.context_tokens
            + self.prefill_pair_ns * plan.prefill_pairs
        )

    def cpu_ns(self, plan: StepPlan) -> float:
        """The part that other jobs slow: what the engine's processes do for a step, however long its prompts are."""
        return self.base_ns + self.decode_seq_ns * plan.decode_seqs

    def noise_factor(self, plan: StepPlan) -> float:
        """Of the part of the noise that comes with further sequences."""
        return sqrt(self.noise_growth * max(0, plan.decode_seqs - 1))


@dataclass(frozen=True, slots=True)
class FrontendCosts:
    """CPU time of the API server, one event loop; see `core.frontend`."""

    request_ns: float = 0.0
    """For each request, from its arrival to its hand-over to the engine."""
    prompt_token_ns: float = 0.0
    """The same, for each prompt token, cached or not."""
    step_ns: float = 0.0
    """For each batch of outputs taken from the engine."""
    chunk_ns: float = 0.0
    """For each chunk written to a client."""
    wake_ns: float = 0.0
    """For the first request after the engine was idle: it sleeps and must be woken."""
    handover_ns: float = 0.0
    """Between front end and engine, both ways together: it takes time but not the loop's."""
    contention: float = 0.0
    """Share of the work on a request that the steps under way lose to it: front end and engine share the machine's cores."""
    turns: int = 1
    """Turns of the loop that a request needs: how long it waits behind other work."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One calibrated server. Frozen; `as_mapping` and `from_mapping` are its file form."""

    step: StepCosts = field(default_factory=StepCosts)
    frontend: FrontendCosts = field(default_factory=FrontendCosts)
    step_noise: Noise = field(default_factory=Noise)
    request_noise: Noise = field(default_factory=Noise)
    """Around `handover_ns`."""
    source: str = ""
    """Where the numbers come from: file, concurrencies, seed."""
    machine: Machine = field(default_factory=Machine)

    def as_mapping(self) -> dict[str, Any]:
        sections = {name: _plain(getattr(self, name)) for name in _SECTIONS}
        return {"format": FORMAT, "source": self.source, **sections}


_SECTIONS: Mapping[str, type] = {
    "step": StepCosts,
    "frontend": FrontendCosts,
    "step_noise": Noise,
    "request_noise": Noise,
    "machine": Machine,
}


def _plain(section: Any) -> dict[str, Any]:
    values = {item.name: getattr(section, item.name) for item in fields(section)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_mapping(document: Any) -> Profile:
    """The profile of a parsed file. Raises ProfileError that names the field."""
    if not isinstance(document, Mapping) or document.get("format") != FORMAT:
        raise ProfileError(f"format: must be {FORMAT!r}")
    unknown = sorted(set(document) - {"format", "source", "fit", *_SECTIONS})
    if unknown:
        raise ProfileError(f"{unknown[0]}: unknown field; known are source, fit, {', '.join(_SECTIONS)}")
    sections = {name: _section(name, kind, document[name]) for name, kind in _SECTIONS.items() if name in document}
    if "base_ns" not in document.get("step", {}):
        raise ProfileError("step.base_ns: is missing: a step must cost something, or 0 must be said")
    return Profile(**sections, source=str(document.get("source", "")))


def _section(name: str, kind: type, given: Any) -> Any:
    if not isinstance(given, Mapping):
        raise ProfileError(f"{name}: must be an object")
    known = {item.name: item.default for item in fields(kind)}
    for key, value in given.items():
        if key not in known:
            raise ProfileError(f"{name}.{key}: unknown field; known are {', '.join(known)}")
        _check(f"{name}.{key}", value, known[key], _bounds(key, known[key]))
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in given.items()})


@dataclass(frozen=True, slots=True)
class _Bounds:
    least: float
    most: float
    unit: str = ""

    def check(self, name: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.least <= value <= self.most:
            raise ProfileError(
                f"{name} is {repr(value)[:_SHOWN_CHARS]}: must be a number of {self.least:g} to {self.most:g}{self.unit}"
            )


_SHOWN_CHARS = 100
MOST_CORES = 100_000
_MOST_POINTS = 10_000
_LONGEST_NS = float(LONGEST_S * S)
_BOUNDS: Mapping[str, _Bounds] = {
    "shares": _Bounds(0, 1),
    "lasting": _Bounds(0, 1),
    "memory": _Bounds(0, 1),
    "noise_growth": _Bounds(0, 1000),
    "contention": _Bounds(0, 1000),
    "turns": _Bounds(1, 1000),
    "cores": _Bounds(0, MOST_CORES),
    "engine_cores": _Bounds(1, MOST_CORES),
}


def _bounds(key: str, like: Any) -> _Bounds:
    """What is not in the table is a duration; noise may be negative."""
    return _BOUNDS.get(key) or _Bounds(-_LONGEST_NS if isinstance(like, tuple) else 0, _LONGEST_NS, " (10^9 s)")


def _check(name: str, value: Any, like: Any, bounds: _Bounds) -> None:
    if isinstance(like, tuple):
        if not isinstance(value, list | tuple) or len(value) > _MOST_POINTS:
            raise ProfileError(f"{name}: must be a list of at most {_MOST_POINTS} numbers")
        for at, item in enumerate(value):
            bounds.check(f"{name}[{at}]", item)
        return
    if isinstance(like, int) and not isinstance(value, int):
        raise ProfileError(f"{name} is {repr(value)[:_SHOWN_CHARS]}: must be a whole number")
    bounds.check(name, value)


def at_speed(profile: Profile, speed: float) -> Profile:
    """Every duration divided by `speed`."""
    if speed == 1:
        return profile
    sections = {name: _at_speed(getattr(profile, name), speed) for name in _SECTIONS}
    return replace(profile, **sections)


def _at_speed(section: Any, speed: float) -> Any:
    durations = {item.name: getattr(section, item.name) for item in fields(section) if item.name.endswith("_ns")}
    scaled = {
        name: tuple(one / speed for one in value) if isinstance(value, tuple) else value / speed
        for name, value in durations.items()
    }
    return replace(section, **scaled)


class ProfilePacing:
    """The step model of a profile as a `Pacing`. Owns its noise streams.

    `other_jobs` count if the profile knows its machine.
    """

    lock_step: ClassVar[bool] = True

    def __init__(self, profile: Profile, draws: Draws, other_jobs: OtherJobs = NO_OTHER_JOBS) -> None:
        self.profile = profile
        self.other_jobs = other_jobs
        self.stretch = 1.0
        """What other jobs do to the steps that begin: `core.fronted` keeps it up to date."""
        self._step_noise = NoiseStream(profile.step_noise, draws)
        self._further_noise = NoiseStream(replace(profile.step_noise, lasting=0.0), draws)

    def step_ns(self, plan: StepPlan) -> int:
        costs = self.profile.step
        spent_ns = costs.step_ns(plan) + (self.stretch - 1) * costs.cpu_ns(plan) + self._step_noise.draw()
        if factor := costs.noise_factor(plan):
            spent_ns += factor * self._further_noise.draw()
        return max(0, round(spent_ns))

    def first_token_ns(self, prompt_tokens: int, cached_tokens: int, load: float = 0.0) -> int:
        return 0

    def next_token_ns(self, load: float = 0.0) -> int:
        return 0
