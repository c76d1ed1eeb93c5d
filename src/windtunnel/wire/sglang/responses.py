"""`/v1/responses` of an SGLang server: the API's own events, written as in `wire.vllm.responses`; errors are nested (§7.3).

Nothing is stored, so there is no background mode and no `previous_response_id`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from windtunnel.wire import http
from windtunnel.wire.family import ChoiceResult, Generation, StreamEncoder, Usage
from windtunnel.wire.sglang import errors, requests
from windtunnel.wire.sglang.env import SglangEnv, lenient
from windtunnel.wire.sglang.native import routed_values
from windtunnel.wire.vllm import responses as openai
from windtunnel.wire.vllm.responses_in import ResponsesRequest

name = "sglang_responses"
paths: Sequence[str] = ("/v1/responses",)
waits_for_output = True

error_body = openai.error_body


def plan(body: bytes, headers: Mapping[str, str], env: SglangEnv) -> Generation:
    """Any model name is served. Raises WireError for everything found before the head."""
    request = http.read_model(ResponsesRequest, body, headers)
    extra = errors.validated(requests.RoutingFields.model_validate, request.model_extra or {})
    routed = requests.routing(extra, headers, 1, env, request.model)
    known = request.model_copy(update={"model": env.served_models[0]})
    planned = openai.plan_request(known, {}, lenient(env))
    if planned.late_error is not None:
        raise planned.late_error
    return replace(planned, family=name, engine_ids=routed.rids, indexed_ids=False, **routed_values(routed))


def encoder(generation: Generation) -> StreamEncoder:
    return openai.encoder(generation)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    return openai.body(generation, choices, usage)
