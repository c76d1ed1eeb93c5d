"""The recorded cases against the families themselves, in this process: no server, no engine, no clock."""

from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from tests.conformance.cases import Answer, Case
from windtunnel.core.request import Lora
from windtunnel.core.tokenizer import Tokenizer
from windtunnel.wire.env import ServerEnv, counting_ids
from windtunnel.wire.family import Delta, Generation, OpeningEncoder, Usage, WireError
from windtunnel.wire.output import ChoiceState
from windtunnel.wire.recorded import Playback, RecordedPlayer
from windtunnel.wire.vllm import (
    chat,
    chat_batch,
    completions,
    generate,
    invocations,
    messages,
    models,
    render,
    responses,
    scoring,
    tokenize,
)

BLOCK_SIZE = 32
SIMPLE: Mapping[str, Callable[..., bytes]] = {
    "/tokenize": tokenize.tokenize,
    "/detokenize": tokenize.detokenize,
    "/v1/completions/render": render.completions_render,
    "/v1/chat/completions/render": render.chat_render,
}
FAMILIES: Mapping[str, ModuleType] = {
    path: family
    for family in (completions, chat, chat_batch, generate, invocations, responses, messages, scoring)
    for path in family.paths
}
_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "variant_b": {
        "served_models": ("tiny-llama", "tiny-alias"),
        "enable_per_request_metrics": True,
        "enable_scale_out": True,
        "trust_request_chat_template": True,
        "reasoning_parser": "qwen3",
    },
    "variant_c": {
        "enable_prompt_tokens_details": False,
        "enable_force_include_usage": True,
        "return_tokens_as_token_ids": True,
        "enable_auto_tool_choice": False,
        "tool_call_parser": None,
        "loras": {},
    },
}


def environment(group: str, tokenizer: Tokenizer) -> ServerEnv:
    """The server of a group as the golden README describes it."""
    options: dict[str, Any] = {
        "served_models": ("tiny-llama",),
        "loras": {"tiny-lora": Lora("tiny-lora", "tiny-lora", 1)},
        "enable_prompt_tokens_details": True,
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    return ServerEnv(
        tokenizer=tokenizer,
        max_model_len=2048,
        new_id=counting_ids(),
        now_s=lambda: 0,
        version="0.32.0",
        extra_eos_token_ids=(5,),
        **(options | dict(_VARIANTS.get(group, {}))),
    )


def answer(case: Case, env: ServerEnv, player: RecordedPlayer) -> Answer | None:
    """Our answer to a case; None when its route is not a family of this package."""
    path = case.path.partition("?")[0]
    try:
        return _answer(case, path, env, player)
    except WireError as error:
        return _json(error.status, FAMILIES.get(path, completions).error_body(error))


def _answer(case: Case, path: str, env: ServerEnv, player: RecordedPlayer) -> Answer | None:
    headers = case.lower_headers
    simple = SIMPLE.get(path)
    if simple is not None:
        return _json(200, simple(case.json_body, headers, env))
    if case.method == "GET" and path in ("/v1/models", "/version"):
        return _json(200, models.models_body(env) if path == "/v1/models" else models.version_body(env))
    family = FAMILIES.get(path)
    if family is None or case.method != "POST":
        return None
    generation: Generation = family.plan(case.json_body, headers, env)
    return _generated(family, generation, case.json_body, player)


def _generated(family: ModuleType, generation: Generation, body: bytes, player: RecordedPlayer) -> Answer:
    if generation.late_error is not None and not generation.stream:
        raise generation.late_error
    usage = Usage(sum(len(prompt.token_ids) for prompt in generation.prompts), 0)
    if generation.late_error is not None:
        # no recorded Responses stream has a late error: its encoder would cut the body here
        return _stream(family.encoder(generation).error(generation.late_error))
    states = _states(generation)
    played = player.play(body, generation.prompts, generation.sampling.n) or Playback((None,) * len(states))
    streams = [tokens or () for tokens in played.choices]
    cached = played.cached_tokens or 0
    if generation.stream:
        encoder = family.encoder(generation)
        opening = [encoder.opening()] if isinstance(encoder, OpeningEncoder) else []
        out = opening + [encoder.delta(delta, usage) for delta in _deltas(states, streams, generation)]
        return _stream(b"".join([*out, encoder.close(_usage(usage.prompt_tokens, states, cached, generation))]))
    for _delta in _deltas(states, streams, generation):
        pass
    usage = _usage(usage.prompt_tokens, states, cached, generation)
    return _json(200, family.body(generation, [state.result() for state in states], usage))


def _states(generation: Generation) -> list[ChoiceState]:
    count, tokenizer = generation.sampling.n, generation.spec.env.tokenizer
    return [
        ChoiceState(prompt * count + choice, prompt, generation.sampling, tokenizer, stream_interval=generation.stream_interval)
        for prompt in range(len(generation.prompts))
        for choice in range(count)
    ]


def _deltas(states: list[ChoiceState], streams: list[tuple[int, ...]], generation: Generation) -> Iterator[Delta]:
    """Steps in which every choice that is not done gets one token."""
    done = [False] * len(states)
    step = 0
    while not all(done):
        for at, state in enumerate(states):
            if not done[at]:
                delta = state.push(*_token(streams[at], step, generation))
                done[at] = state.finish_reason is not None
                if delta is not None:
                    yield delta
        step += 1


def _token(stream: tuple[int, ...], step: int, generation: Generation) -> tuple[tuple[int, ...], str | None, int | None]:
    """One token and how it ends the sequence: EOS, a stop token, or the limit."""
    sampling = generation.sampling
    token = stream[step] if step < len(stream) else generation.spec.env.tokenizer.eos_token_id
    if step >= len(stream):
        return (token,), "stop", None
    if token in sampling.stop_token_ids and step >= sampling.min_tokens:
        return (token,), "stop", token
    return (token,), "length" if step + 1 == sampling.max_tokens else None, None


def _usage(prompt_tokens: int, states: list[ChoiceState], cached: int, generation: Generation) -> Usage:
    full = sum(len(prompt.token_ids) // BLOCK_SIZE * BLOCK_SIZE for prompt in generation.prompts)
    completion = sum(state.completion_tokens for state in states)
    metrics = dict.fromkeys(METRIC_NAMES, 1.0) | {"speculative_decoding": None}
    return Usage(prompt_tokens, completion, cached, max(0, full - cached), metrics)


METRIC_NAMES = ("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second")


def _json(status: int, body: bytes) -> Answer:
    return Answer(status, (("content-type", "application/json"), ("vary", "Origin")), body)


def _stream(body: bytes) -> Answer:
    return Answer(200, (("content-type", "text/event-stream; charset=utf-8"), ("vary", "Origin")), body)
