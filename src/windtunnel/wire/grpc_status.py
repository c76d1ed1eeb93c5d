"""From an error as HTTP has it to the name of a gRPC status code.

smg-grpc-servicer 0.14.1 maps 400, 404, 408, 429, 503 and 504 as here and answers INTERNAL for everything else. The further rows
are what that servicer cannot meet: refusals that only this server has (injected failures, body limits, developer routes).
"""

from collections.abc import Mapping
from types import MappingProxyType

from windtunnel.wire.family import WireError

CODES: Mapping[int, str] = MappingProxyType(
    {
        400: "INVALID_ARGUMENT",
        401: "UNAUTHENTICATED",
        403: "PERMISSION_DENIED",
        404: "NOT_FOUND",
        408: "DEADLINE_EXCEEDED",
        409: "ABORTED",
        412: "FAILED_PRECONDITION",
        413: "RESOURCE_EXHAUSTED",
        416: "OUT_OF_RANGE",
        422: "INVALID_ARGUMENT",
        429: "RESOURCE_EXHAUSTED",
        501: "UNIMPLEMENTED",
        503: "UNAVAILABLE",
        504: "DEADLINE_EXCEEDED",
    }
)


def code_name(error: WireError) -> str:
    """The status code of an error; INTERNAL for every status that is not in the table."""
    return CODES.get(error.status, "INTERNAL")
