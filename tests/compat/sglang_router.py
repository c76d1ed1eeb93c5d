"""sglang-router (clients reference §3)."""

from tests.compat.modes import Mode, Peer, Setup
from tests.compat.steering import answered, by_load, by_rank, by_vectors

_HEAD = "launch --host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 --prometheus-port {metrics_port}"
_CALM = f"{_HEAD} --disable-circuit-breaker"
_BOTH = f"{_CALM} --policy round_robin --worker-urls {{url0}} {{url1}}"
_PAIR = f"{_CALM} --pd-disaggregation --prefill {{url0}} {{bootstrap0}} --decode {{url1}}"
_LEGS = ("prefill", "decode")

PEER = Peer(
    "sglang-router",
    "sglang-router",
    "sglang-router",
    (
        Mode("SGLang", "sglang", _BOTH),
        Mode("vLLM", "vllm", _BOTH),
        Mode("SGLang P/D", "sglang", _PAIR, _LEGS),
    ),
    (
        by_rank(_HEAD, "sglang", "--dp-aware"),
        by_vectors(Mode("vLLM", "vllm", _BOTH)),
        by_load(_HEAD, "sglang"),
        Setup(
            "`--mini-lb` with P/D",
            Mode("mini-lb", "sglang", _PAIR.replace("launch", "launch --mini-lb"), _LEGS),
            answered,
            thorough=True,
        ),
    ),
)
