"""The kinds of engine a scenario may name, as one table. A kind is added by a row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, NamedTuple, TypeVar

from windtunnel.core.engine import Engine
from windtunnel.core.kv.hashing import BlockHasher
from windtunnel.core.pacing import Draws, Duration, Pacing, RequestPacing, StepPacing
from windtunnel.core.request import EngineRequest
from windtunnel.core.sglang import SglangEngine, SglangEngineConfig
from windtunnel.core.sglang.disagg.config import DisaggConfig
from windtunnel.core.sglang.disagg.decode import DecodeWorker
from windtunnel.core.sglang.disagg.prefill import PrefillWorker
from windtunnel.core.sglang.hashing import namespace_of, page_digest, seed_of
from windtunnel.core.sglang.profiles import profile
from windtunnel.core.transfer.backends import Fate, SimBackend, Write, always_ok
from windtunnel.core.units import S, parse_duration_ns
from windtunnel.core.vllm import VllmEngine, VllmEngineConfig
from windtunnel.core.vllm.connector.config import CONNECTORS, MOONCAKE, PULL, KvTransferConfig
from windtunnel.core.vllm.connector.engine import ConnectorEngine
from windtunnel.core.vllm.connector.peers import ranks_mismatch
from windtunnel.core.vllm.connector.runs import RunConnectorEngine
from windtunnel.core.vllm.runs import RunVllmEngine
from windtunnel.sim.policies import PrefixHasher
from windtunnel.sim.scenario import EnginesSpec, PacingSpec, ScenarioError
from windtunnel.wire.sglang.metrics import SglangMetrics
from windtunnel.wire.vllm.cache_config import cache_config_labels
from windtunnel.wire.vllm.kv_transfer import ABORT_TIMEOUT_S
from windtunnel.wire.vllm.metrics import VllmMetrics


class Build(NamedTuple):
    """What an engine is made of. The last two concern prefill and decode workers."""

    spec: EnginesSpec
    pacing: Pacing
    kv_events: bool
    chance: Random
    endpoints: tuple[str, ...] = ()
    """SGLang: ip:port of each rank of this process. vLLM: its side channel, and its engine id."""
    fate: Callable[[Write], Fate] = always_ok
    """What becomes of a KV write."""


@dataclass(frozen=True, slots=True)
class Switches:
    """What an operator's faults mean to this kind of engine."""

    pauses: Mapping[str, str]
    """Fault → mode of the engine's `pause`."""
    halves: tuple[str, ...]
    """Fields of the configuration that `shrink` halves."""
    reset_cache: Callable[[Any, int], object]
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How to make an engine of this kind, its metrics, and the hasher of its blocks (for prefix-aware routing)."""

    make: Callable[[Build], Engine]
    metrics: Callable[[EnginesSpec, Callable[[], float]], VllmMetrics | SglangMetrics]
    hasher: Callable[[EnginesSpec], PrefixHasher]
    switches: Switches
    roles: frozenset[str] = frozenset({"unified"})


def make_pacing(spec: PacingSpec, draws: Draws) -> Pacing:
    if spec.model == "step":
        return StepPacing(spec.base, spec.prefill_token, spec.decode_seq)
    return RequestPacing(
        draws,
        ttft=Duration(spec.ttft, spec.ttft_std, spec.distribution),
        itl=Duration(spec.itl, spec.itl_std, spec.distribution),
        prefill_token_ns=spec.prefill_token,
        load_factor=spec.load_factor,
    )


def kind_of(spec: EnginesSpec) -> EngineKind:
    """Raises ScenarioError for a kind that is not in the table, and for a role that it cannot have."""
    kind = KINDS.get(spec.kind)
    if kind is None:
        raise ScenarioError(f"engines.kind is {spec.kind!r}: must be one of {', '.join(KINDS)}")
    if spec.role not in kind.roles:
        raise ScenarioError(f"engines.role is {spec.role!r}: {spec.kind} can be {', '.join(sorted(kind.roles))}")
    return kind


Config = TypeVar("Config", VllmEngineConfig, SglangEngineConfig, DisaggConfig, KvTransferConfig)


def _checked(make: Callable[..., Config], name: str, values: Mapping[str, Any], fixed: Mapping[str, Any]) -> Config:
    """Raises ScenarioError that names the field of `config` or `disagg`."""
    try:
        return make(**{**{key: _plain(key, value) for key, value in values.items()}, **fixed})
    except (TypeError, ValueError) as error:
        raise ScenarioError(f"engines.{name}: {error}") from None


def _plain(key: str, value: Any) -> Any:
    """A duration as nanoseconds."""
    return parse_duration_ns(value) if key.endswith("_ns") and isinstance(value, str) else value


def vllm_config(spec: EnginesSpec, **fixed: Any) -> VllmEngineConfig:
    return _checked(VllmEngineConfig, "config", spec.config, fixed)


def sglang_config(spec: EnginesSpec, **fixed: Any) -> SglangEngineConfig:
    return _checked(SglangEngineConfig, "config", spec.config, fixed)


_ASSIGNED = frozenset({"endpoints", "dp_rank", "transfer_backend"})
"""Fields of `DisaggConfig` that the simulator sets."""


def disagg_config(spec: EnginesSpec, endpoints: tuple[str, ...]) -> DisaggConfig:
    """`disagg` takes the fields of `DisaggConfig`, with the name of a release as `profile`, and `tombstones` beside it.

    Raises ScenarioError.
    """
    values, known = dict(spec.disagg), {field.name for field in fields(DisaggConfig)} - _ASSIGNED
    tombstones = values.pop("tombstones", False)
    for name in sorted(values.keys() - known):
        raise ScenarioError(f"engines.disagg: {name} is not one of {', '.join(sorted(known))}")
    try:
        release = profile(**({"version": values.pop("profile")} if "profile" in values else {}))
    except ValueError as error:
        raise ScenarioError(f"engines.disagg.profile: {error}") from None
    release = replace(release, tombstones=bool(tombstones))
    return _checked(DisaggConfig, "disagg", values, {"profile": release, "endpoints": endpoints})


_KV_ASSIGNED = frozenset({"engine_id", "side_channel_host", "side_channel_port", "role", "tp_size"})
"""Fields of `KvTransferConfig` that the simulator sets."""
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def kv_config(spec: EnginesSpec, side_channel: str, engine_id: str) -> KvTransferConfig:
    """`disagg` takes the fields of `KvTransferConfig`. Raises ScenarioError."""
    known = {field.name for field in fields(KvTransferConfig)} - _KV_ASSIGNED
    for name in sorted(spec.disagg.keys() - known):
        raise ScenarioError(f"engines.disagg: {name} is not one of {', '.join(sorted(known))}")
    values = dict(spec.disagg)
    if values.get("connector") == MOONCAKE:
        values.setdefault("abort_timeout_ns", ABORT_TIMEOUT_S * S)
    host, _, port = side_channel.rpartition(":")
    fixed = {"engine_id": engine_id, "side_channel_host": host, "side_channel_port": int(port), "tp_size": spec.tp}
    return _checked(KvTransferConfig, "disagg", values, {**fixed, "role": _KV_ROLES[spec.role]})


def connector_of(specs: Sequence[EnginesSpec]) -> str:
    """The one that prefills and decodes share. Raises ScenarioError."""
    names = sorted({str(spec.disagg.get("connector", PULL)) for spec in specs})
    if len(names) > 1:
        raise ScenarioError(f"engines.disagg: the connectors are {', '.join(names)}: prefill and decode must have the same")
    return names[0]


def check_ranks(specs: Sequence[EnginesSpec]) -> None:
    """Raises ScenarioError for a prefill and a decode of vLLM that could not be paired."""
    prefills, decodes = ({spec.tp for spec in specs if spec.role == role} for role in ("prefill", "decode"))
    for reason in (ranks_mismatch(decode, prefill) for decode in sorted(decodes) for prefill in sorted(prefills)):
        if reason is not None:
            raise ScenarioError(f"engines.tp of a decode (local) and a prefill (remote): {reason}")


def _make_vllm(build: Build) -> Engine:
    config = vllm_config(build.spec, collect_kv_events=build.kv_events)
    in_runs = build.pacing.lock_step and not config.async_scheduling
    if build.spec.role != "unified":
        kv = kv_config(build.spec, *build.endpoints)
        if in_runs:
            return RunConnectorEngine(config, build.pacing, kv, quick_hashes=not build.kv_events)
        return ConnectorEngine(config, build.pacing, kv)
    if in_runs:
        return RunVllmEngine(config, build.pacing, quick_hashes=not build.kv_events)
    return VllmEngine(config, build.pacing)


def _make_sglang(build: Build) -> Engine:
    config = sglang_config(build.spec, collect_kv_events=build.kv_events)
    if build.spec.role == "unified":
        return SglangEngine(config, build.pacing, build.chance)
    disagg = disagg_config(build.spec, build.endpoints)
    if build.spec.role == "decode":
        return DecodeWorker(config, disagg, build.pacing, build.chance)
    return PrefillWorker(config, disagg, build.pacing, build.chance, lambda _rank: _backend(build))


def _backend(build: Build) -> SimBackend:
    transfer = build.spec.transfer
    return SimBackend(
        bandwidth_gb_s=transfer.bandwidth_gb_s,
        latency_ns=transfer.latency,
        dead_peer_ns=transfer.dead_peer,
        fate=build.fate,
    )


class PageHasher:
    """Digests of a prompt's pages as SGLang's KV events name them."""

    def __init__(self, page_size: int) -> None:
        self.block_size = page_size

    def in_parts(self, request: EngineRequest, blocks_at_once: int) -> Iterator[list[bytes]]:
        """The digests of all whole pages, growing."""
        digests: list[bytes] = []
        prompt, size, parent = request.prompt_token_ids, self.block_size, seed_of(namespace_of(request))
        for at in range(0, len(prompt) - size + 1, size):
            parent = page_digest(parent, prompt[at : at + size])
            digests.append(parent)
            if len(digests) % blocks_at_once == 0:
                yield digests


def _sglang_metrics(spec: EnginesSpec, clock_s: Callable[[], float]) -> SglangMetrics:
    config = sglang_config(spec)
    constants = {
        "max_total_num_tokens": config.capacity,
        "page_size": config.page_size,
        "num_pages": config.num_pages,
        "context_len": config.context_length,
    }
    renamed: dict[str, str] = {}
    if spec.role != "unified":
        release = disagg_config(spec, ("0.0.0.0:1",)).profile
        renamed = {
            "num_prefill_bootstrap_queue_reqs": release.bootstrap_gauge,
            "num_prefill_inflight_queue_reqs": release.inflight_gauge,
        }
    return SglangMetrics("sim", 1, clock_s, engine_type=spec.role, constants=constants, renamed=renamed)


def _sglang_hasher(spec: EnginesSpec) -> PrefixHasher:
    return PageHasher(sglang_config(spec).page_size)


def _vllm_metrics(spec: EnginesSpec, clock_s: Callable[[], float]) -> VllmMetrics:
    config = vllm_config(spec)
    labels = cache_config_labels(
        block_size=config.block_size,
        num_gpu_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_caching_hash_algo=config.prefix_caching_hash_algo,
    )
    kv_role, kv_mode = _KV_ROLES.get(spec.role), CONNECTORS.get(connector_of([spec]), "pull")
    return VllmMetrics("sim", [0], config.max_model_len, labels, clock_s, config.max_loras or None, kv_role, kv_mode)


def _vllm_hasher(spec: EnginesSpec) -> PrefixHasher:
    config = vllm_config(spec)
    return BlockHasher(config.prefix_caching_hash_algo, config.block_size, config.hash_seed)


def _reset_vllm_cache(engine: Any, now_ns: int) -> object:
    return engine.reset_prefix_cache(now_ns, reset_running=True)


def _flush_sglang_cache(engine: Any, now_ns: int) -> object:
    """Refused while anything is live, as the real server does."""
    return engine.flush_cache(now_ns)


VLLM_SWITCHES = Switches(
    {"pause": "keep", "pause_wait": "wait", "pause_abort": "abort"},
    ("max_num_seqs", "max_num_batched_tokens"),
    _reset_vllm_cache,
    sleeps=True,
)
SGLANG_SWITCHES = Switches(
    {"pause": "in_place", "pause_wait": "in_place", "pause_abort": "abort"},
    ("max_running_requests", "max_prefill_tokens"),
    _flush_sglang_cache,
)
_DISAGGREGATED = frozenset({"unified", "prefill", "decode"})
KINDS: Mapping[str, EngineKind] = {
    "vllm": EngineKind(_make_vllm, _vllm_metrics, _vllm_hasher, VLLM_SWITCHES, _DISAGGREGATED),
    "sglang": EngineKind(_make_sglang, _sglang_metrics, _sglang_hasher, SGLANG_SWITCHES, _DISAGGREGATED),
}
