"""sglang-router (clients reference §3)."""

from tests.compat.modes import Mode, Peer

_HEAD = "launch --host 127.0.0.1 --port {port} --prometheus-host 127.0.0.1 --prometheus-port {metrics_port} --disable-circuit-breaker"
_BOTH = "--policy round_robin --worker-urls {url0} {url1}"
_PAIR = "--pd-disaggregation --prefill {url0} {bootstrap0} --decode {url1}"

PEER = Peer(
    "sglang-router",
    "sglang-router",
    "sglang-router",
    (
        Mode("SGLang workers", "sglang", f"{_HEAD} {_BOTH}"),
        Mode("vLLM workers", "vllm", f"{_HEAD} {_BOTH}"),
        Mode("SGLang P/D", "sglang", f"{_HEAD} {_PAIR}", ("prefill", "decode")),
    ),
)
