"""Derender routes: what `/inference/v1/generate` answered, back in the API's form (vLLM 0.33, `scale_out/derender`).

No engine has a part in it: the tokens go through the output state of a live answer, and the same writers write it.
A token outside the vocabulary is a 400 of ours. Members that neither the tokens nor the original request tell are null. Chunks
of a stream (`"stream": true`) are not simulated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, PromptPlan, SamplingPlan, TokenLogprob, Usage, WireError
from windtunnel.wire.output import ChoiceState, decoded
from windtunnel.wire.vllm import chat, completions, fields, models, prompts
from windtunnel.wire.vllm.chat_request import ChatCompletionRequest
from windtunnel.wire.vllm.fields import TokenId
from windtunnel.wire.vllm.generate import disabled

Derender = Callable[[bytes, Mapping[str, str], ServerEnv], bytes]
Ids = list[TokenId]

CHOICES_MAX = 16384
"""`VLLM_MAX_N_SEQUENCES`."""


class Candidate(fields.OpenModel):
    token_id: TokenId
    logprob: float


class Entry(Candidate):
    top_logprobs: list[Candidate] = Field(default_factory=list)


class Logprobs(fields.OpenModel):
    content: list[Entry] | None = None


class Choice(fields.OpenModel):
    index: int
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: Ids | None = None
    logprobs: Logprobs | None = None


class Generated(fields.OpenModel):
    """An answer of `/inference/v1/generate`; other modes than tokens are text already."""

    request_id: str
    output_mode: Literal["tokens"] = "tokens"
    choices: list[Choice]
    prompt_token_ids: Ids | None = None
    kv_transfer_params: dict[str, Any] | None = None


class ChatDerender(fields.OpenModel):
    stream: bool = False
    model: str | None = None
    generate_response: Generated
    prompt_tokens: Annotated[int, Field(ge=0)] | None = None
    prompt_token_ids: Ids | None = None
    chat_request: ChatCompletionRequest | None = None


class CompletionDerender(fields.OpenModel):
    stream: bool = False
    model: str | None = None
    generate_responses: list[Generated]
    prompt_tokens: list[Annotated[int, Field(ge=0)]] | None = None
    prompt_token_ids: list[Ids | None] | None = None
    completion_request: completions.CompletionRequest | None = None


def chat_derender(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """All of these raise WireError."""
    _check_possible(body, env)
    asked = http.read_model(ChatDerender, body, headers)
    model, _lora = models.resolve(asked.model, env)
    _check_bounds([asked.generate_response], env)
    parsed = env.reasoning_parser is not None or env.tool_call_parser is not None
    if parsed and asked.chat_request is None:
        raise WireError(
            "chat_request is required when a tool or reasoning parser is configured because plain detokenization would leak raw"
            " parser markup into content."
        )
    planned = _chat_plan(asked, headers, env)
    answer = asked.generate_response
    told = _told(planned, [answer], [asked.prompt_tokens or 0], [asked.prompt_token_ids], env)
    generation, choices, usage = told
    spec = replace(generation.spec, response_id=answer.request_id, model=model, created=env.now_s())
    if asked.chat_request is None and any(choice.logprobs is not None for choice in choices):
        spec = replace(spec, top_logprobs=env.vocabulary)
    return chat.body(replace(generation, spec=spec), choices, usage)


def completion_derender(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    _check_possible(body, env)
    asked = http.read_model(CompletionDerender, body, headers)
    model, _lora = models.resolve(asked.model, env)
    answers = asked.generate_responses
    if not answers:
        raise WireError("generate_responses must not be empty")
    for name, given in (("prompt_tokens", asked.prompt_tokens), ("prompt_token_ids", asked.prompt_token_ids)):
        if given is not None and len(given) != len(answers):
            raise WireError(f"{name} length ({len(given)}) must equal generate_responses length ({len(answers)})")
    _check_bounds(answers, env)
    request = asked.completion_request or completions.CompletionRequest(prompt=" ")
    planned = completions.plan_request(request.model_copy(update={"model": None, "stream": False}), headers, env)
    counts = asked.prompt_tokens or [0] * len(answers)
    generation, choices, usage = _told(planned, answers, counts, asked.prompt_token_ids or [None] * len(answers), env)
    spec = replace(generation.spec, response_id=answers[0].request_id, model=model, created=env.now_s(), echo=False)
    if any(choice.logprobs is not None for choice in choices) and spec.logprobs is None:
        spec = replace(spec, logprobs=0)
    return completions.body(replace(generation, spec=spec), choices, usage)


def _check_possible(body: bytes, env: ServerEnv) -> None:
    if not env.enable_scale_out:
        raise disabled()
    asked = http.parse_json(body)
    if isinstance(asked, dict) and asked.get("stream") is True:
        raise WireError("Derendering the chunks of a stream is not simulated", 501, "NotImplementedError")


def _check_bounds(answers: Sequence[Generated], env: ServerEnv) -> None:
    if len(answers) > CHOICES_MAX:
        raise WireError(f"generate_responses count ({len(answers)}) exceeds server maximum ({CHOICES_MAX}).")
    for answer in answers:
        if len(answer.choices) > CHOICES_MAX:
            told = f"choices count ({len(answer.choices)}) in response '{answer.request_id}'"
            raise WireError(f"{told} exceeds server maximum ({CHOICES_MAX}).")
        for choice in answer.choices:
            if not choice.token_ids:
                raise WireError(f"choice {choice.index} has empty or null token_ids")
            if len(choice.token_ids) > env.max_model_len:
                told = f"token_ids length ({len(choice.token_ids)}) in choice {choice.index}"
                raise WireError(f"{told} exceeds max_model_len ({env.max_model_len}).")
            prompts.check_vocabulary(_ids(choice), env)


def _ids(choice: Choice) -> Ids:
    """Every token that is to become text."""
    entries = (choice.logprobs and choice.logprobs.content) or ()
    candidates = [one.token_id for entry in entries for one in (entry, *entry.top_logprobs)]
    return [*(choice.token_ids or ()), *candidates]


def _chat_plan(asked: ChatDerender, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    request = asked.chat_request
    if request is None:
        request = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": ""}]})
    return chat.plan_request(request.model_copy(update={"model": None, "stream": False}), headers, env)


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
    choices = [_choice(choice, at, planned.sampling, env) for at, answer in enumerate(answers) for choice in answer.choices]
    numbered = [replace(choice, index=at) for at, choice in enumerate(choices)]
    usage = Usage(sum(prompt_tokens), sum(len(choice.token_ids) for choice in choices))
    params = answers[0].kv_transfer_params
    usage.kv_transfer = params if all(answer.kv_transfer_params == params for answer in answers) else None
    spec = replace(planned.spec, prompts=made)
    return replace(planned, prompts=made, spec=spec, extra={}), numbered, usage


def _choice(given: Choice, prompt_index: int, sampling: SamplingPlan, env: ServerEnv) -> ChoiceResult:
    """The text as the engine's detokenizer gives it: without the token that ended it, and cut at a stop string."""
    ids = tuple(given.token_ids or ())
    by_token = _ended_by_token(given, ids[-1], sampling, env)
    looked_for = () if by_token or given.finish_reason != "stop" else sampling.stop
    stop = (given.stop_reason,) if isinstance(given.stop_reason, str) else looked_for
    state = ChoiceState(given.index, prompt_index, replace(sampling, stop=stop, logprobs=None), env.tokenizer)
    state.push(ids, "stop" if by_token else "length", given.stop_reason)
    made = state.result()
    stop_reason = made.stop_reason if state.stopped_by is not None else given.stop_reason
    if by_token and stop_reason is None and ids[-1] != env.tokenizer.eos_token_id:
        stop_reason = ids[-1]
    entries = given.logprobs.content if given.logprobs is not None else None
    logprobs = None if entries is None else tuple(_entry(one, env) for one in entries)
    return replace(made, finish_reason=given.finish_reason, stop_reason=stop_reason, token_ids=ids, logprobs=logprobs)


def _ended_by_token(given: Choice, last: int, sampling: SamplingPlan, env: ServerEnv) -> bool:
    if given.finish_reason != "stop" or isinstance(given.stop_reason, str):
        return False
    if given.stop_reason is not None:
        return last == given.stop_reason
    eos = () if sampling.ignore_eos else (env.tokenizer.eos_token_id, *env.extra_eos_token_ids)
    return last in eos or last in sampling.stop_token_ids


def _entry(given: Entry, env: ServerEnv) -> TokenLogprob:
    top = tuple((one.token_id, decoded(env.tokenizer, one.token_id), one.logprob) for one in given.top_logprobs)
    return TokenLogprob(given.token_id, decoded(env.tokenizer, given.token_id), given.logprob, top)


ROUTES: Mapping[str, Derender] = {
    "/v1/completions/derender": completion_derender,
    "/v1/chat/completions/derender": chat_derender,
}
