"""`/v1/messages` and `/v1/messages/count_tokens`, the Anthropic form (vLLM reference §2.7, §3.6, §9.2).

As in vLLM, a request becomes a chat request; planning, limits and parsers are those of `chat`. Nulls are left out of bodies.
Errors of the body's validation keep the OpenAI envelope (§9.2, 17); all others are in Anthropic's own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Delta, Generation, StreamEncoder, Usage, WireError
from windtunnel.wire.vllm import chat, chat_prompt, chat_spec, fields, messages_in, models, parsers
from windtunnel.wire.vllm.chat_request import ChatCompletionRequest

name = "messages"
paths: Sequence[str] = ("/v1/messages",)

BlockType = Literal[
    "text",
    "image",
    "tool_use",
    "tool_result",
    "tool_reference",
    "thinking",
    "redacted_thinking",
    "tool_addition",
    "tool_removal",
]


class ContentBlock(fields.OpenModel):
    type: BlockType
    text: str | None = None
    source: dict[str, Any] | None = None
    id: str | None = None
    tool_use_id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    tool_name: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


class InputMessage(fields.OpenModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class Tool(fields.OpenModel):
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(fields.OpenModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingEnabled(fields.OpenModel):
    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1024)]


class ThinkingDisabled(fields.OpenModel):
    type: Literal["disabled"]


class ThinkingAdaptive(fields.OpenModel):
    type: Literal["adaptive"]


Thinking = Annotated[ThinkingEnabled | ThinkingDisabled | ThinkingAdaptive, Field(discriminator="type")]


class JsonOutputFormat(fields.OpenModel):
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    type: Literal["json_schema"] = "json_schema"


class OutputConfig(fields.OpenModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


def _named(value: str) -> str:
    if not value:
        raise ValueError("Model is required")
    return value


ModelName = Annotated[str, AfterValidator(_named)]


class CountTokensRequest(fields.OpenModel):
    """Fields in the order of vLLM's own model: it is the order of the validation lines."""

    model: ModelName
    messages: list[InputMessage]
    output_config: OutputConfig | None = None
    system: str | list[ContentBlock] | None = None
    thinking: Thinking | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(fields.OpenModel):
    """Fields in the order of vLLM's own model."""

    model: ModelName
    messages: list[InputMessage]
    max_tokens: int
    metadata: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    stop_sequences: fields.StopList | None = None
    stream: bool | None = False
    system: str | list[ContentBlock] | None = None
    temperature: float | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    top_k: int | None = None
    top_p: float | None = None
    mm_payload: Literal["tensors", "none"] = "tensors"
    return_mm_kwargs: bool | None = None
    cache_salt: fields.CacheSalt | None = None
    watermarking: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: fields.Xargs | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("max_tokens")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value <= 0:
            raise ValueError("max_tokens must be positive")
        return value

    @model_validator(mode="after")
    def _budget(self) -> "MessagesRequest":
        if isinstance(self.thinking, ThinkingEnabled) and self.thinking.budget_tokens >= self.max_tokens:
            raise ValueError("thinking.budget_tokens must be less than max_tokens")
        return self


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """What a message is written from."""

    env: ServerEnv
    response_id: str
    model: str
    prompt_tokens: int
    tools: bool
    reasoning: bool
    parallel_tool_calls: bool


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate, render and tokenise. Raises WireError for everything found before the head."""
    return plan_request(http.read_model(MessagesRequest, body, headers), headers, env)


def plan_request(request: MessagesRequest, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """The same from a request model that has been read already (render routes)."""
    try:
        models.resolve(request.model, env)
        planned = chat.plan_request(chat_request(request, env), headers, env)
    except WireError as error:
        raise _named_error(error, env) from None
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
    late = planned.late_error and _named_error(planned.late_error, env)
    return replace(planned, spec=spec, family=name, late_error=late)


def count_tokens(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> tuple[int, bytes]:
    """The status and the JSON of `/v1/messages/count_tokens`."""
    try:
        request = http.read_model(CountTokensRequest, body, headers)
        models.resolve(request.model, env)
        asked = chat_request(request, env)
        _conversation, planned = chat_prompt.render(asked.messages, asked, env)
    except WireError as error:
        return error.status, error_body(_named_error(error, env))
    count = len(planned.token_ids)
    return 200, http.dumps({"input_tokens": count, "context_management": {"original_input_tokens": count}})


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


def encoder(generation: Generation) -> StreamEncoder:
    return MessageEncoder(generation.spec)


class MessageEncoder:
    """Events of one message. Mutable: the parser, the open block and how the message ends."""

    __slots__ = ("_called", "_index", "_open", "_parser", "_spec", "_started", "_stop")

    def __init__(self, spec: MessageSpec) -> None:
        self._spec = spec
        self._parser = parsers.make_parser(reasoning=spec.reasoning, tools=spec.tools)
        self._open: str | None = None
        """Kind of the open block."""
        self._index = -1
        self._started = False
        self._called = False
        self._stop: tuple[str | None, str | None] = (None, None)

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        frames = [b"" if self._started else self._start()]
        frames += [self._piece(piece) for piece in self._pieces(delta)]
        if delta.finish_reason is not None:
            frames.append(self._close_block())
            self._stop = _stop(delta.finish_reason, delta.stop_reason, self._called)
        return b"".join(frames)

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        """Text of an open text block, while no parser looks at it."""
        if self._parser is not None or self._open != "text":
            return None
        return _TEXT_HEAD, b'},"index":%d}\n\n' % self._index

    def close(self, usage: Usage) -> bytes:
        reason, sequence = self._stop
        told = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": _usage(usage, self._spec)}
        return _event("message_delta", told) + _event("message_stop", {})

    def error(self, error: WireError) -> bytes:
        return self._close_block() + _event("error", {"error": _error(_named_error(error, self._spec.env))})

    def _pieces(self, delta: Delta) -> list[parsers.Piece]:
        if self._parser is None:
            return [parsers.Piece("content", delta.text)] if delta.text else []
        pieces = self._parser.push(delta.text)
        return pieces + self._parser.finish() if delta.finish_reason is not None else pieces

    def _start(self) -> bytes:
        self._started = True
        spec = self._spec
        message: dict[str, Any] = {
            "id": spec.response_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": spec.model,
        }
        message |= {"stop_reason": None, "stop_sequence": None}
        message["usage"] = {"input_tokens": spec.prompt_tokens, "output_tokens": 0}
        return _event("message_start", {"message": message})

    def _piece(self, piece: parsers.Piece) -> bytes:
        if piece.call > 0 and not self._spec.parallel_tool_calls:
            return b""
        if piece.kind == "name":
            self._called = True
            block = {"type": "tool_use", "id": _tool_id(self._spec), "name": piece.text, "input": {}}
            return self._open_block("tool_use", block)
        kind, member, delta_type = _DELTAS[piece.kind]
        opened = b"" if self._open == kind else self._open_block(kind, {"type": kind, member: ""})
        return opened + self._delta({"type": delta_type, member: piece.text})

    def _open_block(self, kind: str, block: dict[str, Any]) -> bytes:
        closed = self._close_block()
        self._open = kind
        self._index += 1
        return closed + _event("content_block_start", {"content_block": block, "index": self._index})

    def _close_block(self) -> bytes:
        kind, self._open = self._open, None
        if kind is None:
            return b""
        signed = b""
        if kind == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": _signature(self._spec)})
        return signed + _event("content_block_stop", {"index": self._index})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"delta": delta, "index": self._index})


_DELTAS = {
    "content": ("text", "text", "text_delta"),
    "reasoning": ("thinking", "thinking", "thinking_delta"),
    "arguments": ("tool_use", "partial_json", "input_json_delta"),
}
"""Block kind, member and delta type of each kind of piece."""


_TEXT_HEAD = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":'


def _event(kind: str, told: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), http.dumps({"type": kind} | dict(told)))


def _signature(spec: MessageSpec) -> str:
    return spec.env.new_id() + spec.env.new_id()


def _tool_id(spec: MessageSpec) -> str:
    return f"chatcmpl-tool-{spec.env.new_id()}"


def _stop(finish_reason: str | None, stop_reason: int | str | None, called: bool) -> tuple[str | None, str | None]:
    """(`stop_reason`, `stop_sequence`); an operator's abort has neither (§3.6)."""
    if finish_reason == "length":
        return "max_tokens", None
    if finish_reason != "stop":
        return None, None
    if called:
        return "tool_use", None
    return ("stop_sequence", stop_reason) if isinstance(stop_reason, str) else ("end_turn", None)


def _usage(usage: Usage, spec: MessageSpec) -> dict[str, int]:
    """With prompt details, `input_tokens` is what was neither read from nor written to the cache (§2.7)."""
    told = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    if spec.env.enable_prompt_tokens_details:
        created = usage.created_cache_tokens or 0
        told["input_tokens"] = usage.prompt_tokens - usage.cached_tokens - created
        told |= {"cache_creation_input_tokens": created, "cache_read_input_tokens": usage.cached_tokens}
    return told


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
    reason, sequence = _stop(result.finish_reason, result.stop_reason, called)
    if reason is not None:
        told["stop_reason"] = reason
    if sequence is not None:
        told["stop_sequence"] = sequence
    told["usage"] = _usage(usage, spec)
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
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": _signature(spec)})
    if said:
        blocks.append({"type": "text", "text": said})
    for call in calls if spec.parallel_tool_calls else calls[:1]:
        blocks.append({"type": "tool_use", "id": _tool_id(spec), "name": call.name, "input": json.loads(call.arguments)})
    return blocks, bool(calls)


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


def _named_error(error: WireError, env: ServerEnv) -> WireError:
    """`error` with the `type` that this release shows; validation errors stay what they are."""
    if error.kind in (http.BAD_REQUEST, http.DETAIL, http.BARE):
        return error
    if error.kind in _RECORDED_KINDS and not env.profile.anthropic_error_types:
        return error
    return replace(error, kind=_BY_STATUS.get(error.status, _API_ERROR))


def _error(error: WireError) -> dict[str, Any]:
    return {"type": error.kind, "message": error.message}


def error_body(error: WireError) -> bytes:
    """Validation errors in the OpenAI envelope, all others in Anthropic's.

    Errors of `plan` carry their final type; what is found later (a refusal, a body over the limit) is named by its status.
    """
    if error.kind in (http.BAD_REQUEST, http.DETAIL, http.BARE):
        return http.error_body(error)
    if error.kind not in _RECORDED_KINDS:
        error = replace(error, kind=_BY_STATUS.get(error.status, _API_ERROR))
    return http.dumps({"type": "error", "error": _error(error)})
