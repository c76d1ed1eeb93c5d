"""`/v1/systemone` and `/v1/decisions`: structured decisions of models that have such a head (vLLM reference §1.1)."""

from collections.abc import Mapping
from typing import Any

from windtunnel.wire import http
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import WireError
from windtunnel.wire.vllm import fields, models
from windtunnel.wire.vllm.fields import Int64

PATHS = ("/v1/systemone", "/v1/decisions")


class QuestionSpec(fields.OpenModel):
    type: str
    instructions: str = ""
    criteria: Any = None


class StructuredDecisionRequest(fields.OpenModel):
    """Fields in the order of vLLM's own model."""

    model: str | None = None
    state: Any
    questions: dict[str, QuestionSpec]
    instructions: str | None = None
    images: list[str] | None = None
    audio: list[str] | None = None
    videos: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Int64 = 0
    request_id: str | None = None


def refuse(body: bytes, headers: Mapping[str, str], env: ServerEnv) -> bytes:
    """Raises WireError always: the body's faults, an unknown model, or 501, because no plain language model has the head."""
    request = http.read_model(StructuredDecisionRequest, body, headers)
    models.resolve(request.model, env)
    raise WireError("This model has no head for structured decisions", 501, "NotImplementedError")
