"""`/v1/completions` (vLLM reference §2.2, §2.4, §3.3)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, model_validator

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Delta, Generation, PromptPlan, StreamEncoder, TokenLogprob, Usage, WireError
from windtunnel.wire.vllm import chunks, fields, models, prompts, sampling, structured
from windtunnel.wire.vllm.fields import AtLeastOne, Int64, LongTokenIds, StopList, TokenId

name = "completions"
paths: Sequence[str] = ("/v1/completions",)

DEFAULT_MAX_TOKENS = 16


class _Asked(fields.OpenModel):
    model: str | None = None
    prompt: Annotated[list[TokenId] | list[list[TokenId]] | str | list[str] | None, LongTokenIds] = None
    echo: bool | None = False
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    n: int = 1
    presence_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | StopList | None = None
    stream: bool | None = False
    stream_options: fields.StreamOptions | None = None
    suffix: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None


class _Prompt(fields.OpenModel):
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    bad_words: list[str] = Field(default_factory=list)
    prompt_embeds: str | list[str] | None = None
    add_special_tokens: bool = True
    response_format: fields.AnyResponseFormat | None = None


class CompletionRequest(fields.PassedOn, fields.Answered, _Prompt, fields.Sampled, _Asked):
    """Fields in the order of vLLM's own model: it is the order of the validation lines."""

    thinking_token_budget: int | None = None
    stream_interval: AtLeastOne | None = None

    @model_validator(mode="before")
    @classmethod
    def _before(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for check in _BEFORE:
                check(data)
        return data


def _check_prompt(data: Mapping[str, Any]) -> None:
    prompt, embeds = data.get("prompt"), data.get("prompt_embeds")
    if prompt in (None, "") and not embeds:
        raise http.parameter_error("Either prompt or prompt_embeds must be provided and not be empty", "prompt")


def _check_logprobs(data: Mapping[str, Any]) -> None:
    fields.check_prompt_logprobs(data)
    wanted = data.get("logprobs")
    if isinstance(wanted, int) and wanted < -1:
        raise http.parameter_error("`logprobs` must be a positive value or -1", "logprobs", wanted)


_BEFORE = (
    fields.check_cache_salt,
    _check_prompt,
    fields.check_stream_options,
    _check_logprobs,
    fields.check_response_format,
    fields.check_structured_outputs,
)


@dataclass(frozen=True, slots=True)
class CompletionSpec:
    """What a completion's answer is written from."""

    env: ServerEnv
    response_id: str
    model: str
    created: int
    echo: bool
    echo_only: bool
    """`max_tokens` 0: the prompt is the whole answer."""
    logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    as_ids: bool
    include_usage: bool
    continuous_usage: bool
    n: int
    prompts: tuple[PromptPlan, ...]
    beam: bool = False


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate and tokenise. Raises WireError for everything found before the head."""
    return plan_request(http.read_model(CompletionRequest, body, headers), headers, env)


def plan_request(request: CompletionRequest, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """The same from a request model that has been read already (`/invocations`, render routes)."""
    model, lora = models.resolve(request.model, env)
    _check_unsupported(request, env)
    planned = _prompts(request, env)
    prompt_tokens = max((len(prompt.token_ids) for prompt in planned), default=0)
    sampled = _sampling(request, env, prompt_tokens)
    sampling.check_ranges(sampled, env)
    answer = structured.wanted_answer(request.response_format, request.structured_outputs, planned, env)
    routing = Routing.read(request, headers, env)
    spec = _spec(request, env, model, sampled, planned, routing.id_base)
    ids = [prompt.token_ids for prompt in planned]
    return Generation(
        spec=spec,
        response_id=spec.response_id,
        model=model,
        prompts=planned,
        sampling=sampling.plan(sampled, env),
        stream=bool(request.stream),
        family=name,
        indexed_ids=True,
        priority=routing.priority,
        lora=lora,
        cache_salt=request.cache_salt,
        data_parallel_rank=routing.rank,
        session_id=routing.session_id,
        stream_interval=request.stream_interval or env.stream_interval,
        late_error=sampling.late_error(sampled, ids, env) or answer.late_error or routing.late_error,
        answer_text=answer.text,
        kv_transfer=request.kv_transfer_params,
        extra={"beam": sampled.beam, "vllm_xargs": dict(request.vllm_xargs or {})},
    )


def _check_unsupported(request: CompletionRequest, env: ServerEnv) -> None:
    if request.suffix is not None:
        raise WireError("suffix is only supported for models with FIM (fill-in-the-middle) rendering", param="suffix")
    if request.prompt_embeds and not env.enable_prompt_embeds:
        raise http.parameter_error("`prompt_embeds` needs a server with `--enable-prompt-embeds`", "prompt_embeds")
    sampling.check_logit_bias_keys(request.logit_bias)
    check_cache_salt(request.cache_salt, env)
    if request.use_beam_search and request.stream:
        raise WireError("Streaming is not currently supported with beam search")


def check_cache_salt(salt: str | None, env: ServerEnv) -> None:
    """The rule of the server's release (vLLM reference §2.2)."""
    rule = env.profile
    if salt is None or (len(salt) <= rule.cache_salt_max_chars and not set(salt) & set(rule.cache_salt_forbidden)):
        return
    told = f"cache_salt must have 1 to {rule.cache_salt_max_chars} characters and none of @ / \\ NUL"
    raise http.parameter_error(told, "cache_salt", salt)


def _prompts(request: CompletionRequest, env: ServerEnv) -> tuple[PromptPlan, ...]:
    prompt: Any = request.prompt
    single = isinstance(prompt, str) or (prompt and isinstance(prompt[0], int))
    given = [prompt] if single else list(prompt or ())
    if not given:
        raise WireError("You must pass at least one prompt")
    if len(given) > prompts.MAX_PROMPTS:
        raise WireError(f"A request may have at most {prompts.MAX_PROMPTS} prompts, got {len(given)}")
    return tuple(_one_prompt(one, request, env) for one in given)


def _one_prompt(one: str | list[int], request: CompletionRequest, env: ServerEnv) -> PromptPlan:
    keep, side = request.truncate_prompt_tokens, request.truncation_side
    if isinstance(one, str):
        return prompts.from_text(one, env, add_special_tokens=request.add_special_tokens, keep=keep, side=side)
    return prompts.from_token_ids(one, env, keep=keep, side=side)


def _sampling(request: CompletionRequest, env: ServerEnv, prompt_tokens: int) -> sampling.Sampling:
    requested = request.max_tokens
    if request.echo and requested == 0:
        requested = 1
    limit = sampling.capped_max_tokens(requested, "max_tokens", prompt_tokens, DEFAULT_MAX_TOKENS, env)
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = request.logprobs
    return sampling.from_request(request, env, max_tokens=limit, logprobs=request.logprobs, prompt_logprobs=prompt_logprobs)


def _spec(
    request: CompletionRequest,
    env: ServerEnv,
    model: str,
    sampled: sampling.Sampling,
    planned: tuple[PromptPlan, ...],
    id_base: str,
) -> CompletionSpec:
    options = request.stream_options
    forced = env.enable_force_include_usage
    return CompletionSpec(
        env=env,
        response_id=f"cmpl-{id_base}",
        model=model,
        created=env.now_s(),
        echo=bool(request.echo),
        echo_only=bool(request.echo) and request.max_tokens == 0,
        logprobs=sampled.logprobs,
        prompt_logprobs=sampled.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        as_ids=_or_default(request.return_tokens_as_token_ids, env.return_tokens_as_token_ids),
        include_usage=forced or bool(options and options.include_usage),
        continuous_usage=forced or bool(options and options.include_usage and options.continuous_usage_stats),
        n=sampled.n,
        prompts=planned,
        beam=sampled.beam,
    )


def _or_default(value: bool | None, default: bool) -> bool:
    return default if value is None else value


@dataclass(frozen=True, slots=True)
class Routing:
    """What the request headers say, over what the body says (vLLM reference §1.6). Of the session the body has the first word
    and `vllm_xargs` the last (vLLM 0.33, `_get_session_id`)."""

    id_base: str
    priority: int
    rank: int | None
    session_id: str | None
    late_error: WireError | None

    @classmethod
    def read(cls, request: Any, headers: Mapping[str, str], env: ServerEnv) -> "Routing":
        rank = _integer(headers.get("x-data-parallel-rank"))
        late = None
        if rank is not None and not 0 <= rank < env.data_parallel_size:
            late = WireError(f"data_parallel_rank {rank} is out of range [0, {env.data_parallel_size}).")
        priority = _integer(headers.get("x-vllm-priority"))
        return cls(
            id_base=headers.get("x-request-id") or request.request_id or env.new_id(),
            priority=request.priority if priority is None else priority,
            rank=rank,
            session_id=request.session_id or headers.get("x-session-id") or _extra_session(request),
            late_error=late,
        )


def _extra_session(request: Any) -> str | None:
    named = (getattr(request, "vllm_xargs", None) or {}).get("session_id")
    return named if isinstance(named, str) and named else None


def _integer(text: str | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def encoder(generation: Generation) -> StreamEncoder:
    return CompletionEncoder(generation.spec)


class CompletionEncoder:
    """Frames of one completion stream. Mutable: text offsets, counts and what has been echoed, per choice.

    `text_offset` counts on from an echoed prompt, as in a body (recorded from vLLM 0.32.0).
    A plain delta (no logprobs, token ids, usage or finish) is one join of prepared bytes around its text.
    """

    __slots__ = ("_counts", "_heads", "_offsets", "_plain", "_spec", "_tail", "_top")

    def __init__(self, spec: CompletionSpec) -> None:
        self._spec = spec
        self._top = _chunk_head(spec)
        total = spec.n * len(spec.prompts)
        self._heads = [b'%b"choices":[{"index":%d,"text":' % (self._top, index) for index in range(total)]
        self._tail = _plain_tail(spec)
        self._counts = [0] * total
        self._offsets: list[int | None] = [None] * total
        self._plain = not (spec.echo or spec.token_ids or spec.continuous_usage or spec.logprobs is not None)

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        if self._plain and delta.finish_reason is None:
            return b"".join((self._heads[delta[0]], http.json_text(delta.text), self._tail))
        return self._full(delta)

    def plain(self, index: int) -> tuple[bytes, bytes] | None:
        return (self._heads[index], self._tail) if self._plain else None

    def close(self, usage: Usage) -> bytes:
        spec = self._spec
        if not spec.include_usage:
            return chunks.DONE
        details = spec.env.enable_prompt_tokens_details
        told: dict[str, Any] = {"usage": chunks.stream_usage(usage, details, created=False)}
        told["system_fingerprint"] = spec.env.system_fingerprint
        if usage.metrics is not None and spec.env.enable_per_request_metrics:
            told["metrics"] = {key: value for key, value in usage.metrics.items() if value is not None}
        return b'%b"choices":[],%b\n\n%b' % (self._top, http.dumps(told)[1:], chunks.DONE)

    def error(self, error: WireError) -> bytes:
        return http.error_frames(error, spaced=True)

    def _full(self, delta: Delta) -> bytes:
        spec, index = self._spec, delta.index
        first = self._offsets[index] is None
        prompt = spec.prompts[index // spec.n]
        echoing = first and spec.echo
        text = _with_echo(prompt, delta.text, spec) if echoing else delta.text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": self._logprobs(delta, prompt, echoing)}
        choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        shown = spec.echo or spec.token_ids
        choice["prompt_token_ids"] = list(prompt.token_ids) if first and shown else None
        choice["token_ids"] = list(delta.token_ids) if spec.token_ids else None
        if spec.env.profile.weight_versions:
            choice["weight_versions"] = None
        self._offsets[index] = (self._offsets[index] or 0) + len(text)
        self._counts[index] += len(delta.token_ids)
        return self._frame(choice, len(prompt.token_ids), self._counts[index])

    def _frame(self, choice: dict[str, Any], prompt_tokens: int, completion_tokens: int) -> bytes:
        spec = self._spec
        told: dict[str, Any] = {"choices": [choice]}
        if spec.continuous_usage:
            told["usage"] = chunks.counts(prompt_tokens, completion_tokens)
        if choice["finish_reason"] is not None and not spec.include_usage:
            told["system_fingerprint"] = spec.env.system_fingerprint
        if spec.env.profile.stream_kv_transfer:
            told["kv_transfer_params"] = None
        return b"%b%b\n\n" % (self._top, http.dumps(told)[1:])

    def _logprobs(self, delta: Delta, prompt: PromptPlan, echoing: bool) -> dict[str, Any] | None:
        spec = self._spec
        if spec.logprobs is None:
            return None
        entries = _echoed_entries(prompt, delta.logprobs or (), spec) if echoing else list(delta.logprobs or ())
        return chunks.legacy_logprobs(entries, self._offsets[delta.index] or 0, spec.as_ids)


def _chunk_head(spec: CompletionSpec) -> bytes:
    told = {"id": spec.response_id, "object": "text_completion", "created": spec.created, "model": spec.model}
    return b"data: %b," % http.dumps(told)[:-1]


def _plain_tail(spec: CompletionSpec) -> bytes:
    names = ["logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids"]
    told = dict.fromkeys(names) | chunks.weight_versions(spec.env)
    after = b',"kv_transfer_params":null' if spec.env.profile.stream_kv_transfer else b""
    return b",%b]%b}\n\n" % (http.dumps(told)[1:], after)


def _with_echo(prompt: PromptPlan, text: str, spec: CompletionSpec) -> str:
    shown = spec.env.tokenizer.decode(prompt.token_ids, skip_special_tokens=False) if prompt.text is None else prompt.text
    return shown if spec.echo_only else shown + text


def _echoed_entries(prompt: PromptPlan, entries: Sequence[TokenLogprob], spec: CompletionSpec) -> list[TokenLogprob]:
    asked = spec.logprobs or 0
    before = chunks.prompt_entries(prompt.token_ids, asked, spec.env.tokenizer)
    return before if spec.echo_only else [*before, *entries]


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    """The JSON of an answer that is not streamed, nulls included."""
    spec: CompletionSpec = generation.spec
    choices, usage = chunks.beams(generation, choices, usage)
    details = None if spec.beam else chunks.body_details(usage, spec.env.enable_prompt_tokens_details, created=False)
    told: dict[str, Any] = {
        "id": spec.response_id,
        "object": "text_completion",
        "created": spec.created,
        "model": spec.model,
        "choices": [_body_choice(spec, choice) for choice in choices],
        "service_tier": None,
        "system_fingerprint": spec.env.system_fingerprint,
        "usage": chunks.body_usage(usage, details, None),
        "kv_transfer_params": usage.kv_transfer,
        "ec_transfer_params": None,
    }
    return http.dumps(told | chunks.body_metrics(usage, spec.env))


def _body_choice(spec: CompletionSpec, result: ChoiceResult) -> dict[str, Any]:
    prompt = spec.prompts[result.prompt_index]
    logprobs = None
    if spec.logprobs is not None:
        entries = _echoed_entries(prompt, result.logprobs or (), spec) if spec.echo else list(result.logprobs or ())
        logprobs = chunks.legacy_logprobs(entries, 0, spec.as_ids)
    choice: dict[str, Any] = {
        "index": result.index,
        "text": _with_echo(prompt, result.text, spec) if spec.echo else result.text,
        "logprobs": logprobs,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "token_ids": list(result.token_ids) if spec.token_ids else None,
        "prompt_logprobs": chunks.prompt_logprobs(prompt.token_ids, spec.prompt_logprobs, spec.env),
        "prompt_token_ids": list(prompt.token_ids) if spec.token_ids else None,
        "routed_experts": None,
    }
    return choice | chunks.weight_versions(spec.env)


def error_body(error: WireError) -> bytes:
    return http.error_body(error)
