"""Comparison of a recorded answer with ours: a list of differences, empty when they match."""

import json
import re
from collections.abc import Sequence
from typing import Any

from tests.conformance.cases import Answer
from tests.conformance.normalise import (
    FREE_LENGTHS,
    IGNORED_HEADERS,
    PRESENT_HEADERS,
    TABLE,
    sentence_difference,
)

_COMPILED = [(re.compile(row.path), row.same_form) for row in TABLE]


def differences(want: Answer, have: Answer) -> list[str]:
    """Status, headers, then the body: JSON by value, streams frame by frame, anything else byte by byte."""
    found = [f"status: {have.status} instead of {want.status}"] if want.status != have.status else []
    found += _header_differences(want, have)
    if found and want.status != have.status:
        return [*found, f"body: {have.body[:300]!r}"]
    if want.is_stream:
        return found + stream_differences(want.body, have.body)
    return found + body_differences(want.body, have.body)


def _header_differences(want: Answer, have: Answer) -> list[str]:
    found = []
    for name in sorted({key for key, _value in (*want.headers, *have.headers)} - IGNORED_HEADERS):
        sides = want.header(name), have.header(name)
        same = (sides[0] is None) == (sides[1] is None) if name in PRESENT_HEADERS else sides[0] == sides[1]
        if not same:
            found.append(f"header {name}: {sides[1]!r} instead of {sides[0]!r}")
    return found


def body_differences(want: bytes, have: bytes) -> list[str]:
    if want == have:
        return []
    try:
        values = json.loads(want), json.loads(have)
    except ValueError:
        return [f"body: {have[:200]!r} instead of {want[:200]!r}"]
    return value_differences(*values)


def value_differences(want: Any, have: Any, path: str = "") -> list[str]:
    """Differences of two JSON values: key order, lengths, and every value that no row of the table frees."""
    if want == have and type(want) is type(have) and not isinstance(want, dict | list):
        return []
    if path == "error.message" and isinstance(want, str) and isinstance(have, str):
        why = sentence_difference(want, have)
        return [f"error.message {why}: {have!r} for {want!r}"] if why else []
    if _is_free(path, want, have):
        return []
    if isinstance(want, dict) and isinstance(have, dict):
        return _object_differences(want, have, path)
    if isinstance(want, list) and isinstance(have, list):
        return _list_differences(want, have, path)
    return [f"{path or 'body'}: {_short(have)} instead of {_short(want)}"]


def _is_free(path: str, want: Any, have: Any) -> bool:
    return any(pattern.fullmatch(path) and same_form(want, have) for pattern, same_form in _COMPILED)


def _object_differences(want: dict[str, Any], have: dict[str, Any], path: str) -> list[str]:
    if list(want) != list(have):
        return [f"{path or 'body'}: keys {list(have)} instead of {list(want)}"]
    dot = f"{path}." if path else ""
    return [line for key in want for line in value_differences(want[key], have[key], dot + key)]


def _list_differences(want: list[Any], have: list[Any], path: str) -> list[str]:
    if len(want) != len(have) and not FREE_LENGTHS.fullmatch(path):
        return [f"{path}: {len(have)} entries instead of {len(want)}: {_short(have)} for {_short(want)}"]
    return [line for pair in zip(want, have, strict=False) for line in value_differences(*pair, f"{path}[]")]


def stream_differences(want: bytes, have: bytes) -> list[str]:
    """Frame sequences. Where the reader was slow and outputs were merged (vLLM reference §3.1), ours are merged alike."""
    wanted, got = frames(want), frames(have)
    if len(wanted) != len(got):
        wanted, got = coalesced(wanted), coalesced(got)
    if len(wanted) != len(got):
        return [f"stream: {len(got)} frames instead of {len(wanted)}", *_first_difference(wanted, got)]
    return [f"frame {at}: {line}" for at, pair in enumerate(zip(wanted, got, strict=True)) for line in _frame(*pair)]


def _first_difference(wanted: Sequence[bytes], got: Sequence[bytes]) -> list[str]:
    for at, pair in enumerate(zip(wanted, got, strict=False)):
        lines = _frame(*pair)
        if lines:
            return [f"frame {at}: {lines[0]}"]
    return []


def _frame(want: bytes, have: bytes) -> list[str]:
    heads = [side.split(b"data: ", 1)[0] for side in (want, have)]
    if heads[0] != heads[1]:
        return [f"{have[:120]!r} instead of {want[:120]!r}"]
    return body_differences(want.split(b"data: ", 1)[-1], have.split(b"data: ", 1)[-1])


def frames(stream: bytes) -> list[bytes]:
    """The events of an SSE stream, with their `event:` and `data:` lines."""
    return [part for part in stream.split(b"\n\n") if part]


def coalesced(parts: Sequence[bytes]) -> list[bytes]:
    """Frames with neighbours of one choice merged where both only add text (and token ids) to it."""
    if parts and parts[0].startswith(b"event: "):
        return _coalesced_events(parts)
    out: list[Any] = []
    for part in parts:
        value = _json(part)
        joined = _joined(out[-1], value) if out and value is not None else None
        if joined is not None:
            out[-1] = joined
        else:
            out.append(part if value is None else value)
    return [part if isinstance(part, bytes) else b"data: " + json.dumps(part).encode() for part in out]


def _coalesced_events(parts: Sequence[bytes]) -> list[bytes]:
    """Events with neighbouring text deltas of one item merged and numbered anew."""
    out: list[dict[str, Any]] = []
    for part in parts:
        value = json.loads(part.split(b"data: ", 1)[1])
        last = out[-1] if out else {}
        if value["type"].endswith("_text.delta") and last.get("type") == value["type"] and last["item_id"] == value["item_id"]:
            last["delta"] += value["delta"]
        else:
            out.append(value)
    numbered = [value | ({"sequence_number": at} if "sequence_number" in value else {}) for at, value in enumerate(out)]
    return [b"event: %b\ndata: %b" % (value["type"].encode(), json.dumps(value).encode()) for value in numbered]


def _json(part: bytes) -> Any:
    try:
        return json.loads(part.removeprefix(b"data: "))
    except ValueError:
        return None


def _joined(first: Any, second: Any) -> Any:
    """`second` with the text of `first` in front; None when they cannot be one frame."""
    if not isinstance(first, dict) or not isinstance(second, dict):
        return None
    choices: list[Any] = [value.get("choices") for value in (first, second)]
    if not all(isinstance(side, list) and len(side) == 1 for side in choices):
        return None
    before, after = choices[0][0], choices[1][0]
    if before["index"] != after["index"] or before.get("finish_reason") or before.get("logprobs"):
        return None
    merged = _joined_choice(before, after)
    return None if merged is None else second | {"choices": [merged]}


def _joined_choice(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    ids: list[Any] = [side.get("token_ids") for side in (before, after)]
    token_ids = ids[0] + ids[1] if all(isinstance(side, list) for side in ids) else ids[1]
    extra = {"token_ids": token_ids} if "token_ids" in after else {}
    if "text" in after:
        return after | {"text": before["text"] + after["text"]} | extra
    deltas = before.get("delta", {}), after.get("delta", {})
    if list(deltas[0]) != ["content"] or list(deltas[1]) not in (["content"], []):
        return None
    return after | {"delta": {"content": deltas[0]["content"] + deltas[1].get("content", "")}} | extra


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."
