"""The labels of `vllm:cache_config_info` (vLLM reference §4)."""

from collections.abc import Mapping

_CACHE_CONFIG_DEFAULTS: Mapping[str, str] = {
    "_block_size_resolved": "True", "block_size": "16", "cache_dtype": "auto", "cache_hit_alignment_tokens": "None",
    "effective_attention_block_size": "16", "enable_mamba_shared_prefix_checkpoint": "False", "enable_prefix_caching": "True",
    "gpu_memory_utilization": "0.92", "hash_block_size": "None", "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]", "kv_cache_layout": "None", "kv_cache_max_concurrency": "None",
    "kv_cache_memory_bytes": "None", "kv_cache_size_tokens": "None", "kv_offloading_backend": "native",
    "kv_offloading_size": "None", "kv_sharing_fast_prefill": "False", "mamba_block_size": "None", "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none", "mamba_page_size_padded": "None", "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None", "num_gpu_blocks": "None", "num_gpu_blocks_override": "None",
    "prefix_cache_retention_interval": "0", "prefix_caching_hash_algo": "sha256", "prefix_match_unit": "None",
    "replayssm_buffer_len": "16", "skip_page_size_padded": "None", "sliding_window": "None", "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False", "use_replayssm": "False", "user_specified_block_size": "False",
}  # fmt: skip
"""The label set of `vllm:cache_config_info` as vLLM 0.32 shows it."""


def cache_config_labels(*, block_size: int, num_gpu_blocks: int, max_model_len: int, **others: object) -> dict[str, str]:
    """The labels of `vllm:cache_config_info`; `others` are further fields of the cache configuration, by their vLLM names.

    Raises ValueError for a name that vLLM does not have.
    """
    unknown = others.keys() - _CACHE_CONFIG_DEFAULTS.keys()
    if unknown:
        raise ValueError(f"vllm:cache_config_info has no label {', '.join(sorted(unknown))}")
    size_tokens = block_size * num_gpu_blocks
    derived = {
        "block_size": block_size,
        "effective_attention_block_size": block_size,
        "num_gpu_blocks": num_gpu_blocks,
        "kv_cache_size_tokens": size_tokens,
        "kv_cache_max_concurrency": size_tokens / max_model_len,
    }
    return {**_CACHE_CONFIG_DEFAULTS, **{name: str(value) for name, value in {**derived, **others}.items()}}
