"""Developer routes about the engine's inside: configuration, remote calls, weights, profiler (§1.4)."""

import os
import platform
from typing import Any

from windtunnel.serve.config import as_json
from windtunnel.serve.operations.endpoint import Call, Reply, Rule, get, json_reply, post
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.http import BAD_REQUEST, parse_json

_FORMATS = ("text", "json")


def _server_info(server: Server, call: Call) -> Reply:
    """The whole configuration: as one line of `name=value`, or nested."""
    wanted = call.query.get("config_format", "text")
    if wanted not in _FORMATS:
        raise WireError(f"config_format is {wanted!r}: must be text or json", kind=BAD_REQUEST, param="query.config_format")
    settings = as_json(server.config)
    config = settings if wanted == "json" else ", ".join(f"{name}={value!r}" for name, value in settings.items())
    environment = {name: value for name, value in os.environ.items() if name in _SHOWN_ENVIRONMENT}
    return json_reply(
        {"vllm_config": config, "vllm_env": environment, "system_env": {"python_version": platform.python_version()}}
    )


_SHOWN_ENVIRONMENT = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE")
"""Variables that this server reads and that are no secret."""


def _object(call: Call) -> dict[str, Any]:
    body = parse_json(call.body) if call.body else {}
    if not isinstance(body, dict):
        raise WireError("The body must be a JSON object.", kind=BAD_REQUEST, param="body")
    return body


def _collective_rpc(_server: Server, call: Call) -> Reply:
    """One worker, which answers null to every method."""
    try:
        body = _object(call)
    except WireError as error:
        raise WireError(f"JSON decode error: {error.message}", kind=BAD_REQUEST) from None
    if body.get("method") is None:
        raise WireError("Missing 'method' in request body", kind=BAD_REQUEST)
    return json_reply({"results": [None]})


def _world_size(server: Server, call: Call) -> Reply:
    """All ranks, unless `include_dp=false`."""
    ranks = server.config.data_parallel_size if call.query.get("include_dp", "true").lower() != "false" else 1
    return json_reply({"world_size": ranks})


def _weight_info(server: Server, _call: Call) -> Reply:
    return json_reply({"weight_version": server.operator.weights.version})


def _begin_transfer(server: Server, call: Call) -> Reply:
    _object(call)
    server.operator.weights.transfer = True
    return json_reply({"message": "Weight transfer initialized"})


def _end_transfer(server: Server, _call: Call) -> Reply:
    server.operator.weights.transfer = server.operator.weights.updating = False
    return json_reply({"message": "Weight transfer engine shut down"})


def _start_update(server: Server, call: Call) -> Reply:
    _object(call)
    if server.operator.weights.updating:
        raise WireError("A weight update is already under way: finish it first.", kind=BAD_REQUEST)
    server.operator.weights.updating = True
    return json_reply({"message": "Weight update started"})


def _update(server: Server, call: Call) -> Reply:
    _object(call)
    if not server.operator.weights.updating:
        raise WireError("No weight update is under way: call /start_weight_update first.", kind=BAD_REQUEST)
    return json_reply({"message": "Weights updated"})


def _finish_update(server: Server, call: Call) -> Reply:
    _update(server, call)
    server.operator.weights.updating = False
    return json_reply({"message": "Weight update finished"})


def _version(server: Server, call: Call) -> Reply:
    version = _object(call).get("weight_version")
    if not isinstance(version, str) or not version:
        raise WireError("weight_version must be a non-empty text.", kind=BAD_REQUEST, param="body.weight_version")
    server.operator.weights.version = version
    return json_reply({"weight_version": version})


def _checker(_server: Server, call: Call) -> Reply:
    _object(call)
    return json_reply({"results": [None]})


def _start_profile(server: Server, _call: Call) -> Reply:
    if server.operator.profiling:
        raise WireError("The profiler is already running.", 409, "Conflict")
    server.operator.profiling = True
    return Reply()


def _stop_profile(server: Server, _call: Call) -> Reply:
    if not server.operator.profiling:
        raise WireError("The profiler is not running.", 409, "Conflict")
    server.operator.profiling = False
    return Reply()


PROFILER: tuple[Rule, ...] = (post("/start_profile", _start_profile), post("/stop_profile", _stop_profile))
DEVELOPER: tuple[Rule, ...] = (
    get("/server_info", _server_info),
    post("/collective_rpc", _collective_rpc),
    get("/get_world_size", _world_size),
    get("/weight_info", _weight_info),
    post("/init_weight_transfer_engine", _begin_transfer),
    post("/shutdown_weight_transfer_engine", _end_transfer),
    post("/start_weight_update", _start_update),
    post("/start_draft_weight_update", _start_update),
    post("/update_weights", _update),
    post("/finish_weight_update", _finish_update),
    post("/update_weight_version", _version),
    post("/weight_checker", _checker),
)
