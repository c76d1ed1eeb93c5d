"""vllm-router (clients reference §4.3)."""

from tests.compat.modes import Mode, Peer

_HEAD = "--host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 --prometheus-port {metrics_port} --disable-circuit-breaker"
_BOTH = "--policy round_robin --worker-urls {url0} {url1}"

PEER = Peer(
    "vllm-router",
    "vllm-router",
    "vllm-router",
    (
        Mode("vLLM workers", "vllm", f"{_HEAD} {_BOTH}"),
        Mode("SGLang workers", "sglang", f"{_HEAD} {_BOTH}"),
    ),
)
