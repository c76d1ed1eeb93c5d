"""`/v1/chat/completions` as SGLang writes it (SGLang reference §7.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.family import ChoiceResult, Delta, Generation, PromptPlan, StreamEncoder, Usage, WireError
from windtunnel.wire.output import HeldLogprobs
from windtunnel.wire.sglang import errors, openai, requests
from windtunnel.wire.sglang.env import SglangEnv
from windtunnel.wire.sglang.openai import AnswerSpec, OpenAiRequest, chunk_head, finish_members, stream_end, usage_value
from windtunnel.wire.vllm import chat_prompt, chat_request, chunks, messages_in, parsers, structured

name = "sglang_chat"
paths: Sequence[str] = ("/v1/chat/completions",)
waits_for_output = True
"""The head of a stream waits for the engine's first output (§7.4)."""

error_body = errors.flat_body


class ChatRequest(OpenAiRequest):
    messages: messages_in.MessageList
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tools: list[messages_in.ChatCompletionToolsParam] | None = None
    tool_choice: chat_request.ToolChoice | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = True
    stream_reasoning: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def chat_template(self) -> None:
        """SGLang takes no template from a request."""

    @property
    def add_generation_prompt(self) -> bool:
        return not self.continue_final_message


@dataclass(frozen=True, slots=True)
class ChatSpec(AnswerSpec):
    top_logprobs: int | None
    tools: str | None
    parallel_tool_calls: bool
    reasoning: bool

    @property
    def parsed(self) -> bool:
        return self.reasoning or self.tools is not None


def plan(body: bytes, headers: Mapping[str, str], env: SglangEnv) -> Generation:
    """Read, validate, render and tokenise. Raises WireError for everything found before the head."""
    request = errors.read_model(ChatRequest, body, headers)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    requests.check_ranges(request.sampling_values(limit))
    requests.check_logprobs("top_logprobs", request.top_logprobs, env)
    _conversation, planned = chat_prompt.render(request.messages, request, env)
    prompts = (planned,)
    routed = requests.routing(request, headers, 1, env, request.model, request.n)
    spec = _spec(request, routed, prompts, env)
    room = requests.output_limit(limit, prompts, env)
    sampling = requests.sampling_plan(request, room, min_tokens=request.min_tokens, logprobs=spec.top_logprobs, env=env)
    if spec.parsed:
        sampling = replace(sampling, skip_special_tokens=False)
    return openai.planned(name, request, routed, spec, sampling, _wanted(request, spec, prompts, env))


def _spec(request: ChatRequest, routed: requests.Routing, prompts: tuple[PromptPlan, ...], env: SglangEnv) -> ChatSpec:
    thinking = (request.chat_template_kwargs or {}).get("enable_thinking", True)
    return ChatSpec.of(
        request,
        routed,
        prompts,
        env,
        top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        tools=_tool_mode(request, env),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=env.reasoning_parser is not None and thinking is not False and request.separate_reasoning is not False,
    )


def _tool_mode(request: ChatRequest, env: SglangEnv) -> str | None:
    """Calls are parsed only by a server with `--tool-call-parser`; `required` and a named tool are forced without one, too."""
    if not request.tools:
        if request.tool_choice not in (None, "none", "auto"):
            raise WireError("tool_choice needs tools: the list is empty or missing")
        return None
    choice = request.tool_choice or "auto"
    if choice == "none":
        return None
    mode = choice if isinstance(choice, str) else "named"
    return mode if mode != "auto" or env.tool_call_parser else None


def _wanted(request: ChatRequest, spec: ChatSpec, prompts: Sequence[PromptPlan], env: SglangEnv) -> str | None:
    if spec.tools in ("required", "named"):
        choice = request.tool_choice
        wanted = choice.function.name if isinstance(choice, messages_in.ChatCompletionNamedToolChoiceParam) else None
        offered = [tool.function for tool in request.tools or () if wanted in (None, tool.function.name)]
        if not offered:
            raise WireError(f"tool_choice names {wanted!r}, which is not among the tools")
        answer = structured.tool_answer(offered, prompts[0])
        if answer.late_error is not None:
            raise answer.late_error
        return answer.text
    return requests.wanted_text(request, prompts, env, request.response_format)


def encoder(generation: Generation) -> StreamEncoder:
    return ChatEncoder(generation.spec)


class ChatEncoder:
    """Frames of one chat stream. Mutable: which choices have begun and how each ended, counts, parsers."""

    __slots__ = (
        "_begun",
        "_called",
        "_counts",
        "_ends",
        "_heads",
        "_held",
        "_parsers",
        "_plain",
        "_spec",
        "_tail",
        "_top",
        "_usage",
    )

    def __init__(self, spec: ChatSpec) -> None:
        self._spec = spec
        self._top = chunk_head(spec, "chat.completion.chunk")
        self._heads = [b'%b"choices":[{"index":%d,"delta":{"content":' % (self._top, index) for index in range(spec.n)]
        self._tail = b',"reasoning_content":null},"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}\n\n'
        self._plain = spec.top_logprobs is None and not spec.continuous_usage and not spec.parsed
        self._parsers = [parsers.make_parser(reasoning=spec.reasoning, tools=spec.tools is not None) for _ in range(spec.n)]
        self._begun = [False] * spec.n
        self._called = [False] * spec.n
        self._counts = [0] * spec.n
        self._held = HeldLogprobs(spec.n)
        self._ends: dict[int, Delta] = {}
        self._usage: Usage | None = None

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        """The role event of a choice comes with its first output; its finish event only when all choices have ended."""
        self._usage = usage
        index = delta.index
        frames = b""
        self._counts[index] += len(delta.token_ids)
        if not self._begun[index]:
            self._begun[index] = True
            frames = self._event(index, {"role": "assistant", "content": "", "reasoning_content": None})
        self._held.hold(delta)
        members = self._members(delta)
        if delta.finish_reason is not None:
            self._ends[index] = delta
            if not members and self._held.any(index):
                members = [{"content": "", "reasoning_content": None}]
        for at, member in enumerate(members):
            frames += self._event(index, member, last=at == len(members) - 1)
        return frames

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        return (self._heads[index], self._tail) if self._plain and self._begun[index] else None

    def close(self, usage: Usage) -> bytes:
        finished = [self._finish_event(index, delta) for index, delta in sorted(self._ends.items())]
        return b"".join(finished) + stream_end(self._top, self._spec, usage)

    def error(self, error: WireError) -> bytes:
        """No finish event: the error, usage when asked for, the end."""
        return errors.stream_event(error) + stream_end(self._top, self._spec, self._usage)

    def _members(self, delta: Delta) -> list[dict[str, Any]]:
        parser = self._parsers[delta.index]
        if parser is None:
            return [{"content": delta.text, "reasoning_content": None}] if delta.text else []
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.finish()
        made = [self._member(piece, delta.index) for piece in pieces]
        return [member for member in made if member is not None]

    def _member(self, piece: parsers.Piece, index: int) -> dict[str, Any] | None:
        if piece.kind == "reasoning":
            return {"content": None, "reasoning_content": piece.text}
        if piece.kind == "content":
            return {"content": piece.text, "reasoning_content": None}
        if piece.call > 0 and not self._spec.parallel_tool_calls:
            return None
        self._called[index] = True
        return {"content": None, "reasoning_content": None, "tool_calls": [_call_piece(piece, self._spec)]}

    def _event(self, index: int, member: dict[str, Any], *, last: bool = False) -> bytes:
        logprobs = None
        if last and self._spec.top_logprobs is not None:
            logprobs = chunks.chat_logprobs(self._held.release(index), self._spec.top_logprobs, as_ids=False)
        return self._frame(index, member, logprobs, {"finish_reason": None, "matched_stop": None})

    def _finish_event(self, index: int, delta: Delta) -> bytes:
        members = finish_members(delta)
        if members["finish_reason"] == "stop" and self._called[index]:
            members["finish_reason"] = "tool_calls"
        return self._frame(index, {}, None, members)

    def _frame(self, index: int, member: dict[str, Any], logprobs: Any, finish: dict[str, Any]) -> bytes:
        spec, usage = self._spec, None
        if spec.continuous_usage:
            cached = self._usage.cached_tokens if self._usage else 0
            usage = usage_value(len(spec.prompts[0].token_ids), self._counts[index], cached, spec.env)
        choice = {"index": index, "delta": member, "logprobs": logprobs} | finish
        return b"%b%b\n\n" % (self._top, http.dumps({"choices": [choice], "usage": usage})[1:])


def _call_id(spec: ChatSpec) -> str:
    return f"call_{spec.env.new_id()}{spec.env.new_id()[:8]}"


def _call_piece(piece: parsers.Piece, spec: ChatSpec) -> dict[str, Any]:
    """The name comes with an id and empty arguments; then arguments only."""
    if piece.kind == "name":
        function: dict[str, Any] = {"name": piece.text, "arguments": ""}
        return {"id": _call_id(spec), "index": piece.call, "type": "function", "function": function}
    return {"id": None, "index": piece.call, "type": "function", "function": {"name": None, "arguments": piece.text}}


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed."""
    spec: ChatSpec = generation.spec
    return openai.answer_body(spec, "chat.completion", [_choice(spec, one) for one in choices], usage)


def _choice(spec: ChatSpec, result: ChoiceResult) -> dict[str, Any]:
    message, called = _message(spec, result.text)
    logprobs = None
    if spec.top_logprobs is not None:
        logprobs = chunks.chat_logprobs(result.logprobs or (), spec.top_logprobs, as_ids=False)
    finish = finish_members(result)
    if called and finish["finish_reason"] == "stop":
        finish["finish_reason"] = "tool_calls"
    return {"index": result.index, "message": message, "logprobs": logprobs} | finish


def _message(spec: ChatSpec, text: str) -> tuple[dict[str, Any], bool]:
    reasoning, content = parsers.split_reasoning(text) if spec.reasoning else (None, text)
    calls: tuple[parsers.ToolCall, ...] = ()
    if spec.tools is not None and content:
        content, calls = parsers.split_calls(content)
    shown = calls if spec.parallel_tool_calls else calls[:1]
    told = [
        {"id": _call_id(spec), "index": at, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for at, call in enumerate(shown)
    ]
    message = {"role": "assistant", "content": (content or None) if calls else content, "reasoning_content": reasoning}
    return message | {"tool_calls": told or None}, bool(calls)
