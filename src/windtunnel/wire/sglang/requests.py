"""What all SGLang request bodies share: ids, adapters, rank, bootstrap fields, sampling (SGLang reference §7.2, §7.4)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field

from windtunnel.core.request import Lora
from windtunnel.wire.family import PromptPlan, SamplingPlan, WireError
from windtunnel.wire.sglang.env import SglangEnv
from windtunnel.wire.synth.errors import SynthesisError
from windtunnel.wire.synth.regex import compiled
from windtunnel.wire.vllm import fields, prompts, structured

MAX_BATCH = 1024
"""Prompts in one request; the real server has no limit."""
MAX_N = 1024
MAX_RANKS = 1024
MAX_STOP_REGEX = 32
MAX_STOP_REGEX_BYTES = 256
_META = frozenset(".^$*+?{}[]\\|()")
MAX_RESULTS = 4096
"""Prompts times `n`."""
Bootstrap = tuple[str, int | None, int]
T = TypeVar("T")


class SessionFields(fields.OpenModel):
    """`session_params`: where in which session the request goes on (SGLang 0.5.23, `SessionParams`)."""

    id: str | None = None
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A request of a session."""

    session: str
    rid: str | None
    """The request to go on from."""
    offset: int
    """Tokens to keep of what comes before, from its end if it is negative; 0: all."""
    replace: bool
    drop_previous_output: bool


class RoutingFields(fields.OpenModel):
    """Fields that every endpoint takes; lists of them belong to batches."""

    rid: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    priority: int | None = None
    lora_path: str | list[str | None] | None = None
    session_id: str | None = None
    bootstrap_host: str | list[str] | None = None
    bootstrap_port: int | list[int | None] | None = None
    bootstrap_room: int | list[int] | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    disagg_prefill_dp_rank: Annotated[int, Field(ge=0, lt=MAX_RANKS)] | None = None


class SamplingFields(fields.OpenModel):
    """Fields that the native sampling parameters and the OpenAI requests have in common."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    regex: str | None = None
    ebnf: str | None = None


@dataclass(frozen=True, slots=True)
class Routing:
    """One value for all prompts, except for the ids (one a prompt) and the bootstrap triples (one a choice)."""

    rids: tuple[str, ...]
    lora: Lora | None
    rank: int | None
    bootstrap: tuple[Bootstrap, ...] | None
    prefill_rank: int | None
    """On a decode: the prefill's rank, where the room does not tell it."""
    priority: int
    cache_salt: str | None
    extra_key: str | None
    routing_key: str | None
    session_id: str | None


def routing(
    request: RoutingFields, headers: Mapping[str, str], count: int, env: SglangEnv, model: str | None = None, n: int | None = 1
) -> Routing:
    """`count` prompts with `n` choices each. Raises the 400 for what does not fit the batch or the server."""
    return Routing(
        rids=_rids(request.rid, count, env),
        lora=_lora(request.lora_path, model, env),
        rank=_rank(request, headers, env),
        bootstrap=_bootstrap(request, count, n or 1),
        prefill_rank=request.disagg_prefill_dp_rank,
        priority=request.priority or 0,
        cache_salt=first(request.cache_salt),
        extra_key=first(request.extra_key),
        routing_key=headers.get("x-smg-routing-key"),
        session_id=request.session_id,
    )


def session_turn(told: SessionFields | None, session_id: str | None, results: int) -> SessionTurn | None:
    """What `session_params` ask for; None without an id in them. Raises the 400 for what does not fit them."""
    if told is not None and session_id is not None:
        raise WireError("session_id and session_params cannot both be set.")
    if told is None or not told.id:
        return None
    if results > 1:
        raise WireError("session_params: a request of a session has one prompt and one answer, a batch is not simulated")
    return SessionTurn(told.id, told.rid, told.offset or 0, bool(told.replace), bool(told.drop_previous_output))


def new_rid(env: SglangEnv) -> str:
    """32 hex digits, as SGLang makes them."""
    return env.new_id() + env.new_id()


def _rids(given: str | list[str] | None, count: int, env: SglangEnv) -> tuple[str, ...]:
    """A single id of a batch gets `_0`, `_1`, … appended."""
    if isinstance(given, list):
        if len(given) != count:
            raise WireError(f"rid has {len(given)} entries: a batch of {count} needs as many")
        if len(set(given)) != count:
            raise WireError("rid has the same id twice: ids of a batch must differ")
        return tuple(given)
    base = given or new_rid(env)
    return (base,) if count == 1 else tuple(f"{base}_{index}" for index in range(count))


def _lora(path: str | list[str | None] | None, model: str | None, env: SglangEnv) -> Lora | None:
    """`lora_path` names a loaded adapter; so does `base:adapter` as the model."""
    name = path[0] if isinstance(path, list) else path
    if name is None and model and model not in env.served_models and ":" in model:
        name = model.partition(":")[2]
    if not name:
        return None
    lora = env.loras.get(name)
    if lora is None:
        loaded = ", ".join(env.loras) or "none"
        raise WireError(f"LoRA adapter {name!r} is not loaded. Loaded adapters: {loaded}.")
    return lora


def _rank(request: RoutingFields, headers: Mapping[str, str], env: SglangEnv) -> int | None:
    header = headers.get("x-data-parallel-rank")
    rank = int(header) if header and header.isascii() and header.isdigit() else request.routed_dp_rank
    rank = request.data_parallel_rank if rank is None else rank
    if rank is not None and not 0 <= rank < env.data_parallel_size:
        raise WireError(f"routed_dp_rank is {rank}: must be in [0, {env.data_parallel_size})")
    return rank


def _bootstrap(request: RoutingFields, count: int, n: int) -> tuple[Bootstrap, ...] | None:
    """One triple for each choice, prompt by prompt. A list has one entry for each prompt, or for each choice (routers send that
    for `n > 1`, reference §2.4); rooms that are not given count up from the one before.
    """
    if request.bootstrap_host is None or request.bootstrap_room is None:
        return None
    room = request.bootstrap_room
    if isinstance(room, list):
        rooms: list[int] = _spread("bootstrap_room", room, count, n)
        rooms = rooms if len(room) == count * n else [one + index % n for index, one in enumerate(rooms)]
    else:
        rooms = [room + index for index in range(count * n)]
    hosts = _spread("bootstrap_host", request.bootstrap_host, count, n)
    ports = _spread("bootstrap_port", request.bootstrap_port, count, n)
    return tuple(zip(hosts, ports, rooms, strict=True))


def _spread(name: str, value: T | list[T], count: int, n: int) -> list[T]:
    """One value for each choice."""
    if not isinstance(value, list):
        return [value] * (count * n)
    if len(value) == count * n:
        return value
    if len(value) != count:
        needed = f"{count}" if n == 1 else f"{count} or {count * n}"
        raise WireError(f"{name} has {len(value)} entries: {count} prompts with n={n} need {needed}")
    return [one for one in value for _ in range(n)]


def first(value: T | list[T] | None) -> T | None:
    """Of a member that is one value, or one for each prompt."""
    return (value[0] if value else None) if isinstance(value, list) else value


def prompt_of(value: str | Sequence[int], env: SglangEnv, *, special: bool = True, may_be_empty: bool = False) -> PromptPlan:
    """Tokenise one prompt. Raises the 400 for one that cannot be."""
    if isinstance(value, str):
        planned = prompts.from_text(value, env, add_special_tokens=special)
    else:
        planned = prompts.from_token_ids(value, env)
    if not planned.token_ids:
        if may_be_empty:
            return planned
        raise WireError("The prompt is empty: it needs at least one token.")
    for extreme in (min(planned.token_ids), max(planned.token_ids)):
        if not 0 <= extreme < env.vocabulary:
            raise WireError(f"input_ids holds {extreme}: this model has token ids from 0 to {env.vocabulary - 1}")
    return planned


def room_of(planned: Sequence[PromptPlan], env: SglangEnv) -> int:
    """Output tokens that the longest prompt leaves; raises the 400 when there is no room for any."""
    longest = max(len(prompt.token_ids) for prompt in planned)
    room = env.max_model_len - longest
    if room < 1:
        raise WireError(f"The input ({longest} tokens) is longer than the model's context length ({env.max_model_len} tokens).")
    return room


def check_size(prompts: int, n: int) -> None:
    """Raises the 400 for more results than one call may ask for."""
    if prompts * n > MAX_RESULTS:
        raise WireError(f"{prompts} prompts with n={n} are {prompts * n} results: at most {MAX_RESULTS} in one request")


def check_logprobs(field: str, count: int | None, env: SglangEnv) -> None:
    """A limit of ours: SGLang has none."""
    if count is not None and not 0 <= count <= env.max_logprobs:
        raise WireError(f"{field} must be in [0, {env.max_logprobs}], got {count}.")


def output_limit(asked: int | None, planned: Sequence[PromptPlan], env: SglangEnv) -> int:
    """`max_new_tokens`: what was asked for, or all that is left. More than fits is a 400 (no truncation is asked for)."""
    room = room_of(planned, env)
    if asked is None:
        return room
    if asked > room:
        raise WireError(
            f"Requested token count exceeds the model's maximum context length of {env.max_model_len} tokens: "
            f"{env.max_model_len - room} tokens of input and {asked} of output."
        )
    return asked


@dataclass(frozen=True, slots=True)
class _Rule:
    field: str
    ok: Callable[[Any], bool]
    must: str


_RULES = (
    _Rule("temperature", lambda v: v >= 0, "at least 0"),
    _Rule("top_p", lambda v: 0 < v <= 1, "in (0, 1]"),
    _Rule("min_p", lambda v: 0 <= v <= 1, "in [0, 1]"),
    _Rule("top_k", lambda v: v == -1 or v >= 1, "-1 (off) or at least 1"),
    _Rule("frequency_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]"),
    _Rule("presence_penalty", lambda v: -2 <= v <= 2, "in [-2, 2]"),
    _Rule("repetition_penalty", lambda v: 0 < v <= 2, "in (0, 2]"),
    _Rule("max_new_tokens", lambda v: v >= 1, "at least 1"),
    _Rule("min_new_tokens", lambda v: v >= 0, "at least 0"),
    _Rule("n", lambda v: 1 <= v <= MAX_N, f"in [1, {MAX_N}]"),
)


def check_ranges(values: Mapping[str, Any]) -> None:
    """Raises the 400 of the first value out of range. Keys are SGLang's own sampling names; None is "not given"."""
    for rule in _RULES:
        value = values.get(rule.field)
        if value is not None and not rule.ok(value):
            raise WireError(f"{rule.field} must be {rule.must}, got {value}.")
    least, most = values.get("min_new_tokens") or 0, values.get("max_new_tokens")
    if most is not None and least > most:
        raise WireError(f"min_new_tokens must be in [0, max_new_tokens({most})], got {least}.")


SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "top_k",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


def sampling_plan(request: Any, max_tokens: int, *, min_tokens: int, logprobs: int | None, env: SglangEnv) -> SamplingPlan:
    """`request` has SGLang's common names: n, stop, stop_token_ids, stop_regex, no_stop_trim, ignore_eos, skip_special_tokens.

    A stop regex without metacharacters is a stop string: SGLang trims an answer where the text of the *pattern* is found.
    Raises the 400 for a stop regex that cannot be.
    """
    stop = request.stop
    patterns = _stop_regex(getattr(request, "stop_regex", None))
    plain = tuple(pattern for pattern in patterns if _META.isdisjoint(pattern))
    return SamplingPlan(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=request.n or 1,
        stop=(*(text for text in ([stop] if isinstance(stop, str) else stop or ()) if text), *plain),
        stop_token_ids=(*(request.stop_token_ids or ()), *(() if request.ignore_eos else env.extra_eos_token_ids)),
        stop_regex=tuple(pattern for pattern in patterns if pattern not in plain),
        early_stops=True,
        include_stop_str=request.no_stop_trim,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens is not False,
        logprobs=logprobs,
        temperature=request.temperature,
    )


def _stop_regex(given: str | list[str] | None) -> tuple[str, ...]:
    """Limits and their texts: SGLang 0.5.23, `SamplingParams.normalize`."""
    patterns = tuple(text for text in ([given] if isinstance(given, str) else given or ()) if text)
    if len(patterns) > MAX_STOP_REGEX:
        raise WireError(f"at most {MAX_STOP_REGEX} stop_regex patterns are allowed, got {len(patterns)}")
    for pattern in patterns:
        size = len(pattern.encode("utf-8", "surrogatepass"))
        if size > MAX_STOP_REGEX_BYTES:
            raise WireError(f"stop_regex is {size} bytes, over the {MAX_STOP_REGEX_BYTES}-byte limit")
        try:
            compiled(pattern)
        except SynthesisError as error:
            raise WireError(f"stop_regex: {error}") from None
    return patterns


def wanted_text(request: Any, planned: Sequence[PromptPlan], env: SglangEnv, response_format: Any = None) -> str | None:
    """The answer that `regex`, `ebnf`, `json_schema` or `response_format` asks for. A grammar that cannot be is a 400."""
    given = {"json": getattr(request, "json_schema", None), "regex": request.regex, "grammar": request.ebnf}
    named = {kind: value for kind, value in given.items() if value}
    if len(named) > 1:
        raise WireError("Only one of regex, json_schema, or ebnf can be set.")
    outputs = fields.StructuredOutputs(**named) if named else None
    answer = structured.wanted_answer(response_format, outputs, planned, env)
    if answer.late_error is not None:
        raise answer.late_error
    return answer.text
