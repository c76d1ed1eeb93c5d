"""`/v1/chat/completions` (vLLM reference §2.3, §2.4, §3.2)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Generation, PromptPlan, StreamEncoder, WireError
from windtunnel.wire.vllm import chat_body, models, sampling, structured
from windtunnel.wire.vllm.chat_prompt import check_trust, render
from windtunnel.wire.vllm.chat_request import ChatCompletionRequest
from windtunnel.wire.vllm.chat_spec import ChatSpec
from windtunnel.wire.vllm.chat_stream import ChatEncoder
from windtunnel.wire.vllm.completions import Routing, check_cache_salt

name = "chat"
paths: Sequence[str] = ("/v1/chat/completions",)


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


body = chat_body.body


def error_body(error: WireError) -> bytes:
    return http.error_body(error)
