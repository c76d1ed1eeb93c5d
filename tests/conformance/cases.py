"""The recorded cases: one JSON file each, request and response as they were on the wire."""

import base64
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BIG_PROMPT = {"model": "tiny-llama", "prompt": "hello " * 700_000, "max_tokens": 1}


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer. `body` is de-chunked; header names are lower case."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def is_stream(self) -> bool:
        return (self.header("content-type") or "").startswith("text/event-stream")


@dataclass(frozen=True, slots=True)
class Case:
    """A recorded exchange. `raw` is set for the verbatim cases, whose bytes are compared as they are."""

    group: str
    name: str
    seq: int
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    expected: Answer
    raw: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        return f"{self.group}__{self.name}"

    @property
    def lower_headers(self) -> dict[str, str]:
        return {key.lower(): value for key, value in self.headers}

    @property
    def json_body(self) -> bytes:
        """The request's body without chunk framing."""
        if "transfer-encoding" not in self.lower_headers:
            return self.body
        return b"".join(_dechunked(self.body))


def _dechunked(data: bytes) -> list[bytes]:
    parts = []
    while data:
        size_line, _newline, data = data.partition(b"\r\n")
        size = int(size_line.split(b";")[0] or b"0", 16)
        parts.append(data[:size])
        data = data[size + 2 :]
        if size == 0:
            break
    return parts


def golden_folder() -> Path | None:
    """`$WINDTUNNEL_GOLDEN/vllm` (default `../shared/golden`), or None where it is not there."""
    folder = Path(os.environ.get("WINDTUNNEL_GOLDEN", "../shared/golden")) / "vllm"
    return folder if (folder / "cases").is_dir() else None


def load(folder: Path, groups: Sequence[str] = ()) -> list[Case]:
    """The cases of these groups (all of them without any), in the order in which they were recorded."""
    cases = [read(file) for file in sorted((folder / "cases").glob("*.json"))]
    return sorted((case for case in cases if not groups or case.group in groups), key=lambda case: (case.group, case.seq))


def read(file: Path) -> Case:
    value = json.loads(file.read_text())
    request, response = value["request"], value["response"]
    return Case(
        group=value["group"],
        name=value["name"],
        seq=int(value.get("seq", 0)),
        method=request.get("method", ""),
        path=request.get("path", ""),
        headers=tuple((key, header) for key, header in request.get("headers", ())),
        body=_body(request),
        expected=_expected(response),
        raw=value if "method" not in request else None,
    )


def _body(part: dict[str, Any]) -> bytes:
    if part.get("body_description"):
        return json.dumps(_BIG_PROMPT).encode()
    text = part.get("sse_raw") or part.get("body") or ""
    return base64.b64decode(text) if part.get("body_encoding") == "base64" else text.encode("utf-8", "surrogatepass")


def _expected(response: dict[str, Any]) -> Answer:
    headers = tuple((key.lower(), value) for key, value in response.get("headers", ()))
    return Answer(int(response.get("status", 0)), headers, _body(response))
