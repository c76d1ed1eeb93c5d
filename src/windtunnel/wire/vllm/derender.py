"""Derender routes: what `/inference/v1/generate` answered, back in the API's form (vLLM 0.33, `scale_out/derender`).

No engine has a part in it: the tokens go through the output state of a live answer, and the same writers write it. Members that
neither the tokens nor the original request tell are null. A body with `"stream": true` is one chunk: `derender_stream`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, PromptPlan, SamplingPlan, Usage, WireError
from windtunnel.wire.output import ChoiceState
from windtunnel.wire.vllm import chat, completions, derender_parts, derender_stream, fields, models, prompts
from windtunnel.wire.vllm.chat_request import ChatCompletionRequest
from windtunnel.wire.vllm.derender_parts import Ids
from windtunnel.wire.vllm.generate import disabled

Derender = Callable[[bytes, Mapping[str, str], ServerEnv], bytes]

CHOICES_MAX = 16384
"""`VLLM_MAX_N_SEQUENCES`."""


class Choice(derender_parts.Part):
    finish_reason: str | None = "stop"


class Generated(fields.OpenModel):
    """An answer of `/inference/v1/generate`; other modes than tokens are text already."""

    request_id: str
    output_mode: Literal["tokens"] = "tokens"
    choices: list[Choice]
    prompt_logprobs: list[Any] | None = None
    prompt_token_ids: Ids | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatDerender(fields.OpenModel):
    stream: Literal[False] = False
    model: str | None = None
    generate_response: Generated
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_token_ids: Ids | None = None
    chat_request: ChatCompletionRequest | None = None


class CompletionDerender(fields.OpenModel):
    stream: Literal[False] = False
    model: str | None = None
    generate_responses: list[Generated]
    prompt_tokens: list[Annotated[int, Field(ge=0)]] | None = None
    prompt_token_ids: list[Ids | None] | None = None
    completion_request: completions.CompletionRequest | None = None


def chat_derender(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """All of these raise WireError."""
    asked = http.read_model(ChatDerender, body, headers)
    model, _lora = models.resolve(asked.model, env)
    _check_bounds([asked.generate_response], env)
    _check_prompts([asked.prompt_token_ids], env)
    derender_parts.check_parsers(asked.chat_request, env)
    planned = derender_parts.chat_plan(asked.chat_request, headers, env)
    answer = asked.generate_response
    told = _told(planned, [answer], [asked.prompt_tokens or 0], [asked.prompt_token_ids], env)
    generation, choices, usage = told
    spec = replace(generation.spec, response_id=answer.request_id, model=model, created=env.now_s())
    if any(choice.logprobs is not None for choice in choices):
        keep = derender_parts.chat_candidates(asked.chat_request)
        spec = replace(spec, top_logprobs=env.vocabulary if keep is None else keep)
    return chat.body(replace(generation, spec=spec), choices, usage)


def completion_derender(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    asked = http.read_model(CompletionDerender, body, headers)
    model, _lora = models.resolve(asked.model, env)
    answers = asked.generate_responses
    if not answers:
        raise WireError("generate_responses must not be empty")
    for name, given in (("prompt_tokens", asked.prompt_tokens), ("prompt_token_ids", asked.prompt_token_ids)):
        if given is not None and len(given) != len(answers):
            raise WireError(f"{name} length ({len(given)}) must equal generate_responses length ({len(answers)})")
    _check_bounds(answers, env)
    _check_prompts(asked.prompt_token_ids or [], env)
    planned = derender_parts.completion_plan(asked.completion_request, headers, env)
    counts = asked.prompt_tokens or [0] * len(answers)
    generation, choices, usage = _told(planned, answers, counts, asked.prompt_token_ids or [None] * len(answers), env)
    spec = replace(generation.spec, response_id=answers[0].request_id, model=model, created=env.now_s(), echo=False)
    if any(choice.logprobs is not None for choice in choices) and spec.logprobs is None:
        spec = replace(spec, logprobs=0)
    return completions.body(replace(generation, spec=spec), choices, usage)


def _check_bounds(answers: Sequence[Generated], env: ServerEnv) -> None:
    if len(answers) > CHOICES_MAX:
        raise WireError(f"generate_responses count ({len(answers)}) exceeds server maximum ({CHOICES_MAX}).")
    for answer in answers:
        if len(answer.choices) > CHOICES_MAX:
            told = f"choices count ({len(answer.choices)}) in response '{answer.request_id}'"
            raise WireError(f"{told} exceeds server maximum ({CHOICES_MAX}).")
        for choice in answer.choices:
            _check_choice(choice, env)
        if len(answer.prompt_logprobs or ()) > env.max_model_len:
            told = f"prompt_logprobs length ({len(answer.prompt_logprobs or ())}) in response '{answer.request_id}'"
            raise WireError(f"{told} exceeds max_model_len ({env.max_model_len}).")


def _check_choice(choice: Choice, env: ServerEnv) -> None:
    entries = (choice.logprobs and choice.logprobs.content) or ()
    for name, given in (("token_ids", choice.token_ids or ()), ("logprobs.content", entries)):
        if len(given) > env.max_model_len:
            told = f"{name} length ({len(given)}) in choice {choice.index}"
            raise WireError(f"{told} exceeds max_model_len ({env.max_model_len}).")
    most = max((len(entry.top_logprobs) for entry in entries), default=0)
    if most > env.max_logprobs >= 0:
        told = f"top_logprobs count ({most}) in choice {choice.index}"
        raise WireError(f"{told} exceeds max_logprobs ({env.max_logprobs}).")
    if not choice.token_ids:
        raise WireError(f"choice {choice.index} has empty or null token_ids")
    prompts.check_vocabulary(derender_parts.ids_of(choice), env)


def _check_prompts(given: Sequence[Ids | None], env: ServerEnv) -> None:
    for ids in given:
        if len(ids or ()) > env.max_model_len:
            raise WireError(f"prompt_token_ids length ({len(ids or ())}) exceeds max_model_len ({env.max_model_len}).")


def _told(
    planned: Generation,
    answers: Sequence[Generated],
    prompt_tokens: Sequence[int],
    prompt_ids: Sequence[Ids | None],
    env: ServerEnv,
) -> tuple[Generation, list[ChoiceResult], Usage]:
    """The generation that would have given these answers, its choices and its usage."""
    made = tuple(
        PromptPlan(tuple(given or answer.prompt_token_ids or ()), None)
        for given, answer in zip(prompt_ids, answers, strict=True)
    )
    choices = [
        _choice(choice, at, planned.sampling, made[at].token_ids, env)
        for at, answer in enumerate(answers)
        for choice in answer.choices
    ]
    numbered = [replace(choice, index=at) for at, choice in enumerate(choices)]
    usage = Usage(sum(prompt_tokens), sum(len(choice.token_ids) for choice in choices))
    params = answers[0].kv_transfer_params
    usage.kv_transfer = params if all(answer.kv_transfer_params == params for answer in answers) else None
    spec = replace(planned.spec, prompts=made)
    return replace(planned, prompts=made, spec=spec, extra={}), numbered, usage


def _choice(given: Choice, at: int, sampling: SamplingPlan, prompt: Sequence[int], env: ServerEnv) -> ChoiceResult:
    """The text as the engine's detokenizer gives it: without the token that ended it, and cut at a stop string."""
    ids = tuple(given.token_ids or ())
    by_token = derender_parts.ended_by_token(given, sampling, env)
    looked_for = () if by_token or given.finish_reason != "stop" else sampling.stop
    stop = (given.stop_reason,) if isinstance(given.stop_reason, str) else looked_for
    state = ChoiceState(given.index, at, replace(sampling, stop=stop, logprobs=None), env.tokenizer, after=prompt)
    state.push(ids, "stop" if by_token else "length", given.stop_reason)
    made = state.result()
    told = derender_parts.stop_reason_of(given, sampling, env)
    return replace(
        made,
        finish_reason=given.finish_reason,
        stop_reason=made.stop_reason if state.stopped_by is not None else told,
        token_ids=ids,
        logprobs=derender_parts.logprob_entries(given, None, env),
    )


def _by_form(whole: Derender, streamed: Derender) -> Derender:
    """One path for both: `stream` in the body tells which."""

    def derender(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
        if not env.enable_scale_out:
            raise disabled()
        told = http.parse_json(body)
        return (streamed if isinstance(told, dict) and told.get("stream") is True else whole)(body, headers, env)

    return derender


ROUTES: Mapping[str, Derender] = {
    "/v1/completions/derender": _by_form(completion_derender, derender_stream.completion_chunk),
    "/v1/chat/completions/derender": _by_form(chat_derender, derender_stream.chat_chunk),
}
