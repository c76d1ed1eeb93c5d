"""`/rerank`, `/v1/rerank`, `/v2/rerank`: documents in the order of their closeness to a query (vLLM reference §1.5)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, Usage
from windtunnel.wire.vllm import models, pooled
from windtunnel.wire.vllm.score import Texts, as_list, check_lengths, similarities, text_prompts

name = "rerank"
paths: Sequence[str] = ("/rerank", "/v1/rerank", "/v2/rerank")

encoder = pooled.no_encoder
error_body = http.error_body


class RerankRequest(pooled.PoolingFields):
    query: str
    documents: Texts
    top_n: int = Field(default=0, ge=0)
    """0: all documents."""


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate and tokenise. Raises WireError."""
    request = http.read_model(RerankRequest, body, headers)
    models.resolve(request.model, env)
    pooled.check_removed(request)
    documents = as_list(request.documents)
    check_lengths(1, len(documents))
    made = text_prompts([request.query, *documents], request, env)
    extra = {"documents": tuple(documents), "top_n": request.top_n}
    return pooled.planned("score", name, request, made, headers, env, extra=extra)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    spec: pooled.PooledSpec = generation.spec
    scores = similarities(generation.prompts, 1, spec.env.embedding_size)
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))
    top = spec.extra["top_n"] if spec.extra["top_n"] > 0 else len(order)
    results = [_result(at, spec.extra["documents"][at], scores[at]) for at in order[:top]]
    told = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
    return http.dumps({"id": spec.response_id, "model": spec.model, "usage": told, "results": results})


def _result(index: int, document: str, score: float) -> dict[str, Any]:
    return {"index": index, "document": {"text": document, "multi_modal": None}, "relevance_score": score}
