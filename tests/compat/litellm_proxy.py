"""The LiteLLM proxy as a router over two workers (clients reference §5)."""

from tests.compat.cases import refused_by_all
from tests.compat.modes import Mode, Peer, Setup

_WORDS = "--config {config} --host 127.0.0.1 --port {port} --telemetry False"
_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


def _config(settings: str) -> str:
    workers = "".join(
        f"  - model_name: wt-model\n    litellm_params: {{{{model: hosted_vllm/wt-model, api_base: {{url{number}}}/v1, api_key: none}}}}\n"
        for number in (0, 1)
    )
    return f"model_list:\n{workers}router_settings: {{{{routing_strategy: simple-shuffle, {settings}}}}}\n"


def _mode(name: str, engine: str, settings: str) -> Mode:
    return Mode(name, engine, _WORDS, random=True, config=_config(settings), environment=_ENVIRONMENT)


_COOLING = "num_retries: 2, allowed_fails: 0, cooldown_time: 1"
_CALM = "num_retries: 2, disable_cooldowns: true"

PEER = Peer(
    "litellm",
    "litellm",
    "litellm",
    (_mode("vLLM", "vllm", _COOLING), _mode("SGLang", "sglang", _COOLING)),
    tuple(
        Setup(f"`disable_cooldowns`: all workers answer {status}", _mode("calm", "vllm", _CALM), refused_by_all(status))
        for status in (429, 500, 503)
    ),
)
