"""How errors look in the Anthropic form (vLLM reference §9.2)."""

from dataclasses import replace
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import WireError

_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_API_ERROR = "api_error"
_RECORDED_KINDS = frozenset({"BadRequestError", "NotFoundError"})
"""Kinds that vLLM 0.32 shows as they are."""


def named_error(error: WireError, env: ServerEnv) -> WireError:
    """`error` with the `type` that this release shows; validation errors stay what they are."""
    if error.kind in (http.BAD_REQUEST, http.DETAIL, http.BARE):
        return error
    if error.kind in _RECORDED_KINDS and not env.profile.anthropic_error_types:
        return error
    return replace(error, kind=_BY_STATUS.get(error.status, _API_ERROR))


def error_object(error: WireError) -> dict[str, Any]:
    return {"type": error.kind, "message": error.message}


def error_body(error: WireError) -> bytes:
    """Validation errors in the OpenAI envelope, all others in Anthropic's.

    Errors of `plan` carry their final type; what is found later (a refusal, a body over the limit) is named by its status.
    """
    if error.kind in (http.BAD_REQUEST, http.DETAIL, http.BARE):
        return http.error_body(error)
    if error.kind not in _RECORDED_KINDS:
        error = replace(error, kind=_BY_STATUS.get(error.status, _API_ERROR))
    return http.dumps({"type": "error", "error": error_object(error)})
