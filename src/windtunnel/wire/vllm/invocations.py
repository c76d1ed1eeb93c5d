"""`/invocations`: SageMaker's one route for chat and completions; the shape of the body decides (vLLM reference §1.1)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, StreamEncoder, Usage, WireError
from windtunnel.wire.vllm import chat, chat_request, chat_spec, completions

name = "invocations"
paths: Sequence[str] = ("/invocations",)

error_body = http.error_body


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """A body with `messages` is a chat request, any other a completion."""
    http.check_content_type(headers)
    value = _parsed(body)
    if isinstance(value, Mapping) and "messages" in value:
        return chat.plan_request(http.validated(chat_request.ChatCompletionRequest.model_validate, value), headers, env)
    return completions.plan_request(http.validated(completions.CompletionRequest.model_validate, value), headers, env)


def _parsed(body: bytes) -> Any:
    """Unlike the other routes this one reports a JSON fault as a sentence."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"JSON decode error: {error}", kind=http.BAD_REQUEST) from None


def encoder(generation: Generation) -> StreamEncoder:
    return chat.encoder(generation) if isinstance(generation.spec, chat_spec.ChatSpec) else completions.encoder(generation)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    write = chat.body if isinstance(generation.spec, chat_spec.ChatSpec) else completions.body
    return write(generation, choices, usage)
