"""Reading a JSON body, and the error envelopes around everything that can go wrong with it. Pure functions.

The rules are FastAPI's and vLLM's together (vLLM reference §2.6, and the recordings):

* only `application/json` (parameters and letter case are free); anything else is a 400 sentence without a list;
* malformed JSON is one `json_invalid` line located at the byte offset; bytes that are no UTF-8 are FastAPI's own 400;
* an absent body is a missing `body`; field errors are one Python-repr line each, at most ten.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from windtunnel.wire.family import WireError

MAX_ERROR_LINES = 10
_LARGE_BODY_BYTES = 64 * 1024
_PART_BYTES = 8 * 1024
_WHOLE_NUMBERS = re.compile(rb"[-0-9, \t\r\n]*")
"""A larger body goes through msgspec, twice as fast; what that refuses (NaN, a BOM, errors) `json` reads again."""
BAD_REQUEST = "Bad Request"
DETAIL = "detail"
"""The `kind` of errors in FastAPI's own shape: `{"detail": message}`."""
BARE = "bare"
"""The `kind` of errors that are a string: `{"error": message}`."""
_PLAIN_TAGS = frozenset({"str", "int", "float", "bool", "bytes", "none", "dict", "any", "url", "json"})

Model = TypeVar("Model")
BaseModelT = TypeVar("BaseModelT", bound=BaseModel)


def parameter_error(message: str, parameter: str, value: object = None, *, status: int = 400) -> WireError:
    """A semantic check that names its parameter; the sentence ends in ` (parameter=x, value=y)`."""
    told = f"parameter={parameter}" if value is None else f"parameter={parameter}, value={value}"
    return WireError(f"{message} ({told})", status=status, param=parameter)


def check_content_type(headers: Mapping[str, str]) -> None:
    """Raises the 400 for anything that is not JSON. `headers` has lower-case names."""
    media_type = headers.get("content-type", "").lower().split(";", maxsplit=1)[0].strip()
    if media_type != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise WireError(message, kind=BAD_REQUEST)


def parse_json(body: bytes) -> Any:
    """The value of a JSON body, as `json.loads` reads it (a BOM, NaN and duplicate keys are fine)."""
    if len(body) > _LARGE_BODY_BYTES:
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            return _large_object(body)
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        line = {"type": "json_invalid", "loc": f"body.{error.pos}", "msg": "JSON decode error", "input": "<dict of 0 items>"}
        raise validation_error([line | {"ctx": {"error": error.msg}}]) from None
    except (ValueError, RecursionError):
        raise WireError("There was an error parsing the body", kind=DETAIL) from None


def _large_object(body: bytes) -> Any:
    """A JSON object, each long array of whole numbers in parts. Raises msgspec.DecodeError for everything else that is odd."""
    members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return {name: _member(bytes(raw)) for name, raw in members.items()}


def _member(raw: bytes) -> Any:
    if len(raw) < _LARGE_BODY_BYTES or not raw.startswith(b"["):
        return msgspec.json.decode(raw)
    numbers: list[Any] = []
    start, end = 1, len(raw) - 1
    while start < end:
        stop = raw.find(b",", start + _PART_BYTES)
        stop = end if stop < 0 else stop
        part = raw[start:stop]
        if _WHOLE_NUMBERS.fullmatch(part) is None:
            return msgspec.json.decode(raw)
        numbers += msgspec.json.decode(b"[%b]" % part)
        start = stop + 1
    return numbers


def read_json(body: bytes, headers: Mapping[str, str]) -> Any:
    """The checked JSON value of a request body."""
    check_content_type(headers)
    if not body:
        raise validation_error([{"type": "missing", "loc": "body", "msg": "Field required", "input": "None"}])
    return parse_json(body)


def read_model(model: type[BaseModelT], body: bytes, headers: Mapping[str, str]) -> BaseModelT:
    """The request model of a body. Raises WireError for everything that its fields refuse."""
    return validated(model.model_validate, read_json(body, headers))


def validated(validate: Callable[[Any], Model], value: Any) -> Model:
    """`value` through a model's or a type adapter's validation, with its errors in vLLM's form."""
    if not isinstance(value, dict):
        line = {"type": "model_attributes_type", "loc": "body", "msg": _NOT_AN_OBJECT, "input": shortened(value)}
        raise validation_error([line])
    try:
        return validate(value)
    except ValidationError as error:
        raise from_pydantic(error, value) from None


_NOT_AN_OBJECT = "Input should be a valid dictionary or object to extract fields from"


def from_pydantic(error: ValidationError, value: Any) -> WireError:
    """pydantic's own errors as vLLM prints them."""
    return validation_error([_line(entry, value) for entry in error.errors(include_url=False)])


def validation_error(lines: Sequence[Mapping[str, Any]]) -> WireError:
    """`N validation error(s):` and one Python-repr line each; `param` is the place of the first."""
    head = f"{len(lines)} validation error{'s' if len(lines) != 1 else ''}:"
    shown = [f"  {dict(line)!r}" for line in lines[:MAX_ERROR_LINES]]
    if len(lines) > MAX_ERROR_LINES:
        shown.append(f"  ...and {len(lines) - MAX_ERROR_LINES} more errors")
    return WireError("\n".join([head, *shown]), kind=BAD_REQUEST, param=str(lines[0]["loc"]))


def _line(entry: Mapping[str, Any], value: Any) -> dict[str, Any]:
    line = {"type": entry["type"], "loc": location(entry["loc"], value), "msg": entry["msg"]}
    line["input"] = shortened(entry["input"])
    if entry.get("ctx"):
        line["ctx"] = dict(entry["ctx"])
    return line


def shortened(value: object) -> str:
    """An input as the error lines show it: containers by size only."""
    if isinstance(value, dict | list):
        return f"<{type(value).__name__} of {len(value)} items>"
    return str(value)


def location(loc: Sequence[int | str], value: Any) -> str:
    """`body.a.0.b`. Names of union members are left out, except right behind a list index."""
    parts = ["body"]
    here: Any = value
    behind_index = False
    for part in loc:
        if isinstance(part, int):
            here = here[part] if isinstance(here, list) and part < len(here) else None
        elif isinstance(here, dict) and part in here:
            here = here[part]
        elif not behind_index and _is_tag(part):
            continue
        parts.append(str(part))
        behind_index = isinstance(part, int)
    return ".".join(parts)


def _is_tag(part: str) -> bool:
    return not part.isidentifier() or part[0].isupper() or part in _PLAIN_TAGS


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8, as the real servers write it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def json_text(text: str) -> bytes:
    """A JSON string in UTF-8; what is no Unicode becomes U+FFFD's ASCII stand-in."""
    return encode_basestring(text).encode("utf-8", "replace")


def openai_error(error: WireError) -> dict[str, Any]:
    """The members of the OpenAI envelope (vLLM reference §2.6)."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}}


def error_body(error: WireError) -> bytes:
    """The JSON of an error before the head: FastAPI's shape, a bare string, or the OpenAI envelope."""
    if error.kind == DETAIL:
        return dumps({"detail": error.message})
    if error.kind == BARE:
        return dumps({"error": error.message})
    return dumps(openai_error(error))


def error_frames(error: WireError, *, spaced: bool) -> bytes:
    """An error inside an OpenAI stream, with its terminator. Completions write it with spaces (vLLM reference §3.1)."""
    value = openai_error(error)
    text = json.dumps(value).encode() if spaced else dumps(value)
    return b"data: %b\n\ndata: [DONE]\n\n" % text


def not_found() -> WireError:
    return WireError("Not Found", status=404, kind=DETAIL)


def method_not_allowed() -> WireError:
    return WireError("Method Not Allowed", status=405, kind=DETAIL)


def unauthorized() -> WireError:
    return WireError("Unauthorized", status=401, kind=BARE)


def body_too_large(limit_bytes: int) -> WireError:
    """413 for a body over the server's own limit; vLLM has none, so the shape is the OpenAI one."""
    return WireError(f"The request body is larger than the {limit_bytes} bytes that this server reads", 413, "RequestTooLarge")
