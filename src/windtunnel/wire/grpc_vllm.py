"""Messages of `vllm.grpc.engine.VllmEngine` to generations and back (vLLM reference §8; smg-grpc-proto 0.4.28).

Tokens in, tokens out: the caller has the tokenizer and the chat template. As in smg-grpc-servicer 0.14.1, a 0 that makes no
sense (`top_p`, `repetition_penalty`, `n`) is proto3's "unset" and means the default, and without `max_tokens` the context is
the limit. Generation-config defaults are the caller's business (`default_sampling_params_json`). Ranges, limits and structured
outputs are those of HTTP, and both stages of refusal are one status here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Delta, Generation, PromptPlan, TokenLogprob, Usage, WireError
from windtunnel.wire.grpc_chunks import PlainChunks
from windtunnel.wire.http import parameter_error
from windtunnel.wire.vllm import chunks, fields, pooled, prompts, sampling, structured, vectors

SERVICE = "vllm.grpc.engine.VllmEngine"
FAMILY = "grpc"

STOPS_MAX = 1024
"""Stop strings of one request: each token is searched for all of them."""
_PORT_MAX = 65535
_CHUNK = b"\x0a"
"""Key of `GenerateResponse.chunk`."""
_MEDIA = ("mm_inputs", "media_refs")
_STRUCTURED = {"json_schema": "json", **{kind: kind for kind in ("regex", "grammar", "structural_tag", "json_object")}}


@dataclass(frozen=True, slots=True)
class GenerateSpec:
    """What the messages of one answer are written from."""

    env: ServerEnv
    prompt_token_ids: tuple[int, ...]
    logprobs: int | None
    prompt_logprobs: int | None


def plan(request: pb.GenerateRequest, env: ServerEnv) -> Generation:
    """Read, check and, for text, tokenise. Raises WireError for everything that the front end or the engine's input refuses."""
    params = request.sampling_params
    prompt = _prompt(request, env)
    sampled = _sampling(params, _room(prompt, env))
    sampling.check_ranges(sampled, env)
    answer = structured.wanted_answer(None, _constraint(params), [prompt], env)
    late = sampling.late_error(sampled, [prompt.token_ids], env) or answer.late_error
    if late is not None:
        raise late
    return Generation(
        spec=GenerateSpec(env, prompt.token_ids, sampled.logprobs, sampled.prompt_logprobs),
        response_id=request.request_id or env.new_id(),
        model=env.served_models[0],
        prompts=(prompt,),
        sampling=sampling.plan(sampled, env),
        stream=request.stream,
        family=FAMILY,
        data_parallel_rank=_rank(request, env),
        stream_interval=env.stream_interval,
        answer_text=answer.text,
        kv_transfer=_kv_transfer(request),
    )


def _prompt(request: pb.GenerateRequest, env: ServerEnv) -> PromptPlan:
    for name in _MEDIA:
        if request.HasField(name):
            raise WireError(f"{name} cannot be given: this model takes text only", param=name)
    if request.extra_mm_inputs:
        raise WireError("extra_mm_inputs cannot be given: this model takes text only", param="extra_mm_inputs")
    params = request.sampling_params
    keep = params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
    if keep is not None and keep < -1:
        raise parameter_error(
            "truncate_prompt_tokens must be -1 (the model's own length) or more", "truncate_prompt_tokens", keep
        )
    match request.WhichOneof("input"):
        case "tokenized":
            return prompts.from_token_ids(request.tokenized.input_ids, env, keep=keep)
        case "text":
            return prompts.from_text(request.text, env, add_special_tokens=True, keep=keep)
    raise WireError("input is missing: give `tokenized` (token ids) or `text`", param="input")


def _room(prompt: PromptPlan, env: ServerEnv) -> int:
    """Tokens that the context leaves for the answer."""
    room = env.max_model_len - len(prompt.token_ids)
    if room < 1:
        told = f"The prompt fills this model's maximum context length of {env.max_model_len} tokens; leave room for one more"
        raise parameter_error(told, "input_tokens", len(prompt.token_ids))
    return room


def _sampling(params: pb.SamplingParams, room: int) -> sampling.Sampling:
    """`room`: what the context leaves for the answer; more is never asked of the engine."""
    if len(params.stop) > STOPS_MAX:
        raise parameter_error(f"stop may have at most {STOPS_MAX} entries", "stop", len(params.stop))
    return sampling.Sampling(
        max_tokens=min(params.max_tokens, room) if params.HasField("max_tokens") else room,
        n=params.n or 1,
        min_tokens=params.min_tokens,
        temperature=_optional(params, "temperature", 1.0),
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logprobs=_logprobs(params, "logprobs"),
        prompt_logprobs=_logprobs(params, "prompt_logprobs"),
        seed=_optional(params, "seed"),
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        logit_bias={str(token): bias for token, bias in params.logit_bias.items()},
        include_stop_str=params.include_stop_str_in_output,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
    )


def _optional(message: Any, name: str, default: Any = None) -> Any:
    return getattr(message, name) if message.HasField(name) else default


def _logprobs(params: pb.SamplingParams, name: str) -> int | None:
    value: int | None = _optional(params, name)
    if value is not None and value < -1:
        raise parameter_error(f"{name} must be -1 (all) or more", name, value)
    return value


def _constraint(params: pb.SamplingParams) -> fields.StructuredOutputs | None:
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "choice":
        return fields.StructuredOutputs.model_validate({"choice": list(params.choice.choices)})
    return fields.StructuredOutputs.model_validate({_STRUCTURED[kind]: getattr(params, kind)})


def _rank(request: pb.GenerateRequest, env: ServerEnv) -> int | None:
    rank: int | None = _optional(request, "data_parallel_rank")
    if rank is not None and not 0 <= rank < env.data_parallel_size:
        raise WireError(f"data_parallel_rank {rank} is out of range [0, {env.data_parallel_size}).", param="data_parallel_rank")
    return rank


def readable_kv_transfer(request: pb.GenerateRequest) -> Mapping[str, Any] | None:
    """The parameters of a request that may be wrong in every other way; None where they cannot be read."""
    try:
        return _kv_transfer(request)
    except WireError:
        return None


def _kv_transfer(request: pb.GenerateRequest) -> Mapping[str, Any] | None:
    """The JSON field beats the older typed one."""
    if request.HasField("kv_transfer_params_json"):
        return _json_object(request.kv_transfer_params_json)
    if not request.HasField("kv_transfer_params"):
        return None
    host, port = request.kv_transfer_params.remote_host, request.kv_transfer_params.remote_port
    if not host or not 1 <= port <= _PORT_MAX:
        told = f"kv_transfer_params needs a remote_host and a remote_port from 1 to {_PORT_MAX}, got {host!r} and {port}"
        raise WireError(told, param="kv_transfer_params")
    return {"remote_host": host, "remote_port": port}


def _json_object(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"kv_transfer_params_json is not JSON: {error}", param="kv_transfer_params_json") from None
    if not isinstance(value, dict):
        raise WireError("kv_transfer_params_json must be a JSON object", param="kv_transfer_params_json")
    return value


class GenerateEncoder:
    """The messages of one stream. Mutable: which choices have begun."""

    __slots__ = ("_begun", "_plain", "_spec")

    def __init__(self, spec: GenerateSpec) -> None:
        self._spec = spec
        self._begun: set[int] = set()
        self._plain: dict[int, PlainChunks] = {}

    def messages(self, delta: Delta, usage: Usage) -> list[pb.GenerateResponse | bytes]:
        """A chunk and, at the end of its choice, a `complete` that repeats the last delta, as the real servicer has it."""
        _index, _text, token_ids, logprobs, finish_reason, _stop = delta
        plain = self._plain.get(delta.index)
        if plain is not None and finish_reason is None and not logprobs and token_ids:
            return [plain.chunk(token_ids, len(token_ids), usage.cached_tokens)]
        return self._messages(delta, usage)

    def _messages(self, delta: Delta, usage: Usage) -> list[pb.GenerateResponse | bytes]:
        spec, index = self._spec, delta.index
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(spec.prompt_token_ids),
            completion_tokens=len(delta.token_ids),
            cached_tokens=usage.cached_tokens,
            index=index,
        )
        if delta.logprobs:
            chunk.output_logprobs.CopyFrom(_output_logprobs(delta.logprobs, spec.logprobs))
        if index not in self._begun:
            self._begun.add(index)
            self._plain[index] = PlainChunks(pb.GenerateStreamChunk, _CHUNK, len(spec.prompt_token_ids), index)
            if spec.prompt_logprobs is not None:
                chunk.input_logprobs.CopyFrom(_input_logprobs(spec))
        out: list[pb.GenerateResponse | bytes] = [pb.GenerateResponse(chunk=chunk)]
        if delta.finish_reason is not None:
            out.append(_complete(spec, delta, usage))
        return out

    def whole(self, result: ChoiceResult, usage: Usage) -> pb.GenerateResponse:
        """All of one choice."""
        return _complete(self._spec, result, usage)


def _complete(spec: GenerateSpec, part: Delta | ChoiceResult, usage: Usage) -> pb.GenerateResponse:
    """The end of one choice: all of it (not streamed), or its last delta."""
    told = pb.GenerateComplete(
        output_ids=part.token_ids,
        finish_reason=part.finish_reason or "stop",
        prompt_tokens=len(spec.prompt_token_ids),
        completion_tokens=len(part.token_ids),
        cached_tokens=usage.cached_tokens,
        index=part.index,
    )
    if part.logprobs:
        told.output_logprobs.CopyFrom(_output_logprobs(part.logprobs, spec.logprobs))
    if spec.prompt_logprobs is not None:
        told.input_logprobs.CopyFrom(_input_logprobs(spec))
    if isinstance(part.stop_reason, int):
        told.matched_token_id = part.stop_reason
    elif part.stop_reason is not None:
        told.matched_stop_str = part.stop_reason
    _set_kv_transfer(told, usage.kv_transfer)
    return pb.GenerateResponse(complete=told)


def _set_kv_transfer(told: pb.GenerateComplete, params: Mapping[str, Any] | None) -> None:
    """What the connector returned, as JSON and, where it has the shape, in the older typed field too."""
    if not params:
        return
    told.kv_transfer_params_json = json.dumps(dict(params))
    host, port = params.get("remote_host"), params.get("remote_port")
    if isinstance(host, str) and host and isinstance(port, int) and 1 <= port <= _PORT_MAX:
        told.kv_transfer_params.remote_host = host
        told.kv_transfer_params.remote_port = port


def _output_logprobs(entries: Sequence[TokenLogprob], asked: int | None) -> pb.OutputLogProbs:
    """Without alternatives (`logprobs` 0) there is no `top_logprobs` at all."""
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry) for entry in entries] if asked else (),
    )


def _input_logprobs(spec: GenerateSpec) -> pb.InputLogProbs:
    """The first token of a prompt has no logprob."""
    asked = spec.env.vocabulary if spec.prompt_logprobs == -1 else spec.prompt_logprobs or 0
    entries = chunks.prompt_entries(spec.prompt_token_ids, asked, spec.env.tokenizer)
    return pb.InputLogProbs(
        token_logprobs=[
            pb.InputTokenLogProb() if at == 0 else pb.InputTokenLogProb(value=entry.logprob) for at, entry in enumerate(entries)
        ],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry) for entry in entries] if asked else (),
    )


def _top(entry: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[logprob for _, _, logprob in entry.top], token_ids=[token for token, _, _ in entry.top])


def plan_embedding(request: pb.EmbedRequest, env: ServerEnv) -> Generation:
    """One engine step for the prompt. Raises WireError."""
    if not request.HasField("tokenized"):
        raise WireError("tokenized is missing: an embedding is made from token ids", param="tokenized")
    prompt = prompts.from_token_ids(request.tokenized.input_ids, env)
    if not prompt.token_ids:
        raise WireError("The prompt cannot be empty", param="tokenized")
    prompts.check_vocabulary(prompt.token_ids, env)
    return Generation(
        spec=GenerateSpec(env, prompt.token_ids, None, None),
        response_id=request.request_id or env.new_id(),
        model=env.served_models[0],
        prompts=(prompt,),
        sampling=pooled.ONE_STEP,
        stream=False,
        family=FAMILY,
    )


def embedding(generation: Generation) -> pb.EmbedResponse:
    """The same vector as over HTTP."""
    spec: GenerateSpec = generation.spec
    values = vectors.vector(spec.prompt_token_ids, spec.env.embedding_size)
    return pb.EmbedResponse(embedding=values, prompt_tokens=len(spec.prompt_token_ids), embedding_dim=len(values))
