"""`/inference/v1/generate`: tokens in, tokens out (vLLM reference §1.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Delta, Generation, StreamEncoder, TokenLogprob, Usage, WireError
from windtunnel.wire.vllm import chunks, fields, models, prompts, sampling
from windtunnel.wire.vllm.completions import DEFAULT_MAX_TOKENS, Routing
from windtunnel.wire.vllm.fields import Int64, TokenId

name = "generate_tokens"
paths: Sequence[str] = ("/inference/v1/generate",)


class SamplingParams(fields.OpenModel):
    """The engine's own sampling parameters, as render routes give them."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    use_beam_search: Literal[False] = False


class GenerateRequest(fields.OpenModel):
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: SamplingParams
    model: str | None = None
    stream: bool | None = False
    stream_options: fields.StreamOptions | None = None
    cache_salt: str | None = None
    priority: Int64 = 0
    features: Any = None
    output_mode: Literal["tokens"] = "tokens"
    request_id: str | None = None
    session_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TokensSpec:
    """What an answer in tokens is written from."""

    env: ServerEnv
    response_id: str
    model: str
    created: int
    logprobs: int | None
    include_usage: bool


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read and validate. Raises WireError."""
    request = http.read_model(GenerateRequest, body, headers)
    model, lora = models.resolve(request.model, env)
    planned = prompts.from_token_ids(request.token_ids, env)
    asked = request.sampling_params
    limit = sampling.capped_max_tokens(asked.max_tokens, "max_tokens", len(planned.token_ids), None, env)
    sampled = sampling.from_request(asked, env, max_tokens=limit, logprobs=asked.logprobs, prompt_logprobs=asked.prompt_logprobs)
    sampling.check_ranges(sampled, env)
    routing = Routing.read(request, headers, env)
    spec = TokensSpec(
        env=env,
        response_id=f"generate-tokens-{routing.id_base}",
        model=model,
        created=env.now_s(),
        logprobs=asked.logprobs,
        include_usage=env.enable_force_include_usage or bool(request.stream_options and request.stream_options.include_usage),
    )
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
        late_error=sampling.late_error(sampled, [planned.token_ids], env) or routing.late_error,
        kv_transfer=request.kv_transfer_params,
    )


def encoder(generation: Generation) -> StreamEncoder:
    return TokensEncoder(generation.spec)


class TokensEncoder:
    """Frames of one answer in tokens. Mutable: how many tokens each choice has."""

    __slots__ = ("_counts", "_spec")

    def __init__(self, spec: TokensSpec) -> None:
        self._spec = spec
        self._counts: dict[int, int] = {}

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        count = self._counts[delta.index] = self._counts.get(delta.index, 0) + len(delta.token_ids)
        logprobs = None if self._spec.logprobs is None else _logprobs(delta.logprobs or (), self._spec.logprobs)
        finish = (delta.finish_reason, delta.stop_reason)
        return self._frame(None, [_choice(delta.index, delta.token_ids, finish, count, logprobs)])

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        """Never: a frame holds token ids, not text."""
        return None

    def close(self, usage: Usage) -> bytes:
        if not self._spec.include_usage:
            return chunks.DONE
        told = chunks.stream_usage(usage, self._spec.env.enable_prompt_tokens_details, created=False)
        return self._frame(told, []) + chunks.DONE

    def error(self, error: WireError) -> bytes:
        return http.error_frames(error, spaced=False)

    def _frame(self, usage: Any, choices: list[dict[str, Any]]) -> bytes:
        return chunks.frame({"request_id": self._spec.response_id, "usage": usage, "output_mode": "tokens", "choices": choices})


def _choice(
    index: int, token_ids: Sequence[int], finish: tuple[str | None, int | str | None], count: int, logprobs: Any
) -> dict[str, Any]:
    """`weight_versions` comes with the finish and covers all of the choice's tokens."""
    versions = None if finish[0] is None else [{"version": "default", "start": 0, "end": count}]
    head = {"index": index, "finish_reason": finish[0], "stop_reason": finish[1], "token_ids": list(token_ids)}
    return head | {"routed_experts": None, "sampling_mask": None, "weight_versions": versions, "logprobs": logprobs}


def _logprobs(entries: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    return {"content": [_logprob(entry, top) for entry in entries]}


def _logprob(entry: TokenLogprob, top: int) -> dict[str, Any]:
    alternatives = [
        {"token_id": token_id, "logprob": logprob, "rank": rank}
        for rank, (token_id, _text, logprob) in enumerate(entry.top[:top], start=1)
    ]
    return {"token_id": entry.token_id, "logprob": entry.logprob, "rank": 1, "top_logprobs": alternatives}


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed, nulls included; `metrics` stays null whatever the flags say."""
    spec: TokensSpec = generation.spec
    details = chunks.body_details(usage, spec.env.enable_prompt_tokens_details, created=False)
    none = ("prompt_logprobs", "prompt_token_id_logprobs", "prompt_token_ids", "mm_placeholders", "metrics")
    told: dict[str, Any] = {
        "request_id": spec.response_id,
        "model": spec.model,
        "created": spec.created,
        "usage": chunks.body_usage(usage, details, None),
        **dict.fromkeys(none),
        "kv_transfer_params": usage.kv_transfer,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [_whole(spec, choice) for choice in choices],
    }
    return http.dumps(told)


def _whole(spec: TokensSpec, result: ChoiceResult) -> dict[str, Any]:
    logprobs = None if spec.logprobs is None else _logprobs(result.logprobs or (), spec.logprobs)
    finish = (result.finish_reason, result.stop_reason)
    return _choice(result.index, result.token_ids, finish, len(result.token_ids), logprobs)


def error_body(error: WireError) -> bytes:
    return http.error_body(error)
