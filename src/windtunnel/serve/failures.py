"""Injected failures, as llm-d-inference-sim has them: a share of requests is refused with a chosen error, and `X-Return-Error`.

The kinds, statuses and `param` members are that simulator's (its reference §2.10, §2.11); the envelope is the family's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from windtunnel.wire.family import WireError

RETURN_ERROR = "x-return-error"

FAILURES: Mapping[str, WireError] = MappingProxyType(
    {
        "rate_limit": WireError("Rate limit reached. Please try again later.", 429, "RateLimitError"),
        "invalid_api_key": WireError("Incorrect API key provided.", 401, "AuthenticationError"),
        "context_length": WireError("The prompt is longer than the context window.", 400, "BadRequestError", "messages"),
        "server_error": WireError("The server is overloaded or not ready yet.", 503, "InternalServerError"),
        "invalid_request": WireError("The request is not valid.", 400, "BadRequestError", "model"),
        "model_not_found": WireError("The model does not exist.", 404, "NotFoundError", "model"),
    }
)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
}


@dataclass(frozen=True, slots=True)
class FailureConfig:
    """How many requests fail, in percent, and how. No types: all of them."""

    rate_percent: int = 0
    types: tuple[str, ...] = ()


def check_header(value: str) -> None:
    """Raises the error that `X-Return-Error` asks for."""
    if not (value.isascii() and value.isdigit() and 400 <= int(value) <= 599):
        raise WireError(f"X-Return-Error is {value!r}: must be a status from 400 to 599", param=RETURN_ERROR)
    status = int(value)
    kind = _TYPES.get(status, "InternalServerError" if status >= 500 else "APIConnectionError")
    raise WireError(f"Error {status}, as X-Return-Error asked for.", status, kind)


def roll(config: FailureConfig, chance: Random) -> None:
    """Raises one of the failures for `rate_percent` of the calls."""
    if config.rate_percent and chance.random() * 100 < config.rate_percent:
        raise FAILURES[chance.choice(config.types or tuple(FAILURES))]
