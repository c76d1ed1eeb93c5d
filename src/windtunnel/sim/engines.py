"""The kinds of engine a scenario may name, as one table. A kind is added by a row."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.core.engine import Engine
from windtunnel.core.kv.hashing import BlockHasher
from windtunnel.core.pacing import Draws, Duration, Pacing, RequestPacing, StepPacing
from windtunnel.core.vllm import VllmEngine, VllmEngineConfig
from windtunnel.core.vllm.runs import RunVllmEngine
from windtunnel.sim.scenario import EnginesSpec, PacingSpec, ScenarioError
from windtunnel.wire.vllm.metrics import VllmMetrics, cache_config_labels


@dataclass(frozen=True, slots=True)
class EngineKind:
    """How to make an engine of this kind, its metrics, and the hasher of its blocks (for prefix-aware routing)."""

    make: Callable[[EnginesSpec, Pacing, bool], Engine]
    metrics: Callable[[EnginesSpec, Callable[[], float]], VllmMetrics]
    hasher: Callable[[EnginesSpec], BlockHasher]


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
    """Raises ScenarioError for a kind that is not in the table."""
    try:
        return KINDS[spec.kind]
    except KeyError:
        raise ScenarioError(f"engines.kind is {spec.kind!r}: must be one of {', '.join(KINDS)}") from None


def vllm_config(spec: EnginesSpec, **fixed: Any) -> VllmEngineConfig:
    """Raises ScenarioError that names the field of `config`."""
    try:
        return VllmEngineConfig(**{**spec.config, **fixed})
    except (TypeError, ValueError) as error:
        raise ScenarioError(f"engines.config: {error}") from None


def _make_vllm(spec: EnginesSpec, pacing: Pacing, kv_events: bool) -> Engine:
    config = vllm_config(spec, collect_kv_events=kv_events)
    if pacing.lock_step and not config.async_scheduling:
        return RunVllmEngine(config, pacing)
    return VllmEngine(config, pacing)


def _vllm_metrics(spec: EnginesSpec, clock_s: Callable[[], float]) -> VllmMetrics:
    config = vllm_config(spec)
    labels = cache_config_labels(
        block_size=config.block_size,
        num_gpu_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_caching_hash_algo=config.prefix_caching_hash_algo,
    )
    return VllmMetrics("sim", [0], config.max_model_len, labels, clock_s, config.max_loras or None)


def _vllm_hasher(spec: EnginesSpec) -> BlockHasher:
    config = vllm_config(spec)
    return BlockHasher(config.prefix_caching_hash_algo, config.block_size, config.hash_seed)


KINDS: Mapping[str, EngineKind] = {"vllm": EngineKind(_make_vllm, _vllm_metrics, _vllm_hasher)}
