"""`/openapi.json` and `/docs`: which routes a server has, with the operation ids that FastAPI gives them (§1.1).

Request bodies are described by the request models of this package; answers are not described.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from windtunnel.wire.http import dumps
from windtunnel.wire.vllm import (
    chat_batch,
    chat_request,
    completions,
    decisions,
    generate,
    messages_request,
    pooled,
    pooling,
    rerank,
    responses_in,
    score,
    scoring,
    tokenize,
)

Operation = tuple[str, str, str, type[BaseModel] | None]
"""Path, method, the name of vLLM's handler, request model."""

_TOKENIZE: Any = tokenize.TokenizeCompletionRequest

OPERATIONS: tuple[Operation, ...] = (
    ("/load", "get", "get_server_load_metrics", None),
    ("/version", "get", "show_version", None),
    ("/kv_event_sources", "get", "kv_event_sources", None),
    ("/health", "get", "health", None),
    ("/metrics", "get", "metrics", None),
    ("/tokenize", "post", "tokenize", _TOKENIZE),
    ("/detokenize", "post", "detokenize", tokenize.DetokenizeRequest),
    ("/v1/models", "get", "show_available_models", None),
    ("/v1/systemone", "post", "create_structured_decision", decisions.StructuredDecisionRequest),
    ("/ping", "get", "ping", None),
    ("/ping", "post", "ping", None),
    ("/invocations", "post", "decorated_func", None),
    ("/v1/chat/completions", "post", "create_chat_completion", chat_request.ChatCompletionRequest),
    ("/v1/chat/completions/batch", "post", "create_batch_chat_completion", chat_batch.BatchChatCompletionRequest),
    ("/v1/responses", "post", "create_responses", responses_in.ResponsesRequest),
    ("/v1/responses/{response_id}", "get", "retrieve_responses", None),
    ("/v1/responses/{response_id}/cancel", "post", "cancel_responses", None),
    ("/v1/completions", "post", "create_completion", completions.CompletionRequest),
    ("/v1/messages", "post", "create_messages", messages_request.MessagesRequest),
    ("/v1/messages/count_tokens", "post", "count_tokens", messages_request.CountTokensRequest),
    ("/generative_scoring", "post", "create_generative_scoring", scoring.GenerativeScoringRequest),
    ("/scale_elastic_ep", "post", "scale_elastic_ep", None),
    ("/is_scaling_elastic_ep", "post", "is_scaling_elastic_ep", None),
    ("/inference/v1/generate", "post", "generate", generate.GenerateRequest),
    ("/v1/embeddings", "post", "create_embedding", pooled.InputRequest),
    ("/pooling", "post", "create_pooling", pooling.PoolingRequest),
    ("/classify", "post", "create_classify", pooled.InputRequest),
    ("/score", "post", "create_score", score.ScoreRequest),
    ("/v1/score", "post", "create_score_v1", score.ScoreRequest),
    ("/rerank", "post", "do_rerank", rerank.RerankRequest),
    ("/v1/rerank", "post", "do_rerank_v1", rerank.RerankRequest),
    ("/v2/rerank", "post", "do_rerank_v2", rerank.RerankRequest),
)
"""In the order of the recorded document; what a server does not have is left out."""


def document(served: Sequence[str], *, scale_out: bool) -> bytes:
    """The document of a server that has these paths. Routes that only answer 403 are not in it, as recorded."""
    shown = [row for row in OPERATIONS if row[0] in served and (scale_out or not row[0].startswith("/inference"))]
    paths: dict[str, dict[str, Any]] = {}
    for path, method, handler, model in shown:
        paths.setdefault(path, {})[method] = _operation(path, method, handler, model)
    schemas = _schemas({model.__name__: model for *_row, model in shown if model is not None})
    info = {"title": "FastAPI", "version": "0.1.0"}
    return dumps({"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}})


def _operation(path: str, method: str, handler: str, model: type[BaseModel] | None) -> dict[str, Any]:
    plain = "".join(char if char.isalnum() else "_" for char in path)
    told: dict[str, Any] = {"operationId": f"{handler}{plain}_{method}"}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        told["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    if model is not None:
        reference = {"$ref": f"#/components/schemas/{model.__name__}"}
        told["requestBody"] = {"content": {"application/json": {"schema": reference}}, "required": True}
    return told | {"responses": {"200": {"content": {"application/json": {"schema": {}}}}}}


def _schemas(models: dict[str, type[BaseModel]]) -> dict[str, Any]:
    wanted = [(model, "validation") for model in models.values()]
    _map, made = models_json_schema(wanted, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    schemas: dict[str, Any] = made.get("$defs", {})
    return schemas


PAGE = """<!DOCTYPE html>
<html>
<head>
<meta name="viewport" content="width=device-width, initial-scale=1.0">
<title>FastAPI - Swagger UI</title>
</head>
<body>
<p>The API is described by <a href="/openapi.json">/openapi.json</a>. This page loads no script from elsewhere.</p>
</body>
</html>
"""
