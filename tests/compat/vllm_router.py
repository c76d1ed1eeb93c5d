"""vllm-router (clients reference §4.3)."""

from tests.compat.modes import BLOCK_SIZE, KV_EVENTS, Mode, Peer, Setup
from tests.compat.steering import by_load, by_rank, by_vectors, follows_the_cache

_HEAD = "--host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 --prometheus-port {metrics_port}"
_CALM = f"{_HEAD} --disable-circuit-breaker"
_BOTH = f"{_CALM} --policy round_robin --worker-urls {{url0}} {{url1}}"
_PAIR = f"{_CALM} --vllm-pd-disaggregation --prefill {{url0}} --decode {{url1}} --kv-connector nixl"
_MOONCAKE = f"{_CALM} --vllm-pd-disaggregation --prefill {{url0}} {{bootstrap0}} --decode {{url1}} --kv-connector mooncake"
_LEGS = ("prefill", "decode")

KV_AWARE = Mode(
    "kv_aware",
    "vllm",
    f"{_HEAD} --policy kv_aware --kv-event-source {{url0}}={{events0}} --kv-event-source {{url1}}={{events1}} "
    f"--kv-event-model wt-model --kv-event-block-size {BLOCK_SIZE} --worker-urls {{url0}} {{url1}}",
    flags=KV_EVENTS,
    balanced=False,
)

PEER = Peer(
    "vllm-router",
    "vllm-router",
    "vllm-router",
    (
        Mode("vLLM", "vllm", _BOTH),
        Mode("SGLang", "sglang", _BOTH),
        Mode("vLLM P/D, nixl", "vllm", _PAIR, _LEGS),
        Mode("vLLM P/D, mooncake", "vllm", _MOONCAKE, _LEGS, connector="mooncake"),
    ),
    (
        Setup(
            "`--policy kv_aware`: 6 of 6 to the worker that holds the prompt, then to the other", KV_AWARE, follows_the_cache
        ),
        by_rank(f"{_HEAD} --api-key wt-key", "vllm", "--intra-node-data-parallel-size 2"),
        by_vectors(Mode("vLLM", "vllm", _BOTH)),
        by_load(_HEAD, "vllm"),
    ),
)
