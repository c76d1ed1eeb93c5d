"""Messages of `sglang.grpc.scheduler.SglangScheduler` to generations and back (SGLang reference §8.1; smg-grpc-proto 0.4.28).

As in smg-grpc-servicer 0.14.1, a 0 of `top_p`, `top_k`, `repetition_penalty` or `n` means "unset", and chunks count all tokens
so far.
Checks, limits and structured outputs are those of `/generate`; both stages of refusal are one status here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from windtunnel.core.request import Lora
from windtunnel.wire.family import ChoiceResult, Delta, Generation, PromptPlan, TokenLogprob, Usage, WireError
from windtunnel.wire.grpc_chunks import PlainChunks
from windtunnel.wire.output import synthetic_logprobs
from windtunnel.wire.sglang import native, requests
from windtunnel.wire.sglang.env import SglangEnv

FAMILY = "sglang_grpc"
STOPS_MAX = 1024
_CHUNK = b"\x12"
"""Key of `GenerateResponse.chunk`."""
_PORT_MAX = 65535
_NOT_SIMULATED = ("mm_inputs", "input_embeds", "token_ids_logprob", "return_hidden_states", "custom_logit_processor")


@dataclass(frozen=True, slots=True)
class SchedulerSpec:
    """What the messages of one answer are written from."""

    env: SglangEnv
    request_id: str
    prompt_token_ids: tuple[int, ...]
    n: int
    logprobs: int | None
    """Alternatives per token; None: no logprobs."""
    logprob_start: int
    """The first prompt token with a logprob; -1: none has."""


def plan(request: pb.GenerateRequest, lora: Lora | None, env: SglangEnv) -> Generation:
    """Read and check. Raises WireError for everything that the front end or the scheduler refuses."""
    prompt = _prompt(request, env)
    sampling = _sampling(request.sampling_params)
    requests.check_ranges(sampling.model_dump())
    limit = requests.output_limit(sampling.max_new_tokens, [prompt], env)
    logprobs = _logprobs(request)
    spec = SchedulerSpec(
        env=env,
        request_id=request.request_id or requests.new_rid(env),
        prompt_token_ids=prompt.token_ids,
        n=sampling.n,
        logprobs=logprobs,
        logprob_start=-1 if logprobs is None else request.logprob_start_len,
    )
    return Generation(
        spec=spec,
        response_id=spec.request_id,
        model=env.served_models[0],
        prompts=(prompt,),
        sampling=requests.sampling_plan(sampling, limit, min_tokens=sampling.min_new_tokens, logprobs=logprobs, env=env),
        stream=request.stream,
        family=FAMILY,
        engine_ids=(spec.request_id,),
        lora=lora,
        data_parallel_rank=_rank(request, env),
        stream_interval=_interval(request.sampling_params, env),
        answer_text=requests.wanted_text(sampling, [prompt], env),
        bootstrap=_bootstrap(request, sampling.n),
    )


def _prompt(request: pb.GenerateRequest, env: SglangEnv) -> PromptPlan:
    given = {field.name for field, _ in request.ListFields()}
    for name in _NOT_SIMULATED:
        if name in given:
            raise WireError(f"{name} cannot be given: this model takes token ids and gives tokens only", param=name)
    if "tokenized" not in given:
        raise WireError("tokenized is missing: give the prompt's token ids", param="tokenized")
    return requests.prompt_of(request.tokenized.input_ids, env)


def _sampling(params: pb.SamplingParams) -> native.SamplingParams:
    if len(params.stop) > STOPS_MAX:
        raise WireError(f"stop may have at most {STOPS_MAX} entries, got {len(params.stop)}.", param="stop")
    return native.SamplingParams(
        max_new_tokens=params.max_new_tokens if params.HasField("max_new_tokens") else None,
        min_new_tokens=params.min_new_tokens,
        n=params.n or 1,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_token_ids),
        no_stop_trim=params.no_stop_trim,
        ignore_eos=params.ignore_eos,
        skip_special_tokens=params.skip_special_tokens,
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k or -1,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        json_schema=params.json_schema or None,
        regex=params.regex or None,
        ebnf=params.ebnf_grammar or None,
    )


def _logprobs(request: pb.GenerateRequest) -> int | None:
    if request.top_logprobs_num < 0:
        raise WireError(f"top_logprobs_num must be at least 0, got {request.top_logprobs_num}.", param="top_logprobs_num")
    return request.top_logprobs_num if request.return_logprob else None


def _rank(request: pb.GenerateRequest, env: SglangEnv) -> int | None:
    rank = request.data_parallel_rank
    if not request.HasField("data_parallel_rank"):
        return None
    if not 0 <= rank < env.data_parallel_size:
        raise WireError(f"data_parallel_rank is {rank}: must be in [0, {env.data_parallel_size})", param="data_parallel_rank")
    return int(rank)


def _interval(params: pb.SamplingParams, env: SglangEnv) -> int:
    if not params.HasField("stream_interval"):
        return env.stream_interval
    if params.stream_interval < 1:
        raise WireError(f"stream_interval must be at least 1, got {params.stream_interval}.", param="stream_interval")
    return int(params.stream_interval)


def _bootstrap(request: pb.GenerateRequest, n: int) -> tuple[requests.Bootstrap, ...] | None:
    """Host, port and room of each choice; rooms have 32 bits here."""
    told = request.disaggregated_params
    if not request.HasField("disaggregated_params") or not told.bootstrap_host:
        return None
    if not 0 <= told.bootstrap_port <= _PORT_MAX:
        raise WireError(f"bootstrap_port must be from 0 to {_PORT_MAX}, got {told.bootstrap_port}.", param="bootstrap_port")
    return tuple((told.bootstrap_host, told.bootstrap_port or None, told.bootstrap_room + child) for child in range(n))


class SchedulerEncoder:
    """The messages of one answer. Mutable: tokens so far, for each choice."""

    __slots__ = ("_counts", "_plain", "_spec")

    def __init__(self, spec: SchedulerSpec) -> None:
        self._spec = spec
        self._counts: list[int | None] = [None] * spec.n
        head = pb.GenerateResponse(request_id=spec.request_id).SerializeToString() + _CHUNK
        self._plain = [PlainChunks(pb.GenerateStreamChunk, head, len(spec.prompt_token_ids), index) for index in range(spec.n)]

    def messages(self, delta: Delta, usage: Usage) -> list[pb.GenerateResponse | bytes]:
        """A chunk and, at the end of its choice, a `complete` that repeats the last delta."""
        index, _text, token_ids, logprobs, finish_reason, _stop = delta
        before = self._counts[index]
        count = self._counts[index] = (before or 0) + len(token_ids)
        if before and finish_reason is None and not logprobs and token_ids:
            return [self._plain[index].chunk(token_ids, count, usage.cached_tokens)]
        return self._messages(delta, usage, before, count)

    def _messages(self, delta: Delta, usage: Usage, before: int | None, count: int) -> list[pb.GenerateResponse | bytes]:
        spec = self._spec
        chunk = pb.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=len(spec.prompt_token_ids),
            completion_tokens=count,
            cached_tokens=usage.cached_tokens,
            index=delta.index,
        )
        if delta.logprobs:
            chunk.output_logprobs.CopyFrom(_output_logprobs(delta.logprobs, spec))
        if before is None and spec.logprob_start >= 0:
            chunk.input_logprobs.CopyFrom(_input_logprobs(spec))
        out: list[pb.GenerateResponse | bytes] = [pb.GenerateResponse(request_id=spec.request_id, chunk=chunk)]
        if delta.finish_reason is not None:
            out.append(self._complete(delta, count, usage))
        return out

    def whole(self, result: ChoiceResult, usage: Usage) -> pb.GenerateResponse:
        """All of one choice."""
        return self._complete(result, len(result.token_ids), usage)

    def _complete(self, part: Delta | ChoiceResult, count: int, usage: Usage) -> pb.GenerateResponse:
        spec = self._spec
        told = pb.GenerateComplete(
            output_ids=part.token_ids,
            finish_reason=part.finish_reason if part.finish_reason in ("length", "abort") else "stop",
            prompt_tokens=len(spec.prompt_token_ids),
            completion_tokens=count,
            cached_tokens=usage.cached_tokens,
            index=part.index,
        )
        if part.logprobs:
            told.output_logprobs.CopyFrom(_output_logprobs(part.logprobs, spec))
        if spec.logprob_start >= 0:
            told.input_logprobs.CopyFrom(_input_logprobs(spec))
        _set_matched(told, part.stop_reason)
        return pb.GenerateResponse(request_id=spec.request_id, complete=told)


def _set_matched(told: pb.GenerateComplete, stop_reason: int | str | None) -> None:
    """The stop reason of an abort is its message and matched nothing."""
    if told.finish_reason != "stop" or stop_reason is None:
        return
    if isinstance(stop_reason, int):
        told.matched_token_id = stop_reason
    else:
        told.matched_stop_str = stop_reason


def _output_logprobs(entries: Sequence[TokenLogprob], spec: SchedulerSpec) -> pb.OutputLogProbs:
    return pb.OutputLogProbs(
        token_logprobs=[entry.logprob for entry in entries],
        token_ids=[entry.token_id for entry in entries],
        top_logprobs=[_top(entry) for entry in entries] if spec.logprobs else (),
    )


def _input_logprobs(spec: SchedulerSpec) -> pb.InputLogProbs:
    """From `logprob_start_len` on; the first token of a prompt has none."""
    start, asked, tokenizer = spec.logprob_start, spec.logprobs or 0, spec.env.tokenizer
    ids = spec.prompt_token_ids[start:]
    entries = [synthetic_logprobs(token, at, asked, tokenizer) for at, token in enumerate(ids, start=start)]
    values = [pb.InputTokenLogProb(value=entry.logprob) for entry in entries]
    if start == 0 and values:
        values[0] = pb.InputTokenLogProb()
    tops: Any = [_top(entry) for entry in entries] if asked else ()
    return pb.InputLogProbs(token_logprobs=values, token_ids=ids, top_logprobs=tops)


def _top(entry: TokenLogprob) -> pb.TopLogProbs:
    return pb.TopLogProbs(values=[logprob for _, _, logprob in entry.top], token_ids=[token for token, _, _ in entry.top])
