"""`/v1/messages` of an SGLang server: Anthropic's form, errors always in Anthropic's envelope (SGLang reference §7.3, §7.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.family import ChoiceResult, Generation, StreamEncoder, Usage, WireError
from windtunnel.wire.sglang import errors, requests
from windtunnel.wire.sglang.env import SglangEnv, lenient
from windtunnel.wire.sglang.native import routed_values
from windtunnel.wire.vllm import messages as anthropic
from windtunnel.wire.vllm.messages_request import MessagesRequest
from windtunnel.wire.vllm.messages_stream import MessageEncoder

name = "sglang_messages"
paths: Sequence[str] = ("/v1/messages",)
waits_for_output = True

_BY_STATUS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_SCRUBBED = "Internal server error"


def plan(body: bytes, headers: Mapping[str, str], env: SglangEnv) -> Generation:
    """Any model name is served. Raises WireError for everything found before the head."""
    request = errors.read_model(MessagesRequest, body, headers)
    extra = errors.validated(requests.RoutingFields.model_validate, request.model_extra or {})
    routed = requests.routing(extra, headers, 1, env, request.model)
    known = request.model_copy(update={"model": env.served_models[0], "cache_salt": None})
    planned = anthropic.plan_request(known, headers, lenient(env))
    if planned.late_error is not None:
        raise planned.late_error
    spec = replace(planned.spec, response_id=f"msg_{routed.rids[0]}", model=request.model)
    values = routed_values(routed)
    return replace(
        planned,
        spec=spec,
        response_id=spec.response_id,
        model=request.model,
        family=name,
        engine_ids=routed.rids,
        indexed_ids=False,
        **values,
    )


def encoder(generation: Generation) -> StreamEncoder:
    return MessageEncoder(generation.spec)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    return anthropic.body(generation, choices, usage)


def error_body(error: WireError) -> bytes:
    """The text of a 5xx is not shown."""
    kind = _BY_STATUS.get(error.status, "api_error")
    told: dict[str, Any] = {"type": kind, "message": _SCRUBBED if error.status >= 500 else error.message}
    return http.dumps({"type": "error", "error": told})
