"""Answers of `/v1/responses` and `/v1/messages` as a chat answer that says the same.

What the model said is then found by the same code for every family.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.conformance.cases import Answer, Case
from tests.conformance.compare import frames

_FINISHES = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "stop", "max_tokens": "length", None: None}


def as_chat(case: Case) -> Case:
    """The case with its answer in chat form; other families as they are."""
    path = case.path.partition("?")[0]
    if case.expected.status != 200 or case.raw is not None:
        return case
    if path == "/v1/responses":
        value = _response_stream(case) if case.expected.is_stream else _response(json.loads(case.expected.body))
    elif path == "/v1/messages":
        value = _message_stream(case) if case.expected.is_stream else _message(json.loads(case.expected.body))
    else:
        return case
    body = (
        b"".join(b"data: " + json.dumps(frame).encode() + b"\n\n" for frame in value)
        if isinstance(value, list)
        else json.dumps(value).encode()
    )
    return replace(case, expected=Answer(200, case.expected.headers, body))


def request_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The request with the chat names of what matters for the answer."""
    out = dict(request)
    if "stop_sequences" in out:
        out["stop"] = out["stop_sequences"]
    if "max_output_tokens" in out:
        out["max_completion_tokens"] = out["max_output_tokens"]
    return out


def _response(value: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": None, "tool_calls": []}
    for item in value["output"]:
        if item["type"] == "message":
            message["content"] += item["content"][0]["text"]
        elif item["type"] == "reasoning":
            message["reasoning"] = item["content"][0]["text"]
        else:
            message["tool_calls"].append({"function": {"name": item["name"], "arguments": item["arguments"]}})
    finish = "length" if value["status"] == "incomplete" else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": None}
    return {"choices": [choice] if value["usage"] else [], "usage": _response_usage(value["usage"])}


def _response_usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if usage is None:
        return None
    details = {"cached_tokens": usage["input_tokens_details"]["cached_tokens"]}
    return {"completion_tokens": usage["output_tokens"], "prompt_tokens_details": details}


def _events(case: Case) -> list[dict[str, Any]]:
    return [json.loads(part.split(b"data: ", 1)[1]) for part in frames(case.expected.body)]


def _chunk(delta: Mapping[str, Any], finish: str | None = None, stop: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop}]}


def _response_stream(case: Case) -> list[dict[str, Any]]:
    out = []
    events = _events(case)
    for event in events:
        if event["type"] == "response.output_text.delta":
            out.append(_chunk({"content": event["delta"]}))
        elif event["type"] == "response.reasoning_text.delta":
            out.append(_chunk({"reasoning": event["delta"]}))
    last = events[-1]["response"]
    out.append(_chunk({}, "length" if last["status"] == "incomplete" else "stop"))
    return [*out, {"choices": [], "usage": _response_usage(last["usage"])}]


def _message(value: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": None, "tool_calls": []}
    for block in value["content"]:
        if block["type"] == "text":
            message["content"] += block["text"]
        elif block["type"] == "thinking":
            message["reasoning"] = block["thinking"]
        else:
            message["tool_calls"].append({"function": {"name": block["name"], "arguments": json.dumps(block["input"])}})
    finish = _FINISHES[value.get("stop_reason")]
    choice = {"index": 0, "message": message, "finish_reason": finish, "stop_reason": value.get("stop_sequence")}
    return {"choices": [choice], "usage": _message_usage(value["usage"])}


def _message_usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    details = {"cached_tokens": usage.get("cache_read_input_tokens", 0)}
    return {"completion_tokens": usage["output_tokens"], "prompt_tokens_details": details}


def _message_stream(case: Case) -> list[dict[str, Any]]:
    out = []
    for event in _events(case):
        block, delta = event.get("content_block", {}), event.get("delta", {})
        if block.get("type") == "tool_use":
            out.append(_chunk({"tool_calls": [{"function": {"name": block["name"]}}]}))
        elif delta.get("type") == "input_json_delta":
            out.append(_chunk({"tool_calls": [{"function": {"arguments": delta["partial_json"]}}]}))
        elif delta.get("type") == "text_delta":
            out.append(_chunk({"content": delta["text"]}))
        elif delta.get("type") == "thinking_delta":
            out.append(_chunk({"reasoning": delta["thinking"]}))
        elif event["type"] == "message_delta":
            out.append(_chunk({}, _FINISHES[delta["stop_reason"]], delta["stop_sequence"]))
            out.append({"choices": [], "usage": _message_usage(event["usage"])})
    return out
