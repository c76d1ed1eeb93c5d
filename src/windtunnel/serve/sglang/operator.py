"""What an SGLang server remembers for its operator, and how its routes read a body (SGLang reference §7.1)."""

from typing import Any

from windtunnel.serve.operations.endpoint import Call
from windtunnel.serve.sglang.health import Heartbeat
from windtunnel.serve.sglang.sessions import Sessions
from windtunnel.wire.family import WireError
from windtunnel.wire.http import parse_json
from windtunnel.wire.sglang import errors


class Sglang:
    """What the operator's routes of one server remember besides `server.operator`. Owned by the route table."""

    def __init__(self, sessions: Sessions) -> None:
        self.heartbeat = Heartbeat()
        self.sessions = sessions
        self.internal_state: dict[str, Any] = {}
        self.slow_down_ms = 0.0


def json_object(call: Call) -> dict[str, Any]:
    """A JSON object, whatever the content type says; an empty body is an empty one."""
    value = parse_json(call.body) if call.body else {}
    if not isinstance(value, dict):
        raise WireError("The body must be a JSON object.", kind=errors.INVALID)
    return value
