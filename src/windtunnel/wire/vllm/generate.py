"""`/inference/v1/generate`: tokens in, tokens out (vLLM reference §1.3). Without `--enable-scale-out` it answers 403."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Delta, Generation, StreamEncoder, TokenLogprob, Usage, WireError
from windtunnel.wire.vllm import chunks, fields, models, prompts, sampling
from windtunnel.wire.vllm.completions import Routing, check_cache_salt
from windtunnel.wire.vllm.fields import CacheSalt, Int64, LongTokenIds, TokenId

name = "generate"
paths: Sequence[str] = ("/inference/v1/generate",)

error_body = http.error_body


class SamplingParams(fields.OpenModel):
    """The engine's own sampling parameters, as a client may send them here."""

    n: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    use_beam_search: bool = False


class GenerateRequest(fields.OpenModel):
    """Fields in the order of the reference."""

    request_id: str | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1), LongTokenIds]
    sampling_params: SamplingParams
    model: str | None = None
    stream: bool | None = False
    stream_options: fields.StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Int64 = 0
    session_id: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    features: Any = None
    output_mode: str | None = "tokens"


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """What an answer is written from."""

    env: ServerEnv
    response_id: str
    model: str
    created: int
    n: int
    prompt_token_ids: tuple[int, ...]
    logprobs: int | None
    prompt_logprobs: int | None
    include_usage: bool


def disabled() -> WireError:
    """What every scale-out route answers on a server without them."""
    message = "Scale-out endpoints are disabled. Restart the server with --enable-scale-out to enable them."
    return WireError(message, 403, "PermissionDeniedError")


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read and validate. Raises WireError for everything found before the head."""
    if not env.enable_scale_out:
        raise disabled()
    request = http.read_model(GenerateRequest, body, headers)
    params = request.sampling_params
    model, lora = models.resolve(request.model, env)
    check_cache_salt(request.cache_salt, env)
    prompt = prompts.from_token_ids(request.token_ids, env)
    limit = sampling.capped_max_tokens(params.max_tokens, "max_tokens", len(prompt.token_ids), None, env)
    told = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    sampled = sampling.from_request(params, env, max_tokens=limit, **told)
    sampling.check_ranges(sampled, env)
    routing = Routing.read(request, headers, env)
    spec = _spec(request, env, model, routing.id_base, prompt.token_ids, sampled)
    return Generation(
        family=name,
        spec=spec,
        response_id=spec.response_id,
        model=model,
        prompts=(prompt,),
        sampling=sampling.plan(sampled, env),
        stream=bool(request.stream),
        priority=routing.priority,
        lora=lora,
        cache_salt=request.cache_salt,
        data_parallel_rank=routing.rank,
        session_id=routing.session_id,
        stream_interval=env.stream_interval,
        late_error=sampling.late_error(sampled, [prompt.token_ids], env) or routing.late_error,
        kv_transfer=request.kv_transfer_params,
    )


def _spec(
    request: GenerateRequest,
    env: ServerEnv,
    model: str,
    id_base: str,
    token_ids: tuple[int, ...],
    sampled: sampling.Sampling,
) -> GenerateSpec:
    options = request.stream_options
    return GenerateSpec(
        env=env,
        response_id=f"generate-tokens-{id_base}",
        model=model,
        created=env.now_s(),
        n=sampled.n,
        prompt_token_ids=token_ids,
        logprobs=sampled.logprobs,
        prompt_logprobs=sampled.prompt_logprobs,
        include_usage=env.enable_force_include_usage or bool(options and options.include_usage),
    )


def encoder(generation: Generation) -> StreamEncoder:
    return GenerateEncoder(generation.spec)


class GenerateEncoder:
    """Frames of one stream. Mutable: tokens so far, per choice."""

    __slots__ = ("_counts", "_spec")

    def __init__(self, spec: GenerateSpec) -> None:
        self._spec = spec
        self._counts = [0] * spec.n

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        self._counts[delta.index] += len(delta.token_ids)
        choice = _choice(self._spec, delta, self._counts[delta.index])
        return self._frame(None, [choice])

    def plain(self, index: int) -> None:
        """Every frame has token ids."""

    def close(self, usage: Usage) -> bytes:
        if not self._spec.include_usage:
            return chunks.DONE
        told = chunks.stream_usage(usage, self._spec.env.enable_prompt_tokens_details, created=False)
        return self._frame(told, []) + chunks.DONE

    def error(self, error: WireError) -> bytes:
        return http.error_frames(error, spaced=False)

    def _frame(self, usage: Mapping[str, Any] | None, choices: list[dict[str, Any]]) -> bytes:
        told = {"request_id": self._spec.response_id, "usage": usage, "output_mode": "tokens", "choices": choices}
        return chunks.frame(told)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed, nulls included."""
    spec: GenerateSpec = generation.spec
    details = chunks.body_details(usage, spec.env.enable_prompt_tokens_details, created=False)
    told: dict[str, Any] = {
        "request_id": spec.response_id,
        "model": spec.model,
        "created": spec.created,
        "usage": chunks.body_usage(usage, details, None),
        "prompt_logprobs": chunks.prompt_logprobs(spec.prompt_token_ids, spec.prompt_logprobs, spec.env),
        "prompt_token_id_logprobs": None,
        "prompt_token_ids": None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": usage.kv_transfer,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [_choice(spec, choice, len(choice.token_ids)) for choice in choices],
    }
    return http.dumps(told)


def _choice(spec: GenerateSpec, part: Delta | ChoiceResult, tokens_so_far: int) -> dict[str, Any]:
    """A choice; a finished one names the weights that each of its tokens came from."""
    versions = None if part.finish_reason is None else [{"version": "default", "start": 0, "end": tokens_so_far}]
    return {
        "index": part.index,
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
        "token_ids": list(part.token_ids),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": versions,
        "logprobs": None if spec.logprobs is None else {"content": [_entry(entry) for entry in part.logprobs or ()]},
    }


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    top = [{"token_id": at, "logprob": logprob, "rank": rank} for rank, (at, _text, logprob) in enumerate(entry.top, start=1)]
    return {"token_id": entry.token_id, "logprob": entry.logprob, "rank": 1, "top_logprobs": top}
