"""Render routes: template and tokenizer only; the answer is a request to `/inference/v1/generate` (vLLM reference §1.3).

Key order and the odd template arguments are those of the recordings (vLLM 0.32.0 with a reasoning parser).
"""

from collections.abc import Callable, Mapping
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Generation, PromptPlan
from windtunnel.wire.vllm import chat, chat_request, completions, derender, messages, messages_chat, responses, sampling
from windtunnel.wire.vllm.generate import disabled
from windtunnel.wire.vllm.messages_request import MessagesRequest
from windtunnel.wire.vllm.responses_in import ResponsesRequest

Render = Callable[[bytes, Mapping[str, str], ServerEnv], bytes]

_DELTA, _FINAL_ONLY = 1, 2
"""vLLM's output kinds."""


def _check_enabled(env: ServerEnv) -> None:
    if not env.enable_scale_out:
        raise disabled()


def _good(generation: Generation) -> Generation:
    """What the engine's input stage would refuse is refused here."""
    if generation.late_error is not None:
        raise generation.late_error
    return generation


def completions_render(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """A list: one entry for each prompt. All of these raise WireError."""
    _check_enabled(env)
    request = http.read_model(completions.CompletionRequest, body, headers)
    planned = _good(completions.plan_request(request, headers, env))
    return http.dumps([_value(planned, prompt, request, None, None, env) for prompt in planned.prompts])


def chat_render(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    _check_enabled(env)
    request = http.read_model(chat_request.ChatCompletionRequest, body, headers)
    return _chat_value(_good(chat.plan_request(request, headers, env)), request, env)


def responses_render(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    _check_enabled(env)
    request = http.read_model(ResponsesRequest, body, headers)
    planned = _good(responses.plan_request(request, headers, env))
    return _chat_value(planned, responses.chat_request(request, (), env), env)


def messages_render(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    _check_enabled(env)
    request = http.read_model(MessagesRequest, body, headers)
    planned = _good(messages.plan_request(request, headers, env))
    return _chat_value(planned, messages_chat.chat_request(request, env), env)


def _chat_value(planned: Generation, request: chat_request.ChatCompletionRequest, env: ServerEnv) -> bytes:
    template = {
        "cohere_format": "cmd4",
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
    }
    parsed = env.reasoning_parser is not None
    kwargs = {"chat_template_kwargs": template | dict(request.chat_template_kwargs or {})} if parsed else None
    return http.dumps(_value(planned, planned.prompts[0], request, False if parsed else None, kwargs, env))


def _value(
    planned: Generation, prompt: PromptPlan, request: Any, reasoning_ended: bool | None, kwargs: Any, env: ServerEnv
) -> dict[str, Any]:
    return {
        "request_id": planned.response_id,
        "token_ids": list(prompt.token_ids),
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": _sampling_value(planned, request, env),
        "model": planned.model,
        "reasoning_ended": reasoning_ended,
        "reasoning_parser_kwargs": kwargs,
        "return_token_ids": request.return_token_ids,
        "output_mode": "tokens",
        "stream": planned.stream,
        "stream_options": request.stream_options.model_dump() if request.stream_options else None,
        "cache_salt": planned.cache_salt,
        "priority": planned.priority,
        "kv_transfer_params": planned.kv_transfer,
        "ec_transfer_params": request.ec_transfer_params,
    }


_DEFAULTS: Mapping[str, Any] = {
    "n": 1, "top_k": 0, "seed": None, "ignore_eos": False, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None,
    "skip_special_tokens": True,
}  # fmt: skip
"""Members that are left out at their defaults."""


def _sampling_value(planned: Generation, request: Any, env: ServerEnv) -> dict[str, Any]:
    plan = planned.sampling
    sampled = sampling.from_request(
        request, env, max_tokens=plan.max_tokens, logprobs=plan.logprobs, prompt_logprobs=plan.prompt_logprobs
    )
    values: dict[str, Any] = {
        "n": plan.n,
        "presence_penalty": sampled.presence_penalty,
        "frequency_penalty": sampled.frequency_penalty,
        "repetition_penalty": sampled.repetition_penalty,
        "temperature": sampled.temperature,
        "top_p": sampled.top_p,
        "top_k": sampled.top_k,
        "min_p": sampled.min_p,
        "seed": plan.seed,
        "stop": list(plan.stop),
        "stop_token_ids": list(sampled.stop_token_ids),
        "ignore_eos": plan.ignore_eos,
        "max_tokens": plan.max_tokens,
        "min_tokens": plan.min_tokens,
        "logprobs": plan.logprobs,
        "prompt_logprobs": plan.prompt_logprobs,
        "skip_special_tokens": plan.skip_special_tokens,
        "output_kind": _DELTA if planned.stream else _FINAL_ONLY,
        "skip_clone": True,
        "bad_words": list(request.bad_words),
        "skip_reading_prefix_cache": plan.prompt_logprobs is not None,
    }
    return {key: value for key, value in values.items() if key not in _DEFAULTS or value != _DEFAULTS[key]}


ROUTES: Mapping[str, Render] = {
    "/v1/completions/render": completions_render,
    "/v1/chat/completions/render": chat_render,
    "/v1/responses/render": responses_render,
    "/v1/messages/render": messages_render,
}
SCALE_OUT_PATHS = (*ROUTES, *derender.ROUTES, "/inference/v1/abort_requests")
"""Routes that answer 403 on a server without `--enable-scale-out` (`generate` does so itself)."""
