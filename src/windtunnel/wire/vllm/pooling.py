"""`/pooling`: the pooler's raw output (vLLM reference §1.5): a vector, or a classifier's probabilities."""

from collections.abc import Mapping, Sequence

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, Usage
from windtunnel.wire.vllm import embeddings, models, pooled, vectors

name = "pooling"
paths: Sequence[str] = ("/pooling",)

encoder = pooled.no_encoder
error_body = http.error_body


class PoolingRequest(pooled.InputRequest):
    task: str | None = None


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate and tokenise. Raises WireError."""
    request = http.read_model(PoolingRequest, body, headers)
    models.resolve(request.model, env)
    made = pooled.input_prompts(request, env)
    _check_task(request, env)
    told = {"size": env.embedding_size, "encoding_format": request.encoding_format, "extra": {"task": env.pooling_task}}
    return pooled.planned("pooling", name, request, made, headers, env, **told)


def _check_task(request: PoolingRequest, env: ServerEnv) -> None:
    """Raises the 400 of `ServingPooling._verify_pooling_task` (vLLM 0.33)."""
    if request.dimensions is not None:
        raise http.parameter_error("dimensions is currently not supported", "dimensions")
    if request.task not in (None, env.pooling_task):
        raise http.parameter_error(f"Unsupported task: {request.task!r} Supported tasks: {(env.pooling_task,)}", "task")


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    spec: pooled.PooledSpec = generation.spec
    data = [
        {"index": at, "object": "pooling", "data": _data(prompt.token_ids, spec)}
        for at, prompt in enumerate(generation.prompts)
    ]
    return pooled.listed(spec, data, usage)


def _data(token_ids: Sequence[int], spec: pooled.PooledSpec) -> object:
    if spec.extra["task"] == "embed":
        return embeddings.encoded(token_ids, spec)
    values = vectors.probabilities(token_ids, spec.env.num_labels)
    return vectors.as_base64(values) if spec.encoding_format == "base64" else values
