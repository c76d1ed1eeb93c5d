"""What a chat answer is written from, and what its stream and its body say alike (vLLM reference §2.4)."""

from collections.abc import Sequence
from dataclasses import dataclass

from windtunnel.wire.env import ServerEnv
from windtunnel.wire.family import PromptPlan
from windtunnel.wire.vllm import parsers


@dataclass(frozen=True, slots=True)
class ChatSpec:
    """What a chat answer is written from."""

    env: ServerEnv
    response_id: str
    model: str
    created: int
    role: str
    n: int
    prompts: tuple[PromptPlan, ...]
    echo_text: str | None
    """The last message, repeated in front of the answer."""
    top_logprobs: int | None
    prompt_logprobs: int | None
    token_ids: bool
    prompt_text: bool
    as_ids: bool
    include_usage: bool
    continuous_usage: bool
    tools: str | None = None
    """`auto`, `required` or `named` when tool calls are parsed."""
    parallel_tool_calls: bool = True
    reasoning: bool = False
    include_reasoning: bool = True
    bare_usage: bool = False
    """No prompt details (beam search, batch)."""

    @property
    def think_ids(self) -> tuple[int | None, int | None]:
        tokenizer = self.env.tokenizer
        found = [tokenizer.encode(tag, add_special_tokens=False) for tag in (parsers.THINK_START, parsers.THINK_END)]
        start, end = (ids[0] if len(ids) == 1 else None for ids in found)
        return start, end

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({self.env.tokenizer.eos_token_id, *self.env.extra_eos_token_ids})


class ReasoningCount:
    """Counts the reasoning tokens of one choice as they come."""

    __slots__ = ("_done", "_end", "_eos", "_start", "total")

    def __init__(self, spec: ChatSpec) -> None:
        self._start, self._end = spec.think_ids
        self._eos = spec.eos_ids
        self._done = not spec.reasoning
        self.total = 0

    def add(self, token_ids: Sequence[int]) -> None:
        if self._done:
            return
        self.total += parsers.reasoning_tokens(token_ids, self._start, self._end, self._eos)
        self._done = self._end in token_ids


def prompt_text(prompt: PromptPlan, spec: ChatSpec) -> str | None:
    return prompt.text if spec.prompt_text else None


def chat_finish(finish_reason: str | None, spec: ChatSpec, called: bool) -> str | None:
    """`tool_calls` replaces `stop` only, and never for a named tool (vLLM reference §2.4)."""
    return "tool_calls" if finish_reason == "stop" and called and spec.tools in ("auto", "required") else finish_reason
