"""`/open_session` and `/close_session` (SGLang 0.5.23)."""

from typing import Any

from windtunnel.serve.operations.endpoint import Call, Reply, json_reply
from windtunnel.serve.sglang.engines import scaled
from windtunnel.serve.sglang.operator import Sglang, json_object
from windtunnel.serve.sglang.sessions import NAME_LIMIT
from windtunnel.serve.state import Server
from windtunnel.wire.family import WireError
from windtunnel.wire.sglang import errors

_LONGEST_PATIENCE_S = 1e9


def open_session(server: Server, state: Sglang, call: Call) -> Reply:
    """`timeout`: seconds without a request after which the session is closed. SGLang makes nothing of `capacity_of_str_len`."""
    asked = json_object(call)
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
    refused = state.sessions.open(wanted, patience_ns, server.config.limits.stored_responses)
    return json_reply(wanted) if refused is None else _native_refusal(refused)


def _is_patience(told: Any) -> bool:
    return not isinstance(told, bool) and isinstance(told, int | float) and 0 <= told <= _LONGEST_PATIENCE_S


def _native_refusal(message: str) -> Reply:
    return json_reply({"error": {"message": message}}, 400)


def close_session(_server: Server, state: Sglang, call: Call) -> Reply:
    wanted = json_object(call).get("session_id")
    if not isinstance(wanted, str):
        raise WireError("session_id must be a text", kind=errors.INVALID)
    state.sessions.close(wanted)
    return Reply()
