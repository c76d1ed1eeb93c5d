"""A scenario: everything a run depends on, parsed once into frozen values. The TOML file has the same names.

Durations are written with a unit (`250ms`, `1m30s`). Numbers of tokens are a number or a distribution
(`uniform:64:512`, `normal:256:64`, `lognormal:256:128`, `choice:128,512,2048`). Unknown keys are errors.
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from windtunnel.core.units import MS, US, S, parse_duration_ns
from windtunnel.sim.lengths import Lengths, parse_lengths


class ScenarioError(ValueError):
    """A scenario that cannot be: names the key and the right form."""


def _duration_ns(value: Any) -> int:
    """A text with a unit; an int is already nanoseconds (defaults, Python callers)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return parse_duration_ns(value)


DurationNs = Annotated[int, BeforeValidator(_duration_ns), Field(ge=0)]
TokenLengths = Annotated[Lengths, BeforeValidator(parse_lengths)]
POLICIES = ("round-robin", "random", "least-load", "power-of-two", "prefix-aware", "session-affinity", "pd-pairs")


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class PacingSpec(Part):
    """How long things take (`core.pacing`). `step`: the fields of a step; `request`: those of a request."""

    model: Literal["step", "request"] = "step"
    base: DurationNs = 10 * MS
    prefill_token: DurationNs = 20 * US
    decode_seq: DurationNs = 100 * US
    ttft: DurationNs = 50 * MS
    ttft_std: DurationNs = 0
    itl: DurationNs = 20 * MS
    itl_std: DurationNs = 0
    distribution: Literal["constant", "normal", "lognormal", "uniform"] = "normal"
    load_factor: float = Field(1.0, ge=1)


class FrontendSpec(Part):
    """What a request costs the HTTP server before the engine sees it: one core, one request at a time."""

    request: DurationNs = 0
    prompt_token: DurationNs = 0
    """For each token of the prompt (parsing, tokenizing)."""
    latency: DurationNs = 0
    """What passes besides, however many come (sockets, wake-ups)."""


class TransferSpec(Part):
    """How KV moves from a prefill worker: each write takes latency + bytes / bandwidth."""

    bandwidth_gb_s: float = Field(10.0, gt=0)
    """In 10^9 bytes a second."""
    latency: DurationNs = 100 * US
    dead_peer: DurationNs = 30 * S
    """How long the transport takes to report a peer that is gone."""


class EnginesSpec(Part):
    """`count` equal engines. `config` takes the fields of the engine's own configuration, by its names.

    A field that ends in `_ns` may be written as a duration with a unit.
    """

    count: int = Field(1, ge=1, le=4096)
    kind: str = "vllm"
    role: Literal["unified", "prefill", "decode"] = "unified"
    gpus: float = Field(1.0, gt=0)
    config: dict[str, Any] = {}
    pacing: PacingSpec = PacingSpec()
    frontend: FrontendSpec = FrontendSpec()
    tp: int = Field(1, ge=1, le=64)
    """Attention-TP ranks of a prefill or decode worker: each has a KV manager of its own."""
    disagg: dict[str, Any] = {}
    """Fields of `core.sglang.disagg.config.DisaggConfig`; `profile` is a release such as "0.5.23".

    `tombstones = true`: late metadata of an ended room is refused, as no release does.
    """
    transfer: TransferSpec = TransferSpec()


class NetworkSpec(Part):
    """One-way delays. Jitter is drawn once for each message (exponential, this mean); a stream keeps its order."""

    client_router: DurationNs = 500 * US
    router_engine: DurationNs = 200 * US
    engine_engine: DurationNs = 100 * US
    """Frames between prefill and decode workers, and questions to bootstrap servers."""
    jitter: DurationNs = 0
    bandwidth_mbit: float = Field(10_000.0, gt=0)
    """Of each connection, in Mbit/s."""
    health_interval: DurationNs = 5 * S
    """How long a router takes to notice that a server no longer answers, or answers again."""


class WorkloadSpec(Part):
    kind: Literal["poisson", "constant", "onoff", "gamma", "closed", "multiturn", "trace"] = "poisson"
    rate: float = Field(10.0, gt=0)
    """Requests (conversations for `multiturn`) per second; for `onoff` the rate while on."""
    on: Annotated[DurationNs, Field(gt=0)] = 10 * S
    off: DurationNs = 10 * S
    shape: float = Field(0.5, gt=0)
    """`gamma`: below 1 is burstier than Poisson."""
    users: int = Field(16, ge=1, le=1_000_000)
    """`closed`: how many ask at the same time."""
    think: DurationNs = 0
    """`closed` and `multiturn`: the mean pause before the next question (exponential)."""
    turns: TokenLengths = Lengths("uniform", (2, 6))
    prompt_tokens: TokenLengths = Lengths("constant", (256,))
    output_tokens: TokenLengths = Lengths("constant", (200,))
    shared_prefix_tokens: int = Field(0, ge=0)
    """Tokens that begin the prompts of one group."""
    prefix_groups: int = Field(1, ge=1)
    requests: int | None = Field(None, ge=1)
    """Stop after so many arrivals."""
    trace: str | None = None
    """`kind = "trace"`: the file; its format is told from its first line unless `trace_format` names it."""
    trace_format: Literal["auto", "mooncake", "azure", "burstgpt", "loadtool", "golden"] = "auto"
    trace_speed: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _trace_needs_file(self) -> "WorkloadSpec":
        if (self.kind == "trace") != (self.trace is not None):
            raise ValueError("trace is the file of kind = 'trace': give both or neither")
        return self


class AbortSpec(Part):
    """A share of the calls that is closed early by its client."""

    share: float = Field(0.0, ge=0, le=1)
    when: Literal["tokens", "time", "queued"] = "tokens"
    tokens: int = Field(8, ge=1)
    after: DurationNs = 500 * MS


class ClientSpec(Part):
    timeout: DurationNs = 0
    """For a whole attempt; 0: none."""
    ttft_timeout: DurationNs = 0
    retries: int = Field(0, ge=0, le=100)
    backoff: DurationNs = 100 * MS
    backoff_max: DurationNs = 10 * S
    retry_budget: float = Field(0.2, ge=0)
    """Retries so far are at most this share of calls so far, plus ten."""
    retry_on: frozenset[Literal["refused", "failed", "timed_out"]] = frozenset({"refused", "failed"})
    hedge_after: DurationNs = 0
    """Send a second attempt if no token has come by then; the first token wins. 0: never."""
    abort: AbortSpec = AbortSpec()


class SloSpec(Part):
    """A call is good if it finished within all of these; 0: no limit."""

    ttft: DurationNs = 2 * S
    tpot: DurationNs = 100 * MS
    """Mean time per output token after the first."""
    e2e: DurationNs = 0


class PdSpec(Part):
    """How the router treats the two legs of a request to a prefill and a decode worker."""

    aborts: Literal["both", "prefill", "decode", "none"] = "both"
    """Which legs hear that the client has gone."""
    cancel_peer: bool = True
    """A leg that fails closes the other one (SGLang's gateway since #29017)."""
    lag: DurationNs = 0
    """The decode leg leaves the router so much later than the prefill leg."""


FaultKind = Literal[
    "crash", "kill", "silent", "stall", "pause", "pause_wait", "pause_abort", "sleep", "reset_cache", "shrink",
    "lose_frames", "late_frames", "stall_writes", "fail_writes",
]  # fmt: skip
WIRE_FAULTS = frozenset({"lose_frames", "late_frames", "stall_writes", "fail_writes"})


class FaultSpec(Part):
    """What happens to one engine. It ends after `duration` (`crash`, `kill`: with a restart), or never if that is 0.

    `crash`: the process is gone. `kill`: the engine core dies, the server answers errors. `silent`: nothing gets through.
    `stall`: no step begins or ends. `pause…`, `sleep`, `reset_cache`: an operator. `shrink`: half the places and budget.
    Of a prefill or decode worker: `lose_frames`, `late_frames`: a share of the frames that it sends; of a prefill worker:
    `stall_writes`, `fail_writes`: a share of its KV writes never settles, or is reported as failed.
    """

    at: DurationNs
    engine: int = Field(ge=0)
    kind: FaultKind
    duration: DurationNs = 0
    share: float = Field(1.0, ge=0, le=1)
    """Of the frames or writes."""
    late: DurationNs = 100 * MS
    """`late_frames`: by how much; later frames to the same peer wait behind."""


class Scenario(Part):
    seed: int = 0
    duration: DurationNs = 60 * S
    """Arrivals come this long; then the cluster drains."""
    drain: DurationNs = 600 * S
    """What has not ended so long after the last arrival is reported as in flight."""
    policy: str = "round-robin"
    policy_file: str | None = None
    engines: tuple[EnginesSpec, ...] = (EnginesSpec(),)
    network: NetworkSpec = NetworkSpec()
    workload: WorkloadSpec = WorkloadSpec()
    clients: ClientSpec = ClientSpec()
    slo: SloSpec = SloSpec()
    pd: PdSpec = PdSpec()
    faults: tuple[FaultSpec, ...] = ()
    metrics: bool = True
    """Fold every step into the metrics of the live server."""
    timeline_requests: int = Field(2000, ge=0)
    """Attempts that the time line shows."""

    @model_validator(mode="after")
    def _consistent(self) -> "Scenario":
        if self.policy_file is None and self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}: must be one of {', '.join(POLICIES)}, or give policy_file")
        total = sum(spec.count for spec in self.engines)
        for fault in self.faults:
            if fault.engine >= total:
                raise ValueError(f"faults: engine {fault.engine} does not exist; there are {total}, numbered from 0")
        self._check_roles()
        return self

    def _check_roles(self) -> None:
        roles = {spec.role for spec in self.engines}
        if roles not in ({"unified"}, {"prefill", "decode"}):
            raise ValueError(f"engines: the roles are {', '.join(sorted(roles))}: all unified, or prefill and decode")
        if self.policy == "pd-pairs" and roles == {"unified"}:
            raise ValueError("policy is 'pd-pairs': needs engines with role prefill and role decode")
        specs = [spec for spec in self.engines for _ in range(spec.count)]
        for fault in self.faults:
            role = specs[fault.engine].role
            if fault.kind in WIRE_FAULTS and (role == "unified" or (role == "decode" and fault.kind.endswith("writes"))):
                raise ValueError(f"faults: {fault.kind} needs a prefill worker; engine {fault.engine} is {role}")

    @property
    def disaggregated(self) -> bool:
        return any(spec.role != "unified" for spec in self.engines)


def parse_scenario(values: Mapping[str, Any]) -> Scenario:
    """Raises ScenarioError with one line for each wrong key."""
    try:
        return Scenario.model_validate(dict(values))
    except ValidationError as error:
        raise ScenarioError("\n".join(_line(item) for item in error.errors())) from None


def _line(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "scenario"
    text = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        text = "is not a key of a scenario"
    return f"{path}: {text}"


def load_scenario(path: Path, overrides: Mapping[str, Any] | None = None) -> Scenario:
    """A TOML file, with dotted keys of `overrides` on top."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ScenarioError(f"{path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: not TOML: {error}") from None
    return parse_scenario(with_overrides(values, overrides or {}))


def with_overrides(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` by dotted key, such as `workload.rate` or `engines.0.config.max_num_seqs`. Raises ScenarioError."""
    result: dict[str, Any] = _copied(values)
    for key, value in overrides.items():
        _set(result, key, key.split("."), value)
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_copied(item) for item in value]
    return value


def _set(target: Any, key: str, parts: Sequence[str], value: Any) -> None:
    for at, part in enumerate(parts):
        last = at == len(parts) - 1
        if isinstance(target, list):
            if not part.isdigit() or int(part) >= len(target):
                raise ScenarioError(f"{key}: {part!r} is not a position in a list of {len(target)}")
            if last:
                target[int(part)] = value
            else:
                target = target[int(part)]
        elif isinstance(target, dict):
            if last:
                target[part] = value
            else:
                target = target.setdefault(part, [{}] if part in ("engines", "faults") else {})
        else:
            raise ScenarioError(f"{key}: {'.'.join(parts[:at])} has no keys")
