"""What a vLLM engine is told at its start. Names and defaults are vLLM's (0.33.0, reference §5.1) where it has them."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from windtunnel.core.kv.hashing import ALGORITHMS


@dataclass(frozen=True, slots=True)
class VllmEngineConfig:
    """Checked as it is made: a ValueError names the field and what it must be."""

    num_blocks: int = 8192
    """Blocks of the KV pool, the null block included (`--num-gpu-blocks-override`)."""
    block_size: int = 16
    max_model_len: int = 8192
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    policy: Literal["fcfs", "priority"] = "fcfs"
    watermark: float = 0.0
    """Share of the pool that an admission must leave free while others run."""
    reserve_full_isl: bool = True
    """Admit a prompt only if all of it fits, not just its first chunk."""
    long_prefill_token_threshold: int = 0
    """The largest chunk of one prompt in one step; 0: no limit but the budget."""
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    hash_seed: str | None = None
    """PYTHONHASHSEED. The xxhash kinds need one."""
    max_num_queued_reqs: int | None = None
    """Sequences in flight, waiting and running together (golden `admission_503.json`)."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens of the sequences that have no token yet; reaching it closes the door."""
    max_loras: int = 0
    """Adapters that may run in one step; 0: no limit and no LoRA gauges."""
    async_scheduling: bool = False
    """One step ahead, so that an abort takes effect one step later."""
    eos_token_id: int | None = None
    extra_eos_token_ids: frozenset[int] = frozenset()
    """Further end tokens of the generation config: they stop like stop token ids and are named in `stop_reason`."""
    collect_kv_events: bool = False
    host_blocks: int = 0
    """Blocks of a host tier behind the pool; 0: none."""
    host_block_ns: int = 0
    """What it costs to bring one block back from there."""
    disk_blocks: int = 0
    """Blocks of a disk tier behind the host tier; 0: none."""
    disk_block_ns: int = 0
    unsafe_pool: bool = False
    """Allow a pool that cannot hold one context: a prompt that never fits then blocks the queue (vLLM #39734)."""

    def __post_init__(self) -> None:
        for name, least in _AT_LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: must be at least {least}")
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy is {self.policy!r}: must be 'fcfs' or 'priority'")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}: must be at least 0 and below 1")
        if self.prefix_caching_hash_algo not in ALGORITHMS:
            raise ValueError(
                f"prefix_caching_hash_algo is {self.prefix_caching_hash_algo!r}: must be one of {', '.join(ALGORITHMS)}"
            )
        if self.disk_blocks and not self.host_blocks:
            raise ValueError(f"disk_blocks is {self.disk_blocks}: needs host_blocks, which it stands behind")
        self._check_pool()

    def _check_pool(self) -> None:
        usable = self.num_blocks - 1
        if self.unsafe_pool or usable * self.block_size >= self.max_model_len:
            return
        raise ValueError(
            f"num_blocks is {self.num_blocks}: the pool cannot hold one request of max_model_len {self.max_model_len}. "
            f"Use at least {-(-self.max_model_len // self.block_size) + 1} blocks or max_model_len {usable * self.block_size}"
        )

    @property
    def watermark_blocks(self) -> int:
        return int(self.watermark * self.num_blocks)


_AT_LEAST: Mapping[str, int] = MappingProxyType(
    {
        "num_blocks": 2,
        "block_size": 1,
        "max_model_len": 1,
        "max_num_batched_tokens": 1,
        "max_num_seqs": 1,
        "long_prefill_token_threshold": 0,
        "max_num_queued_reqs": 1,
        "max_num_queued_tokens": 1,
        "max_loras": 0,
        "host_blocks": 0,
        "host_block_ns": 0,
        "disk_blocks": 0,
        "disk_block_ns": 0,
    }
)

LIVE_FIELDS = frozenset(
    {
        "max_num_batched_tokens",
        "max_num_seqs",
        "watermark",
        "reserve_full_isl",
        "long_prefill_token_threshold",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_loras",
        "host_block_ns",
        "disk_block_ns",
    }
)
"""What `VllmEngine.reconfigure` may change while requests run."""
