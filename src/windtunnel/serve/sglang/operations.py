"""The routes of an SGLang server that generate nothing (SGLang reference §7.1, §7.3, §7.5, §7.6). One table."""

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from windtunnel.core.request import Lora
from windtunnel.serve.asgi import JSON, send_bytes
from windtunnel.serve.clock import now_ns
from windtunnel.serve.config import as_json
from windtunnel.serve.operations import debug
from windtunnel.serve.operations.endpoint import Call, Handler, Reply, Row, Rule, Simple, get, json_reply, post, post_text
from windtunnel.serve.operations.pages import MetricsPage
from windtunnel.serve.sglang import loads
from windtunnel.serve.sglang.engines import scaled
from windtunnel.serve.sglang.generate import SglangRoute
from windtunnel.serve.sglang.health import Heartbeat, probe
from windtunnel.serve.sglang.kv_config import as_argument
from windtunnel.serve.sglang.sessions import NAME_LIMIT, Sessions
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.http import dumps, parse_json
from windtunnel.wire.sglang import chat, errors, native
from windtunnel.wire.vllm import messages as anthropic
from windtunnel.wire.vllm.chat_prompt import render
from windtunnel.wire.vllm.prompts import check_vocabulary

SHOWN_ARGUMENTS = 64
_ANY = ("GET", "POST")
_LONGEST_WAIT_S = 600.0
_LONGEST_PATIENCE_S = 1e9


class Sglang:
    """What the operator's routes of one server remember besides `server.operator`. Owned by the route table."""

    def __init__(self, sessions: Sessions) -> None:
        self.heartbeat = Heartbeat()
        self.sessions = sessions
        self.internal_state: dict[str, Any] = {}
        self.slow_down_ms = 0.0


def _object(call: Call) -> dict[str, Any]:
    """A JSON object, whatever the content type says; an empty body is an empty one."""
    value = parse_json(call.body) if call.body else {}
    if not isinstance(value, dict):
        raise WireError("The body must be a JSON object.", kind=errors.INVALID)
    return value


def _root(_server: Server, _call: Call) -> Reply:
    return json_reply("SGLang is running")


def _ready(server: Server, _call: Call) -> Reply:
    return Reply(status=200 if server.ready and not server.dead else 503)


# Models and arguments


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


def _model_info(server: Server, _call: Call) -> Reply:
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


def _server_info(server: Server, state: Sglang) -> Reply:
    engine = server.engine
    told = server_arguments(server) | {
        "launch_command": f"windtunnel serve --engine sglang --model-path {server.config.model}",
        "status": "ready",
        "max_total_num_tokens": engine.config.capacity,
        "max_req_input_len": engine.config.max_request_tokens - 1,
        "internal_states": [_internal_state(server, rank, state) for rank in range(len(server.engines))],
        "startup_time": 0.0,
        "version": server.config.sglang.profile,
        "frontend": "python",
    }
    return json_reply(told)


def _models(server: Server, _call: Call) -> Reply:
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


# Requests and the scheduler


def _abort_request(server: Server, call: Call) -> Reply:
    """All ids that begin with `rid`; 200 with nothing in it, whatever matched (§5)."""
    asked = _object(call)
    rid, everything = asked.get("rid") or "", bool(asked.get("abort_all", False))
    if not isinstance(rid, str):
        raise WireError("rid must be a string", kind=errors.INVALID)
    found = sum(engine.abort_matching(rid, now_ns(), abort_all=everything, notify=True) for engine in server.engines)
    server.metrics.on_aborts(found)
    server.driver.wake()
    return Reply()


def _pause(server: Server, call: Call) -> Reply:
    mode = _object(call).get("mode", "abort")
    if mode not in server.engine.pause_modes:
        raise WireError(f"mode is {mode!r}: must be one of {', '.join(server.engine.pause_modes)}")
    for engine in server.engines:
        engine.pause(mode, now_ns())
    server.driver.wake()
    return json_reply({"message": "Generation paused successfully.", "status": "ok"})


def _continue(server: Server, _call: Call) -> Reply:
    for engine in server.engines:
        engine.resume(now_ns())
    server.driver.wake()
    return json_reply({"message": "Generation continued successfully.", "status": "ok"})


async def _flush_cache(server: Server, call: Call) -> Reply:
    """Refused with a 400 while anything is live; `?timeout=` waits so many seconds for idleness."""
    wait_s = float(call.query.get("timeout", "0"))
    if not 0 <= wait_s <= _LONGEST_WAIT_S:
        raise WireError(f"timeout is {wait_s}: must be in [0, {_LONGEST_WAIT_S}] seconds")
    if wait_s:
        await _idle(server, wait_s)
    done = [engine.flush_cache(now_ns()) for engine in server.engines]
    server.driver.wake()
    if not all(done):
        return Reply(b"Failed to flush cache: requests are running or waiting.\n", 400, b"text/plain; charset=utf-8")
    text = b"Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, the "
    return Reply(text + b"operation will not be performed.)\n", 200, b"text/plain; charset=utf-8")


async def _idle(server: Server, limit_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(server.jobs.idle(), limit_s)


def _set_internal_state(server: Server, state: Sglang, call: Call) -> Reply:
    """Takes `max_running_requests` and a few values that are only shown."""
    arguments = _object(call).get("server_args", {})
    if not isinstance(arguments, dict):
        raise WireError("server_args must be an object of server arguments", kind=errors.INVALID)
    if len(state.internal_state | arguments) > SHOWN_ARGUMENTS:
        raise WireError(f"server_args: at most {SHOWN_ARGUMENTS} different arguments")
    live = {name: value for name, value in arguments.items() if name in ("max_running_requests", "max_prefill_tokens")}
    if live:
        server.reconfigure(live)
    state.internal_state |= arguments
    return json_reply([{"updated": True, "server_args": arguments}] * len(server.engines))


def _slow_down(server: Server, state: Sglang, call: Call) -> Reply:
    """`forward_sleep_time` seconds more for every batch; null ends it. Only the step model of time has batches to slow."""
    asked = _object(call).get("forward_sleep_time")
    if asked is not None and (
        isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 <= asked <= _LONGEST_WAIT_S
    ):
        raise WireError(f"forward_sleep_time must be null or in [0, {_LONGEST_WAIT_S}] seconds")
    slower_ms = 0.0 if asked is None else float(asked) * 1000
    base_ms = server.config.pacing.step_base_ns / 1e6 - state.slow_down_ms
    server.reconfigure({"step_base": f"{base_ms + slower_ms}ms"})
    state.slow_down_ms = slower_ms
    return Reply()


# Sessions, adapters, weights


def _open_session(server: Server, state: Sglang, call: Call) -> Reply:
    """`timeout`: seconds without a request after which the session is closed. SGLang makes nothing of `capacity_of_str_len`."""
    asked = _object(call)
    wanted, patience_s = asked.get("session_id") or server.new_id(), asked.get("timeout")
    capacity = asked.get("capacity_of_str_len")
    if isinstance(capacity, bool) or not isinstance(capacity, int):
        raise WireError("capacity_of_str_len must be an integer", kind=errors.INVALID)
    if not isinstance(wanted, str) or len(wanted) > NAME_LIMIT:
        raise WireError(f"session_id must be a text of at most {NAME_LIMIT} characters", kind=errors.INVALID)
    if patience_s is not None and not _is_patience(patience_s):
        raise WireError(f"timeout must be null or a number of seconds up to {_LONGEST_PATIENCE_S:.0e}", kind=errors.INVALID)
    if asked.get("streaming"):
        return _native_refusal("Streaming sessions are disabled. Please relaunch with --enable-streaming-session.")
    patience_ns = None if patience_s is None else scaled(round(patience_s * 1e9), server.config.pacing.time_scale)
    if not state.sessions.open(wanted, patience_ns, server.config.limits.stored_responses):
        return _native_refusal("Failed to open the session. Check if a session with the same id is still open.")
    return json_reply(wanted)


def _is_patience(told: Any) -> bool:
    return not isinstance(told, bool) and isinstance(told, int | float) and 0 <= told <= _LONGEST_PATIENCE_S


def _native_refusal(message: str) -> Reply:
    return json_reply({"error": {"message": message}}, 400)


def _close_session(_server: Server, state: Sglang, call: Call) -> Reply:
    wanted = _object(call).get("session_id")
    if not isinstance(wanted, str):
        raise WireError("session_id must be a text", kind=errors.INVALID)
    state.sessions.close(wanted)
    return Reply()


def _lora_reply(server: Server, problem: str | None) -> Reply:
    loaded = {lora.name: lora.path for lora in server.env.loras.values()}
    told = {"success": problem is None, "error_message": problem or "", "loaded_adapters": loaded}
    return json_reply(told, 200 if problem is None else 400)


def _load_lora(server: Server, call: Call) -> Reply:
    asked = _object(call)
    name, path = asked.get("lora_name"), asked.get("lora_path", "")
    if not isinstance(name, str) or not name or not isinstance(path, str):
        return _lora_reply(server, "lora_name and lora_path must be texts")
    if name in server.env.loras:
        return _lora_reply(server, f"LoRA adapter {name!r} is already loaded.")
    if len(server.env.loras) >= server.config.limits.adapters:
        return _lora_reply(server, f"The server already holds {len(server.env.loras)} adapters: unload one first.")
    lora = Lora(name, path, server.operator.next_lora_id())
    server.env = replace(server.env, loras={**server.env.loras, name: lora})
    return _lora_reply(server, None)


def _unload_lora(server: Server, call: Call) -> Reply:
    name = _object(call).get("lora_name")
    if not isinstance(name, str) or name not in server.env.loras:
        return _lora_reply(server, f"LoRA adapter {name!r} is not loaded.")
    rest = {known: lora for known, lora in server.env.loras.items() if known != name}
    server.env = replace(server.env, loras=rest)
    return _lora_reply(server, None)


def _update_weights(server: Server, call: Call) -> Reply:
    """Nothing is loaded; the version moves when one is named, and the cache is flushed unless told otherwise."""
    asked = _object(call)
    version = asked.get("weight_version")
    if isinstance(version, str) and version:
        server.env = _with_weights(server, version)
    paused = sum(len(engine.sequences) for engine in server.engines)
    if asked.get("flush_cache", True):
        for engine in server.engines:
            engine.flush_cache(now_ns())
    server.driver.wake()
    return json_reply({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": paused})


def _update_weight_version(server: Server, call: Call) -> Reply:
    version = _object(call).get("new_version")
    if not isinstance(version, str) or not version:
        return json_reply({"success": False, "message": "new_version must be a text"}, 400)
    server.env = _with_weights(server, version)
    told = {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
    return json_reply(told)


def _with_weights(server: Server, version: str) -> Any:
    changed: Mapping[str, Any] = {"weight_version": version}
    return replace(server.env, **changed)


def _done(_server: Server, _call: Call) -> Reply:
    return json_reply({"success": True, "message": "Success."})


# Tokens


def _tokenize(server: Server, call: Call) -> Reply:
    asked = _object(call)
    given, special = asked.get("prompt"), asked.get("add_special_tokens", True)
    env = server.env
    if isinstance(asked.get("messages"), list):
        request = errors.validated(chat.ChatRequest.model_validate, asked)
        _conversation, planned = render(request.messages, request, env)
        tokens: Any = list(planned.token_ids)
    elif isinstance(given, str):
        tokens = env.tokenizer.encode(given, add_special_tokens=special)
    elif isinstance(given, list) and all(isinstance(text, str) for text in given):
        tokens = [env.tokenizer.encode(text, add_special_tokens=special) for text in given]
    else:
        raise WireError("prompt must be a text or a list of texts", kind=errors.INVALID)
    batch = bool(tokens) and isinstance(tokens[0], list)
    count: Any = [len(one) for one in tokens] if batch else len(tokens)
    return json_reply({"tokens": tokens, "count": count, "max_model_len": env.max_model_len})


def _detokenize(server: Server, call: Call) -> Reply:
    asked = _object(call)
    tokens, skip = asked.get("tokens"), asked.get("skip_special_tokens", True)
    batch = isinstance(tokens, list) and bool(tokens) and isinstance(tokens[0], list)
    lists: Any = tokens if batch else [tokens]
    if not all(isinstance(one, list) and all(isinstance(token, int) and token >= 0 for token in one) for one in lists):
        raise WireError("tokens must be a list of token ids, or a list of such lists", kind=errors.INVALID)
    for one in lists:
        check_vocabulary(one, server.env)
    texts = [server.env.tokenizer.decode(one, skip_special_tokens=skip) for one in lists]
    return json_reply({"text": texts if batch else texts[0]})


def _count_tokens(server: Server, call: Call) -> Reply:
    asked = _object(call)
    body = dumps(asked | {"model": server.env.served_models[0]})
    status, answer = anthropic.count_tokens(body, call.headers, server.env)
    return Reply(answer, status, JSON)


# The table


class FlatSimple(Simple):
    """Errors of these routes are SGLang's flat object."""

    error_body = staticmethod(errors.flat_body)


def _admin_rules(state: Sglang) -> tuple[Rule, ...]:
    """Behind the admin key, when there is one."""

    def with_state(handle: Any) -> Handler:
        return lambda server, call: handle(server, state, call)

    internal, slow = with_state(_set_internal_state), with_state(_slow_down)
    return (
        Rule("/flush_cache", _ANY, _flush_cache),
        post("/abort_request", _abort_request),
        post("/pause_generation", _pause),
        post("/continue_generation", _continue),
        Rule("/set_internal_state", ("POST", "PUT"), internal),
        Rule("/slow_down", _ANY, slow),
        post("/load_lora_adapter", _load_lora),
        post("/unload_lora_adapter", _unload_lora),
        post("/update_weights_from_disk", _update_weights),
        post("/update_weights_from_tensor", _update_weights),
        post("/update_weights_from_distributed", _update_weights),
        post("/update_weights_from_ipc", _update_weights),
        post("/update_weight_version", _update_weight_version),
        post("/init_weights_update_group", _done),
        post("/destroy_weights_update_group", _done),
        post("/begin_weight_update", _done),
        post("/end_weight_update", _done),
        Rule("/release_memory_occupation", _ANY, _done),
        Rule("/resume_memory_occupation", _ANY, _done),
        Rule("/start_profile", _ANY, _done),
        Rule("/stop_profile", _ANY, _done),
        Rule("/freeze_gc", _ANY, _done),
        Rule("/configure_logging", _ANY, _done),
    )


_STATELESS = Sglang(Sessions(now_ns))
"""For the tables of paths: its rules are never called."""
ADMIN_PATHS = frozenset(rule.path for rule in _admin_rules(_STATELESS))


def _rules(state: Sglang) -> tuple[Rule, ...]:
    def health(server: Server, _call: Call) -> Any:
        return _health(server, state) if server.config.sglang.health_generation else _ready(server, _call)

    def health_generate(server: Server, _call: Call) -> Any:
        return _health(server, state)

    def info(server: Server, _call: Call) -> Reply:
        return _server_info(server, state)

    def open_session(server: Server, call: Call) -> Reply:
        return _open_session(server, state, call)

    def close_session(server: Server, call: Call) -> Reply:
        return _close_session(server, state, call)

    return (
        Rule("/", ("GET", "HEAD"), _root),
        get("/health", health),
        get("/health_generate", health_generate),
        get("/ping", health),
        get("/ready", _ready),
        get("/model_info", _model_info),
        get("/get_model_info", _model_info),
        get("/server_info", info),
        get("/get_server_info", info),
        get("/v1/loads", loads.v1_loads),
        get("/get_load", loads.get_load),
        get("/get_loads", loads.get_load),
        get("/v1/models", _models),
        *(post_text(path, _tokenize) for path in ("/tokenize", "/v1/tokenize")),
        *(post_text(path, _detokenize) for path in ("/detokenize", "/v1/detokenize")),
        post("/v1/messages/count_tokens", _count_tokens),
        Rule("/open_session", _ANY, open_session),
        Rule("/close_session", _ANY, close_session),
    )


POST_PATHS = frozenset(
    rule.path for rule in (*_rules(_STATELESS), *_admin_rules(_STATELESS), *debug.ALWAYS) if "POST" in rule.methods
)


async def _health(server: Server, state: Sglang) -> Reply:
    if not server.ready or server.dead or server.jobs.draining:
        return Reply(status=503)
    return Reply(status=200 if await probe(server, state.heartbeat) else 503)


def table(server: Server, sessions: Sessions) -> list[Row]:
    """All rows of an SGLang server with this configuration."""
    state = Sglang(sessions)
    server.driver.observe(state.heartbeat)
    sessions.watch(server.driver)
    rules = (*_rules(state), *_admin_rules(state), *debug.ALWAYS)
    rows: list[Row] = [(rule.path, rule.methods, FlatSimple(server, rule)) for rule in rules]
    rows.append(("/v1/models/{model:path}", ["GET"], ModelRoute(server)))
    rows.append(("/generate", ["PUT"], SglangRoute(server, server.seams.family(native), sessions)))
    rows.append(("/invocations", ["POST"], SglangRoute(server, server.seams.family(chat), sessions)))
    if server.config.sglang.enable_metrics:
        rows.append(("/metrics", None, MetricsPage(server)))
    return rows
