"""The request of `/v1/responses`: its fields, and the conversation that its items make (vLLM reference §2.7).

Field order is vLLM's, tool class names are OpenAI's: the validation lines name them.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, create_model, model_validator

from windtunnel.wire import http
from windtunnel.wire.family import WireError
from windtunnel.wire.vllm import fields
from windtunnel.wire.vllm.fields import Int64

Penalty = Annotated[float, Field(ge=-2, le=2)]

_TOOLS: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "FunctionTool",
        ("function",),
        ("name", "type"),
        ("name", "parameters", "strict", "type", "allowed_callers", "async", "defer_loading", "description", "output_schema"),
    ),
    (
        "FileSearchTool",
        ("file_search",),
        ("type", "vector_store_ids"),
        ("type", "vector_store_ids", "filters", "max_num_results", "ranking_options"),
    ),
    ("ComputerTool", ("computer",), ("type",), ("type",)),
    (
        "ComputerUsePreviewTool",
        ("computer_use_preview",),
        ("display_height", "display_width", "environment", "type"),
        ("display_height", "display_width", "environment", "type"),
    ),
    (
        "WebSearchTool",
        ("web_search", "web_search_2025_08_26"),
        ("type",),
        ("type", "external_web_access", "filters", "search_context_size", "user_location"),
    ),
    (
        "Mcp",
        ("mcp",),
        ("server_label", "type"),
        (
            "server_label",
            "type",
            "allowed_callers",
            "allowed_tools",
            "authorization",
            "connector_id",
            "defer_loading",
            "headers",
            "require_approval",
            "server_description",
            "server_url",
            "tunnel_id",
        ),
    ),
    ("CodeInterpreter", ("code_interpreter",), ("container", "type"), ("container", "type", "allowed_callers")),
    ("ProgrammaticToolCalling", ("programmatic_tool_calling",), ("type",), ("type",)),
    (
        "ImageGeneration",
        ("image_generation",),
        ("type",),
        (
            "type",
            "action",
            "background",
            "complexity",
            "frame_count",
            "frame_duration_ms",
            "input_fidelity",
            "input_image_mask",
            "model",
            "moderation",
            "output_compression",
            "output_format",
            "partial_images",
            "quality",
            "size",
            "svg",
        ),
    ),
    ("LocalShell", ("local_shell",), ("type",), ("type",)),
    ("FunctionShellTool", ("shell",), ("type",), ("type", "allowed_callers", "environment")),
    (
        "CustomTool",
        ("custom",),
        ("name", "type"),
        ("name", "type", "allowed_callers", "async", "defer_loading", "description", "format"),
    ),
    ("NamespaceTool", ("namespace",), ("description", "name", "tools", "type"), ("description", "name", "tools", "type")),
    ("ToolSearchTool", ("tool_search",), ("type",), ("type", "description", "execution", "parameters")),
    (
        "WebSearchPreviewTool",
        ("web_search_preview", "web_search_preview_2025_03_11"),
        ("type",),
        ("type", "search_content_types", "search_context_size", "user_location"),
    ),
    ("ApplyPatchTool", ("apply_patch",), ("type",), ("type", "allowed_callers")),
)
"""Tool kinds: class, values of `type`, required members, all members in the order in which they are echoed."""

_MEMBER_TYPES: Mapping[str, Any] = {
    "name": str,
    "description": str,
    "parameters": dict[str, Any],
    "strict": bool,
    "vector_store_ids": list[str],
    "display_height": int,
    "display_width": int,
    "server_label": str,
    "tools": list[Any],
}


def _tool_class(name: str, kinds: tuple[str, ...], required: tuple[str, ...], members: tuple[str, ...]) -> type[BaseModel]:
    made: dict[str, Any] = {}
    for member in members:
        kind = Literal[kinds] if member == "type" else _MEMBER_TYPES.get(member, Any)
        field = Field(alias=member) if member in required else Field(default=None, alias=member)
        made[f"{member}_"] = (kind if member in required else kind | None, field)
    return create_model(name, **made)


_CLASSES = tuple(_tool_class(*row) for row in _TOOLS)
_AnyTool: Any = _CLASSES[0]
for _tool in _CLASSES[1:]:
    _AnyTool = _AnyTool | _tool


class TextFormat(fields.OpenModel):
    type: Literal["text"]


class JsonSchemaFormat(fields.OpenModel):
    name: str
    json_schema: dict[str, Any] = Field(alias="schema")
    type: Literal["json_schema"]
    description: str | None = None
    strict: bool | None = None


class JsonObjectFormat(fields.OpenModel):
    type: Literal["json_object"]


class TextConfig(fields.OpenModel):
    format: TextFormat | JsonSchemaFormat | JsonObjectFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(fields.OpenModel):
    context: Any = None
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    mode: Any = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ToolChoiceFunction(BaseModel):
    name: str
    type: Literal["function"]


class ToolChoiceOther(fields.OpenModel):
    """Choices of tools that a plain text model never calls."""

    type: str


class ResponsesRequest(fields.OpenModel):
    background: bool | None = False
    include: list[str] | None = None
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    model: str | None = None
    logit_bias: dict[str, float] | None = None
    parallel_tool_calls: bool | None = True
    previous_response_id: str | None = None
    prompt: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    include_reasoning: bool = True
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] = "auto"
    store: bool | None = True
    stream: bool | None = False
    temperature: float | None = None
    text: TextConfig | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoiceFunction | ToolChoiceOther = "auto"
    tools: list[_AnyTool] = Field(default_factory=list)
    top_logprobs: int | None = 0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    truncation: Literal["auto", "disabled"] | None = "disabled"
    user: str | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    watermarking: bool | None = None
    request_id: str | None = None
    session_id: str | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    priority: Int64 = 0
    cache_salt: fields.CacheSalt | None = None
    enable_response_messages: bool = False
    previous_input_messages: list[dict[str, Any]] | None = None
    structured_outputs: fields.StructuredOutputs | None = None
    repetition_penalty: float | None = None
    seed: Int64 | None = None
    stop: str | fields.StopList | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    vllm_xargs: fields.Xargs | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _before(cls, data: Any) -> Any:
        """vLLM's own validators leave one member more in the data; the size shown in validation lines counts it."""
        if not isinstance(data, Mapping):
            return data
        if data.get("prompt") is not None:
            raise http.parameter_error("prompt template is not supported", "prompt")
        if data.get("background") and not data.get("store", True):
            raise http.parameter_error("background can only be used when `store` is true", "background")
        fields.check_cache_salt(data)
        fields.check_structured_outputs(data)
        return {"store": True, **data}

    @property
    def function_tools(self) -> list[dict[str, Any]]:
        """The tools that a chat template knows."""
        told = [tool.model_dump(by_alias=True) for tool in self.tools]
        return [tool for tool in told if tool["type"] == "function"]

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


def conversation(items: str | Sequence[Any]) -> list[dict[str, Any]]:
    """The chat messages of an input. Raises WireError for an item that a text model cannot take.

    Reasoning and calls that follow one another are one assistant message, as the model said them.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    out: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise WireError(f"input[{at}] must be an object with a `type` or a `role`", param="input")
        _add(out, item, at)
    return out


def _add(out: list[dict[str, Any]], item: Mapping[str, Any], at: int) -> None:
    kind = item.get("type") or ("message" if "role" in item else None)
    make = _ITEMS.get(kind or "")
    if make is None:
        raise WireError(f"input[{at}]: items of type {kind!r} are not supported; use {', '.join(_ITEMS)}", param="input")
    try:
        message = make(item)
    except (KeyError, TypeError, AttributeError) as error:
        raise WireError(f"input[{at}]: a {kind} item is not complete ({error})", param="input") from None
    last = out[-1] if out else None
    if last is not None and last["role"] == message["role"] == "assistant" and ("reasoning" in last or "tool_calls" in last):
        _join(last, message)
    else:
        out.append(message)


def _join(last: dict[str, Any], message: Mapping[str, Any]) -> None:
    last["content"] = message["content"] if last["content"] is None else last["content"]
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def _message(item: Mapping[str, Any]) -> dict[str, Any]:
    content = item["content"]
    if not isinstance(content, str):
        content = [_part(part) for part in content]
    return {"role": item["role"], "content": content}


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    if kind in ("input_text", "output_text", "text"):
        return {"type": "text", "text": part["text"]}
    if kind == "refusal":
        return {"type": "refusal", "refusal": part["refusal"]}
    return {"type": kind}


def _function_call(item: Mapping[str, Any]) -> dict[str, Any]:
    call = {"id": item["call_id"], "type": "function", "function": {"name": item["name"], "arguments": item["arguments"]}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _function_output(item: Mapping[str, Any]) -> dict[str, Any]:
    output = item["output"]
    text = output if isinstance(output, str) else "\n".join(str(part.get("text", "")) for part in output)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}


def _reasoning(item: Mapping[str, Any]) -> dict[str, Any]:
    parts = item.get("content") or item.get("summary") or ()
    return {"role": "assistant", "content": None, "reasoning": "".join(str(part.get("text", "")) for part in parts)}


_ITEMS = {
    "message": _message,
    "function_call": _function_call,
    "function_call_output": _function_output,
    "reasoning": _reasoning,
}
