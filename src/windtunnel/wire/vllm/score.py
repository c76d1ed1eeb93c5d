"""`/score` and `/v1/score`: how close two texts are (vLLM reference §1.5).

The cosine of their vectors; both texts are prompts of their own, as vLLM does it for embedding models.
"""

from collections.abc import Mapping, Sequence

from pydantic import AliasChoices, Field

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import ChoiceResult, Generation, PromptPlan, Usage, WireError
from windtunnel.wire.vllm import models, pooled, prompts, vectors

name = "score"
paths: Sequence[str] = ("/score", "/v1/score")

encoder = pooled.no_encoder
error_body = http.error_body

Texts = str | list[str]


class ScoreRequest(pooled.PoolingFields):
    text_1: Texts = Field(validation_alias=AliasChoices("text_1", "queries", "data_1"))
    text_2: Texts = Field(validation_alias=AliasChoices("text_2", "documents", "items", "data_2"))


def plan(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> Generation:
    """Read, validate and tokenise. Raises WireError."""
    request = http.read_model(ScoreRequest, body, headers)
    models.resolve(request.model, env)
    pooled.check_removed(request)
    first, second = as_list(request.text_1), as_list(request.text_2)
    check_lengths(len(first), len(second))
    made = text_prompts([*first, *second], request, env)
    return pooled.planned("score", name, request, made, headers, env, extra={"first": len(first)})


def check_lengths(first: int, second: int) -> None:
    if first > 1 and first != second:
        raise WireError("Input lengths must be either 1:1, 1:N or N:N")
    if first == 0:
        raise WireError("At least one text element must be given")
    if second == 0:
        raise WireError("At least one text_pair element must be given")


def as_list(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def text_prompts(texts: Sequence[str], request: pooled.PoolingFields, env: ServerEnv) -> tuple[PromptPlan, ...]:
    if len(texts) > prompts.MAX_PROMPTS:
        raise WireError(f"A request may have at most {prompts.MAX_PROMPTS} texts, got {len(texts)}")
    return tuple(pooled.text_prompt(text, request, env) for text in texts)


def body(generation: Generation, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
    spec: pooled.PooledSpec = generation.spec
    scores = similarities(generation.prompts, spec.extra["first"], spec.env.embedding_size)
    return pooled.listed(spec, [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)], usage)


def similarities(made: Sequence[PromptPlan], first: int, size: int) -> list[float]:
    """The first prompt, or the first `first` prompts pairwise, against the others."""
    all_vectors = [vectors.vector(prompt.token_ids, size) for prompt in made]
    left, right = all_vectors[:first], all_vectors[first:]
    if len(left) == 1:
        left = left * len(right)
    return [vectors.cosine(a, b) for a, b in zip(left, right, strict=True)]
