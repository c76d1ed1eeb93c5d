"""The render routes: template and tokenizer only, answered with what `/inference/v1/generate` takes (vLLM reference §1.3)."""

from collections.abc import Mapping
from typing import Any

from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Generation, SamplingPlan
from windtunnel.wire.http import dumps
from windtunnel.wire.vllm import chat, completions
from windtunnel.wire.vllm.generate import disabled

SCALE_OUT_PATHS = (
    "/v1/completions/render",
    "/v1/chat/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    "/v1/completions/derender",
    "/v1/chat/completions/derender",
    "/inference/v1/abort_requests",
)
"""Routes that answer 403 on a server without `--enable-scale-out` (`generate` does so itself)."""


def _refuse_when_disabled(env: ServerEnv) -> None:
    if not env.enable_scale_out:
        raise disabled()


def completions_render(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """One rendered request for each prompt. Raises WireError."""
    _refuse_when_disabled(env)
    generation = _good(completions.plan(body, headers, env))
    return dumps([_rendered(generation, prompt.token_ids, {}) for prompt in generation.prompts])


def chat_render(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """The rendered conversation. Raises WireError."""
    _refuse_when_disabled(env)
    generation = _good(chat.plan(body, headers, env))
    return dumps(_rendered(generation, generation.prompts[0].token_ids, _reasoning(generation)))


def _good(generation: Generation) -> Generation:
    if generation.late_error is not None:
        raise generation.late_error
    return generation


def _reasoning(generation: Generation) -> dict[str, Any]:
    """With a reasoning parser the template's arguments travel on, and special tokens stay visible for it."""
    spec: chat.ChatSpec = generation.spec
    if spec.env.reasoning_parser is None:
        return {}
    template = {"cohere_format": "cmd4", "add_generation_prompt": spec.role == "assistant", "continue_final_message": False}
    return {"reasoning_ended": False, "reasoning_parser_kwargs": {"chat_template_kwargs": template}}


def _rendered(generation: Generation, token_ids: tuple[int, ...], reasoning: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "request_id": generation.response_id,
        "token_ids": list(token_ids),
        "token_offsets": None,
        "features": None,
        "content_parts": None,
        "sampling_params": _sampling_params(generation.sampling, visible_specials=bool(reasoning)),
        "model": generation.model,
        "reasoning_ended": None,
        "reasoning_parser_kwargs": None,
        "return_token_ids": None,
        "output_mode": "tokens",
        "stream": generation.stream,
        "stream_options": None,
        "cache_salt": generation.cache_salt,
        "priority": generation.priority,
        "kv_transfer_params": generation.kv_transfer,
        "ec_transfer_params": None,
    }
    return told | reasoning


def _sampling_params(plan: SamplingPlan, *, visible_specials: bool) -> dict[str, Any]:
    """The engine's parameters: numbers with a fraction and lists always, the others where they are not the default."""
    whole: dict[str, Any] = {
        "n": plan.n if plan.n != 1 else None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": plan.temperature,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": plan.seed,
        "stop": list(plan.stop),
        "stop_token_ids": [],
        "ignore_eos": plan.ignore_eos or None,
        "max_tokens": plan.max_tokens,
        "min_tokens": plan.min_tokens or None,
        "logprobs": plan.logprobs,
        "prompt_logprobs": plan.prompt_logprobs,
        "skip_special_tokens": False if visible_specials or not plan.skip_special_tokens else None,
        "include_stop_str_in_output": plan.include_stop_str or None,
        "output_kind": 2,
        "skip_clone": True,
        "bad_words": [],
        "skip_reading_prefix_cache": plan.prompt_logprobs is not None,
    }
    return {name: value for name, value in whole.items() if value is not None}
