"""What the pooling families share: inputs, one engine step for each prompt, usage (vLLM reference §1.5).

A pooling request is one prefill: the engine is asked for a single token that nobody sees, so queues and metrics hold.
No pooling server was recorded; shapes, ids and refusals were checked against `vllm/entrypoints/pooling` of vLLM 0.33.0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Generation, PromptPlan, SamplingPlan, StreamEncoder, Usage, WireError
from windtunnel.wire.vllm import chat_prompt, fields, messages_in, models, prompts
from windtunnel.wire.vllm.completions import check_cache_salt
from windtunnel.wire.vllm.fields import CacheSalt, Int64, TokenId, Truncation

ONE_STEP = SamplingPlan(max_tokens=1, ignore_eos=True)

EncodingFormat = Literal["float", "base64"]
_REMOVED_TASKS = {"score": "`classify`", "encode": "`token_embed` or `token_classify`"}
Inputs = list[TokenId] | list[list[TokenId]] | str | list[str]


class PoolingFields(fields.OpenModel):
    """Members that every pooling request has."""

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: Int64 = 0
    request_id: str | None = None
    cache_salt: CacheSalt | None = None


class InputRequest(PoolingFields):
    """Texts, token ids or a conversation."""

    input: Inputs | None = None
    messages: messages_in.MessageList | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    encoding_format: EncodingFormat = "float"
    dimensions: int | None = None


@dataclass(frozen=True, slots=True)
class PooledSpec:
    """What a pooling answer is written from."""

    env: ServerEnv
    response_id: str
    model: str
    created: int
    encoding_format: EncodingFormat = "float"
    size: int = 0
    """Dimensions of a vector."""
    extra: Mapping[str, Any] = field(default_factory=dict)


def check_removed(request: PoolingFields) -> None:
    """Raises the 400 for members that vLLM had once (`reject_removed_pooling_parameters`)."""
    if "normalize" in (request.model_extra or {}):
        raise http.parameter_error("Parameter `normalize` was removed; use `use_activation` instead.", "normalize")
    task = getattr(request, "task", None)
    if task in _REMOVED_TASKS:
        raise http.parameter_error(f"`{task}` task was removed; use {_REMOVED_TASKS[task]} instead.", "task")


def input_prompts(request: InputRequest, env: ServerEnv) -> tuple[PromptPlan, ...]:
    """One prompt for each input. Raises WireError."""
    check_removed(request)
    if request.messages is not None:
        chat_prompt.check_trust(request, env)
        return (chat_prompt.render(request.messages, request, env)[1],)
    given = request.input
    if given is None:
        raise validation_missing("input", request)
    if isinstance(given, str):
        return (text_prompt(given, request, env),)
    if not given:
        raise http.parameter_error("`input` must not be empty", "input")
    if isinstance(given[0], int):
        return (ids_prompt(given, request, env),)
    if len(given) > prompts.MAX_PROMPTS:
        raise http.parameter_error(f"`input` may have at most {prompts.MAX_PROMPTS} entries", "input", len(given))
    return tuple(text_prompt(one, request, env) if isinstance(one, str) else ids_prompt(one, request, env) for one in given)


def validation_missing(field_name: str, request: PoolingFields) -> WireError:
    shown = f"<dict of {len(request.model_fields_set)} items>"
    return http.validation_error([{"type": "missing", "loc": f"body.{field_name}", "msg": "Field required", "input": shown}])


def text_prompt(text: str, request: Any, env: ServerEnv) -> PromptPlan:
    keep, side = request.truncate_prompt_tokens, request.truncation_side
    special = getattr(request, "add_special_tokens", True)
    return _not_empty(prompts.from_text(text, env, add_special_tokens=special, keep=keep, side=side))


def ids_prompt(token_ids: Sequence[int], request: Any, env: ServerEnv) -> PromptPlan:
    prompts.check_vocabulary(token_ids, env)
    return _not_empty(prompts.from_token_ids(token_ids, env, keep=request.truncate_prompt_tokens, side=request.truncation_side))


def _not_empty(prompt: PromptPlan) -> PromptPlan:
    if not prompt.token_ids:
        raise WireError("The prompt cannot be empty")
    return prompt


def vector_size(request: InputRequest, env: ServerEnv) -> int:
    """`dimensions` cuts the vector short (Matryoshka)."""
    wanted = request.dimensions
    if wanted is None:
        return env.embedding_size
    if not 1 <= wanted <= env.embedding_size:
        raise http.parameter_error(f"`dimensions` must be from 1 to {env.embedding_size}", "dimensions", wanted)
    return wanted


def planned(
    prefix: str,
    family: str,
    request: PoolingFields,
    made: tuple[PromptPlan, ...],
    headers: Mapping[str, str],
    env: ServerEnv,
    **spec: Any,
) -> Generation:
    """One engine step for each prompt. The headers name the request only, not its rank, priority or session."""
    model, lora = models.resolve(request.model, env)
    check_cache_salt(request.cache_salt, env)
    base = headers.get("x-request-id") or request.request_id or env.new_id()
    answer = PooledSpec(env, f"{prefix}-{base}", model, env.now_s(), **spec)
    return Generation(
        spec=answer,
        response_id=answer.response_id,
        model=model,
        prompts=made,
        sampling=ONE_STEP,
        stream=False,
        family=family,
        indexed_ids=True,
        priority=request.priority,
        lora=lora,
        cache_salt=request.cache_salt,
    )


def listed(spec: PooledSpec, data: list[dict[str, Any]], usage: Usage) -> bytes:
    """The answer of every family but rerank."""
    head = {"id": spec.response_id, "object": "list", "created": spec.created, "model": spec.model}
    return http.dumps(head | {"data": data, "usage": usage_value(usage)})


def usage_value(usage: Usage) -> dict[str, Any]:
    """The engine's one token is not the client's."""
    told = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens, "completion_tokens": 0}
    return told | {"prompt_tokens_details": None, "completion_tokens_details": None}


def no_encoder(_generation: Generation) -> StreamEncoder:
    raise NotImplementedError("vectors and scores are never streamed: `plan` says stream=False")
