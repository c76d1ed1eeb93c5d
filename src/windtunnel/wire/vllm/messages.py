"""`/v1/messages` and `/v1/messages/count_tokens`, the Anthropic form (vLLM reference §2.7, §3.6, §9.2).

As in vLLM, a request becomes a chat request; planning, limits and parsers are those of `chat`. Nulls are left out of bodies.
Errors of the body's validation keep the OpenAI envelope (§9.2, 17); all others are in Anthropic's own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, StreamEncoder, Usage, WireError
from windtunnel.wire.vllm import chat, chat_prompt, chat_spec, messages_errors, models, parsers
from windtunnel.wire.vllm.messages_chat import chat_request
from windtunnel.wire.vllm.messages_errors import named_error
from windtunnel.wire.vllm.messages_request import CountTokensRequest, MessagesRequest
from windtunnel.wire.vllm.messages_spec import MessageSpec, message_stop, message_usage, new_signature, new_tool_id
from windtunnel.wire.vllm.messages_stream import MessageEncoder

name = "messages"
paths: Sequence[str] = ("/v1/messages",)
error_body = messages_errors.error_body


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate, render and tokenise. Raises WireError for everything found before the head."""
    return plan_request(http.read_model(MessagesRequest, body, headers), headers, env)


def plan_request(request: MessagesRequest, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """The same from a request model that has been read already (render routes)."""
    try:
        models.resolve(request.model, env)
        planned = chat.plan_request(chat_request(request, env), headers, env)
    except WireError as error:
        raise named_error(error, env) from None
    inner: chat_spec.ChatSpec = planned.spec
    spec = MessageSpec(
        env=env,
        response_id=planned.response_id,
        model=planned.model,
        prompt_tokens=len(planned.prompts[0].token_ids),
        tools=inner.tools is not None,
        reasoning=inner.reasoning,
        parallel_tool_calls=inner.parallel_tool_calls,
    )
    late = planned.late_error and named_error(planned.late_error, env)
    return replace(planned, spec=spec, family=name, late_error=late)


def count_tokens(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> tuple[int, bytes]:
    """The status and the JSON of `/v1/messages/count_tokens`."""
    try:
        request = http.read_model(CountTokensRequest, body, headers)
        models.resolve(request.model, env)
        asked = chat_request(request, env)
        _conversation, planned = chat_prompt.render(asked.messages, asked, env)
    except WireError as error:
        return error.status, error_body(named_error(error, env))
    count = len(planned.token_ids)
    return 200, http.dumps({"input_tokens": count, "context_management": {"original_input_tokens": count}})


def encoder(generation: Generation) -> StreamEncoder:
    return MessageEncoder(generation.spec)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed, nulls left out."""
    spec: MessageSpec = generation.spec
    (result,) = choices
    content, called = _content(spec, result.text)
    told: dict[str, Any] = {
        "id": spec.response_id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": spec.model,
    }
    reason, sequence = message_stop(result.finish_reason, result.stop_reason, called)
    if reason is not None:
        told["stop_reason"] = reason
    if sequence is not None:
        told["stop_sequence"] = sequence
    told["usage"] = message_usage(usage, spec)
    if usage.kv_transfer is not None:
        told["kv_transfer_params"] = usage.kv_transfer
    return http.dumps(told)


def _content(spec: MessageSpec, text: str) -> tuple[list[dict[str, Any]], bool]:
    """The content blocks, and whether one of them is a tool call."""
    reasoning, said = parsers.split_reasoning(text) if spec.reasoning else (None, text)
    calls: tuple[parsers.ToolCall, ...] = ()
    if spec.tools and said:
        said, calls = parsers.split_calls(said)
    blocks: list[dict[str, Any]] = []
    if reasoning:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": new_signature(spec)})
    if said:
        blocks.append({"type": "text", "text": said})
    for call in calls if spec.parallel_tool_calls else calls[:1]:
        blocks.append({"type": "tool_use", "id": new_tool_id(spec), "name": call.name, "input": json.loads(call.arguments)})
    return blocks, bool(calls)
