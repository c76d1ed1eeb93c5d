"""What no real server has: live settings, a view of every request, the oracle's words, and two operator faults."""

from windtunnel.core.units import parse_duration_ns
from windtunnel.core.words import WORDS
from windtunnel.serve.clock import now_ns
from windtunnel.serve.config import UsageError
from windtunnel.serve.operations.endpoint import Call, Reply, Rule, get, json_reply, post
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.http import read_json

_RECENT = 100
_FOR_EVER_NS = 1 << 62


def _get_config(server: Server, _call: Call) -> Reply:
    return json_reply(server.effective_config())


def _post_config(server: Server, call: Call) -> Reply:
    """Change live settings: all that are named, or none. Durations as text with a unit."""
    changes = read_json(call.body, call.headers)
    if not isinstance(changes, dict):
        raise WireError('The body must be an object of settings, such as {"itl": "20ms"}.')
    try:
        server.reconfigure(changes)
    except UsageError as error:
        raise WireError(str(error), param=str(error).partition(":")[0]) from None
    return _get_config(server, call)


def _requests(server: Server, _call: Call) -> Reply:
    """Every live request with its state, age and resources, and what ended lately."""
    at_ns = now_ns()
    live = [
        {
            "request_id": view.request_id,
            "rank": rank,
            "state": view.state.value,
            "in_state_ms": (at_ns - view.since_ns) / 1e6,
            "age_ms": (at_ns - view.arrival_ns) / 1e6,
            "prompt_tokens": view.prompt_tokens,
            "computed_tokens": view.computed_tokens,
            "output_tokens": view.output_tokens,
            "resources": dict(view.resources),
            **view.tags,
        }
        for rank, engine in enumerate(server.engines)
        for view in engine.live()
    ]
    return json_reply(
        {"live": live, "recent": server.history.recent(_RECENT), "jobs": len(server.jobs), "steps": server.driver.steps}
    )


def _oracle(_server: Server, _call: Call) -> Reply:
    return json_reply({"words": WORDS})


def _engine_death(server: Server, _call: Call) -> Reply:
    """The engine core dies at this instant (§3.9)."""
    failed = sum(engine.kill(now_ns()) for engine in server.engines)
    server.driver.wake()
    return json_reply({"status": "dead", "failed": failed})


def _engine_freeze(server: Server, call: Call) -> Reply:
    """The engine falls silent for `?duration=` (default for ever); `0` thaws it. Health stays green (vLLM #39863)."""
    duration = call.query.get("duration")
    until_ns = _FOR_EVER_NS if duration is None else now_ns() + parse_duration_ns(duration)
    for engine in server.engines:
        engine.freeze(until_ns)
    server.driver.wake()
    return json_reply({"status": "frozen" if until_ns > now_ns() else "running"})


ALWAYS: tuple[Rule, ...] = (
    get("/admin/config", _get_config),
    post("/admin/config", _post_config),
    get("/debug/requests", _requests),
    get("/debug/oracle", _oracle),
    post("/debug/engine_death", _engine_death),
    post("/debug/engine_freeze", _engine_freeze),
)
