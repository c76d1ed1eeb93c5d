"""The recorded cases of the real server, for the routes that generate nothing."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("WINDTUNNEL_GOLDEN", Path(__file__).parents[3] / "shared/golden")) / "vllm"
needs_golden = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no golden data: WINDTUNNEL_GOLDEN does not hold {FOLDER.name}/")


def load(group: str) -> list[dict[str, Any]]:
    """The cases of one group in the order in which they were recorded."""
    files = sorted((FOLDER / "cases").glob(f"{group}__*.json"))
    return sorted((json.loads(file.read_text()) for file in files), key=lambda case: int(case["seq"]))


def request_bytes(case: dict[str, Any]) -> bytes:
    request = case["request"]
    head = "".join(f"{name}: {value}\r\n" for name, value in request["headers"])
    return f"{request['method']} {request['path']} HTTP/1.1\r\n{head}\r\n{request.get('body') or ''}".encode()


def split(answer: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
    """Status, headers in wire order, body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return int(status.split()[1]), [(name, value) for name, _, value in pairs], body
