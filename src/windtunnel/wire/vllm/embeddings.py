"""`/v1/embeddings` (vLLM reference §1.5)."""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, Usage
from windtunnel.wire.vllm import models, pooled, vectors

name = "embeddings"
paths: Sequence[str] = ("/v1/embeddings",)

encoder = pooled.no_encoder
error_body = http.error_body


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate and tokenise. Raises WireError."""
    request = http.read_model(pooled.InputRequest, body, headers)
    models.resolve(request.model, env)
    size = pooled.vector_size(request, env)
    made = pooled.input_prompts(request, env)
    return pooled.planned("embd", name, request, made, headers, env, size=size, encoding_format=request.encoding_format)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    spec: pooled.PooledSpec = generation.spec
    data = [
        {"index": at, "object": "embedding", "embedding": encoded(prompt.token_ids, spec)}
        for at, prompt in enumerate(generation.prompts)
    ]
    return pooled.listed(spec, data, usage)


def encoded(token_ids: Sequence[int], spec: pooled.PooledSpec) -> Any:
    """A vector as the client wants it: numbers or base64."""
    values = vectors.vector(token_ids, spec.env.embedding_size)
    if spec.size < len(values):
        values = vectors.unit(values[: spec.size])
    return vectors.as_base64(values) if spec.encoding_format == "base64" else values
