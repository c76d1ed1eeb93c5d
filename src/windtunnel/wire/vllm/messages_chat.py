"""An Anthropic request as the chat request that vLLM makes of it (vLLM reference §2.7)."""

import json
from collections.abc import Sequence
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.vllm import fields, messages_in
from windtunnel.wire.vllm.chat_request import ChatCompletionRequest
from windtunnel.wire.vllm.messages_request import (
    ContentBlock,
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    OutputConfig,
    ThinkingDisabled,
    ThinkingEnabled,
    Tool,
    ToolChoice,
)


def chat_request(request: MessagesRequest | CountTokensRequest, env: ServerEnv) -> ChatCompletionRequest:
    """The chat request that says the same. Its parts have been validated, so nothing is validated again."""
    values: dict[str, Any] = {
        "model": request.model,
        "messages": _conversation(request),
        "chat_template_kwargs": _template_kwargs(request),
        **_tool_values(request),
        **_output_values(request.output_config),
    }
    if isinstance(request, MessagesRequest):
        values |= {
            "max_completion_tokens": request.max_tokens,
            "stop": list(request.stop_sequences or ()),
            "thinking_token_budget": _budget(request, env),
        }
        same_name = ("stream", "temperature", "top_p", "top_k", "cache_salt", "kv_transfer_params", "vllm_xargs")
        values |= {field: getattr(request, field) for field in same_name}
    return ChatCompletionRequest.model_construct(**values)


def _template_kwargs(request: MessagesRequest | CountTokensRequest) -> dict[str, Any] | None:
    if isinstance(request.thinking, ThinkingDisabled):
        return {"enable_thinking": False} | (request.chat_template_kwargs or {})
    return request.chat_template_kwargs


def _budget(request: MessagesRequest, env: ServerEnv) -> int | None:
    """The thinking budget means nothing to a server without a reasoning parser."""
    thinking = request.thinking
    return thinking.budget_tokens if isinstance(thinking, ThinkingEnabled) and env.reasoning_parser is not None else None


def _output_values(config: OutputConfig | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if config is not None and config.effort is not None:
        values["reasoning_effort"] = config.effort
    if config is not None and config.format is not None and config.format.json_schema is not None:
        schema = fields.JsonSchemaResponseFormat(name="output", schema=config.format.json_schema)
        values["response_format"] = fields.ResponseFormat(type="json_schema", json_schema=schema)
    return values


def _tool_values(request: MessagesRequest | CountTokensRequest) -> dict[str, Any]:
    choice = request.tool_choice
    if not request.tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise http.parameter_error("`tool_choice` can only be used when `tools` is set", "tool_choice")
        return {}
    values: dict[str, Any] = {"tools": [_chat_tool(tool) for tool in request.tools], "tool_choice": "auto"}
    if choice is not None:
        values["tool_choice"] = _chat_choice(choice, request.tools)
        values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return values


def _chat_tool(tool: Tool) -> messages_in.ChatCompletionToolsParam:
    function = messages_in.FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return messages_in.ChatCompletionToolsParam(function=function)


def _chat_choice(choice: ToolChoice, tools: Sequence[Tool]) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name not in {tool.name for tool in tools}:
        raise http.parameter_error("The tool in `tool_choice` does not match any of the `tools`", "tool_choice")
    function = messages_in.ChatCompletionNamedFunction(name=choice.name or "")
    return messages_in.ChatCompletionNamedToolChoiceParam(function=function)


def _conversation(request: MessagesRequest | CountTokensRequest) -> list[dict[str, Any]]:
    system = request.system
    text = system if isinstance(system, str) else "".join(block.text or "" for block in system or () if block.type == "text")
    out: list[dict[str, Any]] = [{"role": "system", "content": text}] if text else []
    for message in request.messages:
        out += _chat_messages(message)
    return out


def _chat_messages(message: InputMessage) -> list[dict[str, Any]]:
    """One message as chat messages: tool results become messages of their own, in front of what else is said."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results = [_tool_message(block) for block in message.content if block.type == "tool_result"]
    parts = [part for block in message.content for part in _parts(block)]
    calls = [_call(block) for block in message.content if block.type == "tool_use"]
    thoughts = "".join(block.thinking or "" for block in message.content if block.type == "thinking")
    if not (parts or calls or thoughts):
        return results
    told: dict[str, Any] = {"role": message.role, "content": parts or None}
    if calls:
        told["tool_calls"] = calls
    if thoughts:
        told["reasoning"] = thoughts
    return [*results, told]


def _parts(block: ContentBlock) -> list[dict[str, Any]]:
    if block.type == "text":
        return [{"type": "text", "text": block.text or ""}]
    if block.type == "image":
        return [{"type": "image_url", "image_url": {"url": json.dumps(block.source, sort_keys=True)}}]
    return []


def _call(block: ContentBlock) -> dict[str, Any]:
    function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
    return {"id": block.id or "", "type": "function", "function": function}


def _tool_message(block: ContentBlock) -> dict[str, Any]:
    content = block.content
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content or ())
    return {"role": "tool", "tool_call_id": block.tool_use_id or "", "content": content}
