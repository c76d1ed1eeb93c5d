"""`/generate`, SGLang's native endpoint (SGLang reference §7.2): text or token ids, single or batch, cumulative events."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from windtunnel.wire import http
from windtunnel.wire.family import ChoiceResult, Delta, Generation, PromptPlan, StreamEncoder, TokenLogprob, Usage, WireError
from windtunnel.wire.output import synthetic_logprobs
from windtunnel.wire.sglang import errors, requests
from windtunnel.wire.sglang.env import SglangEnv

name = "sglang_generate"
paths: Sequence[str] = ("/generate",)
methods: Sequence[str] = ("POST", "PUT")
waits_for_output = False
"""The head of a stream leaves at once; everything found later is an event."""

DEFAULT_MAX_NEW_TOKENS = 128
DONE = b"data: [DONE]\n\n"


class SamplingParams(requests.SamplingFields):
    max_new_tokens: int | None = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    n: int = 1
    json_schema: str | None = None


class GenerateRequest(requests.RoutingFields):
    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    input_embeds: Any = None
    model: str | None = None
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    session_params: requests.SessionFields | None = None
    stream: bool | None = False
    return_logprob: bool | list[bool] | None = False
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = False
    token_ids_logprob: Any = None
    return_hidden_states: bool | str | list[bool] | None = Field(default=False)


@dataclass(frozen=True, slots=True)
class NativeSpec:
    """What the answers of one call are written from. `rids` has one id for each result."""

    env: SglangEnv
    rids: tuple[str, ...]
    prompts: tuple[PromptPlan, ...]
    n: int
    batch: bool
    """The answer is a list, and streamed items carry `index`."""
    logprobs: int | None
    logprob_start: int | None
    text_in_logprobs: bool
    started_s: float
    dp_rank: int | None


def plan(body: bytes, headers: Mapping[str, str], env: SglangEnv) -> Generation:
    """Read, validate and tokenise. Raises WireError for everything found before the head."""
    request = errors.read_model(GenerateRequest, body, headers)
    values, batch = _prompts(request)
    sampling = _sampling(request)
    turn = requests.session_turn(request.session_params, request.session_id, len(values) * sampling.n)
    planned = tuple(requests.prompt_of(value, env, may_be_empty=turn is not None) for value in values)
    requests.check_ranges(sampling.model_dump())
    requests.check_size(len(planned), sampling.n)
    alternatives = requests.first(request.top_logprobs_num)
    requests.check_logprobs("top_logprobs_num", alternatives, env)
    routed = requests.routing(request, headers, len(planned), env, request.model, sampling.n)
    limit = requests.output_limit(sampling.max_new_tokens, planned, env)
    wants = requests.first(request.return_logprob)
    logprobs = (alternatives or 0) if wants else None
    spec = NativeSpec(
        env=env,
        rids=result_ids(routed.rids, sampling.n),
        prompts=planned,
        n=sampling.n,
        batch=batch or sampling.n > 1,
        logprobs=logprobs,
        logprob_start=requests.first(request.logprob_start_len) if wants else None,
        text_in_logprobs=bool(request.return_text_in_logprobs),
        started_s=env.clock_s(),
        dp_rank=routed.rank,
    )
    return Generation(
        spec=spec,
        response_id=routed.rids[0],
        model=env.served_models[0],
        prompts=planned,
        sampling=requests.sampling_plan(sampling, limit, min_tokens=sampling.min_new_tokens, logprobs=logprobs, env=env),
        stream=bool(request.stream),
        family=name,
        engine_ids=routed.rids,
        answer_text=requests.wanted_text(sampling, planned, env),
        stream_interval=env.stream_interval,
        extra={} if turn is None else {"session": turn},
        **routed_values(routed),
    )


def routed_values(routed: requests.Routing) -> dict[str, Any]:
    """The fields of a `Generation` that come from a `Routing`."""
    return {
        "priority": routed.priority,
        "lora": routed.lora,
        "cache_salt": routed.cache_salt,
        "extra_key": routed.extra_key,
        "routing_key": routed.routing_key,
        "data_parallel_rank": routed.rank,
        "session_id": routed.session_id,
        "bootstrap": routed.bootstrap,
        "kv_transfer": None if routed.prefill_rank is None else {"disagg_prefill_dp_rank": routed.prefill_rank},
    }


def result_ids(rids: Sequence[str], n: int) -> tuple[str, ...]:
    """The engine's ids of all results: choice `j` of `n > 1` is `<rid>_<j>`."""
    return tuple(rids) if n == 1 else tuple(f"{rid}_{child}" for rid in rids for child in range(n))


def _prompts(request: GenerateRequest) -> tuple[list[Any], bool]:
    """The prompts, and whether they came as a list."""
    given = [value for value in (request.text, request.input_ids, request.input_embeds) if value is not None]
    if len(given) != 1:
        raise WireError("Either text, input_ids or input_embeds should be provided, and only one of them.")
    if request.input_embeds is not None:
        raise WireError("input_embeds is not simulated: send text or input_ids")
    value: Any = given[0]
    joins = request.session_params is not None and request.session_params.id
    if isinstance(value, str) or (value and isinstance(value[0], int)) or (joins and not value):
        return [value], False
    if not 1 <= len(value) <= requests.MAX_BATCH:
        raise WireError(f"A batch has 1 to {requests.MAX_BATCH} prompts, got {len(value)}")
    return list(value), True


def _sampling(request: GenerateRequest) -> SamplingParams:
    """One set for the whole call: a list must repeat it."""
    given = request.sampling_params
    if not isinstance(given, list):
        return given or SamplingParams()
    if not given or any(one != given[0] for one in given):
        raise WireError("sampling_params differ within the batch: that is not simulated, send separate requests")
    return given[0]


def encoder(generation: Generation) -> StreamEncoder:
    return NativeEncoder(generation.spec)


class NativeEncoder:
    """Events of one call. Mutable: everything said so far, for each result."""

    __slots__ = ("_counts", "_ids", "_logprobs", "_spec", "_texts", "_usage")

    def __init__(self, spec: NativeSpec) -> None:
        self._spec = spec
        total = len(spec.rids)
        self._texts = [""] * total
        self._ids: list[list[int]] = [[] for _ in range(total)]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(total)]
        self._counts = [0] * total
        self._usage: Usage | None = None

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        index, spec = delta.index, self._spec
        self._usage = usage
        if spec.env.incremental_output:
            self._texts[index], self._ids[index], self._logprobs[index] = "", [], []
        self._counts[index] += len(delta.token_ids)
        self._texts[index] += delta.text
        self._ids[index] += delta.token_ids
        self._logprobs[index] += delta.logprobs or ()
        return self._event(index, finish_object(delta.finish_reason, delta.stop_reason, self._counts[index]))

    def _event(self, index: int, finish: dict[str, Any] | None) -> bytes:
        spec = self._spec
        meta = _meta(spec, index, finish, self._counts[index], _cached(self._usage, index // spec.n), self._logprobs[index])
        told: dict[str, Any] = {"text": self._texts[index], "output_ids": self._ids[index], "meta_info": meta}
        return b"data: %b\n\n" % http.dumps(told | ({"index": index} if spec.batch else {}))

    def plain(self, index: int) -> None:
        """Every event counts its tokens."""

    def close(self, usage: Usage) -> bytes:
        return DONE

    def error(self, error: WireError) -> bytes:
        """An abort with a status code is a last event like others; a bad value is an error object (§7.4)."""
        if error.status == errors.BAD_VALUE:
            told = {"message": error.message, "type": "invalid_request_error", "code": error.status, "retryable": False}
            return b"data: %b\n\n%b" % (http.dumps({"error": told}), DONE)
        finish = {"type": "abort", "message": error.message, "status_code": error.status, "err_type": error.kind}
        return self._event(0, finish) + DONE


def finish_object(reason: str | None, stop_reason: int | str | None, tokens: int) -> dict[str, Any] | None:
    """`finish_reason` of `meta_info`. The `stop_reason` of an abort is its message."""
    if reason is None:
        return None
    if reason == "length":
        return {"type": "length", "length": tokens}
    if reason == "abort":
        return {"type": "abort", "message": stop_reason or "Aborted", "status_code": None, "err_type": None}
    return {"type": "stop", "matched": stop_reason}


def _cached(usage: Usage | None, prompt_index: int) -> int:
    return 0 if usage is None else usage.cached_by_prompt.get(prompt_index, 0)


def _meta(
    spec: NativeSpec,
    index: int,
    finish: dict[str, Any] | None,
    tokens: int,
    cached: int,
    logprobs: Sequence[TokenLogprob],
) -> dict[str, Any]:
    prompt = spec.prompts[index // spec.n]
    told: dict[str, Any] = {
        "id": spec.rids[index],
        "finish_reason": finish,
        "prompt_tokens": len(prompt.token_ids),
        "weight_version": spec.env.weight_version,
        "num_retractions": 0,
    }
    if spec.logprobs is not None:
        told |= _logprob_lists(spec, prompt, logprobs)
    told |= {"reasoning_tokens": 0, "completion_tokens": tokens, "cached_tokens": cached, "dp_rank": spec.dp_rank}
    if finish is not None:
        ended_s = spec.env.clock_s()
        told |= {"e2e_latency": ended_s - spec.started_s, "response_sent_to_client_ts": ended_s}
    return told


def _logprob_lists(spec: NativeSpec, prompt: PromptPlan, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`[logprob, token id, text or null]` for each token, and lists of those for the alternatives."""
    start = len(prompt.token_ids) if spec.logprob_start in (None, -1) else max(0, spec.logprob_start or 0)
    tokenizer, wanted = spec.env.tokenizer, spec.logprobs or 0
    before = [synthetic_logprobs(token, at, wanted, tokenizer) for at, token in enumerate(prompt.token_ids)][start:]
    said = [_triple(entry, spec) for entry in before]
    if start == 0 and said:
        said[0] = [None, *said[0][1:]]
    told = {"input_token_logprobs": said, "output_token_logprobs": [_triple(entry, spec) for entry in entries]}
    if wanted:
        told["input_top_logprobs"] = [_tops(entry, spec) for entry in before]
        told["output_top_logprobs"] = [_tops(entry, spec) for entry in entries]
    return told


def _triple(entry: TokenLogprob, spec: NativeSpec) -> list[Any]:
    return [entry.logprob, entry.token_id, entry.token if spec.text_in_logprobs else None]


def _tops(entry: TokenLogprob, spec: NativeSpec) -> list[Any]:
    return [[logprob, token, text if spec.text_in_logprobs else None] for token, text, logprob in entry.top]


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """An object, or a list for a batch or `n > 1`."""
    spec: NativeSpec = generation.spec
    results = [_result(spec, choice, usage) for choice in choices]
    return http.dumps(results if spec.batch else results[0])


def _result(spec: NativeSpec, choice: ChoiceResult, usage: Usage) -> dict[str, Any]:
    tokens = len(choice.token_ids)
    finish = finish_object(choice.finish_reason, choice.stop_reason, tokens)
    meta = _meta(spec, choice.index, finish, tokens, _cached(usage, choice.prompt_index), choice.logprobs or ())
    return {"text": choice.text, "output_ids": list(choice.token_ids), "meta_info": meta}


def error_body(error: WireError) -> bytes:
    """A bad value is `{"error": {"message"}}`; a body that does not validate and an abort are the flat object (§7.3)."""
    if error.status == errors.BAD_VALUE and error.kind != errors.INVALID:
        return http.dumps({"error": {"message": error.message}})
    if error.status == errors.BAD_VALUE:
        return errors.flat_body(error)
    return http.dumps(errors.flat(error) | {"type": str(error.status)})
