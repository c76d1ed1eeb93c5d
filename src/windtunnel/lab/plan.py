"""What a storm is: frozen values, checked before a byte is sent."""

import ipaddress
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from windtunnel.core.units import MS, S, format_duration, parse_duration_ns
from windtunnel.lab.connection import GRPC, HTTP2, How


class Role(Enum):
    """What a request is for."""

    PROBE = "probe"
    VICTIM = "victim"
    SURVIVOR = "survivor"
    BYSTANDER = "bystander"
    LATER = "later"
    CALM = "calm"
    """In a round without victims, the shape of a survivor: what the survivors are compared with."""
    RETRY = "retry"
    """The last attempt of a victim that retries: it stays."""
    KNOWN = "known"
    """One of a pair of equal requests before and after the storm."""


class Moment(Enum):
    """The state a victim is in when it leaves.

    QUEUED, PREFILL, DECODE, TRANSFER and BETWEEN are states of the target: read from `/debug/requests` where the target has it,
    otherwise inferred from its gauges (`lab.states`). The others are seen by the client itself.
    """

    INCOMPLETE = "incomplete"
    SENT = "sent"
    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    """Words are being made: what a client that does not stream cannot see."""
    TRANSFER = "transfer"
    """The KV cache is on its way from prefill to decode worker."""
    BETWEEN = "between-legs"
    """The prefill leg has ended and the decode leg has not begun."""
    HEAD = "head"
    TOKENS = "tokens"
    END = "end"
    """So many tokens before the last."""
    AFTER = "after"

    @property
    def of_target(self) -> bool:
        """A state that only the target knows."""
        return self in (Moment.QUEUED, Moment.PREFILL, Moment.DECODE, Moment.TRANSFER, Moment.BETWEEN)


class Api(Enum):
    """A request API; how each is spoken is in `lab.dialects`."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    GENERATE = "generate"
    """SGLang's own."""
    MESSAGES = "messages"
    """Anthropic's."""
    RESPONSES = "responses"

    @property
    def path(self) -> str:
        return {"chat": "/v1/chat/completions", "generate": "/generate"}.get(self.value, f"/v1/{self.value}")

    @property
    def choices(self) -> bool:
        """Whether a request may ask for several."""
        return self in (Api.COMPLETIONS, Api.CHAT, Api.GENERATE)


_HOWS = ", ".join(how.value for how in How)


CLIENTS_LIMIT = 256
CLIENT_PLACES = ("processes", "ray")


class PlanError(ValueError):
    """A plan that cannot or must not be run; the message names the field and the way out."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """When a victim leaves. `count` belongs to TOKENS and END, `after_ns` to AFTER."""

    moment: Moment = Moment.TOKENS
    count: int = 3
    after_ns: int = 0

    def __str__(self) -> str:
        tail = {
            Moment.TOKENS: f":{self.count}",
            Moment.END: f":{self.count}",
            Moment.AFTER: f":{format_duration(self.after_ns)}",
        }
        return self.moment.value + tail.get(self.moment, "")


def parse_trigger(text: str) -> Trigger:
    """`incomplete`, `sent`, a state of the target, `head`, `tokens:3`, `end:1` or `after:50ms`."""
    name, _, value = text.partition(":")
    try:
        if name in ("tokens", "end") and int(value) > 0:
            return Trigger(Moment(name), count=int(value))
        if name == "after":
            return Trigger(Moment.AFTER, count=0, after_ns=parse_duration_ns(value))
        if name not in ("tokens", "end", "after") and not value:
            return Trigger(Moment(name), count=0)
    except ValueError:
        pass
    raise PlanError(
        f"when: {text!r} is none of incomplete, sent, queued, prefill, decode, transfer, between-legs, head,"
        " tokens:N (N > 0), end:N (N tokens before the last), after:DURATION (after:50ms)"
    )


def parse_hows(text: str) -> tuple[How, ...]:
    """A comma list of ways of leaving that victims take in turns."""
    try:
        return tuple(How(part.strip()) for part in text.split(","))
    except ValueError:
        raise PlanError(f"how: {text!r} is not a comma list of {_HOWS}") from None


@dataclass(frozen=True, slots=True)
class Shape:
    """What a generation request looks like."""

    api: Api = Api.COMPLETIONS
    prompt_words: int = 16
    max_tokens: int = 16
    stream: bool = True
    n: int = 1
    """So many choices; the first is checked word by word, the others for their end."""


@dataclass(frozen=True, slots=True)
class BystanderKind:
    """A request of somebody else, and the status it must get. A shape makes it a generation, a path a GET."""

    name: str
    path: str | None = None
    shape: Shape | None = None
    expect_status: int = 200


METRICS_BYSTANDER = BystanderKind("metrics", path="/metrics")
COMPLETION_BYSTANDER = BystanderKind("completion", shape=Shape(max_tokens=8, stream=False))


def usual_bystanders(api: Api) -> tuple[BystanderKind, ...]:
    """Of a storm that names none: they speak as it does, for a target may have no other API."""
    short = BystanderKind(api.value, shape=Shape(api, max_tokens=8, stream=False))
    return METRICS_BYSTANDER, COMPLETION_BYSTANDER if api is Api.COMPLETIONS else short


@dataclass(frozen=True, slots=True)
class Action:
    """What an operator does meanwhile: a request without a body, so long after each beginning of a phase."""

    path: str
    at: str = "storm"
    after_ns: int = 0
    method: str = "POST"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a storm may cost at most. Each has its own flag to raise it."""

    max_requests: int = 2_000
    max_concurrency: int = 256
    max_duration_ns: int = 300 * S


@dataclass(frozen=True, slots=True)
class StormPlan:
    """One storm. Durations in nanoseconds."""

    victims: int = 20
    rounds: int = 1
    survivors: int = 0
    how: tuple[How, ...] = (How.FIN,)
    when: Trigger = Trigger()
    also: tuple[Trigger, ...] = ()
    """Further moments; victims take `when` and these in turns."""
    victim_concurrency: int = 0
    """So many victims at once; 0: all of a round."""
    hold: bool = False
    """Bring all victims of a round into the state before any of them leaves."""
    ramp_ns: int = 0
    """The victims of a round start over so long, ever more densely."""
    burst: int = 0
    """The victims of a round start in groups of so many, `burst_gap_ns` apart; 0: no groups."""
    burst_gap_ns: int = 100 * MS
    soak_ns: int = 0
    """Rounds repeat until so long has passed, whatever `rounds` says, within the limits."""
    retries: int = 2
    """How often a victim that leaves by timeout-retry tries again; the last attempt stays."""
    stall_ns: int = 1 * S
    """How long a victim that has stopped reading keeps its connection."""
    same_id: bool = False
    """All victims of a round send the same `X-Request-Id`."""
    victim: Shape = Shape(max_tokens=256)
    survivor: Shape = Shape(max_tokens=64)
    bystanders: int = 40
    bystander_kinds: tuple[BystanderKind, ...] = (METRICS_BYSTANDER, COMPLETION_BYSTANDER)
    bystander_concurrency: int = 4
    bystander_gap_ns: int = 0
    """Pause of each bystander client between two requests."""
    later: int = 20
    later_shape: Shape = Shape(max_tokens=16)
    later_concurrency: int = 4
    calm: int = 0
    """Streams of the survivors' shape, for each round, in a turn of their own: the arm without victims."""
    known: int = 3
    """Pairs of equal requests at temperature 0, before and after, where the target does not speak the oracle's words."""
    drain: int = 0
    """After all else: open so many streams, send the server's process SIGTERM, and see streams and process end."""
    drain_deadline_ns: int = 10 * S
    quiet_before_later: bool = True
    """Wait for quiet between the bystanders and the later streams, so that what the victims left is seen alone."""
    sample_every_ns: int = 50 * MS
    quiet_deadline_ns: int = 10 * S
    observe_ns: int = 0
    """Keep sampling for so long after the last victim has left, quiet or not."""
    polls: int = 0
    """Read every queue so often after the last victim has left, `poll_every_ns` apart."""
    poll_every_ns: int = 12 * S
    time_scale: float = 1.0
    """How much faster than the real server the target's clock runs; the durations here are divided already."""
    request_timeout_ns: int = 30 * S
    state_patience_ns: int = 2 * S
    """A victim whose state of the target has not come by then leaves all the same, and a note says so."""
    linger_ns: int = 1 * S
    """How long a half-closed victim still reads."""
    actions: tuple[Action, ...] = ()
    oracle: str = "auto"
    """`on`, `off`, or `auto`: on when the probe before the storm is answered in the oracle's words."""
    seed: int = 0
    clients: int = 1
    """So many processes send the requests (`lab.clients`)."""
    on: str = "processes"
    """Where they run: `processes` of this machine, or the actors of a `ray` cluster."""
    limits: Limits = field(default_factory=Limits)

    @property
    def requests(self) -> int:
        """How many requests the storm sends, samples and probes aside."""
        attempts = self.victims * (1 + (self.retries if How.TIMEOUT_RETRY in self.how else 0))
        return (attempts + self.survivors + self.calm) * self.rounds + self.bystanders + self.later + self.drain

    @property
    def api(self) -> Api:
        """Of what the storm asks by itself: probes and known pairs."""
        return (self.victim if self.victims else self.later_shape if self.later else self.survivor).api

    @property
    def triggers(self) -> tuple[Trigger, ...]:
        return (self.when, *self.also)

    @property
    def concurrency(self) -> int:
        """The most requests that can be open at once."""
        storm = (self.victim_concurrency or self.victims) + self.survivors * self.rounds + self.bystander_concurrency
        return max(storm, self.later_concurrency)


_AT_LEAST = {
    "victims": 0,
    "victim_concurrency": 0,
    "rounds": 1,
    "survivors": 0,
    "bystanders": 0,
    "bystander_concurrency": 1,
    "bystander_gap_ns": 0,
    "ramp_ns": 0,
    "burst": 0,
    "burst_gap_ns": 0,
    "soak_ns": 0,
    "retries": 1,
    "stall_ns": 0,
    "calm": 0,
    "known": 0,
    "drain": 0,
    "drain_deadline_ns": 0,
    "later": 0,
    "later_concurrency": 1,
    "sample_every_ns": MS,
    "quiet_deadline_ns": 0,
    "observe_ns": 0,
    "polls": 0,
    "poll_every_ns": MS,
    "request_timeout_ns": MS,
    "state_patience_ns": MS,
    "linger_ns": 0,
    "clients": 1,
}


_CHOICES = {"oracle": ("auto", "on", "off"), "on": CLIENT_PLACES}


def check_plan(plan: StormPlan) -> None:
    """Raises PlanError naming the first field that is wrong."""
    for name, least in _AT_LEAST.items():
        if getattr(plan, name) < least:
            raise PlanError(f"{name}: {getattr(plan, name)} is below {least}")
    for name in ("victim", "survivor", "later_shape"):
        _check_shape(name, getattr(plan, name))
    if not plan.how:
        raise PlanError(f"how: at least one of {_HOWS}")
    for name, choices in _CHOICES.items():
        if getattr(plan, name) not in choices:
            raise PlanError(f"{name}: {getattr(plan, name)!r} is none of {', '.join(choices)}")
    _check_deadline(plan)
    for trigger in plan.triggers:
        _check_trigger(plan, trigger)
    if plan.hold:
        _check_hold(plan)
    if plan.bystanders and not plan.bystander_kinds:
        raise PlanError("bystander_kinds: empty, but bystanders are asked for")
    _check_limits(plan)


_ONLY_HTTP = frozenset({How.HALF_CLOSE, How.KILL})


def check_spoken(plan: StormPlan, scheme: str) -> None:
    """Raises PlanError for what the protocol of the target has no way to do."""
    hows, moments = set(plan.how), {trigger.moment for trigger in plan.triggers}
    if scheme in GRPC:
        if wrong := hows & _ONLY_HTTP:
            raise PlanError(
                f"how: {_named(wrong)} is for HTTP; leave a gRPC worker by rst-stream (cancel), deadline, fin or rst"
            )
        if Moment.INCOMPLETE in moments:
            raise PlanError("when: incomplete is for HTTP: a gRPC library sends a request whole")
        return
    if scheme == "https" and (wrong := hows & _ONLY_HTTP):
        raise PlanError(f"how: {_named(wrong)} is for plain HTTP: TLS cannot be half closed, and the relay speaks none")
    if How.DEADLINE in hows:
        raise PlanError("how: deadline is for gRPC: a grpc://HOST:PORT target")
    if How.RST_STREAM in hows and scheme not in HTTP2:
        raise PlanError("how: rst-stream is for HTTP/2 and gRPC: an h2c://, h2:// or grpc:// target")


def _named(hows: Iterable[How]) -> str:
    return ", ".join(sorted(how.value for how in hows))


def _check_deadline(plan: StormPlan) -> None:
    by_time = all(trigger.moment is Moment.AFTER for trigger in plan.triggers)
    if How.DEADLINE in plan.how and (plan.hold or not by_time):
        raise PlanError("how: deadline is a time from the start: it needs when after:DURATION and no hold")


def _check_hold(plan: StormPlan) -> None:
    if plan.ramp_ns or plan.burst:
        raise PlanError("hold: all victims wait for the last, so ramp and burst change nothing; leave them at 0")
    if 0 < plan.victim_concurrency < plan.victims:
        raise PlanError("hold: needs all victims at once; leave victim_concurrency at 0")


def _check_trigger(plan: StormPlan, trigger: Trigger) -> None:
    if not plan.victim.stream and trigger.moment in (Moment.TOKENS, Moment.HEAD, Moment.END):
        raise PlanError(f"when: {trigger} needs a streaming victim; without streaming use decode, queued or sent")
    if trigger.moment is Moment.END and trigger.count >= plan.victim.max_tokens:
        raise PlanError(f"when: {trigger} is not within the {plan.victim.max_tokens} tokens of victim.max_tokens")
    if trigger.moment is Moment.INCOMPLETE and {How.ABORT_ID, How.STOP_READING} & set(plan.how):
        raise PlanError("when: incomplete has no request to abort and no response to read; use fin, rst, half-close or kill")


def start_offsets(plan: StormPlan) -> list[int]:
    """When each victim of a round starts, in ns from the round's start; a ramp's density rises linearly."""
    count = plan.victims
    if plan.burst:
        return [(index // plan.burst) * plan.burst_gap_ns for index in range(count)]
    return [round(plan.ramp_ns * math.sqrt(index / max(count - 1, 1))) for index in range(count)]


def _check_shape(name: str, shape: Shape) -> None:
    if not 1 <= shape.max_tokens <= 1_000_000:
        raise PlanError(f"{name}.max_tokens: {shape.max_tokens} is not in 1…1000000")
    if not 1 <= shape.n <= 64:
        raise PlanError(f"{name}.n: {shape.n} is not in 1…64")
    if shape.n > 1 and not shape.api.choices:
        raise PlanError(f"{name}.n: {shape.api.value} has one choice only")
    if not 1 <= shape.prompt_words <= 1_000_000:
        raise PlanError(f"{name}.prompt_words: {shape.prompt_words} is not in 1…1000000")


def _check_limits(plan: StormPlan) -> None:
    limits = plan.limits
    if plan.clients > CLIENTS_LIMIT:
        raise PlanError(f"clients: {plan.clients} is over {CLIENTS_LIMIT}")
    if plan.requests > limits.max_requests:
        raise PlanError(f"{plan.requests} requests are over the limit of {limits.max_requests}; raise it with --max-requests")
    if plan.concurrency > limits.max_concurrency:
        raise PlanError(
            f"{plan.concurrency} requests at once are over the limit of {limits.max_concurrency}; raise it: --max-concurrency"
        )


def check_target_allowed(host: str, *, owned: bool) -> None:
    """Only this machine may be stormed without the explicit word of whoever owns the target."""
    if not (owned or is_local(host)):
        raise PlanError(f"{host} is not this machine: a storm needs --i-own-this-target")


def is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
