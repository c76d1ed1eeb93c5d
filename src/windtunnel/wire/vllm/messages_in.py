"""The messages of a chat request: the union that vLLM validates, and the plain form that a chat template reads.

Class names are vLLM's and OpenAI's, because the validation lines name them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, Required

from pydantic import BaseModel, ConfigDict, Field, with_config
from typing_extensions import TypedDict

from windtunnel.wire.family import WireError
from windtunnel.wire.vllm.fields import OpenModel

_OPEN = ConfigDict(extra="allow")


@with_config(_OPEN)
class ChatCompletionContentPartTextParam(TypedDict, total=False):
    text: Required[str]
    type: Required[Literal["text"]]


@with_config(_OPEN)
class ChatCompletionContentPartRefusalParam(TypedDict, total=False):
    refusal: Required[str]
    type: Required[Literal["refusal"]]


@with_config(_OPEN)
class ImageURL(TypedDict, total=False):
    url: Required[str]
    detail: Literal["auto", "low", "high", "original"]


@with_config(_OPEN)
class ChatCompletionContentPartImageParam(TypedDict, total=False):
    image_url: Required[ImageURL]
    type: Required[Literal["image_url"]]


@with_config(_OPEN)
class InputAudio(TypedDict, total=False):
    data: Required[str]
    format: Required[Literal["wav", "mp3"]]


@with_config(_OPEN)
class ChatCompletionContentPartInputAudioParam(TypedDict, total=False):
    input_audio: Required[InputAudio]
    type: Required[Literal["input_audio"]]


@with_config(_OPEN)
class FileFile(TypedDict, total=False):
    file_data: str
    file_id: str
    filename: str


@with_config(_OPEN)
class File(TypedDict, total=False):
    file: Required[FileFile]
    type: Required[Literal["file"]]


UserPart = (
    ChatCompletionContentPartTextParam | ChatCompletionContentPartImageParam | ChatCompletionContentPartInputAudioParam | File
)


@with_config(_OPEN)
class AudioURL(TypedDict, total=False):
    url: Required[str]


@with_config(_OPEN)
class ChatCompletionContentPartAudioParam(TypedDict, total=False):
    audio_url: Required[AudioURL]
    type: Required[Literal["audio_url"]]


@with_config(_OPEN)
class VideoURL(TypedDict, total=False):
    url: Required[str]


@with_config(_OPEN)
class ChatCompletionContentPartVideoParam(TypedDict, total=False):
    video_url: Required[VideoURL]
    type: Required[Literal["video_url"]]


@with_config(_OPEN)
class CustomThinkCompletionContentParam(TypedDict, total=False):
    thinking: Required[str]
    closed: bool
    type: Required[Literal["thinking"]]


AnyPart = (
    UserPart
    | ChatCompletionContentPartAudioParam
    | ChatCompletionContentPartVideoParam
    | ChatCompletionContentPartRefusalParam
    | CustomThinkCompletionContentParam
    | str
)


@with_config(_OPEN)
class Function(TypedDict, total=False):
    arguments: Required[str]
    name: Required[str]


@with_config(_OPEN)
class ChatCompletionMessageFunctionToolCallParam(TypedDict, total=False):
    id: Required[str]
    function: Required[Function]
    type: Required[Literal["function"]]


@with_config(_OPEN)
class Custom(TypedDict, total=False):
    input: Required[str]
    name: Required[str]


@with_config(_OPEN)
class ChatCompletionMessageCustomToolCallParam(TypedDict, total=False):
    id: Required[str]
    custom: Required[Custom]
    type: Required[Literal["custom"]]


ToolCall = ChatCompletionMessageFunctionToolCallParam | ChatCompletionMessageCustomToolCallParam


@with_config(_OPEN)
class FunctionCall(TypedDict, total=False):
    arguments: Required[str]
    name: Required[str]


@with_config(_OPEN)
class Audio(TypedDict, total=False):
    id: Required[str]


@with_config(_OPEN)
class ChatCompletionDeveloperMessageParam(TypedDict, total=False):
    content: Required[str | Iterable[ChatCompletionContentPartTextParam]]
    role: Required[Literal["developer"]]
    name: str


@with_config(_OPEN)
class ChatCompletionSystemMessageParam(TypedDict, total=False):
    content: Required[str | Iterable[ChatCompletionContentPartTextParam]]
    role: Required[Literal["system"]]
    name: str


@with_config(_OPEN)
class ChatCompletionUserMessageParam(TypedDict, total=False):
    content: Required[str | Iterable[UserPart]]
    role: Required[Literal["user"]]
    name: str


@with_config(_OPEN)
class ChatCompletionAssistantMessageParam(TypedDict, total=False):
    role: Required[Literal["assistant"]]
    audio: Audio | None
    content: str | Iterable[ChatCompletionContentPartTextParam | ChatCompletionContentPartRefusalParam] | None
    function_call: FunctionCall | None
    name: str
    refusal: str | None
    tool_calls: Iterable[ToolCall]


@with_config(_OPEN)
class ChatCompletionToolMessageParam(TypedDict, total=False):
    content: Required[str | Iterable[ChatCompletionContentPartTextParam]]
    role: Required[Literal["tool"]]
    tool_call_id: Required[str]


@with_config(_OPEN)
class ChatCompletionFunctionMessageParam(TypedDict, total=False):
    content: Required[str | None]
    name: Required[str]
    role: Required[Literal["function"]]


@with_config(_OPEN)
class FunctionDefinitionParam(TypedDict, total=False):
    name: Required[str]
    description: str
    parameters: dict[str, object]
    strict: bool | None


@with_config(_OPEN)
class ChatCompletionFunctionToolParam(TypedDict, total=False):
    function: Required[FunctionDefinitionParam]
    type: Required[Literal["function"]]


@with_config(_OPEN)
class CustomChatCompletionMessageParam(TypedDict, total=False):
    role: Required[str]
    content: str | list[AnyPart]
    name: str
    tool_call_id: str | None
    tool_calls: Iterable[ChatCompletionMessageFunctionToolCallParam] | None
    reasoning: str | None
    tools: list[ChatCompletionFunctionToolParam] | None
    task: str | None


class Author(BaseModel):
    role: Literal["user", "assistant", "system", "developer", "tool"]
    name: str | None = None


class Message(BaseModel):
    """The last member of the union: a Harmony message. Accepted and read as a plain one."""

    author: Author
    content: list[Any] = Field(default_factory=list)
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None


ChatMessage = (
    ChatCompletionDeveloperMessageParam
    | ChatCompletionSystemMessageParam
    | ChatCompletionUserMessageParam
    | ChatCompletionAssistantMessageParam
    | ChatCompletionToolMessageParam
    | ChatCompletionFunctionMessageParam
    | CustomChatCompletionMessageParam
    | Message
)
MessageList = list[ChatMessage]


class FunctionDefinition(OpenModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ChatCompletionToolsParam(OpenModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition
    defer_loading: bool | None = None


class ChatCompletionNamedFunction(OpenModel):
    name: str


class ChatCompletionNamedToolChoiceParam(OpenModel):
    function: ChatCompletionNamedFunction
    type: Literal["function"] = "function"


MEDIA_MARK = "\U000ffffd"
"""Stands in the conversation for each medium: a character of a private plane, which texts do not have."""
_MEDIA_PARTS = ("image_url", "input_audio", "audio_url", "video_url")
_IDENTIFIER_BYTES = 32


def for_template(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """What a chat template sees: text parts joined by line breaks, tool arguments as objects, a mark for each medium.

    Raises WireError for parts that no chat can take.
    """
    return [_one(message) for message in messages]


def media_of(messages: Sequence[Any]) -> list[str]:
    """The identifiers of all media, in order: the `uuid` of the part, or a hash of its URL or data."""
    parts = [part for message in messages for part in _parts(message) if isinstance(part, Mapping)]
    return [_identifier(part, kind) for part in parts for kind in _MEDIA_PARTS if kind in part]


def _parts(message: Any) -> Iterable[Any]:
    content = None if isinstance(message, Message) else message.get("content")
    return () if content is None or isinstance(content, str) else content


def _identifier(part: Mapping[str, Any], kind: str) -> str:
    if part.get("uuid"):
        return str(part["uuid"])
    content = json.dumps(part[kind], sort_keys=True).encode()
    return blake2b(content, digest_size=_IDENTIFIER_BYTES).hexdigest()


_PASSED_ON = {"name": "name", "tool_call_id": "tool_call_id", "reasoning_content": "reasoning", "reasoning": "reasoning"}
"""Members that a template sees besides role and content, and under which name (vLLM reference §2.3)."""


def _one(message: Any) -> dict[str, Any]:
    if isinstance(message, Message):
        return {"role": message.author.role, "content": _text(message.content)}
    out: dict[str, Any] = {"role": message["role"], "content": _text(message.get("content"))}
    for key, shown in _PASSED_ON.items():
        if message.get(key) is not None:
            out[shown] = message[key]
    calls = _tool_calls(message.get("tool_calls"))
    if calls:
        out["tool_calls"] = calls
        out["content"] = out["content"] or None
    return out


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return str(getattr(part, "text", ""))
    for key in ("text", "refusal", "thinking"):
        if key in part:
            return str(part[key])
    if any(kind in part for kind in _MEDIA_PARTS):
        return MEDIA_MARK
    raise WireError(f"A part of type {part.get('type')!r} is not possible: this model takes text only")


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    return [dict(call) | ({"function": _parsed(call["function"])} if "function" in call else {}) for call in calls or ()]


def _parsed(function: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as an object where they are one; anything else becomes an empty object, as vLLM's hermes path shows it."""
    try:
        value = json.loads(function.get("arguments") or "{}")
    except ValueError:
        value = {}
    return dict(function) | {"arguments": value}
