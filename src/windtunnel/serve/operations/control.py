"""What an operator does to requests and to the engine: abort, pause, sleep, reset caches (§1.3, §1.4, §3.8)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from windtunnel.core.vllm.control import PAUSE_MODES, PauseMode
from windtunnel.serve.asgi import JSON
from windtunnel.serve.clock import now_ns
from windtunnel.serve.operations.endpoint import Call, Handler, Reply, Rule, empty, get, json_reply, post, post_text
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.http import BAD_REQUEST, parse_json, read_json
from windtunnel.wire.vllm.derender import ROUTES as DERENDER_ROUTES
from windtunnel.wire.vllm.generate import disabled
from windtunnel.wire.vllm.render import ROUTES, SCALE_OUT_PATHS, Render

_SLEEP_LEVELS = range(3)


def _wanted(body: Any) -> list[str]:
    ids = body.get("request_ids", []) if isinstance(body, dict) else None
    if not isinstance(ids, list) or not all(isinstance(request_id, str) for request_id in ids):
        raise WireError(
            "request_ids must be a list of engine request ids (strings).", kind=BAD_REQUEST, param="body.request_ids"
        )
    return ids


def _abort_requests(server: Server, call: Call) -> Reply:
    """Developer route: an empty list aborts everything; with ids the answer counts what was asked for, matched or not."""
    wanted = _wanted(parse_json(call.body) if call.body else {})
    if not wanted:
        return json_reply({"status": "aborted", "aborted": server.jobs.abort_all()})
    server.jobs.abort_by_id(wanted)
    return json_reply({"status": "aborted", "aborted": len(wanted)})


def _scale_out_abort(server: Server, call: Call) -> Reply:
    """200 with nothing in it, whatever matched; an empty list matches nothing."""
    server.jobs.abort_by_id(_wanted(read_json(call.body, call.headers)))
    return Reply()


def _forbidden(_server: Server, _call: Call) -> Reply:
    raise disabled()


def rendering(render: Render) -> Handler:
    """A route whose whole answer a function of `wire` makes from the body."""

    def handle(server: Server, call: Call) -> Reply:
        return Reply(render(call.body, call.headers, server.env), 200, JSON)

    return handle


def _mode(call: Call) -> PauseMode:
    mode = call.query.get("mode", "abort")
    for known in PAUSE_MODES:
        if mode == known:
            return known
    raise WireError(f"mode is {mode!r}: must be one of {', '.join(PAUSE_MODES)}", kind=BAD_REQUEST, param="query.mode")


def _flag(call: Call, name: str, default: bool) -> bool:
    text = call.query.get(name, str(default)).lower()
    if text not in ("true", "1", "yes", "on", "false", "0", "no", "off"):
        raise WireError(f"{name} is {text!r}: must be true or false", kind=BAD_REQUEST, param=f"query.{name}")
    return text in ("true", "1", "yes", "on")


async def _pause(server: Server, call: Call) -> Reply:
    mode, clear_cache = _mode(call), _flag(call, "clear_cache", True)
    _pause_all(server, mode)
    if mode == "wait":
        await server.idle_or_resumed()
    if clear_cache and mode != "keep":
        _reset(server, reset_running=False)
    return json_reply({"status": "paused"})


def _pause_all(server: Server, mode: PauseMode) -> None:
    for engine in server.engines:
        engine.pause(mode, now_ns())
    server.driver.wake()


def _resume(server: Server, _call: Call) -> Reply:
    for engine in server.engines:
        engine.resume(now_ns())
    server.driver.wake()
    server.operator.resumed()
    return json_reply({"status": "resumed"})


def _is_paused(server: Server, _call: Call) -> Reply:
    return json_reply({"is_paused": server.engine.control.paused is not None})


@contextmanager
def _timed(server: Server, operation: str) -> Iterator[None]:
    began_ns = now_ns()
    server.metrics.on_sleep_operation(operation)
    try:
        yield
    finally:
        server.metrics.on_sleep_operation(operation, (now_ns() - began_ns) / 1e9)


async def _sleep(server: Server, call: Call) -> Reply:
    """Pauses by `mode`, then drops the KV cache; weights are discarded from level 2 on."""
    level, mode = call.query.get("level", "1"), _mode(call)
    if not level.isascii() or not level.isdigit() or int(level) not in _SLEEP_LEVELS:
        raise WireError(f"level is {level!r}: must be 0, 1 or 2", kind=BAD_REQUEST, param="query.level")
    with _timed(server, "sleep"):
        if mode == "wait":
            _pause_all(server, mode)
            await server.idle_or_resumed()
        for engine in server.engines:
            engine.sleep(int(level), now_ns(), mode)
        server.driver.wake()
        _show_sleep(server)
    return json_reply({"status": "sleeping", "level": int(level)})


def _wake_up(server: Server, call: Call) -> Reply:
    """Waking only a part (`tags`) leaves the engine asleep until `kv_cache` or everything is asked for."""
    tags = call.query.get("tags")
    with _timed(server, "wake"):
        if tags is None or tags == "kv_cache":
            for engine in server.engines:
                engine.wake(now_ns())
            server.driver.wake()
            server.operator.resumed()
            _show_sleep(server)
    status = "awake" if server.engine.control.sleep_level is None else "sleeping"
    return json_reply({"status": status, "tags": None if tags is None else [tags]})


def _show_sleep(server: Server) -> None:
    for rank, engine in enumerate(server.engines):
        server.metrics.on_sleep(rank, engine.control.sleep_state)


def _is_sleeping(server: Server, _call: Call) -> Reply:
    return json_reply({"is_sleeping": server.engine.control.sleep_level is not None})


def _reset_prefix_cache(server: Server, call: Call) -> Reply:
    reset_running = _flag(call, "reset_running_requests", False)
    _flag(call, "reset_external", False)
    return json_reply({"success": _reset(server, reset_running=reset_running)})


def _release_kv_cache_memory(server: Server, _call: Call) -> Reply:
    """Frees what nobody uses; without the cache being free nothing is released."""
    with _timed(server, "release_kv_cache_memory"):
        _reset(server, reset_running=False)
    return json_reply({"status": "kv_cache_released"})


def _reset_media(server: Server, _call: Call) -> Reply:
    server.metrics.reset_media()
    return Reply()


def _reset(server: Server, *, reset_running: bool) -> bool:
    """Every rank is asked; the answer is rank 0's, as in vLLM."""
    done = [engine.reset_prefix_cache(now_ns(), reset_running=reset_running) for engine in server.engines]
    server.driver.wake()
    return bool(done[0])


SCALE_OUT: tuple[Rule, ...] = (
    post("/inference/v1/abort_requests", _scale_out_abort),
    *(post_text(path, rendering(read)) for path, read in (*ROUTES.items(), *DERENDER_ROUTES.items())),
)
SCALE_OUT_OFF: tuple[Rule, ...] = tuple(post(path, _forbidden) for path in SCALE_OUT_PATHS)
DEVELOPER: tuple[Rule, ...] = (
    post("/abort_requests", _abort_requests),
    post("/pause", _pause),
    post("/resume", _resume),
    get("/is_paused", _is_paused),
    post("/sleep", _sleep),
    post("/wake_up", _wake_up),
    get("/is_sleeping", _is_sleeping),
    post("/reset_prefix_cache", _reset_prefix_cache),
    post("/reset_mm_cache", _reset_media),
    post("/reset_encoder_cache", empty),
    post("/release_kv_cache_memory", _release_kv_cache_memory),
)
