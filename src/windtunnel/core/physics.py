"""How long one engine step takes on a GPU: a roofline over weights, KV cache, arithmetic and all-reduces.

For a step of T tokens (prefill and decode together) on `tensor_parallel` GPUs:

    linear    = max(2 x active linear parameters x T / compute,  weight bytes that T tokens touch / bandwidth)
    attention = max(4 x layers x heads x head_dim x pairs / compute,  (context + T) x KV bytes of a token / bandwidth)
    reduce    = 2 x layers x (latency + 2 x (n - 1) / n x T x hidden x bytes / link), with n GPUs; none with one
    step      = overhead + linear + attention + reduce

compute = peak x compute_efficiency and bandwidth = peak x memory_efficiency, both for all GPUs together. `pairs` are pairs of
a token and a token it attends to. A GPU holds at least one KV head, so beyond `kv_heads` GPUs the cache is replicated. Of a
mixture of E experts with k for each token, T tokens touch the share 1 - (1 - k / E)^T on average, if routing is even.

Peaks are the vendors' dense figures. The efficiencies and the overhead are assumptions, not measurements: `windtunnel
calibrate` replaces all of this by what a server was measured to do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from windtunnel.core.pacing import StepPlan
from windtunnel.core.units import US


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator. `source` says where its figures were published."""

    name: str
    peak_flops: float
    """Dense BF16, for one GPU."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """To the other GPUs of the node, in one direction."""
    source: str
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    step_overhead_ns: int = 1000 * US
    """Scheduling, kernel launches, sampling: what a step takes beside its kernels."""
    all_reduce_latency_ns: int = 10 * US


@dataclass(frozen=True, slots=True)
class Model:
    """One transformer. `source` says where its figures were published."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    parameters: float
    source: str
    experts: int = 1
    experts_per_token: int = 1
    active_parameters: float | None = None
    """Parameters that one token uses; None for a dense model: all."""
    weight_bytes: float = 2
    """Bytes of a parameter (2: BF16)."""
    kv_bytes: float = 2

    @property
    def linear_parameters(self) -> float:
        """All but the input embedding, which is looked up and not multiplied."""
        return self.parameters - self.vocab * self.hidden

    @property
    def expert_parameters(self) -> float:
        """Of one expert, over all layers."""
        if self.active_parameters is None or self.experts == self.experts_per_token:
            return 0.0
        return (self.parameters - self.active_parameters) / (self.experts - self.experts_per_token)

    @property
    def active_linear_parameters(self) -> float:
        return self.linear_parameters - (self.experts - self.experts_per_token) * self.expert_parameters

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    def touched_parameters(self, tokens: int) -> float:
        """Linear parameters that a step of so many tokens reads."""
        untouched = (1 - self.experts_per_token / self.experts) ** tokens
        return self.linear_parameters - self.experts * self.expert_parameters * untouched


@dataclass(frozen=True, slots=True)
class PhysicsPacing:
    """The roofline as a `Pacing`: lock step, no chance in it. Every duration is divided by `speed`."""

    gpu: Gpu
    model: Model
    tensor_parallel: int = 1
    speed: float = 1.0
    lock_step: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.model.heads % self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}: must divide the {self.model.heads} attention heads "
                f"of {self.model.name}"
            )

    def step_ns(self, plan: StepPlan) -> int:
        tokens = plan.prefill_tokens + plan.decode_seqs
        if not tokens:
            return 0
        seconds = self.linear_s(tokens) + self.attention_s(plan) + self.all_reduce_s(tokens)
        return round((self.gpu.step_overhead_ns + 1e9 * seconds) / self.speed)

    def linear_s(self, tokens: int) -> float:
        arithmetic = 2 * self.model.active_linear_parameters * tokens / self._flops
        return max(arithmetic, self.model.touched_parameters(tokens) * self.model.weight_bytes / self._bandwidth)

    def attention_s(self, plan: StepPlan) -> float:
        """A decoding sequence pairs its token with its context; `context_tokens` counts the contexts of all."""
        model = self.model
        pairs = plan.prefill_pairs + (plan.context_tokens if plan.decode_seqs else 0)
        arithmetic = 4 * model.layers * model.heads * model.head_dim * pairs / self._flops
        moved = (plan.context_tokens + plan.prefill_tokens + plan.decode_seqs) * model.kv_bytes_per_token
        copies = max(1.0, self.tensor_parallel / model.kv_heads)
        return max(arithmetic, moved * copies / self._bandwidth)

    def all_reduce_s(self, tokens: int) -> float:
        gpus = self.tensor_parallel
        if gpus == 1:
            return 0.0
        moved = 2 * (gpus - 1) / gpus * tokens * self.model.hidden * self.model.kv_bytes
        return 2 * self.model.layers * (self.gpu.all_reduce_latency_ns / 1e9 + moved / self.gpu.link_bytes_per_s)

    def first_token_ns(self, prompt_tokens: int, cached_tokens: int, load: float = 0.0) -> int:
        return 0

    def next_token_ns(self, load: float = 0.0) -> int:
        return 0

    @property
    def _flops(self) -> float:
        return self.gpu.peak_flops * self.gpu.compute_efficiency * self.tensor_parallel

    @property
    def _bandwidth(self) -> float:
        return self.gpu.memory_bytes_per_s * self.gpu.memory_efficiency * self.tensor_parallel


_T = 1e12
_G = 1e9

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("a100-80gb", 312 * _T, 2.039 * _T, 300 * _G, "NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM"),
            Gpu("h100", 989 * _T, 3.35 * _T, 450 * _G, "NVIDIA H100 Tensor Core GPU data sheet, SXM (1,979 with sparsity)"),
            Gpu("h200", 989 * _T, 4.8 * _T, 450 * _G, "NVIDIA H200 Tensor Core GPU data sheet, SXM (1,979 with sparsity)"),
            Gpu("l4", 121 * _T, 300 * _G, 32 * _G, "NVIDIA L4 Tensor Core GPU data sheet (242 with sparsity), PCIe 4.0 x16"),
            Gpu("l40s", 362 * _T, 864 * _G, 32 * _G, "NVIDIA L40S data sheet (733 with sparsity), PCIe 4.0 x16"),
        )
    }
)

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        model.name: model
        for model in (
            Model("llama-3.1-8b", 32, 4096, 32, 8, 128, 128256, 8.03e9, "arXiv:2407.21783 table 3 and its config.json"),
            Model("llama-3.1-70b", 80, 8192, 64, 8, 128, 128256, 70.6e9, "arXiv:2407.21783 table 3 and its config.json"),
            Model("qwen2.5-7b", 28, 3584, 28, 4, 128, 152064, 7.61e9, "arXiv:2412.15115 and its config.json"),
            Model(
                "qwen3-30b-a3b",
                48,
                2048,
                32,
                4,
                128,
                151936,
                30.5e9,
                "arXiv:2505.09388 table 2 and its config.json",
                128,
                8,
                3.3e9,
            ),
            Model(
                "mixtral-8x7b",
                32,
                4096,
                32,
                8,
                128,
                32000,
                46.7e9,
                "arXiv:2401.04088 table 1 and its config.json",
                8,
                2,
                12.9e9,
            ),
        )
    }
)
