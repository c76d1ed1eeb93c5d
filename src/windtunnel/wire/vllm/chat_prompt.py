"""From a conversation to its prompt: the chat template and what it is told (vLLM reference §2.3)."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from windtunnel.core.tokenizer import TemplateOptions
from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import PromptPlan, WireError
from windtunnel.wire.vllm import messages_in, prompts


def check_trust(request: Any, env: ServerEnv) -> None:
    kwargs = request.chat_template_kwargs or {}
    if (request.chat_template or kwargs.get("chat_template")) and not env.trust_request_chat_template:
        raise WireError("The request has a chat template of its own, but --trust-request-chat-template is not set: refused")
    if (request.media_io_kwargs or request.mm_processor_kwargs) and not env.trust_request_mm_kwargs:
        raise WireError("The request has multimodal arguments of its own, but --trust-request-mm-kwargs is not set: refused")


def render_text(messages: Sequence[Any], request: Any, env: ServerEnv) -> tuple[list[dict[str, Any]], str]:
    """The conversation as the template sees it, and the text that the template makes of it."""
    if not messages:
        raise WireError("Cannot apply the chat template to an empty conversation; send at least one message")
    try:
        conversation = messages_in.for_template(messages)
        media = messages_in.media_of(messages)
    except ValidationError as error:
        raise WireError(str(error)) from None
    if media and not env.media_tokens:
        raise WireError("An image, audio or video part is not possible: this model takes text only")
    return conversation, _template_text(conversation, request, env)


def render(messages: Sequence[Any], request: Any, env: ServerEnv) -> tuple[list[dict[str, Any]], PromptPlan]:
    """The conversation and its prompt. `kv_transfer_params.prompt_token_ids` stands in for the tokens (vLLM reference §2.3)."""
    conversation, text = render_text(messages, request, env)
    given = (getattr(request, "kv_transfer_params", None) or {}).get("prompt_token_ids")
    if given:
        return conversation, prompts.from_token_ids(given, env)
    keep, side = getattr(request, "truncate_prompt_tokens", None), getattr(request, "truncation_side", None)
    special = getattr(request, "add_special_tokens", False)
    media = messages_in.media_of(messages)
    if media:
        if keep is not None:
            raise WireError("truncate_prompt_tokens is not possible in a chat with images, audio or video")
        return conversation, prompts.with_media(text, messages_in.MEDIA_MARK, media, env, add_special_tokens=special)
    return conversation, prompts.from_text(text, env, add_special_tokens=special, keep=keep, side=side)


def _template_text(conversation: list[dict[str, Any]], request: Any, env: ServerEnv) -> str:
    kwargs = dict(request.chat_template_kwargs or {})
    kwargs.update({key: value for key in ("reasoning_effort", "documents") if (value := getattr(request, key, None))})
    tools = getattr(request, "tools", None)
    options = TemplateOptions(
        tools=[_tool_value(tool) for tool in tools] if tools else None,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        chat_template=request.chat_template or kwargs.pop("chat_template", None),
        kwargs=kwargs,
    )
    try:
        return env.tokenizer.apply_chat_template(conversation, options)
    except ValueError as error:
        raise WireError(str(error)) from None


def _tool_value(tool: Any) -> dict[str, Any]:
    """A tool as the template sees it: an absent description is null, the members that vLLM added are left out."""
    value: dict[str, Any] = tool.model_dump(exclude_none=True)
    function = {"name": None, "description": None, "parameters": None} | value["function"]
    return value | {"function": function}
