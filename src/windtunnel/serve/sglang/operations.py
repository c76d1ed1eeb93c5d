"""The routes of an SGLang server that generate nothing (SGLang reference §7.1, §7.3, §7.5, §7.6). One table."""

from collections.abc import Callable
from typing import Any

from windtunnel.serve.clock import now_ns
from windtunnel.serve.operations import debug
from windtunnel.serve.operations.endpoint import Call, Handler, Reply, Row, Rule, Simple, get, post, post_text
from windtunnel.serve.operations.pages import MetricsPage, show_ready
from windtunnel.serve.sglang import loads
from windtunnel.serve.sglang.control import abort_request, flush_cache, pause, resume, set_internal_state, slow_down
from windtunnel.serve.sglang.generate import SglangRoute
from windtunnel.serve.sglang.health import probe
from windtunnel.serve.sglang.info import ModelRoute, show_model_info, show_models, show_root, show_server_info
from windtunnel.serve.sglang.operator import Sglang
from windtunnel.serve.sglang.session_routes import close_session, open_session
from windtunnel.serve.sglang.sessions import Sessions
from windtunnel.serve.sglang.tokens import count_tokens, detokenize, tokenize
from windtunnel.serve.sglang.weights import done, load_lora, unload_lora, update_weight_version, update_weights
from windtunnel.serve.state import Server
from windtunnel.wire.sglang import chat, errors, native

_ANY = ("GET", "POST")


class FlatSimple(Simple):
    """Errors of these routes are SGLang's flat object."""

    error_body = staticmethod(errors.flat_body)


def _with(state: Sglang, handle: Callable[[Server, Sglang, Call], Reply]) -> Handler:
    return lambda server, call: handle(server, state, call)


def _admin_rules(state: Sglang) -> tuple[Rule, ...]:
    """Behind the admin key, when there is one."""
    internal, slow = _with(state, set_internal_state), _with(state, slow_down)
    return (
        Rule("/flush_cache", _ANY, flush_cache),
        post("/abort_request", abort_request),
        post("/pause_generation", pause),
        post("/continue_generation", resume),
        Rule("/set_internal_state", ("POST", "PUT"), internal),
        Rule("/slow_down", _ANY, slow),
        post("/load_lora_adapter", load_lora),
        post("/unload_lora_adapter", unload_lora),
        post("/update_weights_from_disk", update_weights),
        post("/update_weights_from_tensor", update_weights),
        post("/update_weights_from_distributed", update_weights),
        post("/update_weights_from_ipc", update_weights),
        post("/update_weight_version", update_weight_version),
        post("/init_weights_update_group", done),
        post("/destroy_weights_update_group", done),
        post("/begin_weight_update", done),
        post("/end_weight_update", done),
        Rule("/release_memory_occupation", _ANY, done),
        Rule("/resume_memory_occupation", _ANY, done),
        Rule("/start_profile", _ANY, done),
        Rule("/stop_profile", _ANY, done),
        Rule("/freeze_gc", _ANY, done),
        Rule("/configure_logging", _ANY, done),
    )


_STATELESS = Sglang(Sessions(now_ns))
"""For the tables of paths: its rules are never called."""
ADMIN_PATHS = frozenset(rule.path for rule in _admin_rules(_STATELESS))


def _rules(state: Sglang) -> tuple[Rule, ...]:
    def health(server: Server, _call: Call) -> Any:
        return _health(server, state) if server.config.sglang.health_generation else show_ready(server, _call)

    def health_generate(server: Server, _call: Call) -> Any:
        return _health(server, state)

    def info(server: Server, _call: Call) -> Reply:
        return show_server_info(server, state)

    return (
        Rule("/", ("GET", "HEAD"), show_root),
        get("/health", health),
        get("/health_generate", health_generate),
        get("/ping", health),
        get("/ready", show_ready),
        get("/model_info", show_model_info),
        get("/get_model_info", show_model_info),
        get("/server_info", info),
        get("/get_server_info", info),
        get("/v1/loads", loads.v1_loads),
        get("/get_load", loads.get_load),
        get("/get_loads", loads.get_load),
        get("/v1/models", show_models),
        *(post_text(path, tokenize) for path in ("/tokenize", "/v1/tokenize")),
        *(post_text(path, detokenize) for path in ("/detokenize", "/v1/detokenize")),
        post("/v1/messages/count_tokens", count_tokens),
        Rule("/open_session", _ANY, _with(state, open_session)),
        Rule("/close_session", _ANY, _with(state, close_session)),
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
