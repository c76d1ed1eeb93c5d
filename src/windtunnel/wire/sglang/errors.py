"""SGLang's error shapes (SGLang reference §7.3, §7.4): a flat object, not the nested envelope of OpenAI and vLLM."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from windtunnel.wire import http
from windtunnel.wire.family import WireError

INVALID = "Bad Request"
"""The `kind` of bodies that do not parse or do not validate."""
BAD_VALUE = 400
"""The status of a request that cannot be."""
_STATUS_NAMES = {400: "BAD_REQUEST", 500: "INTERNAL_SERVER_ERROR", 503: "SERVICE_UNAVAILABLE", 504: "GATEWAY_TIMEOUT"}
ModelT = TypeVar("ModelT", bound=BaseModel)


def flat(error: WireError) -> dict[str, Any]:
    return {"object": "error", "message": error.message, "type": error.kind, "param": None, "code": error.status}


def flat_body(error: WireError) -> bytes:
    return http.dumps(flat(error))


def stream_event(error: WireError) -> bytes:
    """An error inside an OpenAI stream: its `type` is the name of the status."""
    told = flat(error) | {"type": _STATUS_NAMES.get(error.status, error.kind)}
    return b"data: %b\n\n" % http.dumps({"error": told})


def read_model(model: type[ModelT], body: bytes, headers: Mapping[str, str]) -> ModelT:
    """The request model of a body. Raises WireError (400, never 422) for what does not parse or validate."""
    try:
        http.check_content_type(headers)
        value = http.parse_json(body)
    except WireError as error:
        raise WireError(error.message, 400, INVALID) from None
    return validated(model.model_validate, value)


def validated(validate: Callable[[Any], ModelT], value: Any) -> ModelT:
    if not isinstance(value, dict):
        raise WireError("The body must be a JSON object.", 400, INVALID)
    try:
        return validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False)
        lines = [f"{'.'.join(str(part) for part in entry['loc'])}: {entry['msg']}" for entry in found[: http.MAX_ERROR_LINES]]
        raise WireError(f"{len(found)} validation error(s): " + "; ".join(lines), 400, INVALID) from None
