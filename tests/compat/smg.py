"""smg (clients reference §4.1, §4.2)."""

from tests.compat.modes import Mode, Peer

_HEAD = "launch --host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 --prometheus-port {metrics_port} --disable-circuit-breaker"
_BOTH = f"{_HEAD} --policy round_robin --worker-urls {{url0}} {{url1}}"
_PAIR = f"{_HEAD} --pd-disaggregation --prefill {{url0}} {{bootstrap0}} --decode {{url1}}"
_LEGS = ("prefill", "decode")

PEER = Peer(
    "smg",
    "smg",
    "smg",
    (
        Mode("vLLM", "vllm", _BOTH),
        Mode("SGLang", "sglang", _BOTH),
        Mode("SGLang P/D", "sglang", _PAIR, _LEGS),
        Mode("vLLM, gRPC", "vllm", _BOTH, grpc=True),
        Mode("SGLang, gRPC", "sglang", _BOTH, grpc=True),
        Mode("SGLang P/D, gRPC", "sglang", _PAIR, _LEGS, grpc=True),
    ),
)
