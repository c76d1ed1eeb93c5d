"""`/generative_scoring`: how likely a label follows a query and an item (vLLM reference §1.2).

One prompt for each item, one token each. The probabilities are made up: a pure function of the prompt's tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, PromptPlan, Usage
from windtunnel.wire.vllm import chunks, fields, models, pooled, prompts
from windtunnel.wire.vllm.completions import Routing
from windtunnel.wire.vllm.fields import Int64

name = "generative_scoring"
paths: Sequence[str] = ("/generative_scoring",)

encoder = pooled.no_encoder
error_body = http.error_body


class GenerativeScoringRequest(fields.OpenModel):
    """Fields in the order of vLLM's own model."""

    model: str | None = None
    query: str | list[int]
    items: list[str] | list[list[int]]
    label_token_ids: list[int]
    apply_softmax: bool = True
    item_first: bool = False
    add_special_tokens: bool = True
    cache_salt: str | None = None
    priority: Int64 = 0
    request_id: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class ScoringSpec:
    """What the answer is written from."""

    env: ServerEnv
    response_id: str
    model: str
    created: int
    labels: tuple[int, ...]
    softmax: bool


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate and tokenise. Raises WireError."""
    request = http.read_model(GenerativeScoringRequest, body, headers)
    model, lora = models.resolve(request.model, env)
    _check(request, env)
    routing = Routing.read(request, headers, env)
    spec = ScoringSpec(
        env=env,
        response_id=f"generative-scoring-{routing.id_base}",
        model=model,
        created=env.now_s(),
        labels=tuple(request.label_token_ids),
        softmax=request.apply_softmax,
    )
    return Generation(
        spec=spec,
        response_id=spec.response_id,
        model=model,
        prompts=tuple(_prompt(request, item, env) for item in request.items),
        sampling=pooled.ONE_STEP,
        stream=False,
        family=name,
        indexed_ids=True,
        priority=routing.priority,
        lora=lora,
        cache_salt=request.cache_salt,
    )


def _check(request: GenerativeScoringRequest, env: ServerEnv) -> None:
    for field in ("items", "label_token_ids"):
        if not getattr(request, field):
            raise http.parameter_error(f"`{field}` must have at least one entry", field)
    if len(request.items) > prompts.MAX_PROMPTS:
        raise http.parameter_error(f"`items` may have at most {prompts.MAX_PROMPTS} entries", "items", len(request.items))
    outside = [label for label in request.label_token_ids if not 0 <= label < env.vocabulary]
    if outside:
        raise http.parameter_error(
            f"label_token_ids {outside} are not in the vocabulary of {env.vocabulary}", "label_token_ids", outside
        )


def _prompt(request: GenerativeScoringRequest, item: str | list[int], env: ServerEnv) -> PromptPlan:
    parts = (item, request.query) if request.item_first else (request.query, item)
    ids = [
        token for at, part in enumerate(parts) for token in _tokens(part, env, special=request.add_special_tokens and at == 0)
    ]
    if len(ids) >= env.max_model_len:
        raise http.parameter_error(
            f"A query and its item have {len(ids)} tokens; the context has {env.max_model_len}", "items", len(ids)
        )
    prompts.check_vocabulary(ids, env)
    return prompts.from_token_ids(ids, env)


def _tokens(part: str | list[int], env: ServerEnv, *, special: bool) -> Sequence[int]:
    if not isinstance(part, str):
        return part
    prompts.check_encodable(part)
    return env.tokenizer.encode(part, add_special_tokens=special)


def score(token_ids: Sequence[int], labels: Sequence[int], *, softmax: bool) -> float:
    """The probability of the first label: among the labels with `softmax`, else among all tokens."""
    weights = [math.exp(_logit(token_ids, label)) for label in labels]
    return weights[0] / sum(weights) if softmax else weights[0] / (1 + sum(weights)) / 2


def _logit(token_ids: Sequence[int], label: int) -> float:
    digest = blake2b(repr((tuple(token_ids), label)).encode(), digest_size=4).digest()
    return int.from_bytes(digest) / 2**32 * 12 - 6


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    spec: ScoringSpec = generation.spec
    scores = [score(prompt.token_ids, spec.labels, softmax=spec.softmax) for prompt in generation.prompts]
    told: dict[str, Any] = {"id": spec.response_id, "object": "list", "created": spec.created, "model": spec.model}
    told["data"] = [{"index": at, "object": "score", "score": value} for at, value in enumerate(scores)]
    return http.dumps(told | {"usage": chunks.body_usage(usage, None, None)})
