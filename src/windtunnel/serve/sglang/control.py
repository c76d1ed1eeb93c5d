"""What an operator does to the requests and to the scheduler of an SGLang server (SGLang reference §5, §7.6)."""

import asyncio
import contextlib

from windtunnel.serve.clock import now_ns
from windtunnel.serve.operations.endpoint import Call, Reply, json_reply
from windtunnel.serve.sglang.operator import Sglang, json_object
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.sglang import errors

SHOWN_ARGUMENTS = 64
_LONGEST_WAIT_S = 600.0


def abort_request(server: Server, call: Call) -> Reply:
    """All ids that begin with `rid`; 200 with nothing in it, whatever matched (§5)."""
    asked = json_object(call)
    rid, everything = asked.get("rid") or "", bool(asked.get("abort_all", False))
    if not isinstance(rid, str):
        raise WireError("rid must be a string", kind=errors.INVALID)
    found = sum(engine.abort_matching(rid, now_ns(), abort_all=everything, notify=True) for engine in server.engines)
    server.metrics.on_aborts(found)
    server.driver.wake()
    return Reply()


def pause(server: Server, call: Call) -> Reply:
    mode = json_object(call).get("mode", "abort")
    if mode not in server.engine.pause_modes:
        raise WireError(f"mode is {mode!r}: must be one of {', '.join(server.engine.pause_modes)}")
    for engine in server.engines:
        engine.pause(mode, now_ns())
    server.driver.wake()
    return json_reply({"message": "Generation paused successfully.", "status": "ok"})


def resume(server: Server, _call: Call) -> Reply:
    for engine in server.engines:
        engine.resume(now_ns())
    server.driver.wake()
    return json_reply({"message": "Generation continued successfully.", "status": "ok"})


async def flush_cache(server: Server, call: Call) -> Reply:
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


def set_internal_state(server: Server, state: Sglang, call: Call) -> Reply:
    """Takes `max_running_requests` and a few values that are only shown."""
    arguments = json_object(call).get("server_args", {})
    if not isinstance(arguments, dict):
        raise WireError("server_args must be an object of server arguments", kind=errors.INVALID)
    if len(state.internal_state | arguments) > SHOWN_ARGUMENTS:
        raise WireError(f"server_args: at most {SHOWN_ARGUMENTS} different arguments")
    live = {name: value for name, value in arguments.items() if name in ("max_running_requests", "max_prefill_tokens")}
    if live:
        server.reconfigure(live)
    state.internal_state |= arguments
    return json_reply([{"updated": True, "server_args": arguments}] * len(server.engines))


def slow_down(server: Server, state: Sglang, call: Call) -> Reply:
    """`forward_sleep_time` seconds more for every batch; null ends it. Only the step model of time has batches to slow."""
    asked = json_object(call).get("forward_sleep_time")
    if asked is not None and (
        isinstance(asked, bool) or not isinstance(asked, int | float) or not 0 <= asked <= _LONGEST_WAIT_S
    ):
        raise WireError(f"forward_sleep_time must be null or in [0, {_LONGEST_WAIT_S}] seconds")
    slower_ms = 0.0 if asked is None else float(asked) * 1000
    base_ms = server.config.pacing.step_base_ns / 1e6 - state.slow_down_ms
    server.reconfigure({"step_base": f"{base_ms + slower_ms}ms"})
    state.slow_down_ms = slower_ms
    return Reply()
