"""The request of `/v1/chat/completions`: its fields, and the checks that come before them (vLLM reference §2.3)."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from windtunnel.wire import http
from windtunnel.wire.family import WireError
from windtunnel.wire.vllm import fields, messages_in
from windtunnel.wire.vllm.fields import AtLeastOne, Int64, StopList

ToolChoice = Literal["none"] | Literal["auto"] | Literal["required"] | messages_in.ChatCompletionNamedToolChoiceParam
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _Asked(fields.OpenModel):
    messages: messages_in.MessageList
    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    presence_penalty: float | None = None
    response_format: fields.AnyResponseFormat | None = None
    seed: Int64 | None = None
    stop: str | StopList | None = None
    stream: bool | None = False
    stream_options: fields.StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[messages_in.ChatCompletionToolsParam] | None = None
    tool_choice: ToolChoice | None = "none"
    reasoning_effort: Effort | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True
    user: str | None = None


class _Conversation(fields.OpenModel):
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = Field(default_factory=list)
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class _Answered(fields.Answered):
    return_prompt_text: bool | None = None


class ChatCompletionRequest(fields.PassedOn, _Answered, _Conversation, fields.Sampled, _Asked):
    """Fields in the order of vLLM's own model: it is the order of the validation lines."""

    stream_interval: AtLeastOne | None = None

    @model_validator(mode="before")
    @classmethod
    def _before(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if "tool_choice" not in data and data.get("tools"):
            data = data | {"tool_choice": "auto"}
        for check in _BEFORE:
            check(data)
        return data


def _check_messages(data: Mapping[str, Any]) -> None:
    messages = data.get("messages", ())
    if not isinstance(messages, str | list | tuple | dict):
        raise WireError(f"{type(messages).__name__!r} object is not iterable")


def _check_logprobs(data: Mapping[str, Any]) -> None:
    fields.check_prompt_logprobs(data)
    top = data.get("top_logprobs")
    if not isinstance(top, int) or isinstance(top, bool):
        return
    if top < -1:
        raise http.parameter_error("`top_logprobs` must be a positive value or -1", "top_logprobs", top)
    if top != 0 and not data.get("logprobs"):
        raise http.parameter_error("`top_logprobs` needs `logprobs`, which must be set to true", "top_logprobs")


def _check_template_flags(data: Mapping[str, Any]) -> None:
    if data.get("continue_final_message") and data.get("add_generation_prompt"):
        raise WireError("`continue_final_message` and `add_generation_prompt` cannot both be True")


def _check_tools(data: Mapping[str, Any]) -> None:
    choice, tools = data.get("tool_choice"), data.get("tools")
    if isinstance(tools, list) and not tools:
        raise http.parameter_error("`tools` must have at least one entry, or be left out", "tools")
    if choice is None or choice == "none":
        return
    if tools is None:
        raise http.parameter_error("For `tool_choice` the `tools` must be set", "tool_choice")
    if isinstance(choice, Mapping):
        _check_named_tool(choice, tools)
    elif choice not in ("auto", "required"):
        told = f"Invalid value for `tool_choice`: {choice}; use a named tool, 'none', 'auto' or 'required'"
        raise http.parameter_error(told, "tool_choice", choice)


def _check_named_tool(choice: Mapping[str, Any], tools: Any) -> None:
    function = choice.get("function")
    wanted = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(wanted, str) or not wanted:
        told = '`tool_choice` needs the form {"type": "function", "function": {"name": "my_function"}}'
        raise http.parameter_error(told, "tool_choice", choice)
    if wanted not in _tool_names(tools):
        raise http.parameter_error("The tool in `tool_choice` does not match any of the `tools`", "tool_choice")


def _tool_names(tools: Any) -> set[str]:
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []
    return {str(function.get("name")) for function in functions if isinstance(function, Mapping)}


_BEFORE = (
    fields.check_cache_salt,
    _check_messages,
    _check_template_flags,
    _check_tools,
    fields.check_structured_outputs,
    _check_logprobs,
    fields.check_stream_options,
    fields.check_response_format,
)
