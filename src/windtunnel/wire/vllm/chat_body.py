"""The body of a chat answer that is not streamed (vLLM reference §2.4)."""

from collections.abc import Sequence
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.family import ChoiceResult, Generation, Usage
from windtunnel.wire.vllm import chunks, parsers
from windtunnel.wire.vllm.chat_spec import ChatSpec, ReasoningCount, chat_finish, prompt_text


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
        "prompt_text": prompt_text(prompt, spec),
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
        "finish_reason": chat_finish(result.finish_reason, spec, called),
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
