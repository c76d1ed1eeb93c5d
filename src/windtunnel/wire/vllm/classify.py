"""`/classify` (vLLM reference §1.5)."""

from collections.abc import Mapping, Sequence
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, Usage
from windtunnel.wire.vllm import models, pooled, vectors

name = "classify"
paths: Sequence[str] = ("/classify",)

encoder = pooled.no_encoder
error_body = http.error_body


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate and tokenise. Raises WireError."""
    request = http.read_model(pooled.InputRequest, body, headers)
    models.resolve(request.model, env)
    return pooled.planned("classify", name, request, pooled.input_prompts(request, env), headers, env)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    spec: pooled.PooledSpec = generation.spec
    labels = spec.env.num_labels
    return pooled.listed(spec, [_entry(at, prompt.token_ids, labels) for at, prompt in enumerate(generation.prompts)], usage)


def _entry(index: int, token_ids: Sequence[int], labels: int) -> dict[str, Any]:
    probabilities = vectors.probabilities(token_ids, labels)
    best = max(range(labels), key=probabilities.__getitem__)
    return {"index": index, "label": f"LABEL_{best}", "probs": probabilities, "num_classes": labels}
