"""`/v1/chat/completions` (vLLM reference §2.3, §2.4, §3.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from windtunnel.core.tokenizer import TemplateOptions
from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Delta, Generation, PromptPlan, StreamEncoder, Usage, WireError
from windtunnel.wire.output import HeldLogprobs
from windtunnel.wire.vllm import chunks, fields, messages_in, models, parsers, prompts, sampling, structured
from windtunnel.wire.vllm.completions import Routing, check_cache_salt
from windtunnel.wire.vllm.fields import AtLeastOne, Int64, StopList

name = "chat"
paths: Sequence[str] = ("/v1/chat/completions",)

ToolChoice = Literal["none"] | Literal["auto"] | Literal["required"] | messages_in.ChatCompletionNamedToolChoiceParam
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Asked(fields.OpenModel):
    messages: messages_in.MessageList
    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    response_format: fields.AnyResponseFormat | None = None
    seed: Int64 | None = None
    stop: str | StopList | None = None
    stream: bool | None = False
    stream_options: fields.StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[messages_in.ChatCompletionToolsParam] | None = None
    tool_choice: ToolChoice | None = "none"
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True
    user: str | None = None


class _Conversation(fields.OpenModel):
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = Field(default_factory=list)
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class _Answered(fields.Answered):
    return_prompt_text: bool | None = None


class ChatCompletionRequest(fields.PassedOn, _Answered, _Conversation, fields.Sampled, _Asked):
    """Fields in the order of vLLM's own model: it is the order of the validation lines."""

    stream_interval: AtLeastOne | None = None

    @model_validator(mode="before")
    @classmethod
    def _before(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if "tool_choice" not in data and data.get("tools"):
            data = data | {"tool_choice": "auto"}
        for check in _BEFORE:
            check(data)
        return data


def _check_messages(data: Mapping[str, Any]) -> None:
    messages = data.get("messages", ())
    if not isinstance(messages, str | list | tuple | dict):
        raise WireError(f"{type(messages).__name__!r} object is not iterable")


def _check_logprobs(data: Mapping[str, Any]) -> None:
    fields.check_prompt_logprobs(data)
    top = data.get("top_logprobs")
    if not isinstance(top, int) or isinstance(top, bool):
        return
    if top < -1:
        raise http.parameter_error("`top_logprobs` must be a positive value or -1", "top_logprobs", top)
    if top != 0 and not data.get("logprobs"):
        raise http.parameter_error("`top_logprobs` needs `logprobs`, which must be set to true", "top_logprobs")


def _check_template_flags(data: Mapping[str, Any]) -> None:
    if data.get("continue_final_message") and data.get("add_generation_prompt"):
        raise WireError("`continue_final_message` and `add_generation_prompt` cannot both be True")


def _check_tools(data: Mapping[str, Any]) -> None:
    choice, tools = data.get("tool_choice"), data.get("tools")
    if isinstance(tools, list) and not tools:
        raise http.parameter_error("`tools` must have at least one entry, or be left out", "tools")
    if choice is None or choice == "none":
        return
    if tools is None:
        raise http.parameter_error("For `tool_choice` the `tools` must be set", "tool_choice")
    if isinstance(choice, Mapping):
        _check_named_tool(choice, tools)
    elif choice not in ("auto", "required"):
        told = f"Invalid value for `tool_choice`: {choice}; use a named tool, 'none', 'auto' or 'required'"
        raise http.parameter_error(told, "tool_choice", choice)


def _check_named_tool(choice: Mapping[str, Any], tools: Any) -> None:
    function = choice.get("function")
    wanted = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(wanted, str) or not wanted:
        told = '`tool_choice` needs the form {"type": "function", "function": {"name": "my_function"}}'
        raise http.parameter_error(told, "tool_choice", choice)
    if wanted not in _tool_names(tools):
        raise http.parameter_error("The tool in `tool_choice` does not match any of the `tools`", "tool_choice")


def _tool_names(tools: Any) -> set[str]:
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []
    return {str(function.get("name")) for function in functions if isinstance(function, Mapping)}


_BEFORE = (
    fields.check_cache_salt,
    _check_messages,
    _check_template_flags,
    _check_tools,
    fields.check_structured_outputs,
    _check_logprobs,
    fields.check_stream_options,
    fields.check_response_format,
)


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """What a chat answer is written from."""

    env: ServerEnv
    response_id: str
    model: str
    created: int
    role: str
    n: int
    prompts: tuple[PromptPlan, ...]
    echo_text: str | None
    """The last message, repeated in front of the answer."""
    top_logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    prompt_text: bool
    as_ids: bool
    include_usage: bool
    continuous_usage: bool
    tools: str | None = None
    """`auto`, `required` or `named` when tool calls are parsed."""
    parallel_tool_calls: bool = True
    reasoning: bool = False
    include_reasoning: bool = True
    bare_usage: bool = False
    """No prompt details (beam search, batch)."""

    @property
    def think_ids(self) -> tuple[int | None, int | None]:
        tokenizer = self.env.tokenizer
        found = [tokenizer.encode(tag, add_special_tokens=False) for tag in (parsers.THINK_START, parsers.THINK_END)]
        start, end = (ids[0] if len(ids) == 1 else None for ids in found)
        return start, end

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({self.env.tokenizer.eos_token_id, *self.env.extra_eos_token_ids})


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate, render and tokenise. Raises WireError for everything found before the head."""
    return plan_request(http.read_model(ChatCompletionRequest, body, headers), headers, env)


def plan_request(request: ChatCompletionRequest, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """The same from a request model that has been read already (`/invocations`, render routes)."""
    model, lora = models.resolve(request.model, env)
    tools = tool_mode(request, env)
    check_trust(request, env)
    sampling.check_logit_bias_keys(request.logit_bias)
    check_cache_salt(request.cache_salt, env)
    messages, planned = render(request.messages, request, env)
    sampled = chat_sampling(request, env, len(planned.token_ids))
    if tools is not None or env.reasoning_parser is not None:
        sampled = replace(sampled, skip_special_tokens=False)  # the parsers need their tags, as vLLM's own do
    sampling.check_ranges(sampled, env)
    answer = wanted_answer(request, tools, planned, env)
    routing = Routing.read(request, headers, env)
    spec = make_spec(request, env, (planned,), sampled, model, routing.id_base, messages, tools)
    return Generation(
        spec=spec,
        response_id=spec.response_id,
        model=model,
        prompts=(planned,),
        sampling=sampling.plan(sampled, env),
        stream=bool(request.stream),
        family=name,
        priority=routing.priority,
        lora=lora,
        cache_salt=request.cache_salt,
        data_parallel_rank=routing.rank,
        session_id=routing.session_id,
        stream_interval=request.stream_interval or env.stream_interval,
        late_error=sampling.late_error(sampled, [planned.token_ids], env) or answer.late_error or routing.late_error,
        answer_text=answer.text,
        kv_transfer=request.kv_transfer_params,
        extra={"beam": sampled.beam, "vllm_xargs": dict(request.vllm_xargs or {})},
    )


def tool_mode(request: ChatCompletionRequest, env: ServerEnv) -> str | None:
    """Which kind of tool choice is active. Raises the 400 for a server that was started without a parser."""
    choice = request.tool_choice
    if not request.tools or choice is None or choice == "none":
        return None
    mode = choice if isinstance(choice, str) else "named"
    if mode == "auto" and not (env.enable_auto_tool_choice and env.tool_call_parser):
        raise WireError('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
    if env.tool_call_parser is None:
        shown = '"required"' if mode == "required" else "a named function"
        raise WireError(f"tool_choice={shown} requires --tool-call-parser to be set")
    return mode


def check_trust(request: Any, env: ServerEnv) -> None:
    kwargs = request.chat_template_kwargs or {}
    if (request.chat_template or kwargs.get("chat_template")) and not env.trust_request_chat_template:
        raise WireError("The request has a chat template of its own, but --trust-request-chat-template is not set: refused")
    if (request.media_io_kwargs or request.mm_processor_kwargs) and not env.trust_request_mm_kwargs:
        raise WireError("The request has multimodal arguments of its own, but --trust-request-mm-kwargs is not set: refused")


def render_text(messages: Sequence[Any], request: Any, env: ServerEnv) -> tuple[list[dict[str, Any]], str]:
    """The conversation as the template sees it, and the text that the template makes of it."""
    if not messages:
        raise WireError("Cannot apply the chat template to an empty conversation; send at least one message")
    try:
        conversation = messages_in.for_template(messages)
        media = messages_in.media_of(messages)
    except ValidationError as error:
        raise WireError(str(error)) from None
    if media and not env.media_tokens:
        raise WireError("An image, audio or video part is not possible: this model takes text only")
    return conversation, _template_text(conversation, request, env)


def render(messages: Sequence[Any], request: Any, env: ServerEnv) -> tuple[list[dict[str, Any]], PromptPlan]:
    """The conversation and its prompt. `kv_transfer_params.prompt_token_ids` stands in for the tokens (vLLM reference §2.3)."""
    conversation, text = render_text(messages, request, env)
    given = (getattr(request, "kv_transfer_params", None) or {}).get("prompt_token_ids")
    if given:
        return conversation, prompts.from_token_ids(given, env)
    keep, side = getattr(request, "truncate_prompt_tokens", None), getattr(request, "truncation_side", None)
    special = getattr(request, "add_special_tokens", False)
    media = messages_in.media_of(messages)
    if media:
        if keep is not None:
            raise WireError("truncate_prompt_tokens is not possible in a chat with images, audio or video")
        return conversation, prompts.with_media(text, messages_in.MEDIA_MARK, media, env, add_special_tokens=special)
    return conversation, prompts.from_text(text, env, add_special_tokens=special, keep=keep, side=side)


def _template_text(conversation: list[dict[str, Any]], request: Any, env: ServerEnv) -> str:
    kwargs = dict(request.chat_template_kwargs or {})
    kwargs.update({key: value for key in ("reasoning_effort", "documents") if (value := getattr(request, key, None))})
    tools = getattr(request, "tools", None)
    options = TemplateOptions(
        tools=[_tool_value(tool) for tool in tools] if tools else None,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template or kwargs.pop("chat_template", None),
        kwargs=kwargs,
    )
    try:
        return env.tokenizer.apply_chat_template(conversation, options)
    except ValueError as error:
        raise WireError(str(error)) from None


def _tool_value(tool: Any) -> dict[str, Any]:
    """A tool as the template sees it: an absent description is null, the members that vLLM added are left out."""
    value: dict[str, Any] = tool.model_dump(exclude_none=True)
    function = {"name": None, "description": None, "parameters": None} | value["function"]
    return value | {"function": function}


def chat_sampling(request: Any, env: ServerEnv, prompt_tokens: int) -> sampling.Sampling:
    """Sampling values of a chat request; the default output length is what the context has left."""
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    limit = sampling.capped_max_tokens(getattr(request, field), field, prompt_tokens, None, env)
    top = (request.top_logprobs or 0) if request.logprobs else None
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = request.top_logprobs
    return sampling.from_request(request, env, max_tokens=limit, logprobs=top, prompt_logprobs=prompt_logprobs)


def wanted_answer(request: Any, tools: str | None, prompt: PromptPlan, env: ServerEnv) -> structured.Answer:
    """What the answer must say, when the request leaves no choice."""
    if tools in ("required", "named"):
        wanted = request.tool_choice.function.name if tools == "named" else None
        offered = [tool.function for tool in request.tools if wanted in (None, tool.function.name)]
        return structured.tool_answer(offered, prompt)
    return structured.wanted_answer(request.response_format, request.structured_outputs, (prompt,), env)


def make_spec(
    request: Any,
    env: ServerEnv,
    planned: tuple[PromptPlan, ...],
    sampled: sampling.Sampling,
    model: str,
    id_base: str,
    messages: list[dict[str, Any]],
    tools: str | None,
    *,
    bare_usage: bool = False,
) -> ChatSpec:
    options, forced = getattr(request, "stream_options", None), env.enable_force_include_usage
    as_ids = request.return_tokens_as_token_ids
    thinking = (request.chat_template_kwargs or {}).get("enable_thinking", True)
    last = messages[-1]
    return ChatSpec(
        env=env,
        response_id=f"chatcmpl-{id_base}",
        model=model,
        created=env.now_s(),
        role="assistant" if request.add_generation_prompt else str(last["role"]),
        n=sampled.n,
        prompts=planned,
        echo_text=str(last.get("content") or "") if request.echo else None,
        top_logprobs=sampled.logprobs,
        prompt_logprobs=sampled.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        prompt_text=bool(getattr(request, "return_prompt_text", None)),
        as_ids=env.return_tokens_as_token_ids if as_ids is None else as_ids,
        include_usage=forced or bool(options and options.include_usage),
        continuous_usage=forced or bool(options and options.include_usage and options.continuous_usage_stats),
        tools=tools,
        parallel_tool_calls=getattr(request, "parallel_tool_calls", True) is not False,
        reasoning=env.reasoning_parser is not None and thinking is not False,
        include_reasoning=request.include_reasoning,
        bare_usage=bare_usage or sampled.beam,
    )


def encoder(generation: Generation) -> StreamEncoder:
    return ChatEncoder(generation.spec)


class ChatEncoder:
    """Frames of one chat stream. Mutable: role chunks sent, counts, and one parser per choice.

    A plain delta (no parser, logprobs, token ids, usage or finish) is one join of prepared bytes around its text.
    """

    __slots__ = (
        "_called",
        "_counts",
        "_heads",
        "_held",
        "_parsers",
        "_plain",
        "_reasoned",
        "_roles_sent",
        "_spec",
        "_tail",
        "_top",
    )

    def __init__(self, spec: ChatSpec) -> None:
        self._spec = spec
        self._top = _chunk_head(spec)
        self._heads = [b'%b"choices":[{"index":%d,"delta":{"content":' % (self._top, index) for index in range(spec.n)]
        self._tail = b'},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
        parsed = spec.reasoning or spec.tools is not None
        self._parsers = [parsers.make_parser(reasoning=spec.reasoning, tools=spec.tools is not None) for _ in range(spec.n)]
        self._plain = not (parsed or spec.token_ids or spec.continuous_usage or spec.top_logprobs is not None)
        self._counts = [0] * spec.n
        self._held = HeldLogprobs(spec.n)
        self._called = [False] * spec.n
        self._reasoned = [ReasoningCount(spec) for _ in range(spec.n)] if spec.env.reasoning_parser else []
        self._roles_sent = False

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        if self._plain and delta.finish_reason is None and self._roles_sent:
            if not delta.text:
                return b""
            return b"".join((self._heads[delta[0]], http.json_text(delta.text), self._tail))
        before = b"" if self._roles_sent else self._role_chunks()
        return before + self._full(delta)

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        return (self._heads[index], self._tail) if self._plain and self._roles_sent else None

    def close(self, usage: Usage) -> bytes:
        spec = self._spec
        if not spec.include_usage:
            return chunks.DONE
        details = spec.env.enable_prompt_tokens_details
        told: dict[str, Any] = {"usage": chunks.stream_usage(usage, details, created=True)}
        if self._reasoned:
            told["usage"]["completion_tokens_details"] = {"reasoning_tokens": sum(count.total for count in self._reasoned)}
        told["system_fingerprint"] = spec.env.system_fingerprint
        if usage.metrics is not None and spec.env.enable_per_request_metrics:
            told["metrics"] = {key: value for key, value in usage.metrics.items() if value is not None}
        return b'%b"choices":[],%b\n\n%b' % (self._top, http.dumps(told)[1:], chunks.DONE)

    def error(self, error: WireError) -> bytes:
        return http.error_frames(error, spaced=False)

    def _role_chunks(self) -> bytes:
        self._roles_sent = True
        spec = self._spec
        prompt = spec.prompts[0]
        after: dict[str, Any] = {"prompt_token_ids": list(prompt.token_ids) if spec.token_ids else None}
        after["prompt_text"] = _prompt_text(prompt, spec)
        first = [self._bare_chunk(index, {"role": spec.role, "content": ""}, after) for index in range(spec.n)]
        if spec.echo_text:
            first += [self._bare_chunk(index, {"content": spec.echo_text}, {}) for index in range(spec.n)]
        return b"".join(first)

    def _bare_chunk(self, index: int, delta: dict[str, Any], after: dict[str, Any]) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        usage = {"usage": self._usage_so_far(index)} if self._spec.continuous_usage else {}
        return self._frame({"choices": [choice]} | usage | after)

    def _full(self, delta: Delta) -> bytes:
        index = delta.index
        self._counts[index] += len(delta.token_ids)
        self._held.hold(delta)
        if self._reasoned:
            self._reasoned[index].add(delta.token_ids)
        shown = self._members(delta)
        if not shown:
            if delta.finish_reason is None and not self._spec.token_ids:
                return b""
            shown = [{}]
        frames = [self._chunk(delta, members, last=at == len(shown) - 1) for at, members in enumerate(shown)]
        return b"".join(frames)

    def _members(self, delta: Delta) -> list[dict[str, Any]]:
        """The `delta` objects that this text makes; none while a parser holds everything back."""
        parser = self._parsers[delta.index]
        if parser is None:
            return [{"content": delta.text}] if delta.text else []
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.finish()
        made = [self._member(piece, delta.index) for piece in pieces]
        return [members for members in made if members is not None]

    def _member(self, piece: parsers.Piece, index: int) -> dict[str, Any] | None:
        spec = self._spec
        if piece.kind == "reasoning":
            return {"reasoning": piece.text} if spec.include_reasoning else None
        if piece.kind == "content":
            hidden = spec.reasoning and not spec.include_reasoning
            return {"content": piece.text} | ({"reasoning": None} if hidden else {})
        if piece.call > 0 and not spec.parallel_tool_calls:
            return None
        self._called[index] = True
        return {"content": None, "tool_calls": [_call_piece(piece, spec)]}

    def _chunk(self, delta: Delta, members: dict[str, Any], *, last: bool) -> bytes:
        spec = self._spec
        finish = delta.finish_reason if last else None
        choice: dict[str, Any] = {"index": delta.index, "delta": members, "logprobs": None}
        if spec.top_logprobs is not None and last:
            choice["logprobs"] = chunks.chat_logprobs(self._held.release(delta.index), spec.top_logprobs, spec.as_ids)
        choice["finish_reason"] = _finish(finish, spec, self._called[delta.index])
        if finish is not None:
            choice["stop_reason"] = delta.stop_reason
        choice["token_ids"] = list(delta.token_ids) if spec.token_ids and last else None
        if finish is not None:
            choice |= chunks.weight_versions(spec.env)
        told: dict[str, Any] = {"choices": [choice]}
        if spec.continuous_usage:
            told["usage"] = self._usage_so_far(delta.index)
        if finish is not None and not spec.include_usage:
            told["system_fingerprint"] = spec.env.system_fingerprint
        return self._frame(told)

    def _usage_so_far(self, index: int) -> dict[str, Any]:
        counted = chunks.counts(len(self._spec.prompts[0].token_ids), self._counts[index])
        details = {"reasoning_tokens": self._reasoned[index].total} if self._reasoned else None
        return counted | {"completion_tokens_details": details}

    def _frame(self, told: dict[str, Any]) -> bytes:
        return b"%b%b\n\n" % (self._top, http.dumps(told)[1:])


class ReasoningCount:
    """Counts the reasoning tokens of one choice as they come."""

    __slots__ = ("_done", "_end", "_eos", "_start", "total")

    def __init__(self, spec: ChatSpec) -> None:
        self._start, self._end = spec.think_ids
        self._eos = spec.eos_ids
        self._done = not spec.reasoning
        self.total = 0

    def add(self, token_ids: Sequence[int]) -> None:
        if self._done:
            return
        self.total += parsers.reasoning_tokens(token_ids, self._start, self._end, self._eos)
        self._done = self._end in token_ids


def _chunk_head(spec: ChatSpec) -> bytes:
    told = {"id": spec.response_id, "object": "chat.completion.chunk", "created": spec.created, "model": spec.model}
    return b"data: %b," % http.dumps(told)[:-1]


def _prompt_text(prompt: PromptPlan, spec: ChatSpec) -> str | None:
    return prompt.text if spec.prompt_text else None


def _finish(finish_reason: str | None, spec: ChatSpec, called: bool) -> str | None:
    """`tool_calls` replaces `stop` only, and never for a named tool (vLLM reference §2.4)."""
    return "tool_calls" if finish_reason == "stop" and called and spec.tools in ("auto", "required") else finish_reason


def _call_piece(piece: parsers.Piece, spec: ChatSpec) -> dict[str, Any]:
    if piece.kind == "name":
        head = {"id": f"chatcmpl-tool-{spec.env.new_id()}", "type": "function", "index": piece.call}
        return head | {"function": {"name": piece.text}}
    return {"index": piece.call, "function": {"arguments": piece.text}}


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed, nulls included."""
    spec: ChatSpec = generation.spec
    choices, usage = chunks.beams(generation, choices, usage)
    details = None if spec.bare_usage else chunks.body_details(usage, spec.env.enable_prompt_tokens_details, created=True)
    prompt = spec.prompts[0]
    told: dict[str, Any] = {
        "id": spec.response_id,
        "object": "chat.completion",
        "created": spec.created,
        "model": spec.model,
        "choices": [_body_choice(spec, choice) for choice in choices],
        "service_tier": None,
        "system_fingerprint": spec.env.system_fingerprint,
        "usage": chunks.body_usage(usage, details, _completion_details(spec, choices)),
        "prompt_logprobs": chunks.prompt_logprobs(prompt.token_ids, spec.prompt_logprobs, spec.env),
        "prompt_token_ids": list(prompt.token_ids) if spec.token_ids else None,
        "prompt_text": _prompt_text(prompt, spec),
        "kv_transfer_params": usage.kv_transfer,
        "ec_transfer_params": None,
    }
    return http.dumps(told | chunks.body_metrics(usage, spec.env))


def _completion_details(spec: ChatSpec, choices: Sequence[ChoiceResult]) -> dict[str, Any] | None:
    if spec.env.reasoning_parser is None:
        return None
    counters = [ReasoningCount(spec) for _ in choices]
    for counter, choice in zip(counters, choices, strict=True):
        counter.add(choice.token_ids)
    return {"reasoning_tokens": sum(counter.total for counter in counters)}


def _body_choice(spec: ChatSpec, result: ChoiceResult) -> dict[str, Any]:
    message, called = _message(spec, result)
    logprobs = None
    if spec.top_logprobs is not None:
        logprobs = chunks.chat_logprobs(result.logprobs or (), spec.top_logprobs, spec.as_ids)
    choice: dict[str, Any] = {
        "index": result.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": _finish(result.finish_reason, spec, called),
        "stop_reason": result.stop_reason,
        "token_ids": list(result.token_ids) if spec.token_ids else None,
        "routed_experts": None,
    }
    return choice | chunks.weight_versions(spec.env)


def _message(spec: ChatSpec, result: ChoiceResult) -> tuple[dict[str, Any], bool]:
    """The message, and whether it calls tools."""
    reasoning, content = parsers.split_reasoning(result.text) if spec.reasoning else (None, result.text)
    calls: tuple[parsers.ToolCall, ...] = ()
    if spec.tools is not None and content:
        content, calls = parsers.split_calls(content)
    if calls:
        content = content or (None if spec.tools == "auto" else "")
    if spec.echo_text is not None:
        content = spec.echo_text + (content or "")
    message: dict[str, Any] = {"role": spec.role, "content": content, "refusal": None, "annotations": None}
    message |= {"audio": None, "function_call": None}
    if calls:
        message["tool_calls"] = [_body_call(call, spec) for call in (calls if spec.parallel_tool_calls else calls[:1])]
    message["reasoning"] = reasoning if spec.include_reasoning else None
    return message, bool(calls)


def _body_call(call: parsers.ToolCall, spec: ChatSpec) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"chatcmpl-tool-{spec.env.new_id()}", "type": "function", "function": function}


def error_body(error: WireError) -> bytes:
    return http.error_body(error)
