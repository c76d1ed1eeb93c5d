"""What the wind blows at: addresses, and which gauges tell whether it is quiet.

The engine kind is recognised from the names on `/metrics`; each kind is one row of a table. Gauge and counter names: vLLM
reference §4 and §9.11; SGLang reference §6 and appendix A (the sidecar's `sglang_` is read as `sglang:`);
llm-d-inference-sim reference §5. The rows of TGI, llama.cpp, TensorRT-LLM, Dynamo, LiteLLM and the Rust routers follow what
those programs say, or their source where they could not be run; the head of each page in tests/lab/pages names it.
Unknown servers are watched through `--watch NAME`.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from math import isfinite
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from windtunnel.core.units import MS
from windtunnel.lab.connection import GRPC, TLS, ConnectionCut, MalformedResponse, Origin, fetch, parse_origin
from windtunnel.lab.plan import Api, check_target_allowed, is_local
from windtunnel.lab.redact import REPLACEMENT, hide_passwords
from windtunnel.lab.trust import USUAL, Trust

if TYPE_CHECKING:
    from windtunnel.lab.grpc_client import Worker

SERIES_LIMIT = 50_000
LINES_KEPT = 16_384
MODELS_PATIENCE_S = 30
METRICS_FLAG = "--metrics-url"
"""Errors name it; in an experiment file it is the arm's `metrics_urls`."""
_QUERY = re.compile(r"[!\"$-~]*")
"""What can stand in a request line, and no fragment."""


class Watch(Enum):
    """What a gauge above its baseline means once everyone has left."""

    RUNNING = "running"
    WAITING = "waiting"
    KV = "kv_usage"
    QUEUE = "queue"
    OTHER = "other"


class Gauge(NamedTuple):
    """`key` is the name in results. The first of `names` that is present counts; series are folded by sum, usages by max."""

    key: str
    watch: Watch
    names: tuple[str, ...]
    labels: tuple[tuple[str, str], ...] = ()
    scale: float = 1.0


class Counter(NamedTuple):
    """A counter, split by labels when `by` is given (`key{value}`, or `key{value,value}` for `label,label`)."""

    key: str
    name: str
    by: str | None = None


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of engine or router."""

    name: str
    prefix: str
    """Recognised when a metric name begins with this."""
    gauges: tuple[Gauge, ...]
    counters: tuple[Counter, ...] = ()
    cancel_grace_ns: int = 500 * MS
    """How long a request may outlive its client before that is called late."""
    router: bool = False
    proof: tuple[str, frozenset[str]] | None = None
    """Given: recognised only when this series has these labels and no others."""

    def owns(self, series: "Sequence[Series]") -> bool:
        if self.proof is None:
            return any(one.name.startswith(self.prefix) for one in series)
        return any((one.name, frozenset(one.labels)) == self.proof for one in series)


def _queues(prefix: str, *names: str) -> tuple[Gauge, ...]:
    return tuple(Gauge(name, Watch.QUEUE, (f"{prefix}{name}",)) for name in names)


GENERATION_TOKENS = "generation_tokens"

_VLLM = Kind(
    "vllm",
    "vllm:",
    (
        Gauge("running", Watch.RUNNING, ("vllm:num_requests_running",)),
        Gauge("waiting", Watch.WAITING, ("vllm:num_requests_waiting",)),
        Gauge("kv_usage", Watch.KV, ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")),
    ),
    (
        Counter(GENERATION_TOKENS, "vllm:generation_tokens_total"),
        Counter("prompt_tokens", "vllm:prompt_tokens_total"),
        Counter("request_success", "vllm:request_success_total", "finished_reason"),
        Counter("num_preemptions", "vllm:num_preemptions_total"),
        Counter("admission_rejections", "vllm:admission_rejections_total", "reason"),
        Counter("nixl_num_failed_transfers", "vllm:nixl_num_failed_transfers_total"),
        Counter("nixl_num_kv_expired_reqs", "vllm:nixl_num_kv_expired_reqs_total"),
        Counter("mooncake_num_failed_transfers", "vllm:mooncake_num_failed_transfers_total"),
        Counter("mooncake_num_failed_recvs", "vllm:mooncake_num_failed_recvs_total"),
        Counter("mooncake_num_kv_expired_reqs", "vllm:mooncake_num_kv_expired_reqs_total"),
    ),
)

_SGLANG = Kind(
    "sglang",
    "sglang:",
    (
        Gauge("running", Watch.RUNNING, ("sglang:num_running_reqs",)),
        Gauge("waiting", Watch.WAITING, ("sglang:num_queue_reqs",)),
        Gauge("kv_usage", Watch.KV, ("sglang:token_usage",)),
        Gauge(
            "num_prefill_bootstrap_queue_reqs",
            Watch.QUEUE,
            ("sglang:num_prefill_bootstrap_queue_reqs", "sglang:num_prefill_prealloc_queue_reqs"),
        ),
        Gauge(
            "num_prefill_inflight_queue_reqs",
            Watch.QUEUE,
            ("sglang:num_prefill_inflight_queue_reqs", "sglang:num_prefill_infight_queue_reqs"),
        ),
        *_queues("sglang:", "num_decode_prealloc_queue_reqs", "num_decode_transfer_queue_reqs"),
        *_queues("sglang:", "num_decode_deferred_kv_release_reqs"),
    ),
    (
        Counter(GENERATION_TOKENS, "sglang:generation_tokens_total"),
        Counter("prompt_tokens", "sglang:prompt_tokens_total"),
        Counter("num_requests", "sglang:num_requests_total"),
        Counter("num_aborted_requests", "sglang:num_aborted_requests_total"),
        Counter("num_transfer_failed_reqs", "sglang:num_transfer_failed_reqs_total"),
        Counter("num_bootstrap_failed_reqs", "sglang:num_bootstrap_failed_reqs_total"),
        Counter("transfer_failed_by_rank", "sglang:num_transfer_failed_reqs_total", "engine_type,tp_rank"),
    ),
    cancel_grace_ns=4_500 * MS,
)

# A prompt in its prefill is in neither gauge: the batch is counted from its first decode on, and 0 again when it is empty.
_TGI = Kind(
    "tgi",
    "tgi_",
    (
        Gauge("running", Watch.RUNNING, ("tgi_batch_current_size",)),
        Gauge("waiting", Watch.WAITING, ("tgi_queue_size",)),
    ),
    (Counter("request_success", "tgi_request_success"), Counter("request_failure", "tgi_request_failure", "err")),
    cancel_grace_ns=2_000 * MS,
)

_LLAMA_CPP = Kind(
    "llama.cpp",
    "llamacpp:",
    (
        Gauge("running", Watch.RUNNING, ("llamacpp:requests_processing",)),
        Gauge("waiting", Watch.WAITING, ("llamacpp:requests_deferred",)),
        Gauge("kv_usage", Watch.KV, ("llamacpp:kv_cache_usage_ratio",)),
    ),
    (Counter(GENERATION_TOKENS, "llamacpp:tokens_predicted_total"), Counter("prompt_tokens", "llamacpp:prompt_tokens_total")),
    cancel_grace_ns=2_000 * MS,
)

# Triton shows the engine's last iteration, also when no other follows: what that one had scheduled may have ended with it.
# `active` is counted after it and includes what waits; `waiting` is the difference of the two, so it may be negative.
_TRTLLM = Kind(
    "tensorrt-llm",
    "nv_trt_llm_",
    (
        Gauge("running", Watch.RUNNING, ("nv_trt_llm_request_metrics",), (("request_type", "active"),)),
        Gauge("kv_usage", Watch.KV, ("nv_trt_llm_kv_cache_block_metrics",), (("kv_cache_block_type", "fraction"),)),
    ),
    cancel_grace_ns=2_000 * MS,
)

_TRTLLM_SERVE = Kind(
    "trtllm-serve",
    "trtllm_",
    (
        Gauge("running", Watch.RUNNING, ("trtllm_num_requests_running",)),
        Gauge("waiting", Watch.WAITING, ("trtllm_num_requests_waiting",)),
        Gauge("kv_usage", Watch.KV, ("trtllm_kv_cache_utilization",)),
    ),
    (
        Counter(GENERATION_TOKENS, "trtllm_generation_tokens_total"),
        Counter("prompt_tokens", "trtllm_prompt_tokens_total"),
        Counter("request_success", "trtllm_request_success_total", "finished_reason"),
    ),
    cancel_grace_ns=2_000 * MS,
)

_LLM_D_SIM = Kind(
    "llm-d-inference-sim",
    "vllm:",
    _VLLM.gauges,
    (
        Counter(GENERATION_TOKENS, "vllm:generation_tokens_total"),
        Counter("prompt_tokens", "vllm:prompt_tokens_total"),
        Counter("finished", "vllm:request_success_total", "finish_reason"),
    ),
    cancel_grace_ns=2_000 * MS,
    proof=("vllm:cache_config_info", frozenset({"block_size", "num_gpu_blocks"})),
)


def _router(name: str, prefix: str, active: Sequence[str], *counters: Counter, waiting: str | None = None) -> Kind:
    """A router's own gauges have keys of their own: its requests are not added to those of the workers behind it."""
    queue = (Gauge("router_waiting", Watch.QUEUE, (waiting,)),) if waiting else ()
    gauges = (Gauge("router_active", Watch.OTHER, tuple(active)), *queue)
    return Kind(name, prefix, gauges, counters, cancel_grace_ns=2_000 * MS, router=True)


_ROUTERS = (
    _router(
        "dynamo",
        "dynamo_frontend_",
        ("dynamo_frontend_active_requests", "dynamo_frontend_inflight_requests"),
        Counter("router_requests", "dynamo_frontend_requests_total", "status,error_type"),
        Counter("router_tokens", "dynamo_frontend_output_tokens_total"),
        waiting="dynamo_frontend_queued_requests",
    ),
    _router(
        "litellm",
        "litellm_",
        ("litellm_in_flight_requests",),
        Counter("router_requests", "litellm_proxy_total_requests_metric_total", "status_code"),
        Counter("router_failures", "litellm_proxy_failed_requests_metric_total"),
    ),
    _router(
        "smg",
        "smg_",
        ("smg_worker_requests_active", "smg_http_connections_active"),
        Counter("router_responses", "smg_http_responses_total", "status_code"),
        Counter("router_retries", "smg_worker_retries_total"),
    ),
    _router(
        "sglang-router",
        "sgl_router_",
        ("sgl_router_running_requests",),
        Counter("router_requests", "sgl_router_requests_total"),
        Counter("router_retries", "sgl_router_retries_total"),
    ),
    _router(
        "vllm-router",
        "vllm_router_",
        ("vllm_router_running_requests",),
        Counter("router_requests", "vllm_router_requests_total"),
    ),
)

KINDS: tuple[Kind, ...] = (_LLM_D_SIM, _VLLM, _SGLANG, _TGI, _LLAMA_CPP, _TRTLLM, _TRTLLM_SERVE, *_ROUTERS)
UNKNOWN = Kind("unknown", "", (), cancel_grace_ns=5_000 * MS)


@dataclass(frozen=True, slots=True)
class MetricsUrl:
    origin: Origin
    path: str = "/metrics"
    query: str = ""
    """May hold a key: it is sent and never shown."""
    named: bool = True
    """Whether somebody asked for this very page; one that is only likely may be absent."""

    @property
    def request_path(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path

    @property
    def shown(self) -> str:
        """As messages and documents have it."""
        return f"{self.origin.url}{self.path}{f'?{REPLACEMENT}' if self.query else ''}"


@dataclass(frozen=True, slots=True)
class Target:
    """One thing to blow at; `metrics` may name several sources (a router and its workers), which are added up."""

    origin: Origin
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    metrics: tuple[MetricsUrl, ...] = ()
    watch: tuple[str, ...] = ()
    """Further gauges by their full metric name."""

    @property
    def plain(self) -> Origin:
        """Where all but generations goes, by HTTP/1.1: the same address, for a gRPC worker its first metrics source."""
        if self.origin.scheme in GRPC:
            return self.metrics[0].origin
        return plain_origin(self.origin)

    def path(self, api: Api) -> str:
        """Requests go to the API's path below the base; a base URL that ends in `/v1` already has its first part."""
        return api.path.removeprefix("/v1") if self.origin.prefix.endswith("/v1") else api.path

    def headers_for(self, origin: Origin) -> Mapping[str, str]:
        """The headers may hold the target's key: a metrics source on another host does not get them."""
        return self.headers if _is_same_host(origin, self.origin) else {}


def plain_origin(origin: Origin) -> Origin:
    """The same address for HTTP/1.1."""
    return replace(origin, scheme="https" if origin.scheme in TLS else "http")


class TargetError(RuntimeError):
    """The target cannot be used as it is: unreachable, or it does not answer a plain request."""


class SettingError(TargetError):
    """A setting does not fit the target. The message begins with the flag; an arm of an experiment file calls it `key`."""

    def __init__(self, flag: str, key: str, told: str) -> None:
        super().__init__(f"{flag} {told}")
        self.key = key
        self.told = told


class Series(NamedTuple):
    name: str
    labels: Mapping[str, str]
    value: float


_LINE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"')


def _canonical(name: str) -> str:
    return name.replace("sglang_", "sglang:", 1) if name.startswith("sglang_") else name


def parse_metrics(text: str) -> list[Series]:
    """The series of a Prometheus text exposition; lines that are none are skipped."""
    return [one for line in text.splitlines()[:SERIES_LIMIT] if (one := _series(line)) is not None]


@lru_cache(LINES_KEPT)
def _series(line: str) -> Series | None:
    """Kept, because most lines of a page are those of the sample before."""
    found = None if line.startswith("#") else _LINE.match(line)
    if found is None:
        return None
    try:
        value = float(found[3])
    except ValueError:
        return None
    return Series(_canonical(found[1]), MappingProxyType(dict(_LABEL.findall(found[2] or ""))), value)


def recognise(series: Sequence[Series]) -> Kind:
    """The first kind of the table that owns a series, or UNKNOWN."""
    return next((kind for kind in KINDS if kind.owns(series)), UNKNOWN)


def gauges_of(kind: Kind, watch: Iterable[str]) -> tuple[Gauge, ...]:
    return kind.gauges + tuple(Gauge(name, Watch.OTHER, (_canonical(name),)) for name in watch)


def read_gauges(series: Sequence[Series], gauges: Iterable[Gauge]) -> dict[str, float]:
    """The value of each gauge that is present; NaN and infinities are as good as missing."""
    out: dict[str, float] = {}
    for gauge in gauges:
        for name in gauge.names:
            values = [one.value for one in series if one.name == name and _matches(one, gauge) and isfinite(one.value)]
            if values:
                out[gauge.key] = gauge.scale * (max(values) if gauge.watch is Watch.KV else sum(values))
                break
    return out


def read_counters(series: Sequence[Series], counters: Iterable[Counter]) -> dict[str, float]:
    out: dict[str, float] = {}
    for counter in counters:
        for one in series:
            if one.name == counter.name and isfinite(one.value):
                values = ",".join(one.labels.get(label, "") for label in (counter.by or "").split(","))
                key = f"{counter.key}{{{values}}}" if counter.by else counter.key
                out[key] = out.get(key, 0.0) + one.value
    return out


def not_numbers(series: Sequence[Series], gauges: Iterable[Gauge]) -> set[str]:
    """The names of gauges' series that are NaN or infinite."""
    names = {name for gauge in gauges for name in gauge.names}
    return {one.name for one in series if one.name in names and not isfinite(one.value)}


def _matches(series: Series, gauge: Gauge) -> bool:
    return all(series.labels.get(name) == value for name, value in gauge.labels)


def check_hosts(target: Target, *, owned: bool) -> None:
    """The target's and each metrics source's, before any byte is sent to them. Raises PlanError."""
    for origin in (target.origin, *(url.origin for url in target.metrics)):
        check_target_allowed(origin.host, owned=owned)


def parse_metrics_url(url: str, named: str = f"{METRICS_FLAG} ") -> MetricsUrl:
    """Unlike a base URL it may have a query. Raises ValueError, which begins with `named` and shows no query."""
    base, _, query = url.partition("?")
    if "," in base:
        raise ValueError(f"{named}{hide_passwords(base)!r}: one URL each; write several one by one")
    if not _QUERY.fullmatch(query):
        raise ValueError(f"{named}{hide_passwords(base)!r}: write its query percent-encoded, without a fragment")
    try:
        origin = parse_origin(base)
    except ValueError as error:
        raise ValueError(f"{named}{hide_passwords(str(error))}") from None
    return MetricsUrl(origin.root, origin.prefix or "/metrics", query)


def make_target(
    url: str,
    model: str,
    *,
    headers: Mapping[str, str] | None = None,
    metrics_urls: Sequence[str] = (),
    watch: Sequence[str] = (),
    trust: Trust = USUAL,
) -> Target:
    """A target from what a person types; without metrics URLs it is the base's own `/metrics`. Raises ValueError."""
    origin = replace(parse_origin(url), trust=trust)
    root = plain_origin(replace(origin, prefix=origin.prefix.removesuffix("/v1")))
    metrics = tuple(_trusted(parse_metrics_url(one), origin) for one in metrics_urls) or (MetricsUrl(root, named=False),)
    return Target(origin, model, dict(headers or {}), metrics, tuple(watch))


def _trusted(url: MetricsUrl, target: Origin) -> MetricsUrl:
    trust = target.trust if _is_same_host(url.origin, target) else target.trust.for_others()
    return replace(url, origin=replace(url.origin, trust=trust))


def _is_same_host(one: Origin, two: Origin) -> bool:
    return one.host == two.host or (is_local(one.host) and is_local(two.host))


_NAME_MODEL = "name one with --model, in an experiment file with model = in the arm"
_SEND_KEY = (
    "send it with --header 'Authorization: Bearer KEY', in an experiment file with headers = { Authorization = \"Bearer KEY\" }"
    " in the arm"
)


async def find_model(target_url: str, headers: Mapping[str, str], trust: Trust = USUAL) -> str:
    """The first model id of `/v1/models`, or what a gRPC worker calls its model. Raises TargetError."""
    origin = replace(parse_origin(target_url), trust=trust)
    if origin.scheme in GRPC:
        return (await _look(origin)).model
    origin = plain_origin(origin)
    path = "/models" if origin.prefix.endswith("/v1") else "/v1/models"
    try:
        async with asyncio.timeout(MODELS_PATIENCE_S):
            answer = await fetch(origin, "GET", path, headers)
    except TimeoutError:
        raise TargetError(f"{origin.url}{path}: no answer within {MODELS_PATIENCE_S} s") from None
    except (OSError, ConnectionCut, MalformedResponse) as error:
        raise TargetError(f"{origin.url}{path}: {error}") from error
    if answer.status in (401, 403):
        raise TargetError(f"{origin.url}{path}: status {answer.status}: the server wants a key; {_SEND_KEY}")
    if answer.status != 200:
        raise TargetError(f"{origin.url}{path}: status {answer.status}; {_NAME_MODEL}")
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise TargetError(f"{origin.url}{path} does not list a model; {_NAME_MODEL}") from error


async def _look(origin: Origin) -> "Worker":
    from windtunnel.lab.grpc_client import Unusable, look

    try:
        return await look(origin)
    except Unusable as error:
        raise TargetError(f"{origin.url}: {error}") from error


async def find_context(target: Target) -> int | None:
    """The context window in tokens that `/v1/models` gives (`max_model_len`, vLLM), or None."""
    if target.origin.scheme in GRPC:
        return (await _look(target.origin)).context
    path = "/models" if target.origin.prefix.endswith("/v1") else "/v1/models"
    try:
        answer = await fetch(target.plain, "GET", path, target.headers)
        cards = json.loads(answer.body)["data"]
        return int(next(card["max_model_len"] for card in cards if card["id"] == target.model))
    except (OSError, ConnectionCut, MalformedResponse, ValueError, LookupError, TypeError, StopIteration):
        return None
