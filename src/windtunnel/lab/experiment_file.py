"""The experiment file: TOML in, frozen and validated values out. Errors name the key and, where it can be found, the line.

Predictions and the compared effect are part of the file, so they are written down before the run. The schema is
these models; pydantic refuses unknown keys and wrong types.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from windtunnel.core.units import S, parse_duration_ns
from windtunnel.lab.connection import How, parse_origin
from windtunnel.lab.plan import (
    Action,
    Api,
    BystanderKind,
    Limits,
    PlanError,
    Shape,
    StormPlan,
    Trigger,
    check_plan,
    check_spoken,
    parse_trigger,
    usual_bystanders,
)
from windtunnel.lab.target import parse_metrics_url
from windtunnel.lab.trust import Trust, check_trust

FILE_LIMIT_BYTES = 1024 * 1024
BUILT_INS = "windtunnel.experiments"
ArmName = Literal["control", "treatment"]


class ExperimentError(ValueError):
    """An experiment file that cannot be used."""


class Environment(RuntimeError):
    """The machine or the target does not let the experiment run: a command does not start, a server is never ready."""


def _duration(value: object) -> object:
    return parse_duration_ns(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else value


def _trigger(value: object) -> object:
    return parse_trigger(value) if isinstance(value, str) else value


def _triggers(value: object) -> object:
    return tuple(_trigger(one) for one in value) if isinstance(value, list | tuple) else value


_PORT = re.compile(r"\{port\d?\}")


def _base_url(url: str) -> str:
    """Ports of its own are filled in when the arm is started."""
    parse_origin(_PORT.sub("1", url))
    return url


def _metrics_url(url: str) -> str:
    parse_metrics_url(_PORT.sub("1", url), named="")
    return url


BaseUrl = Annotated[str, AfterValidator(_base_url)]
DurationNs = Annotated[int, BeforeValidator(_duration), Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class ShapeSection(_Section):
    api: Api = Api.COMPLETIONS
    prompt_words: int = Field(16, ge=1)
    max_tokens: int = Field(16, ge=1)
    stream: bool = True
    n: int = Field(1, ge=1)

    def shape(self) -> Shape:
        return Shape(self.api, self.prompt_words, self.max_tokens, self.stream, self.n)


class BystanderSection(_Section):
    """A request of somebody else: either a path to GET or a generation."""

    name: str
    path: str | None = None
    request: ShapeSection | None = None
    expect_status: int = 200

    @model_validator(mode="after")
    def _one_of(self) -> "BystanderSection":
        if (self.path is None) == (self.request is None):
            raise ValueError("give either path (a GET) or request (a generation)")
        return self

    def kind(self) -> BystanderKind:
        return BystanderKind(self.name, self.path, self.request.shape() if self.request else None, self.expect_status)


class ActionSection(_Section):
    """What an operator does while the storm blows."""

    path: str
    at: Literal["storm", "bystanders", "quiet", "later"] = "storm"
    after: DurationNs = 0
    method: Literal["GET", "POST"] = "POST"


class StormSection(_Section):
    """The storm plan; durations carry a unit and are divided by the time scale, except time-outs and deadlines."""

    victims: int = 20
    rounds: int = 1
    survivors: int = 0
    how: tuple[How, ...] = (How.FIN,)
    when: Annotated[Trigger, BeforeValidator(_trigger)] = Trigger()
    also: Annotated[tuple[Trigger, ...], BeforeValidator(_triggers)] = ()
    victim_concurrency: int = 0
    hold: bool = False
    ramp: DurationNs = 0
    burst: int = 0
    burst_gap: DurationNs = 100_000_000
    soak: DurationNs = 0
    retries: int = 2
    stall: DurationNs = 1 * S
    same_id: bool = False
    victim: ShapeSection = ShapeSection(max_tokens=256)
    survivor: ShapeSection = ShapeSection(max_tokens=64)
    bystanders: int = 40
    bystander_kinds: tuple[BystanderSection, ...] | None = None
    bystander_concurrency: int = 4
    bystander_gap: DurationNs = 0
    later: int = 20
    later_request: ShapeSection = ShapeSection(max_tokens=16)
    later_concurrency: int = 4
    calm: int = 0
    known: int = 3
    drain: int = 0
    drain_deadline: DurationNs = 10 * S
    quiet_before_later: bool = True
    sample_every: DurationNs = 50_000_000
    quiet_deadline: DurationNs = 10 * S
    observe: DurationNs = 0
    polls: int = 0
    poll_every: DurationNs = 12 * S
    request_timeout: DurationNs = 30 * S
    state_patience: DurationNs = 2 * S
    actions: tuple[ActionSection, ...] = ()
    oracle: Literal["auto", "on", "off"] = "auto"
    clients: int = 1
    on: Literal["processes", "ray"] = "processes"
    max_requests: int = 2_000
    max_concurrency: int = 256
    max_duration: DurationNs = 300 * S

    def plan(self, *, seed: int, time_scale: float) -> StormPlan:
        def scaled(ns: int) -> int:
            return round(ns / time_scale)

        kinds = self.bystander_kinds
        return StormPlan(
            victims=self.victims,
            rounds=self.rounds,
            survivors=self.survivors,
            how=self.how,
            when=replace(self.when, after_ns=scaled(self.when.after_ns)),
            also=tuple(replace(one, after_ns=scaled(one.after_ns)) for one in self.also),
            ramp_ns=scaled(self.ramp),
            burst=self.burst,
            burst_gap_ns=scaled(self.burst_gap),
            soak_ns=scaled(self.soak),
            retries=self.retries,
            stall_ns=scaled(self.stall),
            same_id=self.same_id,
            calm=self.calm,
            known=self.known,
            drain=self.drain,
            drain_deadline_ns=self.drain_deadline,
            victim_concurrency=self.victim_concurrency,
            hold=self.hold,
            victim=self.victim.shape(),
            survivor=self.survivor.shape(),
            bystanders=self.bystanders,
            bystander_kinds=usual_bystanders(self.victim.api) if kinds is None else tuple(one.kind() for one in kinds),
            bystander_concurrency=self.bystander_concurrency,
            bystander_gap_ns=scaled(self.bystander_gap),
            later=self.later,
            later_shape=self.later_request.shape(),
            later_concurrency=self.later_concurrency,
            quiet_before_later=self.quiet_before_later,
            sample_every_ns=max(scaled(self.sample_every), 1_000_000),
            quiet_deadline_ns=self.quiet_deadline,
            observe_ns=scaled(self.observe),
            polls=self.polls,
            poll_every_ns=max(scaled(self.poll_every), 1_000_000),
            time_scale=time_scale,
            request_timeout_ns=self.request_timeout,
            state_patience_ns=self.state_patience,
            actions=tuple(Action(one.path, one.at, scaled(one.after), one.method) for one in self.actions),
            oracle=self.oracle,
            seed=seed,
            clients=self.clients,
            on=self.on,
            limits=Limits(self.max_requests, self.max_concurrency, self.max_duration),
        )


class TlsSection(_Section):
    """Whom an arm's TLS trusts and as whom the lab comes (`lab.trust`); paths are relative to where the command runs."""

    ca: str | None = None
    insecure: bool = False
    client_cert: str | None = None
    client_key: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "TlsSection":
        check_trust(self.trust)
        return self

    @property
    def trust(self) -> Trust:
        return Trust(self.ca, self.insecure, self.client_cert, self.client_key)


class Arm(_Section):
    """One arm: a command that the lab starts, or a server that is running already."""

    text: str = ""
    command: str | None = None
    url: BaseUrl | None = None
    target: BaseUrl | None = None
    """With a command: where the storm blows, when that is not the address of `ready_url`, or not by HTTP/1.1."""
    ready_url: str | None = None
    ready_timeout_ns: DurationNs = Field(60 * S, alias="ready_timeout")
    env: dict[str, str] = {}
    log_patterns: dict[str, str] = {}
    """Name → regular expression, counted by line in the arm's stdout and stderr."""
    model: str | None = None
    headers: dict[str, str] = {}
    metrics_urls: tuple[Annotated[str, AfterValidator(_metrics_url)], ...] = ()
    watch: tuple[str, ...] = ()
    tls: TlsSection = TlsSection()
    storm: dict[str, Any] = {}
    """What this arm's storm has otherwise than the `[storm]` table; `{ victims = 0 }` makes it an arm without a storm."""

    @model_validator(mode="after")
    def _check(self) -> "Arm":
        if (self.command is None) == (self.url is None):
            raise ValueError("give either command or url")
        if self.url is not None and self.target is not None:
            raise ValueError("target belongs to a command; with url, the url is the target")
        for name, pattern in self.log_patterns.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"log_patterns.{name} is not a regular expression: {error}") from None
        return self

    @property
    def scheme(self) -> str:
        """What the storm speaks."""
        base = self.url or self.target or self.ready_url
        return parse_origin(_PORT.sub("1", base)).scheme if base else "http"


class Arms(_Section):
    control: Arm
    treatment: Arm


class Prediction(_Section):
    """What will be seen, written down before the run.

    `metric` is a path into a trial's document (`bystanders.non_200`, `leaked.running`, `counters.request_success{stop}`,
    `findings.count`, `series.GAUGE.max`, `series.GAUGE.at(12s)`: that long after the last victim left). `value` is a
    number or the path of another metric of the same trial. `over` folds the trials: it must hold in every one, in
    any one, or for their sum or mean.
    """

    id: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    text: str
    arm: ArmName
    metric: str
    operator: Literal["==", "!=", "<", "<=", ">", ">="]
    value: float | str
    over: Literal["every", "any", "total", "mean"] = "every"


class Effect(_Section):
    """What is compared between the arms: a rate when `of` is given (both are counts), else a mean over trials."""

    metric: str
    of: str | None = None
    alpha: float = Field(0.05, gt=0, lt=1)
    margin: float | None = Field(None, gt=0)
    """Given: the claim is that there is no effect larger than this, instead of that there is one."""


class Experiment(_Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    title: str
    description: str = ""
    trials: int = Field(3, ge=1, le=1_000)
    seed: int = 0
    arms: Arms
    storm: StormSection = StormSection()
    predictions: tuple[Prediction, ...] = Field(min_length=1)
    effect: Effect

    @model_validator(mode="after")
    def _check(self) -> "Experiment":
        ids = [prediction.id for prediction in self.predictions]
        twice = {one for one in ids if ids.count(one) > 1}
        if twice:
            raise ValueError(f"predictions: the id {min(twice)!r} is used twice")
        for name in ("control", "treatment"):
            self._check_storm(name)
        return self

    def _check_storm(self, name: ArmName) -> None:
        """Raises ValueError with the path of the key in the file, where the plan's error names one."""
        plan, arm = self.plan(name, seed=0, time_scale=1.0), self.arm(name)
        speaks = ""
        try:
            check_plan(plan)
            speaks = f"; the {name} arm speaks {arm.scheme}"
            check_spoken(plan, arm.scheme)
        except PlanError as error:
            own = str(error).partition(":")[0] in arm.storm
            raise ValueError(f"{f'arms.{name}.storm' if own else 'storm'}.{error}{speaks}") from None

    def plan(self, name: ArmName, *, seed: int, time_scale: float) -> StormPlan:
        """The storm of one arm."""
        changes = StormSection.model_validate(self.arm(name).storm)
        section = self.storm.model_copy(update={key: getattr(changes, key) for key in changes.model_fields_set})
        return section.plan(seed=seed, time_scale=time_scale)

    def arm(self, name: ArmName) -> Arm:
        return self.arms.control if name == "control" else self.arms.treatment


def built_ins() -> dict[str, str]:
    """Name → text of every built-in experiment file."""
    files = sorted(resources.files(BUILT_INS).iterdir(), key=lambda one: one.name)
    return {one.name.removesuffix(".toml"): one.read_text("utf-8") for one in files if one.name.endswith(".toml")}


def load(name_or_path: str) -> Experiment:
    """A built-in by name, or a file. Raises ExperimentError."""
    known = built_ins()
    if name_or_path in known:
        return parse(known[name_or_path], name_or_path)
    path = Path(name_or_path)
    if not path.is_file():
        raise ExperimentError(f"no built-in experiment or file is called {name_or_path!r}; built in: {', '.join(known)}")
    if path.stat().st_size > FILE_LIMIT_BYTES:
        raise ExperimentError(f"{name_or_path}: over {FILE_LIMIT_BYTES} bytes")
    return parse(path.read_text("utf-8"), name_or_path)


def parse(text: str, source: str) -> Experiment:
    """Raises ExperimentError with one line per problem: `source:line: key: what is wrong`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ExperimentError(f"{source}: not TOML: {error}") from None
    try:
        return Experiment.model_validate(data)
    except PlanError as error:
        raise ExperimentError(f"{source}: storm.{error}") from None
    except ValidationError as error:
        problems = _roots(error.errors())
        raise ExperimentError("\n".join(_problem(one, text, source) for one in problems)) from None


def _roots(problems: Sequence[Any]) -> list[Any]:
    """Without those that a part's own error has brought about: a list whose items are all wrong is not too short."""
    return [
        one
        for one in problems
        if one["type"] != "too_short"
        or not any(len(other["loc"]) > len(one["loc"]) and other["loc"][: len(one["loc"])] == one["loc"] for other in problems)
    ]


def at_key(source: str, where: Sequence[str | int]) -> str:
    """`source:line: key` of a name or file as `load` takes it."""
    path = Path(source)
    text = built_ins().get(source) or (path.read_text("utf-8") if path.is_file() else "")
    line = find_line(text, where)
    return f"{source}{f':{line}' if line else ''}: {'.'.join(str(part) for part in where)}"


_NAMED = re.compile(r"((?:storm|arms)\.[\w.]+): ")
"""A message about the whole file that names a key."""


def _problem(problem: Mapping[str, Any], text: str, source: str) -> str:
    where = [part for part in problem["loc"] if not (isinstance(part, str) and part.startswith(("function-", "float", "str")))]
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        message = f"there is no such key{_near(str(where[-1]))}"
    if not where and (named := _NAMED.match(message)):
        where = named[1].split(".")
    line = find_line(text, where)
    key = ".".join(str(part) for part in where) or "the file"
    message = message.removeprefix(f"{key}: ")
    return f"{source}:{line}: {key}: {message}" if line else f"{source}: {key}: {message}"


def _near(key: str) -> str:
    known = {name for section in _Section.__subclasses__() for name in section.model_fields}
    near = get_close_matches(key, sorted(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def storm_plan(values: Mapping[str, Any], *, seed: int) -> StormPlan:
    """The plan that a `[storm]` table makes. Raises PlanError naming the key."""
    try:
        plan = StormSection.model_validate(values).plan(seed=seed, time_scale=1.0)
    except ValidationError as error:
        raise PlanError("\n".join(_problem(one, "", "storm") for one in error.errors())) from None
    check_plan(plan)
    return plan


def with_settings(values: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`values` changed by texts such as `ramp=2s` or `victim.n=2`; a value that is not TOML is a text."""
    out = {key: dict(value) if isinstance(value, dict) else value for key, value in values.items()}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise PlanError(f"--set {setting!r} is not KEY=VALUE")
        try:
            value: Any = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        *tables, key = path.strip().split(".")
        place: dict[str, Any] = out
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
    return out


_TABLE = re.compile(r"^\s*(\[{1,2})\s*([^\]]+?)\s*\]{1,2}")


def find_line(text: str, where: Sequence[str | int]) -> int | None:
    """The line of the innermost part of a key path that is written in the file: its key, or else its table."""
    wanted = [str(part) for part in where]
    best, depth = None, 0
    table: list[str] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = _TABLE.match(line)
        if header:
            table = header[2].replace('"', "").split(".")
            if header[1] == "[[":
                seen[header[2]] = seen.get(header[2], -1) + 1
                table.append(str(seen[header[2]]))
            path = table
        else:
            key = re.match(r'\s*"?([\w.:-]+)"?\s*=', line)
            path = [*table, *key[1].split(".")] if key else []
        if path and wanted[: len(path)] == path and len(path) > depth:
            best, depth = number, len(path)
    return best
