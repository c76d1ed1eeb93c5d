"""What an answer must say: structured outputs, `response_format`, forced tool calls.

The text is synthesised from the request's schema and the prompt's identity (`wire.synth`). A schema that cannot be
satisfied is an error of the engine's input stage, as in the real server.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from windtunnel.core import oracle
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import PromptPlan, WireError
from windtunnel.wire.synth import SynthesisError, json_text, matching_text
from windtunnel.wire.vllm import fields

_ANY_OBJECT = {"type": "object", "properties": {"answer": {"type": "string", "minLength": 12}}, "required": ["answer"]}
"""What `json_object` without a schema is answered with."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The wanted text, or why there is none; both None: the server's generation mode decides."""

    text: str | None = None
    late_error: WireError | None = None


def identity(prompt: PromptPlan) -> int:
    """The oracle identity of a prompt: its marker, or a hash of its tokens."""
    marked = oracle.identity_of_marker(prompt.text) if prompt.text else None
    return oracle.identity_of_tokens(prompt.token_ids) if marked is None else marked


def wanted_answer(
    response_format: fields.AnyResponseFormat | None,
    outputs: fields.StructuredOutputs | None,
    prompts: Sequence[PromptPlan],
    env: ServerEnv,
) -> Answer:
    """The answer to `structured_outputs` or `response_format`; the first prompt's identity decides."""
    wanted = _kind_and_value(response_format, outputs)
    if wanted is None or not prompts:
        return Answer()
    kind, value = wanted
    try:
        return Answer(_text(kind, value, identity(prompts[0])))
    except SynthesisError as error:
        return Answer(late_error=WireError(str(error)))


def _kind_and_value(response_format: Any, outputs: fields.StructuredOutputs | None) -> tuple[str, Any] | None:
    if outputs is not None:
        by_kind = {"json": outputs.json_value} | {kind: getattr(outputs, kind) for kind in fields.KINDS if kind != "json"}
        given = [(kind, value) for kind, value in by_kind.items() if value is not None]
        return given[0] if given else None
    if isinstance(response_format, fields.ResponseFormat):
        if response_format.type == "json_object":
            return "json_object", True
        schema = response_format.json_schema
        if response_format.type == "json_schema" and schema is not None and schema.json_schema is not None:
            return "json", schema.json_schema
    return None


def _text(kind: str, value: Any, seed: int) -> str | None:
    if kind == "json":
        return json_text(_schema(value), seed)
    if kind == "json_object":
        return json_text(_ANY_OBJECT, seed) if value else None
    if kind == "choice":
        if not value:
            raise SynthesisError("Choice '[]' cannot be an empty list")
        return str(value[seed % len(value)])
    if kind in ("regex", "grammar"):
        return matching_text(kind, value, seed)
    return None


def _schema(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise SynthesisError(f"Invalid JSON grammar specification: {error}") from None


def tool_answer(functions: Sequence[Any], prompt: PromptPlan) -> Answer:
    """A hermes call of one of `functions`, with arguments that satisfy its parameters' schema where that is possible."""
    seed = identity(prompt)
    function = functions[seed % len(functions)]
    try:
        arguments = json_text(function.parameters or {"type": "object"}, seed, top_level_object=True)
    except SynthesisError as error:
        if function.strict:
            return Answer(late_error=WireError(str(error)))
        arguments = "{}"
    call = f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "arguments": {arguments}}}'
    return Answer(f"<tool_call>\n{call}\n</tool_call>")
