"""The generating APIs: a small request of each, and where its text, its end and its choices are."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.compat.site import MODEL

PROMPT = "storm [wt:7] over the sea"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
_MESSAGES = [{"role": "user", "content": PROMPT}]


@dataclass(frozen=True)
class Shape:
    """`whole` finds the text of an answer, `piece` what one frame adds; `ends` is one of the last frame's own words."""

    path: str
    body: dict[str, Any]
    whole: Callable[[Any], str]
    piece: Callable[[Any], str]
    ends: str
    cumulative: bool = False
    """A frame has all the text so far."""

    def text(self, answer: str) -> str:
        if not answer.startswith(("data:", "event:")):
            return self.whole(json.loads(answer))
        pieces = [self.piece(frame) for frame in frames(answer)]
        return pieces[-1] if self.cumulative else "".join(pieces)


def frames(answer: str) -> list[Any]:
    """The JSON of each `data:` line."""
    return [json.loads(line[5:]) for line in answer.splitlines() if line.startswith("data:") and line[5:].strip()[:1] == "{"]


def _joined(found: list[Any], member: str) -> str:
    return "".join(one.get(member) or "" for one in found)


def _event(frame: Any, kind: str, *members: str) -> str:
    if frame.get("type") != kind:
        return ""
    for member in members:
        frame = frame.get(member) or {}
    return frame if isinstance(frame, str) else ""


SHAPES = (
    Shape(
        CHAT,
        {"model": MODEL, "messages": _MESSAGES, "max_tokens": 12},
        lambda answer: str(answer["choices"][0]["message"]["content"]),
        lambda frame: _joined([choice["delta"] for choice in frame.get("choices", ())], "content"),
        "[DONE]",
    ),
    Shape(
        COMPLETIONS,
        {"model": MODEL, "prompt": PROMPT, "max_tokens": 12},
        lambda answer: str(answer["choices"][0]["text"]),
        lambda frame: _joined(frame.get("choices", ()), "text"),
        "[DONE]",
    ),
    Shape(
        "/v1/messages",
        {"model": MODEL, "messages": _MESSAGES, "max_tokens": 12},
        lambda answer: str(answer["content"][0]["text"]),
        lambda frame: _event(frame, "content_block_delta", "delta", "text"),
        "message_stop",
    ),
    Shape(
        "/v1/responses",
        {"model": MODEL, "input": PROMPT, "max_output_tokens": 12},
        lambda answer: _joined(answer["output"][-1]["content"], "text"),
        lambda frame: _event(frame, "response.output_text.delta", "delta"),
        "response.incomplete",
    ),
    Shape(
        GENERATE,
        {"text": PROMPT, "sampling_params": {"max_new_tokens": 12}},
        lambda answer: str(answer["text"]),
        lambda frame: str(frame.get("text", "")),
        "[DONE]",
        cumulative=True,
    ),
)
OF = {shape.path: shape for shape in SHAPES}


@dataclass(frozen=True)
class Same:
    """A body whose answer through the router must agree with the worker's in what `pick` takes from it."""

    row: str
    path: str
    more: dict[str, Any]
    pick: Callable[[Any], Any]


def _choices(*members: str) -> Callable[[Any], Any]:
    def pick(answer: Any) -> Any:
        out = []
        for choice in sorted(answer["choices"], key=lambda one: one["index"]):
            found = choice
            for member in members:
                found = found.get(member) or {}
            out.append((found, choice.get("finish_reason")))
        return out

    return pick


def _logprobs(answer: Any) -> Any:
    told = answer["choices"][0]["logprobs"]["content"]
    return [(one["token"], round(one["logprob"], 4), len(one["top_logprobs"])) for one in told]


def _completion_logprobs(answer: Any) -> Any:
    told = answer["choices"][0]["logprobs"]
    return told["tokens"], [round(one, 4) for one in told["token_logprobs"]]


def _usage(answer: Any) -> Any:
    told = answer[-1] if isinstance(answer, list) else answer
    return told["usage"]["completion_tokens"], told["usage"]["prompt_tokens"]


_SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
SAME = (
    Same("300 tokens", CHAT, {"max_tokens": 300}, _choices("message", "content")),
    Same("stop string", CHAT, {"stop": ["e"], "max_tokens": 40}, _choices("message", "content")),
    Same("`n` = 2", CHAT, {"n": 2}, _choices("message", "content")),
    Same("two prompts in one completion", COMPLETIONS, {"prompt": [PROMPT, "[wt:9] b"]}, _choices("text")),
    Same("logprobs of a chat", CHAT, {"logprobs": True, "top_logprobs": 2}, _logprobs),
    Same("logprobs of a completion", COMPLETIONS, {"logprobs": 2}, _completion_logprobs),
    Same("usage at the end of a stream", CHAT, {"stream": True, "stream_options": {"include_usage": True}}, _usage),
    Same("`ignore_eos`, `min_tokens`", CHAT, {"ignore_eos": True, "min_tokens": 60, "max_tokens": 60}, _usage),
    Same(
        "JSON schema",
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}, "max_tokens": 60},
        _choices("message", "content"),
    ),
)
