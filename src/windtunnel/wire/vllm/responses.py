"""`/v1/responses` (vLLM reference §2.7, §3.5, §9.2): the response object, its event stream, and what is stored of it.

As in vLLM, a request becomes a chat request; planning, limits and parsers are those of `chat`. The stream has no `[DONE]`,
and an error after the head cuts it: `error` answers None.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv, Stored
from windtunnel.wire.family import ChoiceResult, Delta, Generation, StreamEncoder, TokenLogprob, Usage, WireError
from windtunnel.wire.vllm import chat, chat_spec, chunks, fields, messages_in, models, parsers
from windtunnel.wire.vllm.chat_request import ChatCompletionRequest
from windtunnel.wire.vllm.responses_in import (
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponsesRequest,
    ToolChoiceFunction,
    conversation,
)

name = "responses"
paths: Sequence[str] = ("/v1/responses",)

INVALID_REQUEST = "invalid_request_error"
TOKEN_LIMIT = "max_output_tokens"


@dataclass(frozen=True, slots=True)
class ResponseSpec:
    """What a response is written from."""

    env: ServerEnv
    chat: chat_spec.ChatSpec
    response_id: str
    created: int
    echoed: Mapping[str, Any]
    """Members that come from the request."""
    messages: tuple[Mapping[str, Any], ...]
    """The conversation without the instructions, for `previous_response_id`."""
    stored: bool
    background: bool
    top_logprobs: int | None


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate, render and tokenise. Raises WireError for everything found before the head."""
    return plan_request(http.read_model(ResponsesRequest, body, headers), headers, env)


def plan_request(request: ResponsesRequest, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """The same from a request model that has been read already (render routes)."""
    models.resolve(request.model, env)
    stored = bool(request.store) and env.stored is not None
    if request.background and not stored:
        raise WireError(_NO_STORE, kind=INVALID_REQUEST, param="background")
    _check_limit(request, env)
    messages = [*_previous(request, env), *conversation(request.input)]
    told = [{"role": "system", "content": request.instructions}, *messages] if request.instructions else messages
    without_id = {key: value for key, value in headers.items() if key != "x-request-id"}
    planned = chat.plan_request(chat_request(request, told, env), without_id, env)
    prompt_tokens = len(planned.prompts[0].token_ids)
    if prompt_tokens >= env.max_model_len:
        raise WireError(
            f"The prompt has {prompt_tokens} tokens; the context has {env.max_model_len}", kind=INVALID_REQUEST, param="input"
        )
    spec = ResponseSpec(
        env=env,
        chat=planned.spec,
        response_id=f"resp_{env.new_id()}",
        created=env.now_s(),
        echoed=_echoed(request, planned, env),
        messages=tuple(messages),
        stored=stored,
        background=bool(request.background),
        top_logprobs=(request.top_logprobs or 0) if request.wants_logprobs else None,
    )
    return replace(planned, spec=spec, response_id=spec.response_id, family=name)


_NO_STORE = (
    "This server keeps no responses, so `store=True` is ignored and the background mode is not possible; "
    "start it with the environment variable VLLM_ENABLE_RESPONSES_API_STORE=1 to have both."
)


def _check_limit(request: ResponsesRequest, env: ServerEnv) -> None:
    limit = request.max_output_tokens
    if limit is not None and limit > env.max_model_len:
        told = f"max_output_tokens={limit} is more than max_model_len={env.max_model_len} allows; request fewer output tokens"
        raise http.parameter_error(told, "max_output_tokens", limit)


def _previous(request: ResponsesRequest, env: ServerEnv) -> list[Mapping[str, Any]]:
    """The conversation up to the previous response, its answer included."""
    if request.previous_input_messages is not None:
        return list(request.previous_input_messages)
    if request.previous_response_id is None:
        return []
    stored = find(request.previous_response_id, env)
    return [*stored.messages, *conversation(stored.body["output"])]


def find(response_id: str, env: ServerEnv) -> Stored:
    """A stored response, or the 404."""
    stored = env.stored.get(response_id) if env.stored is not None else None
    if stored is None:
        raise WireError(f"Response with id '{response_id}' not found.", 404, INVALID_REQUEST, "response_id")
    return stored


def check_cancellable(stored: Stored) -> None:
    if not stored.body["background"]:
        raise WireError("Cannot cancel a synchronous response.", 400, INVALID_REQUEST, "response_id")


def chat_request(request: ResponsesRequest, messages: Sequence[Mapping[str, Any]], env: ServerEnv) -> ChatCompletionRequest:
    """The chat request that says the same. Its parts have been validated, so nothing is validated again."""
    same_name = (
        "model", "parallel_tool_calls", "stream", "temperature", "top_p", "top_k", "min_p", "skip_special_tokens", "logit_bias",
        "include_stop_str_in_output", "presence_penalty", "frequency_penalty", "session_id", "priority", "cache_salt", "stop",
        "structured_outputs", "repetition_penalty", "seed", "stop_token_ids", "ignore_eos", "vllm_xargs", "kv_transfer_params",
        "ec_transfer_params", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "include_reasoning",
    )  # fmt: skip
    values: dict[str, Any] = {field: getattr(request, field) for field in same_name}
    values |= {
        "messages": list(messages),
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "response_format": _response_format(request),
        "logprobs": request.wants_logprobs,
        "top_logprobs": request.top_logprobs,
    }
    return ChatCompletionRequest.model_construct(**values, **_tool_values(request, env))


def _response_format(request: ResponsesRequest) -> fields.ResponseFormat | None:
    wanted = request.text.format if request.text else None
    if isinstance(wanted, JsonSchemaFormat):
        schema = fields.JsonSchemaResponseFormat(name=wanted.name, schema=wanted.json_schema, strict=wanted.strict)
        return fields.ResponseFormat(type="json_schema", json_schema=schema)
    return fields.ResponseFormat(type="json_object") if isinstance(wanted, JsonObjectFormat) else None


def _tool_values(request: ResponsesRequest, env: ServerEnv) -> dict[str, Any]:
    """Without a parser `auto` is no error here: calls stay text."""
    functions = request.function_tools
    if not functions:
        if request.tool_choice == "required" or isinstance(request.tool_choice, ToolChoiceFunction):
            raise http.parameter_error("`tool_choice` can only be used when `tools` has a function", "tool_choice")
        return {}
    parsed = env.enable_auto_tool_choice and env.tool_call_parser
    choice: Any = request.tool_choice if isinstance(request.tool_choice, str) else "auto"
    if isinstance(request.tool_choice, ToolChoiceFunction):
        choice = _named(request.tool_choice.name, functions)
    return {
        "tools": [_chat_tool(tool) for tool in functions],
        "tool_choice": "none" if choice == "auto" and not parsed else choice,
    }


def _named(wanted: str, functions: Sequence[Mapping[str, Any]]) -> messages_in.ChatCompletionNamedToolChoiceParam:
    if wanted not in {function["name"] for function in functions}:
        raise http.parameter_error("The tool in `tool_choice` does not match any of the `tools`", "tool_choice")
    return messages_in.ChatCompletionNamedToolChoiceParam(function=messages_in.ChatCompletionNamedFunction(name=wanted))


def _chat_tool(tool: Mapping[str, Any]) -> messages_in.ChatCompletionToolsParam:
    values = {key: tool[key] for key in ("name", "description", "parameters", "strict")}
    return messages_in.ChatCompletionToolsParam(function=messages_in.FunctionDefinition(**values))


def _echoed(request: ResponsesRequest, planned: Generation, env: ServerEnv) -> dict[str, Any]:
    """The members that repeat the request, with the sampling values in force."""
    choice = request.tool_choice
    top_p = env.default_sampling.get("top_p", 1.0) if request.top_p is None else request.top_p
    return {
        "instructions": request.instructions,
        "metadata": request.metadata,
        "model": planned.model,
        "parallel_tool_calls": request.parallel_tool_calls,
        "temperature": planned.sampling.temperature,
        "tool_choice": "none" if not request.tools else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump(by_alias=True) for tool in request.tools],
        "top_p": top_p,
        "background": bool(request.background),
        "max_output_tokens": planned.sampling.max_tokens,
        "max_tool_calls": request.max_tool_calls,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_options": request.prompt_cache_options,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": request.reasoning.model_dump() if request.reasoning else None,
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier,
        "text": _text_value(request),
        "top_logprobs": request.top_logprobs if request.wants_logprobs else None,
        "truncation": request.truncation,
        "user": request.user,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
    }


def _text_value(request: ResponsesRequest) -> dict[str, Any] | None:
    if request.text is None:
        return None
    wanted = request.text.format
    return {"format": wanted.model_dump(by_alias=True) if wanted else None, "verbosity": request.text.verbosity}


_OWN_RELEASE = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier")
_ORDER = (
    "id", "created_at", "incomplete_details", "instructions", "metadata", "model", "object", "output",
    "parallel_tool_calls", "temperature", "tool_choice", "tools", "top_p", "background", "max_output_tokens",
    "max_tool_calls", "previous_response_id", "prompt", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning", "safety_identifier", "service_tier", "status", "text", "top_logprobs",
    "truncation", "usage", "user", "metrics", "presence_penalty", "frequency_penalty", "kv_transfer_params",
    "ec_transfer_params", "input_messages", "output_messages",
)  # fmt: skip


def response_value(spec: ResponseSpec, status: str, **told: Any) -> dict[str, Any]:
    """The response object in this state, members in the recorded order."""
    fixed = {"id": spec.response_id, "created_at": spec.created, "object": "response", "status": status, "output": []}
    values = {**fixed, **spec.echoed, **told}
    left_out = {"metrics"} - told.keys()
    if not spec.env.profile.responses_cache_members:
        left_out |= set(_OWN_RELEASE)
    return {key: values.get(key) for key in _ORDER if key not in left_out}


def keep(spec: ResponseSpec, value: Mapping[str, Any]) -> None:
    """Put the response into the store, where there is one and the request wanted it. A cancelled one stays as it is."""
    if not spec.stored or spec.env.stored is None:
        return
    before = spec.env.stored.get(spec.response_id)
    if before is None or before.body["status"] != "cancelled":
        spec.env.stored.put(spec.response_id, Stored(value, spec.messages))


def final_value(
    spec: ResponseSpec, output: Sequence[Any], finish_reason: str | None, reasoning_tokens: int, usage: Usage
) -> dict[str, Any]:
    """The response at its end. An operator's abort looks like success (§3.5)."""
    limited = finish_reason == "length"
    told: dict[str, Any] = {
        "incomplete_details": {"reason": TOKEN_LIMIT} if limited else None,
        "output": list(output),
        "usage": _usage(usage, reasoning_tokens),
        "kv_transfer_params": usage.kv_transfer,
    }
    if spec.env.enable_per_request_metrics:
        told["metrics"] = usage.metrics
    return response_value(spec, "incomplete" if limited else "completed", **told)


def _usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """Cached tokens are told whatever `--enable-prompt-tokens-details` says; the per-turn lists stay empty."""
    read = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0}
    made = {"reasoning_tokens": reasoning_tokens, "tool_output_tokens": 0}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": read | {"input_tokens_per_turn": [], "cached_tokens_per_turn": []},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": made | {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _message_item(item_id: str, content: list[Any], status: str) -> dict[str, Any]:
    return {"id": item_id, "content": content, "role": "assistant", "status": status, "type": "message", "phase": None}


def _text_part(text: str, logprobs: Any) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": logprobs}


def _reasoning_item(item_id: str, text: str | None, status: str | None) -> dict[str, Any]:
    content = None if text is None else [{"text": text, "type": "reasoning_text"}]
    head: dict[str, Any] = {"id": item_id, "summary": [], "type": "reasoning", "content": content}
    return head | {"encrypted_content": None, "status": status}


def _call_item(item_id: str, call_id: str, function: str, arguments: str, status: str) -> dict[str, Any]:
    head: dict[str, Any] = {
        "arguments": arguments,
        "call_id": call_id,
        "name": function,
        "type": "function_call",
        "id": item_id,
    }
    return head | {"async": None, "caller": None, "namespace": None, "status": status}


def _logprobs(entries: Sequence[TokenLogprob], spec: ResponseSpec) -> list[dict[str, Any]]:
    told = chunks.chat_logprobs(entries, spec.top_logprobs or 0, False)["content"]
    order = ("token", "bytes", "logprob")
    return [
        {key: entry[key] for key in order}
        | {"top_logprobs": [{key: top[key] for key in order} for top in entry["top_logprobs"]]}
        for entry in told
    ]


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed, nulls included."""
    spec: ResponseSpec = generation.spec
    (result,) = choices
    counter = chat_spec.ReasoningCount(spec.chat)
    counter.add(result.token_ids)
    value = final_value(spec, _output(spec, result), result.finish_reason, counter.total, usage)
    keep(spec, value)
    return http.dumps(value)


def _output(spec: ResponseSpec, result: ChoiceResult) -> list[dict[str, Any]]:
    reasoning, said = parsers.split_reasoning(result.text) if spec.chat.reasoning else (None, result.text)
    calls: tuple[parsers.ToolCall, ...] = ()
    if spec.chat.tools is not None and said:
        said, calls = parsers.split_calls(said)
    items: list[dict[str, Any]] = []
    if reasoning and spec.chat.include_reasoning:
        items.append(_reasoning_item(f"rs_{spec.env.new_id()}", reasoning, None))
    if said:
        logprobs = None if spec.top_logprobs is None else _logprobs(result.logprobs or (), spec)
        items.append(_message_item(f"msg_{spec.env.new_id()}", [_text_part(said, logprobs)], "completed"))
    for call in calls if spec.chat.parallel_tool_calls else calls[:1]:
        ids = (f"fc_{spec.env.new_id()}", f"chatcmpl-tool-{spec.env.new_id()}")
        items.append(_call_item(*ids, call.name, call.arguments, "completed"))
    return items


def encoder(generation: Generation) -> StreamEncoder:
    return ResponseEncoder(generation.spec)


@dataclass(slots=True)
class _OpenItem:
    """The output item that is being written. `text` is what has been sent of it, bounded by the request's token limit."""

    kind: str
    item_id: str
    text: list[str]
    call_id: str = ""
    function: str = ""
    logprobs: list[dict[str, Any]] | None = None


class ResponseEncoder:
    """Events of one response. Mutable: the parser, the open item, finished items, the sequence number."""

    __slots__ = ("_counter", "_finish", "_item", "_number", "_output", "_parser", "_spec")

    def __init__(self, spec: ResponseSpec) -> None:
        self._spec = spec
        self._parser = parsers.make_parser(reasoning=spec.chat.reasoning, tools=spec.chat.tools is not None)
        self._counter = chat_spec.ReasoningCount(spec.chat)
        self._item: _OpenItem | None = None
        self._output: list[dict[str, Any]] = []
        self._number = 0
        self._finish: str | None = None

    def opening(self) -> bytes:
        """What is sent with the head, before the first token."""
        value = response_value(self._spec, "in_progress")
        if self._spec.background:
            keep(self._spec, value)
        return self._event("response.created", response=value) + self._event("response.in_progress", response=value)

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        self._counter.add(delta.token_ids)
        frames = [self._piece(piece, delta) for piece in self._pieces(delta)]
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            frames.append(self._close_item())
        return b"".join(frames)

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        """Never: every event has a number of its own, and the text is repeated at the end."""
        return None

    def close(self, usage: Usage) -> bytes:
        value = final_value(self._spec, self._output, self._finish, self._counter.total, usage)
        keep(self._spec, value)
        limited = self._finish == "length" and self._spec.env.profile.responses_incomplete_event
        return self._event("response.incomplete" if limited else "response.completed", response=value)

    def error(self, error: WireError) -> bytes | None:
        """vLLM's own error object fails its event validation, and the body is cut (§9.2, 15)."""
        if self._spec.background:
            keep(self._spec, response_value(self._spec, "failed"))
        return None

    def _pieces(self, delta: Delta) -> list[parsers.Piece]:
        if self._parser is None:
            return [parsers.Piece("content", delta.text)] if delta.text else []
        pieces = self._parser.push(delta.text)
        return pieces + self._parser.finish() if delta.finish_reason is not None else pieces

    def _piece(self, piece: parsers.Piece, delta: Delta) -> bytes:
        chat_spec = self._spec.chat
        if piece.kind == "reasoning" and not chat_spec.include_reasoning:
            return b""
        if piece.call > 0 and not chat_spec.parallel_tool_calls:
            return b""
        if piece.kind == "name":
            return self._open_item("function_call", piece.text)
        kind = _KINDS[piece.kind]
        opened = b"" if self._item is not None and self._item.kind == kind else self._open_item(kind)
        return opened + self._delta(piece.text, delta)

    def _open_item(self, kind: str, function: str = "") -> bytes:
        closed = self._close_item()
        new_id = self._spec.env.new_id
        item = self._item = _OpenItem(kind, f"{_PREFIXES[kind]}_{new_id()}", [], function=function)
        if kind == "function_call":
            item.call_id = f"chatcmpl-tool-{new_id()}"
            return closed + self._added(_call_item(item.item_id, item.call_id, function, "", "in_progress"))
        if kind == "reasoning":
            added = self._added(_reasoning_item(item.item_id, None, "in_progress"))
            return closed + added + self._part("added", {"text": "", "type": "reasoning_text"})
        item.logprobs = None if self._spec.top_logprobs is None else []
        added = self._added(_message_item(item.item_id, [], "in_progress"))
        return closed + added + self._part("added", _text_part("", []))

    def _delta(self, text: str, delta: Delta) -> bytes:
        item = self._opened
        item.text.append(text)
        where: dict[str, Any] = {"delta": text, "item_id": item.item_id, "output_index": self._index}
        if item.kind == "message":
            where["logprobs"] = [] if item.logprobs is None else _logprobs(delta.logprobs or (), self._spec)
            if item.logprobs is not None:
                item.logprobs += where["logprobs"]
        if item.kind != "function_call":
            where["content_index"] = 0
        return self._event(f"response.{_STEMS[item.kind]}.delta", **where)

    def _close_item(self) -> bytes:
        if self._item is None:
            return b""
        frames, done = self._done_frames(self._item, "".join(self._item.text))
        frames += self._event("response.output_item.done", item=done, output_index=self._index)
        self._output.append(done)
        self._item = None
        return frames

    def _done_frames(self, item: _OpenItem, text: str) -> tuple[bytes, dict[str, Any]]:
        """The events that end the item's text, and the finished item."""
        where: dict[str, Any] = {"item_id": item.item_id, "output_index": self._index}
        kind = f"response.{_STEMS[item.kind]}.done"
        if item.kind == "function_call":
            done = self._event(kind, **where, arguments=text, name=item.function)
            return done, _call_item(item.item_id, item.call_id, item.function, text, "completed")
        if item.kind == "reasoning":
            done = self._event(kind, **where, content_index=0, text=text)
            part = self._part("done", {"text": text, "type": "reasoning_text"})
            return done + part, _reasoning_item(item.item_id, text, "completed")
        done = self._event(kind, **where, content_index=0, logprobs=item.logprobs or [], text=text)
        content = _text_part(text, item.logprobs)
        return done + self._part("done", content), _message_item(item.item_id, [content], "completed")

    @property
    def _opened(self) -> _OpenItem:
        assert self._item is not None
        return self._item

    @property
    def _index(self) -> int:
        return len(self._output)

    def _added(self, item: dict[str, Any]) -> bytes:
        return self._event("response.output_item.added", item=item, output_index=self._index)

    def _part(self, what: str, part: dict[str, Any]) -> bytes:
        where = {"content_index": 0, "item_id": self._opened.item_id, "output_index": self._index}
        return self._event(f"response.content_part.{what}", **where, part=part)

    def _event(self, kind: str, **told: Any) -> bytes:
        """One event; members in alphabetical order, as OpenAI's event classes declare them."""
        told |= {"sequence_number": self._number, "type": kind}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), http.dumps({key: told[key] for key in sorted(told)}))


_KINDS = {"content": "message", "reasoning": "reasoning", "arguments": "function_call"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_STEMS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}


def error_body(error: WireError) -> bytes:
    return http.error_body(error)
