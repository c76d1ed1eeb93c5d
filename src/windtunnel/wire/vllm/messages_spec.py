"""What an Anthropic answer is written from, and what its stream and its body say alike."""

from dataclasses import dataclass

from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import Usage


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """What a message is written from."""

    env: ServerEnv
    response_id: str
    model: str
    prompt_tokens: int
    tools: bool
    reasoning: bool
    parallel_tool_calls: bool


def new_signature(spec: MessageSpec) -> str:
    return spec.env.new_id() + spec.env.new_id()


def new_tool_id(spec: MessageSpec) -> str:
    return f"chatcmpl-tool-{spec.env.new_id()}"


def message_stop(finish_reason: str | None, stop_reason: int | str | None, called: bool) -> tuple[str | None, str | None]:
    """(`stop_reason`, `stop_sequence`); an operator's abort has neither (§3.6)."""
    if finish_reason == "length":
        return "max_tokens", None
    if finish_reason != "stop":
        return None, None
    if called:
        return "tool_use", None
    return ("stop_sequence", stop_reason) if isinstance(stop_reason, str) else ("end_turn", None)


def message_usage(usage: Usage, spec: MessageSpec) -> dict[str, int]:
    """With prompt details, `input_tokens` is what was neither read from nor written to the cache (§2.7)."""
    told = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}
    if spec.env.enable_prompt_tokens_details:
        created = usage.created_cache_tokens or 0
        told["input_tokens"] = usage.prompt_tokens - usage.cached_tokens - created
        told |= {"cache_creation_input_tokens": created, "cache_read_input_tokens": usage.cached_tokens}
    return told
