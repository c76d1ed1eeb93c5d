"""A server environment for wire tests: the built-in tokenizer, fixed ids and time."""

import json
from typing import Any

from windtunnel.core.tokenizer import BuiltinTokenizer
from windtunnel.wire.env import ServerEnv, counting_ids
from windtunnel.wire.family import ChoiceResult, Delta, Family, Generation, Usage

TOKENIZER = BuiltinTokenizer()
JSON = {"content-type": "application/json"}


def env(**options: Any) -> ServerEnv:
    defaults: dict[str, Any] = {
        "served_models": ("m", "alias"),
        "tokenizer": TOKENIZER,
        "max_model_len": 256,
        "new_id": counting_ids(),
        "now_s": lambda: 1700000000,
        "fingerprint": "0123abcd",
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
    }
    return ServerEnv(**(defaults | options))


def plan(family: Family, body: dict[str, Any], server: ServerEnv | None = None, **headers: str) -> Generation:
    lower = {name.replace("_", "-"): value for name, value in headers.items()}
    return family.plan(json.dumps(body).encode(), JSON | lower, server or env())


def frames(data: bytes) -> list[Any]:
    """The parsed frames of a stream; `[DONE]` stays text."""
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [part.decode() if part == b"[DONE]" else json.loads(part) for part in parts]


def stream(family: Family, generation: Generation, *deltas: Delta, usage: Usage | None = None) -> list[Any]:
    """The frames of a whole good stream."""
    counts = usage or Usage(len(generation.prompts[0].token_ids), sum(len(delta.token_ids) for delta in deltas))
    encoder = family.encoder(generation)
    return frames(b"".join([*(encoder.delta(delta, counts) for delta in deltas), encoder.close(counts)]))


def whole(family: Family, generation: Generation, *choices: ChoiceResult, usage: Usage | None = None) -> Any:
    return json.loads(family.body(generation, choices, usage or Usage(3, 2)))
