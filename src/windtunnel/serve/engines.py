"""From the server's settings to an engine, its pacing and its metrics."""

import secrets
import time
from dataclasses import replace

from windtunnel.core.machine import OtherJobs
from windtunnel.core.pacing import Draws, Duration, Pacing, RequestPacing, StepPacing
from windtunnel.core.physics import GPUS, MODELS, PhysicsPacing
from windtunnel.core.profile import ProfilePacing, at_speed
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.core.vllm.config import VllmEngineConfig
from windtunnel.core.vllm.connector.config import CONNECTORS
from windtunnel.serve.config import PacingConfig, ServeConfig
from windtunnel.wire.vllm.cache_config import cache_config_labels
from windtunnel.wire.vllm.metrics import VllmMetrics


def engine_config(config: ServeConfig, tokenizer: Tokenizer) -> VllmEngineConfig:
    settings = config.scheduler
    return VllmEngineConfig(
        num_blocks=settings.num_gpu_blocks,
        block_size=settings.block_size,
        max_model_len=settings.max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        policy=settings.scheduling_policy,
        watermark=settings.watermark,
        reserve_full_isl=settings.reserve_full_isl,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        enable_prefix_caching=settings.enable_prefix_caching,
        prefix_caching_hash_algo=settings.prefix_caching_hash_algo,
        max_num_queued_reqs=settings.max_num_queued_reqs,
        max_num_queued_tokens=settings.max_num_queued_tokens,
        max_loras=settings.max_loras if config.lora else 0,
        async_scheduling=settings.async_scheduling,
        eos_token_id=tokenizer.eos_token_id,
        hash_seed=config.hash_seed,
        collect_kv_events=config.kv_events.publishes,
        host_blocks=host_blocks(config),
        host_block_ns=round(settings.kv_offloading_block_ns / config.pacing.time_scale),
        disk_blocks=settings.kv_offloading_disk_blocks,
        disk_block_ns=round(settings.kv_offloading_disk_block_ns / config.pacing.time_scale),
    )


def host_blocks(config: ServeConfig) -> int:
    """Blocks of the host tier. A size is divided by what a block of `--gpu-model` takes on all GPUs together."""
    settings = config.scheduler
    if not settings.kv_offloading_gib:
        return settings.kv_offloading_blocks
    block_bytes = settings.block_size * MODELS[config.pacing.gpu_model].kv_bytes_per_token
    return max(1, int(settings.kv_offloading_gib * (1 << 30) / block_bytes))


def with_hash_seed(config: ServeConfig) -> ServeConfig:
    """The xxhash kinds draw their root for each process when PYTHONHASHSEED is unset (vLLM reference §6.3)."""
    if config.hash_seed is not None or not config.scheduler.prefix_caching_hash_algo.startswith("xxhash"):
        return config
    return replace(config, hash_seed=secrets.token_hex(16))


def make_pacing(config: PacingConfig, draws: Draws) -> Pacing:
    if config.profile is not None:
        return ProfilePacing(at_speed(config.profile, config.time_scale), draws, OtherJobs((config.other_jobs,)))
    if config.gpu is not None:
        return PhysicsPacing(GPUS[config.gpu], MODELS[config.gpu_model], config.tensor_parallel, config.time_scale)
    if config.model == "step":
        return StepPacing(
            base_ns=round(config.step_base_ns / config.time_scale),
            prefill_token_ns=round(config.step_prefill_token_ns / config.time_scale),
            decode_seq_ns=round(config.step_decode_seq_ns / config.time_scale),
        )
    if not (config.ttft_ns or config.itl_ns or config.prefill_token_ns):
        return StepPacing(0, 0, 0)
    return RequestPacing(
        draws=draws,
        ttft=Duration(config.ttft_ns, config.ttft_std_ns, config.distribution),
        itl=Duration(config.itl_ns, config.itl_std_ns, config.distribution),
        prefill_token_ns=config.prefill_token_ns,
        time_scale=1 / config.time_scale,
    )


def make_metrics(config: ServeConfig, engine: VllmEngineConfig) -> VllmMetrics:
    labels = cache_config_labels(
        block_size=engine.block_size,
        num_gpu_blocks=engine.num_blocks,
        max_model_len=engine.max_model_len,
        enable_prefix_caching=engine.enable_prefix_caching,
        prefix_caching_hash_algo=engine.prefix_caching_hash_algo,
        **({"kv_offloading_size": config.scheduler.kv_offloading_gib or None} if engine.host_blocks else {}),
    )
    kv = config.kv_transfer.parsed("-").config if config.kv_transfer.on else None
    return VllmMetrics(
        config.names[0],
        range(config.data_parallel_size),
        engine.max_model_len,
        labels,
        time.time,
        engine.max_loras or None,
        None if kv is None else kv.role,
        "pull" if kv is None else CONNECTORS[kv.connector],
    )
