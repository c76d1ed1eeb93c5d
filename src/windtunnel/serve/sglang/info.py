"""Routes that tell what an SGLang server is: models, arguments, health's plain form (SGLang reference §7.3, §7.5)."""

from typing import Any

from windtunnel.serve.asgi import send_bytes
from windtunnel.serve.config import as_json
from windtunnel.serve.operations.endpoint import Call, Reply, json_reply
from windtunnel.serve.sglang import loads
from windtunnel.serve.sglang.kv_config import as_argument
from windtunnel.serve.sglang.operator import Sglang
from windtunnel.serve.state import Server


def show_root(_server: Server, _call: Call) -> Reply:
    return json_reply("SGLang is running")


def model_info(server: Server) -> dict[str, Any]:
    config = server.config
    return {
        "model_path": config.model,
        "served_model_name": config.names[0],
        "tokenizer_path": config.tokenizer or config.model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": _weight_version(server),
        "load_format": "dummy",
        "reasoning_parser": config.reasoning_parser,
        "tool_call_parser": config.tool_call_parser,
        "disaggregation_mode": config.disagg.mode,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "windtunnel",
        "architectures": ["WindtunnelForCausalLM"],
    }


def _weight_version(server: Server) -> str:
    version: str = getattr(server.env, "weight_version", "default")
    return version


def show_model_info(server: Server, _call: Call) -> Reply:
    return json_reply(model_info(server))


def server_arguments(server: Server) -> dict[str, Any]:
    """The resolved arguments under SGLang's names."""
    config, settings = server.config, as_json(server.config.sglang)
    hidden = ("admin_api_key", "profile", "health_generation")
    shown = {name: value for name, value in settings.items() if name not in hidden and not name.endswith("_ns")}
    return shown | {
        "model_path": config.model,
        "served_model_name": config.names[0],
        "tokenizer_path": config.tokenizer or config.model,
        "host": config.host,
        "port": config.port,
        "context_length": config.scheduler.max_model_len,
        "random_seed": config.seed,
        "stream_interval": config.stream_interval,
        "tool_call_parser": config.tool_call_parser,
        "reasoning_parser": config.reasoning_parser,
        "dp_size": config.data_parallel_size,
        "pp_size": 1,
        "ep_size": 1,
        "load_balance_method": config.disagg.load_balance_method if config.disagg.on else "auto",
        "disaggregation_mode": config.disagg.mode,
        "disaggregation_transfer_backend": config.disagg.transfer_backend,
        "disaggregation_bootstrap_port": config.disagg.bootstrap_port,
        "enable_lora": config.lora,
        "device": "cpu",
        "load_format": "dummy",
        "kv_events_config": as_argument(server.config.kv_events),
    }


def _internal_state(server: Server, rank: int, state: Sglang) -> dict[str, Any]:
    engine = server.engines[rank]
    gauges = loads.gauges(server, rank)
    return {
        "last_gen_throughput": gauges.get("gen_throughput", 0.0),
        "memory_usage": {"weight": 0.0, "kvcache": 0.0, "graph": 0.0, "token_capacity": engine.config.capacity},
        "effective_max_running_requests_per_dp": engine.config.max_running_requests,
        "load": loads.live(server, rank)["num_running_reqs"],
        **state.internal_state,
    }


def show_server_info(server: Server, state: Sglang) -> Reply:
    engine = server.engine
    told = server_arguments(server) | {
        "launch_command": f"windtunnel serve --engine sglang --model-path {server.config.model}",
        "status": "ready",
        "max_total_num_tokens": engine.config.capacity,
        "max_req_input_len": engine.config.input_bound,
        "internal_states": [_internal_state(server, rank, state) for rank in range(len(server.engines))],
        "startup_time": 0.0,
        "version": server.config.sglang.profile,
        "frontend": "python",
    }
    return json_reply(told)


def show_models(server: Server, _call: Call) -> Reply:
    cards = [_card(server, name, None) for name in server.env.served_models]
    cards += [_card(server, name, server.env.served_models[0]) for name in server.env.loras]
    return json_reply({"object": "list", "data": cards})


def _card(server: Server, name: str, parent: str | None) -> dict[str, Any]:
    root = name if parent is None else server.env.loras[name].path
    limit = server.env.max_model_len if parent is None else None
    card = {"id": name, "object": "model", "created": server.env.now_s(), "owned_by": "sglang", "root": root}
    return card | {"parent": parent, "max_model_len": limit}


class ModelRoute:
    """`/v1/models/{model}`: the error is nested, other than everywhere else (§7.3). Names may have slashes."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        name = scope["path"].removeprefix("/v1/models/")
        env = self._server.env
        if name in env.served_models or name in env.loras:
            parent = env.served_models[0] if name in env.loras else None
            reply = json_reply(_card(self._server, name, parent))
        else:
            told = {"message": f"The model '{name}' does not exist", "type": "invalid_request_error"}
            reply = json_reply({"error": told | {"param": "model", "code": "model_not_found"}}, 404)
        await send_bytes(send, reply.status, reply.body, reply.content_type)
