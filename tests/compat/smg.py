"""smg (clients reference §4.1, §4.2)."""

from tests.compat.modes import KV_EVENTS, Mode, Peer, Setup
from tests.compat.steering import by_load, by_rank, by_vectors, goes_back_to_its_cache

_HEAD = "launch --host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 --prometheus-port {metrics_port}"
_CALM = f"{_HEAD} --disable-circuit-breaker"
_BOTH = f"{_CALM} --policy round_robin --worker-urls {{url0}} {{url1}}"
_PAIR = f"{_CALM} --pd-disaggregation --prefill {{url0}} {{bootstrap0}} --decode {{url1}}"
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
        Mode(
            "vLLM P/D, NIXL",
            "vllm",
            f"{_CALM} --pd-disaggregation --backend vllm --enable-igw",
            _LEGS,
            registers=True,
        ),
        Mode("vLLM P/D, gRPC", "vllm", _PAIR, _LEGS, grpc=True),
        Mode(
            "vLLM P/D, Mooncake",
            "vllm",
            f"{_CALM} --pd-disaggregation --backend vllm --enable-igw",
            _LEGS,
            registers=True,
            connector="mooncake",
        ),
        Mode("vLLM P/D, Mooncake, gRPC", "vllm", _PAIR, _LEGS, grpc=True, connector="mooncake"),
    ),
    (
        Setup(
            "`--policy cache_aware` over `SubscribeKvEvents`",
            Mode(
                "events",
                "vllm",
                f"{_HEAD} --policy cache_aware --worker-urls {{url0}} {{url1}}",
                grpc=True,
                flags=KV_EVENTS,
                balanced=False,
            ),
            goes_back_to_its_cache,
        ),
        by_rank(_HEAD, "sglang", "--dp-aware"),
        by_vectors(Mode("vLLM", "vllm", _BOTH)),
        by_load(_HEAD, "vllm"),
    ),
)
