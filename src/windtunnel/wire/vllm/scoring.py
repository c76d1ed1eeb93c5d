"""`/generative_scoring`, and the routes for model heads that a plain model has not (vLLM reference §1.1, §1.2)."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from pydantic import Field

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import WireError
from windtunnel.wire.vllm import chunks, fields, models, prompts
from windtunnel.wire.vllm.fields import Int64


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


class QuestionSpec(fields.OpenModel):
    type: str
    instructions: Any = ""
    criteria: Any = None


class StructuredDecisionRequest(fields.OpenModel):
    """Fields in the order of vLLM's own model."""

    model: str | None = None
    state: Any = Field(...)
    questions: dict[str, QuestionSpec]
    instructions: str | None = None
    images: list[str] | None = None
    audio: list[str] | None = None
    videos: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Int64 = 0
    request_id: str | None = None


def generative_scoring(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """A score in (0, 1) for each item: a pure function of its prompt. One token is generated for each. Raises WireError."""
    request = http.read_model(GenerativeScoringRequest, body, headers)
    model, _lora = models.resolve(request.model, env)
    if not request.items or not request.label_token_ids:
        raise WireError("`items` and `label_token_ids` must have at least one entry each")
    prompts.check_vocabulary(request.label_token_ids, env)
    rendered = [_prompt(request, item, env) for item in request.items]
    told = {
        "id": f"generative-scoring-{request.request_id or env.new_id()}",
        "object": "list",
        "created": env.now_s(),
        "model": model,
        "data": [{"index": at, "object": "score", "score": _score(tokens)} for at, tokens in enumerate(rendered)],
        "usage": chunks.counts(sum(map(len, rendered)), len(rendered))
        | {"prompt_tokens_details": None, "completion_tokens_details": None},
    }
    return http.dumps(told)


def _prompt(request: GenerativeScoringRequest, item: str | Sequence[int], env: ServerEnv) -> tuple[int, ...]:
    parts = [_tokens(part, request, env) for part in ((item, request.query) if request.item_first else (request.query, item))]
    return prompts.from_token_ids([token for part in parts for token in part], env).token_ids


def _tokens(part: str | Sequence[int], request: GenerativeScoringRequest, env: ServerEnv) -> Sequence[int]:
    if not isinstance(part, str):
        return part
    prompts.check_encodable(part)
    return env.tokenizer.encode(part, add_special_tokens=request.add_special_tokens)


def _score(token_ids: Sequence[int]) -> float:
    digest = blake2b(repr(tuple(token_ids)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest) + 1) / (2**64 + 2)


def systemone(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """A plain model has no such head: whatever is asked well is not implemented. Raises WireError."""
    request = http.read_model(StructuredDecisionRequest, body, headers)
    models.resolve(request.model, env)
    raise WireError("The model does not support structured decisions", 501, "NotImplementedError")
