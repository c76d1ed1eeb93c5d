"""What a balancer makes of one request for a prefill and a decode, as the llm-d sidecar does (vLLM reference §7.4).

With Mooncake: as vLLM's example proxy does (`mooncake_connector_proxy.py` of 0.33.0).
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PREFILL_HEADER = "x-prefiller-host-port"
"""Names the prefill endpoint, or several, comma separated."""
REQUEST_ID_HEADER = "x-request-id"

REMOTE_DECODE: Mapping[str, Any] = MappingProxyType(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
"""What the prefill is asked for: compute, and keep the blocks."""

_OPENAI = ("max_tokens", "max_completion_tokens", "min_tokens")
_ONE_TOKEN: Mapping[str, tuple[str | None, tuple[str, ...]]] = MappingProxyType(
    {
        "/v1/chat/completions": (None, _OPENAI),
        "/v1/completions": (None, _OPENAI),
        "/v1/messages": (None, ("max_tokens",)),
        "/v1/responses": (None, ("max_output_tokens",)),
        "/inference/v1/generate": ("sampling_params", ("max_tokens", "min_tokens")),
    }
)
"""Path → the member that holds the limits (None: the body itself), and the limits that are 1 on the prefill."""
PATHS = frozenset(_ONE_TOKEN)
_COUNTED = frozenset({"/v1/chat/completions", "/v1/completions"})
"""Paths whose usage has `prompt_tokens_details`."""
_DATA = b"data: "


def prefill_body(path: str, body: Mapping[str, Any], params: Mapping[str, Any] = REMOTE_DECODE) -> dict[str, Any]:
    """One token, not streamed, blocks kept."""
    place, limits = _ONE_TOKEN[path]
    ones = dict.fromkeys(limits, 1)
    told = {name: value for name, value in body.items() if name != "stream_options"}
    told |= {"stream": False, "kv_transfer_params": dict(params)}
    if place is None:
        return told | ones
    inner = body.get(place)
    return told | {place: {**(inner if isinstance(inner, dict) else {}), **ones}}


def decode_body(body: Mapping[str, Any], answer: Mapping[str, Any]) -> dict[str, Any]:
    """The client's own body with what the prefill answered under `kv_transfer_params`; null when it answered nothing."""
    return {**body, "kv_transfer_params": answer.get("kv_transfer_params")}


def mooncake_bodies(
    path: str, body: Mapping[str, Any], transfer_id: str, bootstrap: str, engine_id: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """For a prefill and for a decode, which go out together."""
    to_prefill, to_decode = mooncake_params(transfer_id, bootstrap, engine_id)
    return prefill_body(path, body, to_prefill), {**body, "kv_transfer_params": to_decode}


def mooncake_params(transfer_id: str, bootstrap: str, engine_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """`kv_transfer_params` for a prefill and for a decode. `bootstrap` is `http://HOST:PORT`."""
    to_prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    to_decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": bootstrap,
        "remote_engine_id": engine_id,
        "transfer_id": transfer_id,
    }
    return to_prefill, to_decode


def cached_tokens(answer: Mapping[str, Any]) -> int:
    """Of the prefill's answer; vLLM leaves the details null when nothing was cached."""
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    told = details.get("cached_tokens") if isinstance(details, dict) else None
    return told if isinstance(told, int) else 0


class CachedTokens:
    """Puts the prefill's `cached_tokens` into the usage of a decode's answer, whole or streamed.

    In a stream only whole lines are looked at, so the pieces may be cut anywhere. Owned by one answer.
    """

    def __init__(self, path: str, tokens: int) -> None:
        self._tokens = tokens
        self._idle = path not in _COUNTED
        self._rest = b""

    def whole(self, body: bytes) -> bytes:
        """A JSON answer; anything else comes back as it is."""
        return body if self._idle else self._replaced(body)

    def part(self, piece: bytes) -> bytes:
        """The whole lines of a stream so far."""
        if self._idle:
            return piece
        head, newline, self._rest = (self._rest + piece).rpartition(b"\n")
        return b"".join(self._line(line) for line in (head + newline).splitlines(keepends=True))

    def end(self) -> bytes:
        """What a stream ends with that is no whole line."""
        rest, self._rest = self._rest, b""
        return self._line(rest)

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(_DATA) or b'"usage"' not in line:
            return line
        data = line[len(_DATA) :].rstrip(b"\r\n")
        return _DATA + self._replaced(data) + line[len(_DATA) + len(data) :]

    def _replaced(self, text: bytes) -> bytes:
        try:
            told = json.loads(text)
        except ValueError:
            return text
        usage = told.get("usage") if isinstance(told, dict) else None
        if not isinstance(usage, dict):
            return text
        details = usage.get("prompt_tokens_details")
        if not isinstance(details, dict):
            usage["prompt_tokens_details"] = {"cached_tokens": self._tokens}
        elif details.get("cached_tokens") != self._tokens:
            details["cached_tokens"] = self._tokens
        else:
            return text
        return json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode()


def own_error(kind: str, status: int, message: str) -> bytes:
    """The sidecar's own errors are flat."""
    told = {"object": "error", "message": message, "type": kind, "param": "", "code": status}
    return json.dumps(told, separators=(",", ":")).encode()
