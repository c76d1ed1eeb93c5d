"""`/v1/completions` as SGLang writes it (SGLang reference §7.4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.family import ChoiceResult, Delta, Generation, StreamEncoder, TokenLogprob, Usage, WireError
from windtunnel.wire.sglang import errors, openai, requests
from windtunnel.wire.sglang.env import SglangEnv
from windtunnel.wire.sglang.openai import (
    AnswerSpec,
    OpenAiRequest,
    chunk_head,
    finish_members,
    legacy_logprobs,
    stream_end,
    usage_value,
)
from windtunnel.wire.vllm import chunks

name = "sglang_completions"
paths: Sequence[str] = ("/v1/completions",)
waits_for_output = True
"""The head of a stream waits for the engine's first output (§7.4)."""

DEFAULT_MAX_TOKENS = 16
error_body = errors.flat_body


class CompletionRequest(OpenAiRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    suffix: str | None = None
    json_schema: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionSpec(AnswerSpec):
    echo: bool
    logprobs: int | None


def plan(body: bytes, headers: Mapping[str, str], env: SglangEnv) -> Generation:
    """Read, validate and tokenise. Raises WireError for everything found before the head."""
    request = errors.read_model(CompletionRequest, body, headers)
    values = _prompts(request.prompt)
    planned = tuple(requests.prompt_of(value, env) for value in values)
    requests.check_ranges(request.sampling_values(request.max_tokens))
    requests.check_size(len(planned), request.n or 1)
    requests.check_logprobs("logprobs", request.logprobs, env)
    routed = requests.routing(request, headers, len(planned), env, request.model, request.n)
    limit = requests.output_limit(request.max_tokens, planned, env)
    spec = CompletionSpec.of(request, routed, planned, env, echo=request.echo, logprobs=request.logprobs)
    sampling = requests.sampling_plan(request, limit, min_tokens=request.min_tokens, logprobs=request.logprobs, env=env)
    return openai.planned(
        name, request, routed, spec, sampling, requests.wanted_text(request, planned, env, request.response_format)
    )


def _prompts(prompt: Any) -> list[Any]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not 1 <= len(prompt) <= requests.MAX_BATCH:
        raise WireError(f"prompt must be a text, token ids, or a list of 1 to {requests.MAX_BATCH} of those")
    return list(prompt)


def encoder(generation: Generation) -> StreamEncoder:
    return CompletionEncoder(generation.spec)


class CompletionEncoder:
    """Frames of one stream. Mutable: counts, and whether anything has been said (with an echo: the prompt), per choice."""

    __slots__ = ("_begun", "_counts", "_heads", "_plain", "_spec", "_tail", "_top", "_usage")

    def __init__(self, spec: CompletionSpec) -> None:
        total = spec.n * len(spec.prompts)
        self._spec = spec
        self._top = chunk_head(spec, "text_completion")
        self._heads = [b'%b"choices":[{"index":%d,"text":' % (self._top, index) for index in range(total)]
        self._tail = b',"logprobs":null,"finish_reason":null,"matched_stop":null}],"usage":null}\n\n'
        self._plain = spec.logprobs is None and not spec.continuous_usage
        self._counts = [0] * total
        self._begun = [False] * total
        self._usage: Usage | None = None

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        spec, index = self._spec, delta.index
        self._usage = usage
        self._counts[index] += len(delta.token_ids)
        first, self._begun[index] = not self._begun[index], True
        text = echoed(spec, index, delta.text) if first and spec.echo else delta.text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if spec.logprobs is not None:
            before = prompt_entries(spec, index // spec.n) if first else []
            choice["logprobs"] = legacy_logprobs([*before, *(delta.logprobs or ())], spec.logprobs)
        choice |= finish_members(delta)
        told = None
        if spec.continuous_usage:
            prompt_tokens = len(spec.prompts[index // spec.n].token_ids)
            told = usage_value(prompt_tokens, self._counts[index], usage.cached_by_prompt.get(index // spec.n, 0), spec.env)
        return b"%b%b\n\n" % (self._top, http.dumps({"choices": [choice], "usage": told})[1:])

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        return (self._heads[index], self._tail) if self._plain and self._begun[index] else None

    def close(self, usage: Usage) -> bytes:
        return stream_end(self._top, self._spec, usage)

    def error(self, error: WireError) -> bytes:
        return errors.stream_event(error) + stream_end(self._top, self._spec, self._usage)


def echoed(spec: CompletionSpec, index: int, text: str) -> str:
    prompt = spec.prompts[index // spec.n]
    before = spec.env.tokenizer.decode(prompt.token_ids, skip_special_tokens=True) if prompt.text is None else prompt.text
    return before + text


def prompt_entries(spec: CompletionSpec, prompt_index: int) -> list[TokenLogprob]:
    """Logprobs of an echoed prompt; none without an echo, and none unless alternatives were asked for (SGLang 0.5.23)."""
    if not spec.echo or not spec.logprobs:
        return []
    return chunks.prompt_entries(spec.prompts[prompt_index].token_ids, spec.logprobs, spec.env.tokenizer)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed."""
    spec: CompletionSpec = generation.spec
    return openai.answer_body(spec, "text_completion", [_choice(spec, one) for one in choices], usage)


def _choice(spec: CompletionSpec, result: ChoiceResult) -> dict[str, Any]:
    logprobs = None
    if spec.logprobs is not None:
        logprobs = legacy_logprobs([*prompt_entries(spec, result.prompt_index), *(result.logprobs or ())], spec.logprobs)
    text = echoed(spec, result.index, result.text) if spec.echo else result.text
    return {"index": result.index, "text": text, "logprobs": logprobs} | finish_members(result)
